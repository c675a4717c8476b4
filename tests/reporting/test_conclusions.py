"""What a report concludes: about the engine asked for, from right and unmarked rows."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from deploykit.core.evidence import Interval
from deploykit.evaluation.latency import Latency
from deploykit.evaluation.statistics import throughput
from deploykit.reporting.charts import Chart
from deploykit.reporting.figures import charts
from deploykit.reporting.points import CLOSED_LOOP, Point
from deploykit.reporting.report import PointEnergy, Report, crossovers
from deploykit.reporting.tables import best_by_batch, details, summary
from deploykit.reporting.verdict import verdict

BATCHES = (1, 2, 4, 8, 16, 32)


def plain(text: str) -> str:
    return text.replace("\u202f", " ")


def words(report: Report) -> str:
    return plain(" ".join(verdict(report)))


def only(report: Report, *labels: str) -> Report:
    return replace(report, points=tuple(p for p in report.points if p.label in labels))


def simulated(label: str, batch: int, rng: np.random.Generator, times: float = 1.0) -> Point:
    """Five rounds of log-normal calls; each round's speed differs by 1 %."""
    mean_s = (0.2e-3 + 0.1e-3 * batch) / times
    rounds = [rng.lognormal(np.log(mean_s), 0.1, 400) * rng.lognormal(0, 0.01) for _ in range(5)]
    rows = [float(batch * len(calls)) for calls in rounds]
    seconds = [float(calls.sum()) for calls in rounds]
    return Point(
        label=label,
        precision="fp32",
        device="cpu",
        runtime="simulated",
        scenario=CLOSED_LOOP,
        batch=batch,
        sessions=1,
        threads=1,
        samples=2000,
        rounds=5,
        duration_s=sum(seconds),
        latency=Latency.of(*rounds),
        throughput_per_s=throughput(rows, seconds),
        round_rates=tuple(r / s for r, s in zip(rows, seconds, strict=True)),
    )


def test_a_copy_has_no_crossover_in_20_runs_and_is_hardly_ever_called_faster() -> None:
    claims = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        points = tuple(simulated(label, b, rng) for b in BATCHES for label in ("base", "copy"))
        assert [each.batch for each in crossovers(points, "base")] == [None, None], seed
        found = Report("t", "2026", "c", baseline="base", points=points, asked=("copy",))
        first = verdict(found)[0]
        claims += not ("No difference" in first or "practically equal" in first)
        assert "copy is ahead of base by throughput at no batch up to 32" in words(found)
    assert claims <= 1


def test_a_faster_engine_has_its_crossover_and_is_called_faster() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        fast = [simulated("fast", b, rng, 1.3 if b >= 4 else 0.8) for b in BATCHES]
        points = (*fast, *(simulated("base", b, rng) for b in BATCHES))
        found = words(Report("t", "2026", "c", baseline="base", points=points, asked=("fast",)))
        assert found.startswith("fast is 1."), found
        assert (
            "fast is ahead of base by throughput from batch 4 on, by p50 from batch 4 on" in found
        )


def test_a_lead_of_less_than_2_per_cent_is_no_crossover() -> None:
    def at(label: str, rate: float) -> list[Point]:
        point = simulated(label, 1, np.random.default_rng(0))
        exact = Interval(rate, rate * 0.9999, rate * 1.0001)
        return [replace(point, batch=b, throughput_per_s=exact, processes=10) for b in BATCHES]

    for times, expected in ((1.019, None), (1.021, 1)):
        points = (*at("base", 100.0), *at("other", 100.0 * times))
        assert crossovers(points, "base")[0].batch == expected


def test_the_headline_is_about_the_engine_asked_for_not_the_fastest(report: Report) -> None:
    first = plain(verdict(replace(report, asked=("fp16 CPU",)))[0])
    assert first.startswith("fp16 CPU is 0.8")
    assert "the fp32 CPU (baseline) at batch" in first
    text = words(replace(report, asked=("fp16 CPU",)))
    assert "Against the best on the CPU: fp16 CPU is 0.4" in text
    both = [s for s in verdict(replace(report, asked=("fp16 CPU", "int8 CPU"))) if "accuracy" in s]
    assert [s.partition(" is ")[0] for s in both] == ["fp16 CPU", "int8 CPU"]


def test_nothing_is_concluded_from_an_invalid_run(report: Report) -> None:
    why = "another process used 31 % of a core: stop it, and measure again."
    invalid = replace(report, invalid=(why,))
    sentences = verdict(invalid)
    assert sentences[0] == f"INVALID: {why}"
    assert "×" not in " ".join(sentences)
    assert invalid.to_dict()["speedups"] == invalid.to_dict()["crossovers"] == []


