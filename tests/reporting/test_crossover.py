from __future__ import annotations

from dataclasses import replace

import pytest

from deploykit.benchmarking.cpu_search import best_cpu
from deploykit.benchmarking.timing import Timing
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.evaluation.latency import Latency
from deploykit.reporting.points import Point, best, crossover
from deploykit.reporting.report import Report
from tests.support.measure.simulated import bare_point


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_timing_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(BadInput, match="`seconds` must be above 0"):
        Timing(1.0, seconds)


def points(**rates: tuple[float, float]) -> list[Point]:
    """Points by batch ("b8") with the ends of the interval that both figures of them get."""
    found = []
    for batch, ends in rates.items():
        both = Interval(sum(ends) / 2, *ends)
        latency = Latency(100, both, None, None, ends[1])
        found.append(bare_point("A", int(batch[1:]), latency=latency, throughput_per_s=both))
    return found


CPU = points(b1=(90, 110), b2=(90, 110), b4=(90, 110), b8=(90, 110))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (points(b1=(50, 60), b2=(120, 130), b4=(150, 160), b8=(200, 210)), 2),
        (points(b1=(120, 130), b2=(120, 130), b4=(150, 160), b8=(200, 210)), 1),
        (points(b1=(120, 130), b2=(100, 130), b4=(150, 160), b8=(200, 210)), 4),
        (points(b1=(120, 130), b2=(120, 130), b4=(150, 160), b8=(100, 210)), None),
        (points(b2=(120, 130), b4=(150, 160), b16=(1, 2)), 2),
    ],
    ids=["from 2", "from the first", "intervals touch at 2", "not at the end", "common batches"],
)
def test_crossover_is_the_first_batch_from_which_a_stays_ahead(
    gpu: list[Point], expected: int | None
) -> None:
    assert crossover(gpu, CPU) == expected
    assert crossover(gpu[::-1], CPU) == expected


def test_crossover_by_latency_wants_less() -> None:
    slow_then_fast = points(b1=(120, 130), b2=(80, 95), b4=(50, 60), b8=(40, 50))
    assert crossover(slow_then_fast, CPU, by="p50") == 4
    assert crossover(CPU, slow_then_fast, by="p50") is None


@pytest.mark.parametrize(
    ("rate", "in_one", "in_ten"), [(101.9, None, None), (102.5, None, 1), (103, 1, 1)]
)
def test_ahead_is_more_than_processes_differ_where_only_one_timed_both(
    rate: float, in_one: int | None, in_ten: int | None
) -> None:
    pair = [points(b1=(value - 0.1, value + 0.1)) for value in (rate, 100)]
    assert crossover(*pair) == in_one
    ten = [[replace(point, processes=10) for point in side] for side in pair]
    assert crossover(*ten) == in_ten


def test_crossover_needs_a_common_batch() -> None:
    with pytest.raises(BadInput, match="no batch size was measured on both"):
        crossover(points(b3=(1, 2)), CPU)


def test_best_by_throughput_is_the_highest_and_by_p50_the_lowest() -> None:
    mixed = points(b1=(10, 12), b2=(30, 32), b4=(20, 22))
    assert best(mixed).batch == 2
    assert best(mixed, by="p50").batch == 1


def test_best_by_p50_skips_points_without_one() -> None:
    first, second = points(b1=(10, 12), b2=(30, 32))
    unknown = replace(first, latency=Latency(3, None, None, None, 1.0))
    assert best([unknown, second], by="p50").batch == 2
    with pytest.raises(BadInput, match="no point has a p50 figure"):
        best([unknown], by="p50")


def test_the_best_of_the_cpu_is_right_on_the_cpu_and_in_the_closed_loop(report: Report) -> None:
    found = [replace(each, settings=f"of {each.label}") for each in report.points]
    fastest = best_cpu(found, set())
    assert [each.batch for each in fastest] == [1, 2, 4, 8, 16, 32, 64]
    assert (fastest[0].label, fastest[0].settings, fastest[0].precision) == (
        "int8 CPU",
        "of int8 CPU",
        "int8",
    )
    assert fastest[0].why == (
        "the fastest of 4 columns on the CPU (ONNX Runtime fp32, ONNX Runtime fp16, "
        "ONNX Runtime int8)"
    )
    assert best_cpu(found, {"int8 CPU"})[0].label == "fp32 CPU, 2 × 1"
    assert best_cpu([replace(each, device="cuda:0") for each in found], set()) == ()
    assert best_cpu([replace(each, scenario="offline") for each in found], set()) == ()
