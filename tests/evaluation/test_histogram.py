"""Histograms: percentiles taken from them are those of the calls, within half a bin."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.core.errors import BadInput
from deploykit.evaluation.latency import GROWTH, CallHistogram, Latency, percentile_ms
from tests.support.fake_engine import FakeEngine

HALF_A_BIN = math.sqrt(GROWTH) - 1 + 1e-9


@pytest.mark.parametrize("scale_s", [1e-7, 1e-3, 10.0, 1e4], ids=str)
@pytest.mark.parametrize("q", [0, 50, 90, 99, 100], ids=str)
def test_a_percentile_of_the_histogram_is_that_of_the_calls(scale_s: float, q: float) -> None:
    calls_s = np.random.default_rng(1).lognormal(0.0, 1.0, 5000) * scale_s
    exact_ms = float(np.quantile(calls_s, q / 100, method="inverted_cdf")) * 1e3
    found_ms = percentile_ms(CallHistogram.of(calls_s).to_dict(), q)
    assert found_ms == pytest.approx(exact_ms, rel=HALF_A_BIN)


def test_every_call_is_counted_in_one_bin() -> None:
    calls_s = np.random.default_rng(2).lognormal(-7.0, 0.5, 10_000)
    found = CallHistogram.of(calls_s)
    assert found.calls == 10_000
    assert len(found.bins) < 500
    assert CallHistogram.of([1.01e-6]).bins == (1,)  # the lower end of a bin belongs to it
    assert CallHistogram.of([1e-6, 1e-6]) == CallHistogram((0,), (2,))
    assert CallHistogram.of([0.0]).calls == 1  # a clock that did not move


@pytest.mark.parametrize("bad", [[], [-1.0], [math.nan], [math.inf]], ids=str)
def test_what_is_no_latency_is_refused(bad: list[float]) -> None:
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
    setups = [Setup("a", FakeEngine)]
    feeds = {"x": np.zeros((1, 4), np.float32)}
    point = sweep(setups, [1], Timing(0.0, 0.2, 5), lambda _: feeds)[0]
    assert point.histogram is not None
    assert point.histogram.calls == point.samples
    again = point.histogram.to_dict()
    assert percentile_ms(again, 100) == pytest.approx(point.latency.max_ms, rel=HALF_A_BIN)
    assert isinstance(point.latency, Latency)
    for q, stated in ((50, point.latency.p50_ms), (99, point.latency.p99_ms)):
        if stated is not None:
            assert percentile_ms(again, q) == pytest.approx(stated.value, rel=HALF_A_BIN)