def test_a_marked_row_is_in_no_conclusion_and_its_reason_is_stated(report: Report) -> None:
    def mark(point: Point) -> Point:
        chosen = point.label == "int8 CPU" and point.batch >= 8
        return replace(point, marks=("got faster all the time",)) if chosen else point

    marked = replace(report, points=tuple(map(mark, report.points)), asked=("int8 CPU",))
    text = words(marked)
    assert "int8 CPU is 1.74× [1.67, 1.81] the fp32 CPU (baseline) at batch 4," in text
    assert "4 of 28 rows give no verdict: got faster all the time (4)." in text
    assert {each.batch for each in marked.speedups if each.label == "int8 CPU"} == {1, 2, 4}
    everything = tuple(replace(p, marks=("slow",)) for p in report.points)
    assert "×" not in words(replace(report, points=everything, quick=False))


def test_a_marked_row_is_apart_in_tables_and_charts(report: Report) -> None:
    def mark(point: Point) -> Point:
        return replace(point, marks=("slow",)) if point.label == "int8 CPU" else point

    document = replace(report, points=tuple(map(mark, report.points)), invalid=()).to_dict()
    tables = {table.title: table for table in details(document)}
    assert {row[0] for row in tables["Rows without a verdict"].rows} == {"int8 CPU"}
    assert tables["Rows without a verdict"].rows[0][10] == "no verdict: slow"
    assert "int8 CPU" not in {row[0] for row in tables["Every point"].rows}
    setups = [row[0] for row in summary(document).rows]
    assert setups.index("int8 CPU") == 3
    assert summary(document).rows[3][-1] == "no verdict"
    assert "int8 CPU" not in str(best_by_batch(document).rows)
    drawn, sentences = charts(document)
    assert isinstance(drawn[0], Chart)
    assert [one.label for one in drawn[0].series][-1] == "✗ int8 CPU"
    assert "The highest throughput is 7 " in plain(drawn[0].finding)
    assert sentences[0].startswith("✗ in a chart: rows of this setup give no verdict")


def test_a_wrong_engine_is_in_no_conclusion(report: Report) -> None:
    wrong = replace(report, wrong=("int8 CPU",), asked=("int8 CPU",))
    assert "int8 CPU is" not in words(wrong)
    assert summary(wrong.to_dict()).rows[3][-1] == "wrong outputs"
    assert "INT8 pays" not in words(wrong)


def test_an_engine_without_a_usable_row_is_named_and_no_other_takes_its_place(
    report: Report,
) -> None:
    points = tuple(
        replace(each, marks=("slow",)) if each.label == "int8 CPU" else each
        for each in report.points
    )
    first, second, *_ = verdict(replace(report, points=points, asked=("int8 CPU",)))
    assert first == "No row of int8 CPU gives a verdict."
    assert "×" not in first + second


def test_a_run_of_one_model_opens_with_its_figures(report: Report) -> None:
    """It opened with "No difference between" two numbers of sessions of that model."""
    points = [point for point in report.points if point.label == report.baseline]
    points += [replace(p, label=f"{p.label}, 2 sessions", sessions=2) for p in points]
    artefacts = ({"file": "m.onnx", "sha256": "0"},)
    alone = replace(report, points=tuple(points), artefacts=artefacts, asked=(report.baseline,))
    first, second, *_ = map(plain, verdict(alone))
    assert re.match(r"m.onnx: p50 [\d.]+ ms at batch 1; up to 6 630 \[", first)
    assert first.endswith("inferences/s at batch 64, in 1 session of 2 threads.")
    assert "2 sessions" in second


def test_whether_int8_pays_is_reported_with_the_figures_of_the_end_batches(report: Report) -> None:
    assert "INT8 pays here: 1.54× at batch 1, 1.84× at batch 64, against float32." in words(report)
    slow = tuple(
        replace(p, round_rates=tuple(rate / 3 for rate in p.round_rates))
        if p.label == "int8 CPU" and p.batch == 1
        else p
        for p in report.points
    )
    assert "INT8 pays at some batches only: 0.5" in words(replace(report, points=slow))
    slow = tuple(
        replace(p, round_rates=tuple(rate / 3 for rate in p.round_rates))
        if p.label == "int8 CPU"
        else p
        for p in report.points
    )
    text = words(replace(report, points=slow, asked=("int8 CPU",)))
    assert "INT8 does not pay here and costs time: 0.5" in text


