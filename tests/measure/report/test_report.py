"""The report as data: what it says, what it refuses to say, and that it reads its own files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.errors import BadInput
from deploykit.measure.latency import Latency
from deploykit.measure.report.report import (
    Accuracy,
    Gate,
    Report,
    crossovers,
    read,
    speedup,
    speedups,
    write,
)
from deploykit.measure.report.tables import best_by_batch, details
from deploykit.measure.report.tables import machine as machine_table
from deploykit.measure.report.verdict import verdict
from deploykit.measure.statistics import Interval, ratio
from deploykit.measure.timing.sweep import Point
from deploykit.runtimes.gpu_state import Conditions

NAMES = ("report.html", "report.json", "report.md")


def plain(text: str) -> str:
    return text.replace("\u202f", " ")


def find(report: Report, label: str, batch: int) -> Point:
    return next(p for p in report.points if p.label == label and p.batch == batch)


def test_a_report_is_read_back_as_it_was_written(report: Report, tmp_path: Path) -> None:
    assert write(report, tmp_path) == tmp_path / "report.html"
    assert read(tmp_path / "report.json") == report
    assert read(tmp_path) == report


def test_an_empty_report_can_be_written_and_read(tmp_path: Path) -> None:
    empty = Report("nothing", "2026-11-21T00:00:00+00:00", "")
    write(empty, tmp_path)
    assert read(tmp_path) == empty


def test_the_same_report_gives_the_same_bytes(report: Report, tmp_path: Path) -> None:
    write(report, tmp_path / "a")
    write(read(tmp_path / "a"), tmp_path / "b")
    for name in NAMES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == list(NAMES)


def test_a_report_that_json_cannot_hold_leaves_the_old_files(
    report: Report, tmp_path: Path
) -> None:
    write(report, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in NAMES}
    with pytest.raises(TypeError, match="JSON"):
        write(replace(report, title="new", machine={"load": object()}), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in NAMES} == before


def test_a_file_where_the_folder_should_be_is_refused(report: Report, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(BadInput, match="out: cannot be used as a folder"):
        write(report, tmp_path / "out")


def test_a_ratio_is_paired_by_round(report: Report) -> None:
    a, b = find(report, "int8 CPU", 32), find(report, "fp32 CPU (baseline)", 32)
    assert speedup(a, b) == ratio(a.round_rates, b.round_rates)


@pytest.mark.parametrize("change", [{"batch": 16}, {"scenario": "server"}, {"rounds": 3}], ids=str)
def test_what_cannot_be_compared_is_refused(change: dict[str, Any], report: Report) -> None:
    a, b = find(report, "int8 CPU", 32), find(report, "fp32 CPU (baseline)", 32)
    with pytest.raises(BadInput, match=f"cannot be compared: {next(iter(change))}"):
        speedup(a, replace(b, **change))


def test_the_document_holds_ratios_only_between_equals(report: Report) -> None:
    points = tuple(p for p in report.points if p.label == report.baseline or p.batch >= 8)
    found = speedups(points, report.baseline)
    assert {item.batch for item in found} == {8, 16, 32, 64}
    assert {item.label for item in found} == {"fp32 CPU, 2 × 1", "fp16 CPU", "int8 CPU"}
    assert speedups(points, "no such setup") == ()


def test_a_crossover_is_where_a_setup_stays_ahead(report: Report) -> None:
    found = {(c.label, c.by): c.batch for c in crossovers(report.points, report.baseline)}
    assert found["int8 CPU", "throughput"] == 1
    assert found["fp16 CPU", "throughput"] is None
    slow_start = tuple(
        replace(p, throughput_per_s=Interval(1, 1, 1))
        if p.label == "int8 CPU" and p.batch < 4
        else p
        for p in report.points
    )
    found = {(c.label, c.by): c.batch for c in crossovers(slow_start, report.baseline)}
    assert found["int8 CPU", "throughput"] == 4


def test_the_verdict_begins_with_the_ratio_its_interval_and_the_accuracy(report: Report) -> None:
    a, b = find(report, "int8 CPU", 64), find(report, "fp32 CPU (baseline)", 64)
    times = report.speedup(a, b)
    assert (
        times.high - times.low > speedup(a, b).high - speedup(a, b).low
    )  # 21 ratios hold together
    first = plain(verdict(report)[0])
    assert first.startswith(
        f"int8 CPU is {times.value:.2f}× [{times.low:.2f}, {times.high:.2f}] "
        "the fp32 CPU (baseline) at batch 64"
    )
    assert first.endswith("top-1 accuracy drop 0.2 pp (−0.3 to 0.7, n = 540).")


def columns(report: Report, *given: tuple[str, int, int, float]) -> Report:
    """`report` with columns of these labels, sessions, threads and speed-ups."""
    base = [p for p in report.points if p.label == report.baseline]

    def at(point: Point, label: str, sessions: int, threads: int, times: float) -> Point:
        rate = point.throughput_per_s
        rates = tuple(times * each for each in point.round_rates)
        faster = Interval(rate.value * times, rate.low * times, rate.high * times)
        changes = {"label": label, "sessions": sessions, "threads": threads}
        return replace(point, **changes, throughput_per_s=faster, round_rates=rates)  # type: ignore[arg-type]

    points = tuple(at(point, *each) for point in base for each in given)
    return replace(report, baseline="fp32 CPU", points=points, accuracy=(), quick=False)


def test_a_copy_of_the_baseline_is_no_faster_because_it_has_more_sessions(report: Report) -> None:
    both = [("fp32 CPU", 1, 2, 1.0), ("fp32 CPU, 2 sessions", 2, 1, 1.5)]
    copy = [("copy", 1, 2, 1.0), ("copy, 2 sessions", 2, 1, 1.5)]
    first = plain(verdict(columns(report, *both, *copy))[0])
    assert first.startswith(
        "copy, 2 sessions and the baseline fp32 CPU, 2 sessions are practically equal at batch 64"
    )
    assert "each in 2 sessions of 1 thread (1.00× [1.00, 1.00])" in first


def test_like_is_compared_with_like_first_and_then_with_the_fastest(report: Report) -> None:
    both = [("fp32 CPU", 1, 2, 1.0), ("fp32 CPU, 2 sessions", 2, 1, 1.5)]
    first, second = verdict(columns(report, *both, ("int8", 1, 2, 3.0)))[:2]
    assert plain(first).startswith("int8 is 3.00× [3.00, 3.00] the baseline fp32 CPU at batch 64")
    assert "each in 1 session of 2 threads" in first
    assert plain(second).startswith(
        "Against the fastest column of the baseline: int8 is 2.00× [2.00, 2.00] the baseline "
        "fp32 CPU, 2 sessions at batch 64"
    )
    assert "1 session of 2 threads against 2 sessions of 1 thread." in second


def test_a_gpu_is_compared_with_the_fastest_on_the_cpu_whatever_its_precision(
    report: Report,
) -> None:
    cpu = [("fp32 CPU", 1, 2, 1.0), ("int8", 1, 2, 4.0)]
    given = columns(report, *cpu, ("TensorRT", 1, 2, 32.0))
    on_gpu = {"device": "cuda:0", "threads": None}
    points = tuple(replace(p, **on_gpu) if p.label == "TensorRT" else p for p in given.points)  # type: ignore[arg-type]
    first, second = verdict(replace(given, points=points))[:2]
    assert plain(first).startswith("TensorRT is 8.00× [8.00, 8.00] the int8 at batch 64")
    assert plain(second).startswith(
        "Against the fastest column of the baseline: TensorRT is 32.0× [32.0, 32.0] the baseline"
    )


def test_a_gate_that_was_not_met_comes_first(report: Report) -> None:
    failed = replace(report, gates=(*report.gates, Gate("fp16 accuracy", False, "drop 3 pp")))
    assert verdict(failed)[0] == "1 of 3 gates NOT met: fp16 accuracy: drop 3 pp."


def test_no_difference_and_a_difference_of_no_use_are_called_that(report: Report) -> None:
    base = tuple(p for p in report.points if p.label == report.baseline)
    same = tuple(replace(p, label="again") for p in base)
    first = verdict(replace(report, points=base + same))[0]
    assert first.startswith("again and the fp32 CPU (baseline) are practically equal at batch")
    wide = tuple(replace(p, round_rates=p.round_rates[2:] + p.round_rates[:2]) for p in same)
    wide = tuple(replace(p, round_rates=(p.round_rates[0] * 1.1, *p.round_rates[1:])) for p in wide)
    first = verdict(replace(report, points=base + wide))[0]
    assert first.startswith("No difference between again and the fp32 CPU (baseline)")


def test_accuracy_that_was_not_measured_is_stated(report: Report) -> None:
    assert "its accuracy was not measured" in verdict(replace(report, accuracy=()))[0]


def test_the_notes_of_both_points_are_in_the_headline(report: Report) -> None:
    noted = tuple(replace(p, note="did not settle") for p in report.points)
    assert verdict(replace(report, points=noted))[0].count("did not settle") == 1


def test_the_baseline_s_own_best_batch_is_named_where_it_is_another(report: Report) -> None:
    points = tuple(p for p in report.points if p.label == report.baseline or p.batch <= 8)
    second = plain(verdict(replace(report, points=points))[1])
    assert second.startswith("Each at its own best batch: fp32 CPU (baseline)")
    assert "inferences/s at 64, int8 CPU" in second


def test_without_a_baseline_no_ratio_is_named(report: Report) -> None:
    first = verdict(replace(report, baseline=""))[0]
    assert "no baseline was measured" in first
    assert "×" not in first.removeprefix("fp32 CPU, 2 × 1")


def test_a_generator_limited_run_gives_no_figure(report: Report) -> None:
    limited = replace(report.serving[0], generator_limited=True, limits=("it slept", "it hung"))
    sentences = verdict(replace(report, serving=(limited,), points=()))
    assert sentences[0] == (
        "Over HTTP at 32 connections there is no verdict: the load generator was the limit, "
        "not the server (it slept; it hung)."
    )


def test_a_report_without_points_and_loads_says_so(report: Report) -> None:
    assert verdict(replace(report, serving=(), points=()))[0] == "No engine was timed."


def test_losses_and_a_rate_that_was_not_sustained_are_in_the_verdict(report: Report) -> None:
    lost = Latency(900, Interval(1, 1, 1), None, None, 5.0, {"p90_ms": 36}, 100)
    bad = replace(report.serving[2], latency=lost, sustained=False, failed=70, unsent=30)
    sentence = plain(verdict(replace(report, serving=(bad,), points=()))[0])
    assert "p50 1.00 ms, p99 none, as 100 had no answer" in sentence
    assert "70 failed, 30 never sent of" in sentence
    assert "THE RATE WAS NOT SUSTAINED" in sentence


def test_what_was_served_names_refusals_and_the_shared_machine(report: Report) -> None:
    sentence = plain(next(s for s in verdict(report) if "2\u202f000 requests/s" in s))
    assert "30 refused of 9 970" in sentence
    assert "client and server shared one machine" in sentence


def test_a_server_that_answered_nothing_is_reported_with_its_error(report: Report) -> None:
    dead = replace(report.serving[0], latency=None, ok=0, failed=9, sent=9, errors={"boom": 9})
    text = " ".join(verdict(replace(report, serving=(dead,))))
    assert "no request of 9 was answered: boom" in text


def test_quick_and_not_measured_are_stated(report: Report) -> None:
    sentences = verdict(report)
    assert sentences[-1] == "Not measured: GPU (no NVIDIA GPU on this machine)."
    assert sentences[-2].startswith("Timings are short")
    assert not any("quick" in s for s in verdict(replace(report, quick=False)))


def test_no_bound_is_stated_where_the_accuracy_decides(report: Report) -> None:
    parity = report.parity[0]
    found = {**parity, "b": "int8.onnx", "passed": False}
    files = ({"file": "int8.onnx", "sha256": "0", "precision": "int8", "format": "onnx"},)
    document = replace(report, parity=(found,), artefacts=files).to_dict()
    for rows, by in ((document["accuracy"], "its accuracy decides, above"), ([], "not measured")):
        notes = [table.note for table in details(document | {"accuracy": rows}) if table.note]
        assert any(by in note for note in notes)
        assert not any("within" in note for note in notes)
    files = ({**files[0], "precision": "fp32"},)
    document = replace(report, parity=(found,), artefacts=files).to_dict()
    assert any("NOT within" in table.note for table in details(document))


@pytest.mark.parametrize(("precision", "bounded"), [("bf16", False), ("fp32", True)])
def test_no_bound_applies_to_a_rounded_rival_timed_or_not(
    report: Report, precision: str, bounded: bool
) -> None:
    name = f"model.onnx in OpenVINO {precision} of model"
    found = {**report.parity[0], "b": name, "passed": False}
    notes = [table.note for table in details(replace(report, parity=(found,)).to_dict())]
    assert any("NOT within" in note for note in notes) is bounded


def test_markdown_holds_the_verdict_the_tables_and_the_command(
    report: Report, tmp_path: Path
) -> None:
    write(report, tmp_path)
    text = plain((tmp_path / "report.md").read_text())
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[:6] == [
        "# mnist-cnn on this machine",
        "## In short",
        "## Best at each batch",
        "## What the measurements show",
        "## How it was measured",
        "## Machine and versions",
    ]
    assert "    deploykit demo -o out/" in text
    assert "| int8 | top-1 accuracy | 540 |" in text
    widths = {line.count(" | ") for line in text.splitlines() if line.startswith("| logits")}
    assert widths == {7}


def test_markdown_shows_hostile_names_as_they_are(report: Report, tmp_path: Path) -> None:
    hostile = "<script>a|b`c*d[e]\nf"
    accuracy = (Accuracy("fp32", hostile, 540, Interval(0.9, 0.8, 0.95), None),)
    write(replace(report, title=hostile, accuracy=accuracy), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "<script>" not in text
    assert text.startswith("# &lt;script&gt;a\\|b\\`c\\*d\\[e\\] f\n")


def test_each_batch_shows_the_baseline_and_the_best_cpu_whichever_setup_it_was() -> None:
    points = [
        {
            "label": label,
            "batch": batch,
            "device": device,
            "latency": {"p50_ms": {"value": ms, "low": ms, "high": ms}},
            "throughput_per_s": {"value": rate, "low": rate, "high": rate},
        }
        for label, batch, device, ms, rate in [
            ("fp32 CPU", 1, "cpu", 2.0, 500.0),
            ("int8", 1, "cpu", 1.0, 900.0),
            ("int8, 2 sessions", 1, "cpu", 1.5, 1300.0),
            ("fp16, GPU", 1, "cuda:0", 0.5, 2000.0),
            ("fp32 CPU", 8, "cpu", 9.0, 800.0),
        ]
    ]
    table = best_by_batch({"points": points, "baseline": "fp32 CPU"})
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert "fp32 CPU" in cells["baseline, p50 (ms)"]
    assert cells["best CPU, p50 (ms)"].endswith("int8")
    assert cells["best CPU, inferences/s"].endswith("int8, 2 sessions")
    assert cells["best GPU, inferences/s"].endswith("fp16, GPU")
    assert table.rows[1][0] == "8"
    assert table.rows[1][-1] == "not measured"


def test_nothing_is_derived_from_a_run_whose_gpu_was_throttled(
    report: Report, tmp_path: Path
) -> None:
    throttled = replace(report, throttled=("sw_thermal",))
    throttled = replace(throttled, verdict=verdict(throttled))
    assert "The GPU was throttled (sw_thermal): no speed-up is stated." in throttled.verdict[0]
    assert "×" not in " ".join(throttled.verdict)
    assert throttled.to_dict()["speedups"] == throttled.to_dict()["crossovers"] == []
    write(throttled, tmp_path)
    assert read(tmp_path / "report.json") == throttled
    assert "no speed-up is stated" in (tmp_path / "report.md").read_text()


JETSON = Conditions("Orin", "sysfs", 9, "25W", 306.0, 918.0, 918.0, 9.5, 12.0, 61.0, ())


@pytest.mark.parametrize(
    ("machine", "conditions", "says"),
    [
        ({"l4t": "36.4.3"}, (), "THE POWER MODE IS NOT KNOWN"),
        ({"board": "NVIDIA Jetson"}, (replace(JETSON, power_mode=None),), "IS NOT KNOWN"),
        ({}, (replace(JETSON, power_mode=None, source="nvml+sysfs"),), "IS NOT KNOWN"),
        ({"l4t": "36.4.3"}, (replace(JETSON, power_mode="15W, 25W"),), "CHANGED during the run"),
        ({"l4t": "36.4.3", "power_mode": "25W"}, (), ""),
        ({"l4t": "36.4.3"}, (JETSON,), ""),
        ({"l4t": None, "board": None}, (replace(JETSON, power_mode=None, source="nvml"),), ""),
    ],
)
def test_a_report_of_a_jetson_without_its_power_mode_is_marked(
    report: Report,
    tmp_path: Path,
    machine: dict[str, str],
    conditions: tuple[Conditions],
    says: str,
) -> None:
    marked = replace(report, machine={**report.machine, **machine}, conditions=conditions)
    marked = replace(marked, verdict=verdict(marked))
    write(marked, tmp_path)
    assert read(tmp_path / "report.json") == marked
    for name in ("report.md", "report.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert ("THE POWER MODE" in page) == bool(says)
        assert says in page


def test_what_held_during_the_run_is_in_the_table_of_the_machine(report: Report) -> None:
    document = replace(report, conditions=(JETSON,)).to_dict()
    rows = {name: plain(text) for name, text in machine_table(document).rows}
    assert rows["power mode"] == "25W"
    assert rows["GPU clock meanwhile"] == "306 to 918 MHz, at most 918"
    assert rows["power meanwhile"] == "9.50 W on average, 12.0 W at most"
    assert rows["temperature meanwhile"] == "61.0 °C at most"
    assert rows["throttled meanwhile"] == "no"


def test_the_provenance_is_in_the_table_of_the_machine(report: Report, tmp_path: Path) -> None:
    known = {
        "project": {"commit": "abc", "changed": True},
        "host": "bench-1",
        "clocks": {"governor": "performance", "max_mhz": 3500.0, "turbo": "off"},
        "affinity": "0-1",
        "environment": {"OMP_NUM_THREADS": "2"},
    }
    full = replace(report, provenance=known)
    write(full, tmp_path)
    assert read(tmp_path) == full
    rows = dict(machine_table(full.to_dict()).rows)
    assert rows["commit measured"] == "abc, with changes that are not committed"
    assert "commit of deploykit" not in rows
    assert rows["CPU clocks"] == "performance, at most 3500.0 MHz, turbo off"
    assert (rows["host"], rows["CPUs used"], rows["OMP_NUM_THREADS"]) == ("bench-1", "0-1", "2")
