"""The verdict of a report: what comes first, what is compared with what, what is concluded.

At the end, runs whose truth is known: whether all ratios of a report hold together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest

from deploykit.benchmarking.timing import PROCESSES
from deploykit.core.evidence import Gate, Interval
from deploykit.evaluation.statistics import FASTER, SLOWER, Latency, difference
from deploykit.reporting.charts import charts
from deploykit.reporting.report import NotMeasured, Point, PointEnergy, Report
from deploykit.reporting.tables import details, summary
from deploykit.reporting.verdict import verdict
from tests.support.measure.simulated import bare_point, plain

BASE = "fp32 CPU (baseline)"
BATCHES = (1, 2, 4, 8, 16, 32)
Change = Callable[[Report], Report]


def sentences(report: Report) -> list[str]:
    return [plain(sentence) for sentence in verdict(report)]


def words(report: Report) -> str:
    return " ".join(sentences(report))


def where(label: str = "", **changes: Any) -> Change:
    return lambda report: replace(
        report,
        points=tuple(replace(p, **changes) if label in ("", p.label) else p for p in report.points),
    )


def slow(*batches: int) -> Change:
    """INT8 at these batches takes three times as long."""
    return lambda report: replace(
        report,
        asked=("int8 CPU",),
        points=tuple(
            replace(p, round_rates=tuple(rate / 3 for rate in p.round_rates))
            if p.label == "int8 CPU" and p.batch in batches
            else p
            for p in report.points
        ),
    )


def roofline(gflops: float, intensity: float) -> Change:
    point = {"label": "int8 CPU", "batch": 64, "intensity": intensity, "gflops": gflops}
    found = {"ceilings": {"gflops": 1000.0, "gbytes_per_s": 100.0}, "points": [point]}
    return lambda report: replace(report, roofline=found)


def mostly_copies(report: Report) -> Report:
    def compute(point: Point) -> Latency:
        value = point.latency.p50_ms.value
        return Latency(100, Interval(value / 4, 0, value), None, None, 1.0)

    return replace(report, points=tuple(replace(p, compute=compute(p)) for p in report.points))


def energy(label: str, joules: float) -> PointEnergy:
    return PointEnergy(label, 64, joules, 1.0e-3, 5.0, "RAPL package-0")


def served(**changes: Any) -> Change:
    return lambda report: replace(
        report, serving=(replace(report.serving[2], **changes),), points=()
    )


def new(**changes: Any) -> Change:
    return lambda report: replace(report, **changes)


LOST = Latency(900, Interval(1, 1, 1), None, None, 5.0, {"p90_ms": 36}, 100)
GAPS = (NotMeasured("A", "slow"), NotMeasured("B", "slow"))
METERED = "alone: int8 CPU 1.20 mJ; fp32 CPU (baseline) 2.50 mJ (from RAPL package-0)."


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            new(gates=(Gate("a", True, ""), Gate("fp16 accuracy", False, "drop 3 pp"))),
            "1 of 2 gates NOT met: fp16 accuracy: drop 3 pp. ",
        ),
        (new(), "top-1 accuracy drop 0.2 pp [−0.3, 0.7], n = 540."),
        (new(accuracy=()), "its accuracy was not measured"),
        (where(note="did not settle"), "n = 540; did not settle."),
        (new(quick=True), "Timings are short"),
        (new(serving=(), points=()), "No engine was timed."),
        (new(), "INT8 pays here: 1.54× at batch 1, 1.84× at batch 64, against"),
        (slow(1), "INT8 pays at some batches only: 0.5"),
        (slow(1, 2, 4, 8, 16, 32, 64), "INT8 does not pay here and costs time: 0.5"),
        (
            new(asked=("int8 CPU",)),
            "has 1.66× the throughput of batch 1.",
        ),
        (
            where(throughput_per_s=Interval(100.0, 99.0, 101.0)),
            "Batching does not pay: no batch has 1.1× the throughput of batch",
        ),
        (roofline(75.0, 1.0), "64 is memory-bound: it reaches 75 % of what the memory"),
        (roofline(900.0, 100.0), "64 is compute-bound: it reaches 90 % of what the comp"),
        (roofline(10.0, 1.0), "is bound by neither compute nor memory, but by launches"),
        (mostly_copies, "is bound by copies and launches: 75 % of a call"),
        (new(slo_ms=0.01), "int8 CPU none; fp32 CPU (baseline) none"),
        (new(slo_ms=3.0), "3.00 ms at p99: int8 CPU 11 800 inferences/s at batch 16; fp32 CPU"),
        (new(energy=(energy("int8 CPU", 1.2e-3), energy(BASE, 2.5e-3))), METERED),
        (
            served(generator_limited=True, limits=("it slept", "it hung")),
            "no verdict: the load generator was the limit, not the server (it slept; it hung).",
        ),
        (new(), "30 refused of 9 970; client and server shared one machine."),
        (
            served(latency=LOST, sustained=False, failed=70, unsent=30),
            "p99 none, as 100 had no good answer; 30 refused, 70 failed, 30 never sent of",
        ),
        (served(sustained=False), "THE RATE WAS NOT SUSTAINED"),
        (
            served(latency=None, ok=0, failed=9, sent=9, errors={"boom": 9}),
            "no request of 9 had a good answer: boom",
        ),
        (new(not_measured=GAPS), "Not measured: A and B (slow)."),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_the_verdict_says_what_was_measured(report: Report, change: Change, expected: str) -> None:
    assert words(change(report)).count(expected) == 1


def test_what_was_not_measured_is_not_concluded(report: Report) -> None:
    assert "Within" not in words(report)
    assert "Energy" not in words(replace(report, energy=(energy(BASE, 2.5e-3),)))
    assert "Batching" not in words(
        replace(report, points=tuple(p for p in report.points if p.batch == 1))
    )
    assert "quick" not in words(replace(report, quick=False))
    first = sentences(replace(report, baseline=""))[0]
    assert "no baseline was measured" in first
    assert "×" not in first.removeprefix("fp32 CPU, 2 × 1")


def test_the_verdict_begins_with_the_ratio_and_its_interval(report: Report) -> None:
    a, b = (
        next(p for p in report.points if (p.label, p.batch) == (label, 64))
        for label in ("int8 CPU", BASE)
    )
    times, alone = report.speedup(a, b), replace(report, points=()).speedup(a, b)
    assert times.high - times.low > alone.high - alone.low  # 21 ratios hold together
    assert sentences(report)[0].startswith(
        f"int8 CPU is {times.value:.2f}× [{times.low:.2f}, {times.high:.2f}] "
        "the fp32 CPU (baseline) at batch 64"
    )


def columns(report: Report, *given: tuple[str, int, int, float]) -> Report:
    """`report` with columns of these labels, sessions, threads and speed-ups."""

    def at(point: Point, label: str, sessions: int, threads: int, times: float) -> Point:
        rate = point.throughput_per_s
        rates = tuple(times * each for each in point.round_rates)
        faster = Interval(rate.value * times, rate.low * times, rate.high * times)
        new = replace(point, label=label, sessions=sessions, threads=threads)
        return replace(new, throughput_per_s=faster, round_rates=rates)

    base = [p for p in report.points if p.label == report.baseline]
    points = tuple(at(point, *each) for point in base for each in given)
    return replace(report, baseline="fp32 CPU", points=points, accuracy=(), quick=False)


BOTH = [("fp32 CPU", 1, 2, 1.0), ("fp32 CPU, 2 sessions", 2, 1, 1.5)]


def test_like_is_compared_with_like_first_and_then_with_the_fastest(report: Report) -> None:
    copy = [("copy", 1, 2, 1.0), ("copy, 2 sessions", 2, 1, 1.5)]
    first = sentences(columns(report, *BOTH, *copy))[0]
    assert first.startswith(
        "copy, 2 sessions and the baseline fp32 CPU, 2 sessions are practically equal at batch 64"
    )
    assert "each in 2 sessions of 1 thread (1.00× [1.00, 1.00])" in first
    first, second = sentences(columns(report, *BOTH, ("int8", 1, 2, 3.0)))[:2]
    assert first.startswith("int8 is 3.00× [3.00, 3.00] the baseline fp32 CPU at batch 64")
    assert "each in 1 session of 2 threads" in first
    assert second.startswith(
        "Against the fastest column of the baseline: int8 is 2.00× [2.00, 2.00] the baseline "
        "fp32 CPU, 2 sessions at batch 64"
    )
    assert "1 session of 2 threads against 2 sessions of 1 thread." in second


def test_an_engine_to_compare_with_is_named_in_the_same_settings(report: Report) -> None:
    old = [("old", 1, 2, 2.0), ("old, 2 sessions", 2, 1, 9.0)]
    given = columns(report, BOTH[0], *old, ("new", 1, 2, 3.0))
    given = replace(given, asked=("new",), against=("old", "old, 2 sessions"))
    first, second = sentences(given)[:2]
    assert first.startswith("new is 3.00× [3.00, 3.00] the baseline fp32 CPU at batch 64")
    assert second.startswith(
        "Against the engine to compare with: new is 1.50× [1.50, 1.50] the old at batch 64"
    )


def test_a_gpu_is_compared_with_the_fastest_on_the_cpu_whatever_its_precision(
    report: Report,
) -> None:
    given = columns(report, BOTH[0], ("int8", 1, 2, 4.0), ("TensorRT", 1, 2, 32.0))
    slow = columns(report, ("TensorRT", 1, 2, 2.0))
    points = [p for p in given.points if p.label != "TensorRT" or p.batch >= 8]
    points += [p for p in slow.points if p.batch < 8]
    given = replace(given, points=tuple(points))
    first, second, third, *_ = sentences(where("TensorRT", device="cuda:0", threads=None)(given))
    assert first.startswith("TensorRT is 8.00× [8.00, 8.00] the int8 at batch 64")
    assert second.startswith(
        "Against the fastest column of the baseline: TensorRT is 32.0× [32.0, 32.0] the baseline"
    )
    assert third.startswith(
        "TensorRT is ahead of the best on the CPU by throughput from batch 8 on"
    )


def test_the_headline_is_about_the_engine_asked_for_not_the_fastest(report: Report) -> None:
    first, second = sentences(replace(report, asked=("fp16 CPU",)))[:2]
    assert first.startswith("fp16 CPU is 0.8")
    assert "the fp32 CPU (baseline) at batch" in first
    assert "Against the best on the CPU: fp16 CPU is 0.4" in second
    both = [s for s in verdict(replace(report, asked=("fp16 CPU", "int8 CPU"))) if "accuracy" in s]
    assert [s.partition(" is ")[0] for s in both] == ["fp16 CPU", "int8 CPU"]


def test_a_run_of_one_model_opens_with_its_figures(report: Report) -> None:
    points = [point for point in report.points if point.label == report.baseline]
    first = sentences(replace(report, points=tuple(points)))[0]
    assert first.startswith("fp32 CPU (baseline): 6 630 [")
    assert first.endswith("at batch 64; nothing else was measured to compare it with.")
    points += [replace(p, label=f"{p.label}, 2 sessions", sessions=2) for p in points]
    artefacts = ({"file": "m.onnx", "sha256": "0"},)
    alone = replace(report, points=tuple(points), artefacts=artefacts, asked=(report.baseline,))
    first, second, *_ = sentences(alone)
    assert re.match(r"m.onnx: p50 [\d.]+ ms at batch 1; up to 6 630 \[", first)
    assert first.endswith("inferences/s at batch 64, in 1 session of 2 threads.")
    assert "2 sessions" in second


def test_nothing_is_concluded_from_an_invalid_run(report: Report) -> None:
    why = "another process used 31 % of a core: stop it, and measure again."
    invalid = replace(report, invalid=(why,))
    assert sentences(invalid)[0].startswith(f"The machine was busy: {why}")
    several = sentences(replace(invalid, invalid=(why, "steal: rent another")))
    assert sum("busy" in sentence for sentence in several) == 1
    assert "×" not in words(invalid)
    assert invalid.to_dict()["speedups"] == invalid.to_dict()["crossovers"] == []


def test_a_marked_row_is_in_no_conclusion_and_its_reason_is_stated(report: Report) -> None:
    points = tuple(
        replace(p, marks=("got faster all the time",))
        if p.label == "int8 CPU" and p.batch >= 8
        else p
        for p in report.points
    )
    marked = replace(report, points=points, asked=("int8 CPU",))
    assert "int8 CPU is 1.74× [1.67, 1.81] the fp32 CPU (baseline) at batch 4," in words(marked)
    assert "4 of 28 rows give no verdict: got faster all the time (4)." in words(marked)
    assert {each.batch for each in marked.speedups if each.label == "int8 CPU"} == {1, 2, 4}
    assert "×" not in words(where(marks=("slow",))(report))
    none = where("int8 CPU", marks=("slow",))(replace(report, asked=("int8 CPU",)))
    first, second, *_ = verdict(none)  # and no other takes its place
    assert first == "No row of int8 CPU gives a verdict."
    assert "×" not in first + second


def test_a_marked_row_is_apart_in_tables_and_charts(report: Report) -> None:
    document = where("int8 CPU", marks=("slow",))(report).to_dict()
    tables = {table.title: table for table in details(document)}
    assert {row[0] for row in tables["Rows without a verdict"].rows} == {"int8 CPU"}
    assert tables["Rows without a verdict"].rows[0][10] == "no verdict: slow"
    assert "int8 CPU" not in {row[0] for row in tables["Every point"].rows}
    last = [row for row in summary(document).rows if not row[0].startswith("over")][-1]
    assert (last[0], last[-1]) == ("int8 CPU", "no verdict")
    drawn, notes = charts(document)
    assert [one.label for one in drawn[0].series][-1] == "✗ int8 CPU"
    assert notes[0].startswith("✗ in a chart: rows of this setup give no verdict")


def test_a_wrong_engine_is_in_no_conclusion_and_no_chart(report: Report) -> None:
    wrong = replace(report, wrong=("int8 CPU",), asked=("int8 CPU",))
    assert "int8 CPU is" not in words(wrong)
    assert "INT8 pays" not in words(wrong)
    assert summary(wrong.to_dict()).rows[3][-1] == "wrong outputs"
    place = {"label": "int8 CPU", "batch": 1, "intensity": 2.0, "gflops": 9.0}
    roof = {"ceilings": {"gflops": 10.0, "gbytes_per_s": 9.0}, "points": [place]}
    drawn, notes = charts(replace(wrong, roofline=roof).to_dict())
    assert not any("int8 CPU" in str(figure) for figure in drawn)
    assert "Not drawn, as the outputs are wrong: int8 CPU." in notes


MODEL, COPY = "fp32 CPU", "copy"


def point(
    label: str, batch: int, sessions: int, rates: Sequence[float], processes: int | None = None
) -> Point:
    value = float(np.mean(rates))
    return bare_point(
        f"{label}, {sessions} sessions" if sessions > 1 else label,
        batch,
        sessions=sessions,
        threads=3 - sessions,
        rounds=20,
        throughput_per_s=Interval(value, value * 0.9, value * 1.1),
        round_rates=tuple(rates),
        processes=len(rates) if processes is None else processes,
    )


def copied(points: Sequence[Point]) -> Report:
    asked = (COPY, f"{COPY}, 2 sessions")
    return Report("copy", "", "", baseline=MODEL, points=tuple(points), asked=asked)


def simulated(random: Any, processes: int, spread: float, times: float, most: int = 8) -> Report:
    """All setups of a process drift together; each differs by `spread` on top, in each process."""
    points = []
    for batch in BATCHES:
        drift = 0.02 * random.standard_normal(processes)
        for label, factor in ((MODEL, 1.0), (COPY, times)):
            for count in (1, 2):
                logs = drift + spread * random.standard_normal(processes)
                rate = 1000 * factor * count * min(batch, most)
                points.append(point(label, batch, count, [rate * exp(each) for each in logs]))
    return copied(points)


def differs(found: Report) -> bool:
    """Whether anything in the report says that the copy is faster, or slower, than its like."""
    by_key = {(p.label, p.batch): p for p in found.points}
    likes = [
        found.speedup(p, by_key[label.replace(COPY, MODEL), batch])
        for (label, batch), p in by_key.items()
        if COPY in label
    ]
    said = any(difference(each) in (FASTER, SLOWER) for each in likes)
    return said or not sentences(found)[0].startswith(("No difference", "copy"))


@pytest.mark.parametrize("processes", [5, PROCESSES])
def test_a_copy_differs_nowhere_in_19_of_20_reports(processes: int) -> None:
    random = np.random.default_rng(13)
    runs = [simulated(random, processes, 0.02, 1.0) for _ in range(150)]
    assert sum(map(differs, runs)) <= 0.05 * 150
    assert "fp32 CPU, 2 sessions by throughput at no batch up to 32" in words(runs[0])


def test_one_process_leaves_room_for_what_it_cannot_show() -> None:
    """Rounds that agree to 0.1 % say nothing of how processes differ, by 1 % each."""
    for rate, expected in ((975, "No difference"), (950, "copy is 0.950")):
        sides = ((MODEL, 1000), (COPY, rate))
        rounds = [point(label, 1, 1, [each * 0.999, each * 1.001] * 10, 1) for label, each in sides]
        assert sentences(copied(rounds))[0].startswith(expected)