def test_whether_batching_pays_is_reported_with_its_price(report: Report) -> None:
    text = words(replace(report, asked=("int8 CPU",)))
    assert "Batching pays: batch 64 has 1.66× the throughput of batch 1, and calls that" in text
    assert "take 38.5× as long" in text
    flat = tuple(
        replace(p, throughput_per_s=Interval(100.0 + p.batch / 100, 99.0, 101.0))
        for p in report.points
    )
    assert "Batching does not pay" in words(replace(report, points=flat))
    alone = tuple(p for p in report.points if p.batch == 1)
    assert "Batching" not in words(replace(report, points=alone))


@pytest.mark.parametrize(
    ("gflops", "intensity", "says"),
    [
        (75.0, 1.0, "is memory-bound: it reaches 75 % of what the memory"),
        (900.0, 100.0, "is compute-bound: it reaches 90 % of what the compute"),
        (10.0, 1.0, "is bound by neither compute nor memory, but by launches and calls"),
    ],
)
def test_what_bounds_an_engine_is_read_off_the_roofline(
    report: Report, gflops: float, intensity: float, says: str
) -> None:
    point = {"label": "int8 CPU", "batch": 64, "intensity": intensity, "gflops": gflops}
    roofline = {"ceilings": {"gflops": 1000.0, "gbytes_per_s": 100.0}, "points": [point]}
    assert f"int8 CPU at batch 64 {says}" in words(replace(report, roofline=roofline))


def test_an_engine_that_mostly_copies_is_bound_by_that(report: Report) -> None:
    def with_compute(point: Point) -> Point:
        p50 = point.latency.p50_ms
        assert p50 is not None
        short = Latency(100, Interval(p50.value / 4, 0, p50.value), None, None, 1.0)
        return replace(point, compute=short)

    points = tuple(map(with_compute, report.points))
    assert "is bound by copies and launches: 75 % of a call" in words(
        replace(report, points=points)
    )


def test_the_throughput_within_the_wanted_latency_is_named(report: Report) -> None:
    text = words(replace(report, slo_ms=3.0))
    assert "Within 3.00 ms at p99: int8 CPU 11 800 inferences/s at batch 16; fp32 CPU" in text
    assert "int8 CPU none; fp32 CPU (baseline) none" in words(replace(report, slo_ms=0.01))
    few = tuple(replace(p, latency=replace(p.latency, p99_ms=None)) for p in report.points)
    text = words(replace(report, points=few, slo_ms=3.0))
    assert "int8 CPU not known, as calls were too few for a p99; fp32" in text
    assert "Within" not in words(report)


def test_a_gpu_is_ahead_of_the_best_on_the_cpu_from_a_batch_on(report: Report) -> None:
    base = [p for p in report.points if p.label == report.baseline]

    def gpu(point: Point) -> Point:
        times = 0.5 if point.batch < 8 else 4.0
        rate, p50 = point.throughput_per_s, point.latency.p50_ms
        assert p50 is not None
        faster = Interval(rate.value * times, rate.low * times, rate.high * times)
        ms = Interval(p50.value / times, p50.low / times, p50.high / times)
        rates = tuple(each * times for each in point.round_rates)
        new = replace(point, label="fp16, GPU", device="cuda:0", threads=None, round_rates=rates)
        latency = replace(point.latency, p50_ms=ms)
        return replace(new, throughput_per_s=faster, latency=latency)

    points = (*report.points, *map(gpu, base))
    text = words(replace(report, points=points, asked=("fp16, GPU",)))
    assert text.startswith("fp16, GPU is 2.1")  # the best on the CPU is int8
    assert "the int8 CPU at batch 64" in text.partition(";")[0]
    assert "Against the fastest column of the baseline: fp16, GPU is 4.00×" in text
    assert "fp16, GPU is ahead of the best on the CPU by throughput from batch 8 on" in text


def test_without_another_engine_the_baseline_s_own_figure_is_the_headline(report: Report) -> None:
    first = plain(verdict(only(report, report.baseline))[0])
    assert first.startswith("fp32 CPU (baseline): 6 630 [")
    assert first.endswith("at batch 64; nothing else was measured to compare it with.")


def test_the_energy_of_an_inference_is_named_where_it_was_measured(report: Report) -> None:
    ours = PointEnergy("int8 CPU", 64, 1.2e-3, 1.0e-3, 5.0, "RAPL package-0")
    theirs = replace(ours, label="fp32 CPU (baseline)", joules=2.5e-3)
    text = words(replace(report, energy=(ours, theirs)))
    assert (
        "Energy of one inference at batch 64, of the device alone: int8 CPU 1.20 mJ; "
        "fp32 CPU (baseline) 2.50 mJ (from RAPL package-0)." in text
    )
    assert "Energy" not in words(replace(report, energy=(theirs,)))
