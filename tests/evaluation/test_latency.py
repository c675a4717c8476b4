"""Percentiles of latencies: which they are, how often their intervals hold the truth, and bins."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.evaluation.latency import (
    GROWTH,
    CallHistogram,
    Latency,
    fewest_calls,
    percentile_ms,
)
from tests.support import campaign
from tests.support.campaign import only_in_a_campaign
from tests.support.fake_engine import FakeEngine

SPREAD = 0.3
POINTS = {50: 0.0, 90: 1.281552, 99: 2.326348}  # of the normal distribution
RUNS = campaign.rounds(150, 300)
COVERED = (0.915, 0.985)  # 95 % nominal; a share of 150 runs varies by 1.8 %
HALF_A_BIN = math.sqrt(GROWTH) - 1 + 1e-9

Random = np.random.Generator


def uneven(n: int) -> np.ndarray:
    """1 to n ms in an order in which neighbours do not depend on each other."""
    return np.random.default_rng(1).permutation(np.arange(1, n + 1)) / 1e3


def percentiles(latency: Latency) -> dict[int, Interval | None]:
    return {50: latency.p50_ms, 90: latency.p90_ms, 99: latency.p99_ms}


def test_a_percentile_is_the_nearest_rank_a_latency_that_happened() -> None:
    found = percentiles(Latency.of(uneven(1007)))
    values = {q: each.value for q, each in found.items() if each is not None}
    assert values == pytest.approx({50: 504.0, 90: 907.0, 99: 997.0}, rel=1e-12)
    assert Latency.of([0.001, 0.004] * 50).p50_ms.value == 1.0
    equal = Latency.of(*[[0.001] * 100] * 5)
    assert equal.p99_ms == Interval(1.0, 1.0, 1.0)
    rounds = (np.random.default_rng(9).random(size) for size in (1, 30, 7, 200, 3))
    assert Latency.of(*rounds).samples == 241


@pytest.mark.parametrize(
    "samples", [[], [math.nan], [0.1, -math.inf], [math.inf], [[0.1]]], ids=str
)
def test_latencies_that_are_none_are_refused(samples: list[float]) -> None:
    with pytest.raises(BadInput, match="finite numbers"):
        Latency.of(samples)


@pytest.mark.parametrize(("q", "fewest"), [(50, 6), (90, 36), (99, 368)])
def test_a_percentile_of_too_few_calls_says_how_many_it_needs(q: int, fewest: int) -> None:
    assert fewest_calls(q) == fewest
    assert (q / 100) ** fewest <= 0.025 < (q / 100) ** (fewest - 1)
    assert Latency.of(uneven(fewest - 1)).needs[f"p{q}_ms"] == fewest


def dependent(random: Random, size: int, correlation: float) -> np.ndarray:
    """Normal values whose neighbours correlate."""
    from scipy.signal import lfilter

    noise = random.standard_normal(size) * math.sqrt(1 - correlation**2)
    first = [correlation * random.standard_normal()]
    return np.asarray(lfilter([1], [1, -correlation], noise, zi=first)[0])


def calls(random: Random, rounds: int, size: int, correlation: float = 0.0) -> list[np.ndarray]:
    """Rounds of one series, log-normal around 1 s, with this correlation of neighbours."""
    series = np.exp(SPREAD * dependent(random, rounds * size, correlation))
    return list(series.reshape(rounds, size))


def uneven_rounds(random: Random, rounds: int, size: int) -> list[np.ndarray]:
    """Rounds that differ by 1 %, of calls that differ by 10 %."""
    noise = np.exp(0.1 * random.standard_normal((rounds, size)))
    return list(noise * np.exp(0.01 * random.standard_normal((rounds, 1))))


def drifting(random: Random, rounds: int, size: int) -> list[np.ndarray]:
    """Rounds that differ by 1 %, each rather like the one before, of calls that differ by 2 %."""
    noise = np.exp(0.02 * random.standard_normal((rounds, size)))
    return list(noise * np.exp(0.01 * dependent(random, rounds, 0.9))[:, None])


@pytest.mark.parametrize(
    ("rounds", "spread", "known"),
    [
        (lambda random: calls(random, 5, 400), SPREAD, (50, 90, 99)),
        (lambda random: calls(random, 1, 1000), SPREAD, (50, 90, 99)),
        (lambda random: calls(random, 5, 2000, 0.9), SPREAD, (50, 90)),
        pytest.param(
            *(lambda random: calls(random, 1, 20_000, 0.9), SPREAD, (50, 90, 99)),
            marks=only_in_a_campaign,
        ),
        pytest.param(
            *(lambda random: calls(random, 5, 10_000, 0.99), SPREAD, (50, 90)),
            marks=only_in_a_campaign,
        ),
        (lambda random: uneven_rounds(random, 5, 2000), math.hypot(0.1, 0.01), (50, 90, 99)),
        (lambda random: drifting(random, 60, 100), math.hypot(0.02, 0.01), (50,)),
    ],
    ids=["independent", "one series", "0.9", "0.9, one series", "0.99", "uneven", "drifting"],
)
def test_the_interval_of_a_percentile_holds_the_truth_as_often_as_it_says(
    rounds: Callable[[Random], list[np.ndarray]], spread: float, known: tuple[int, ...]
) -> None:
    random = np.random.default_rng(20)
    runs = [percentiles(Latency.of(*rounds(random))) for _ in range(RUNS)]
    for q in known:
        truth_ms = 1e3 * math.exp(spread * POINTS[q])
        intervals = [each for run in runs if (each := run[q]) is not None]
        assert len(intervals) > 0.95 * RUNS
        held = np.mean([each.low <= truth_ms <= each.high for each in intervals])
        assert COVERED[0] <= held <= COVERED[1], q


@pytest.mark.parametrize(
    ("size", "correlation", "q"), [(2000, 0.9, 99), (2000, 0.99, 90), (10_000, 0.99, 99)]
)
def test_calls_that_depend_on_each_other_are_too_few_for_what_independent_ones_show(
    size: int, correlation: float, q: int
) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        assert Latency.of(*calls(random, 5, size // 5, correlation)).needs[f"p{q}_ms"] > size


def test_a_stall_of_many_calls_counts_as_one_event() -> None:
    series = np.exp(0.05 * np.random.default_rng(5).standard_normal(2000))
    for begin in (300, 1100):
        series[begin : begin + 20] *= 3
    assert Latency.of(series).p99_ms is None


def test_latency_reports_what_the_samples_allow() -> None:
    few, some, many = Latency.of([0.002, 0.001, 0.003]), *map(Latency.of, map(uneven, (100, 4000)))
    assert (few.p50_ms, few.p90_ms, few.p99_ms, few.max_ms) == (None, None, None, 3.0)
    assert few.needs == {"p50_ms": 6, "p90_ms": 36, "p99_ms": 368}
    assert some.p90_ms is not None
    assert (some.p99_ms, some.needs) == (None, {"p99_ms": 368})
    assert many.p99_ms.low < 3960 == many.p99_ms.value < many.p99_ms.high
    assert (many.samples, many.needs) == (4000, {})
    assert json.loads(json.dumps(Latency.of([0.001] * 10).to_dict(), allow_nan=False)) == {
        "samples": 10,
        "p50_ms": {"value": 1.0, "low": 1.0, "high": 1.0},
        "p90_ms": None,
        "p99_ms": None,
        "max_ms": 1.0,
        "needs": {"p90_ms": 36, "p99_ms": 368},
        "lost": 0,
    }


# Histograms: percentiles taken from them are those of the calls, within half a bin


@pytest.mark.parametrize("scale_s", [1e-7, 1e-3, 10.0, 1e4], ids=str)
@pytest.mark.parametrize("q", [0, 50, 90, 99, 100], ids=str)
def test_a_percentile_of_the_histogram_is_that_of_the_calls(scale_s: float, q: float) -> None:
    calls_s = np.random.default_rng(1).lognormal(0.0, 1.0, 5000) * scale_s
    exact_ms = float(np.quantile(calls_s, q / 100, method="inverted_cdf")) * 1e3
    found_ms = percentile_ms(CallHistogram.of(calls_s).to_dict(), q)
    assert found_ms == pytest.approx(exact_ms, rel=HALF_A_BIN)


def test_every_call_is_counted_in_one_bin() -> None:
    found = CallHistogram.of(np.random.default_rng(2).lognormal(-7.0, 0.5, 10_000))
    assert found.calls == 10_000
    assert len(found.bins) < 500
    assert CallHistogram.of([1.01e-6]).bins == (1,)  # the lower end of a bin belongs to it
    assert CallHistogram.of([1e-6, 1e-6]) == CallHistogram((0,), (2,))
    assert CallHistogram.of([0.0]).calls == 1  # a clock that did not move
    for bad in ([], [-1.0], [math.nan], [math.inf]):
        with pytest.raises(BadInput):
            CallHistogram.of(bad)


@pytest.mark.parametrize(
    ("bins", "counts"),
    [((1,), ()), ((2, 1), (1, 1)), ((1, 1), (1, 1)), ((1,), (0,)), ((10**400,), (1,))],
    ids=["lengths", "order", "twice", "empty bin", "no such time"],
)
def test_a_damaged_histogram_is_refused(bins: tuple[int, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="rising bins"):
        CallHistogram(bins, counts)


def test_a_timed_point_keeps_its_calls_with_the_percentiles_that_it_states() -> None:
    feeds = {"x": np.zeros((1, 4), np.float32)}
    point = sweep([Setup("a", FakeEngine)], [1], Timing(0.0, 0.2, 5), lambda _: feeds)[0]
    assert point.histogram.calls == point.samples
    again = point.histogram.to_dict()
    assert percentile_ms(again, 100) == pytest.approx(point.latency.max_ms, rel=HALF_A_BIN)
    for q, stated in ((50, point.latency.p50_ms), (99, point.latency.p99_ms)):
        if stated is not None:
            assert percentile_ms(again, q) == pytest.approx(stated.value, rel=HALF_A_BIN)
