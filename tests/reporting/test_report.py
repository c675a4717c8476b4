"""The report as data: what it says, what it refuses to say, and that it reads its own files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.engines.devices import Conditions
from deploykit.evaluation.statistics import ratio
from deploykit.reporting.points import Point
from deploykit.reporting.report import Accuracy, Report, read, speedup, write
from deploykit.reporting.tables import best_by_batch, details
from deploykit.reporting.tables import machine as machine_table
from deploykit.reporting.verdict import verdict

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
    found = replace(report, points=points).speedups
    assert {item.batch for item in found} == {8, 16, 32, 64}
    assert {item.label for item in found} == {"fp32 CPU, 2 × 1", "fp16 CPU", "int8 CPU"}
    assert replace(report, points=points, baseline="no such setup").speedups == ()


def test_a_crossover_is_where_a_setup_stays_ahead(report: Report) -> None:
    found = {(c.label, c.by): c.batch for c in report.crossovers}
    assert found["int8 CPU", "throughput"] == 1
    assert found["fp16 CPU", "throughput"] is None
    slow_start = tuple(
        replace(p, throughput_per_s=Interval(1, 1, 1))
        if p.label == "int8 CPU" and p.batch < 4
        else p
        for p in report.points
    )
    found = {(c.label, c.by): c.batch for c in replace(report, points=slow_start).crossovers}
    assert found["int8 CPU", "throughput"] == 4


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
