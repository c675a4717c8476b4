"""The warm-up before a sweep: when it ends, and what it marks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deploykit.benchmarking.timing import Timing
from tests.support.measure.virtual_time import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_happens_before_the_engine_is_warm_is_not_timed(bench: Bench) -> None:
    cold = bench.setup("A", lambda call: 0.1 if call < 20 else 0.005)
    (point,) = bench.sweep(cold, timing=Timing(warmup_s=10.0, seconds=1.0, rounds=2))
    assert point.latency.max_ms == 5.0
    assert point.note == ""


def test_warm_up_ends_when_four_windows_agree(bench: Bench) -> None:
    bench.sweep(bench.setup("A", 0.1), timing=Timing(warmup_s=10.0, seconds=1.0, rounds=2))
    # four windows of 1 s, then two rounds of 0.5 s, each after one untimed call
    assert len(bench.engines[0].batches) == 40 + 2 * (1 + 5)


def sped_up(bench: Bench, window_s: float, until_s: float) -> Callable[[int], float]:
    """1 ms in the end; before `until_s`, 3 % more for each window that is still to come."""
    return lambda _: 0.001 * 1.03 ** (max(0.0, until_s - bench.clock.now_ns / 1e9) / window_s)


@pytest.mark.parametrize("warmup_s", [0.5, 2.0, 10.0], ids=["demo", "quick", "full"])
def test_calls_that_still_speed_up_are_warmed_up_for_longer(bench: Bench, warmup_s: float) -> None:
    window_s = warmup_s / 10
    slow_start = bench.setup("A", sped_up(bench, window_s, until_s=2 * warmup_s))
    (point,) = bench.sweep(slow_start, timing=Timing(warmup_s, seconds=5.0))
    assert point.latency.p50_ms is not None
    assert point.latency.p50_ms.value == pytest.approx(1.0, rel=0.01)
    assert (point.note, point.marks) == ("", ())


@pytest.mark.parametrize("warmup_s", [0.5, 2.0, 10.0], ids=["demo", "quick", "full"])
def test_calls_that_speed_up_all_the_time_are_marked(bench: Bench, warmup_s: float) -> None:
    window_s = warmup_s / 10
    speeding = bench.setup("A", sped_up(bench, window_s, until_s=5.0 * warmup_s))
    (point,) = bench.sweep(speeding, timing=Timing(warmup_s, seconds=warmup_s))
    warm_up, in_rounds = point.marks
    assert "3% faster every" in warm_up
    assert f"after {3 * warmup_s:g} s of warm-up" in warm_up
    assert "over the rounds" in in_rounds


def test_a_slow_rise_that_the_warm_up_does_not_see_is_seen_in_the_rounds(bench: Bench) -> None:
    slowly = bench.setup("A", lambda _: 0.005 * 0.99 ** (bench.clock.now_ns / 1e9))
    steady = bench.setup("B", 0.005)
    risen, other = bench.sweep(slowly, steady, timing=Timing(1.0, 5.0))
    assert risen.marks == (
        "calls still sped up, by 12% over the rounds: a longer warm-up is needed",
    )
    assert other.marks == ()


def test_noise_is_no_rise(bench: Bench) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        noisy = bench.setup("A", lambda _: 0.005 * float(random.lognormal(0, 0.3)))
        (point,) = bench.sweep(noisy, timing=Timing(0.5, 1.0))
        assert point.marks == ()


def test_warm_up_that_never_settles_is_bounded_and_noted(bench: Bench) -> None:
    ended_s: list[float] = []
    (point,) = bench.sweep(
        bench.setup("A", lambda call: 0.02 * 1.1**call),
        timing=Timing(warmup_s=3.0, seconds=0.1, rounds=2),
        on_progress=lambda *_: ended_s.append(bench.clock.now_ns / 1e9),
    )
    assert "not yet steady after 3 s" in point.note
    assert (
        3.0 <= ended_s[1] < 3.5
    )  # when round 1 was reported; the call that was running was finished


def test_no_warm_up_is_noted(bench: Bench) -> None:
    assert bench.sweep(bench.setup("A"))[0].note == "no warm-up"
