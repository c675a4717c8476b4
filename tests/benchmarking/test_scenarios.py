from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from deploykit.benchmarking.scenarios import (
    MULTI,
    OFFLINE,
    SERVER,
    SINGLE,
    early_stopping_ms,
    fewest_queries,
    most_above,
    replay,
    run_offline,
    run_server,
    run_stream,
)
from deploykit.benchmarking.timing import Column, Setup
from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from tests.support.fake_engine import FakeEngine
from tests.support.measure.virtual_time import Timed, VirtualTime

FEEDS = random_feeds(FakeEngine().inputs, {"N": 1})


def subject(*engines: FakeEngine) -> Column:
    setup = Setup("a", FakeEngine, precision="fp32", settings="1 session of 1 thread")
    return Column(setup, engines)


@pytest.mark.parametrize(
    ("queries", "discarded"), [(2048, 172), (7469, 685), (2116, 178), (2145, 181)]
)
def test_as_many_latencies_are_discarded_as_in_published_logs_of_loadgen(
    queries: int, discarded: int
) -> None:
    """Its "would discard" is one less than the rank from the top of the latency that it gives."""
    assert most_above(queries, 90) - 1 == discarded


def test_percentiles_need_as_many_queries_as_in_loadgen() -> None:
    assert (fewest_queries(90), fewest_queries(99)) == (64, 662)
    assert (fewest_queries(90, above=0), fewest_queries(99, above=0)) == (44, 459)
    assert early_stopping_ms(np.ones(63), 90) is None
    assert early_stopping_ms(np.ones(64), 90) == 1000.0
    assert most_above(0, 99) == -1


@pytest.mark.parametrize("q", [90.0, 99.0])
@pytest.mark.parametrize("n", [700, 3000])
def test_the_bound_is_below_the_true_percentile_in_one_of_a_hundred_runs(q: float, n: int) -> None:
    rng = np.random.default_rng(int(q) + n)
    truth = -math.log(1 - q / 100)  # of the exponential distribution
    found = [early_stopping_ms(rng.exponential(1, n), q) / 1e3 for _ in range(3000)]
    below = float(np.mean(np.array(found) < truth))
    assert (0.0 if n < 1000 else 0.002) <= below <= 0.014


@pytest.mark.parametrize(("scenario", "metric"), [(SINGLE, "p90 ms"), (MULTI, "p99 ms")])
def test_a_stream_gives_its_percentile(scenario: str, metric: str) -> None:
    """Slow by turns: of 100 calls, one takes 40 ms and nineteen take 20 ms."""
    clock = VirtualTime()
    engine = Timed(clock, lambda n: 0.04 if n % 100 == 0 else 0.02 if n % 5 == 0 else 0.01, [], "")
    found = run_stream(scenario, subject(engine), FEEDS, 30.0, clock)
    assert found.metric == metric
    assert found.value == pytest.approx(20.0 if scenario == SINGLE else 40.0)
    assert found.queries >= 2400
    assert found.latency is not None
    assert (found.needs, found.why, found.batch) == (None, "", 1 if scenario == SINGLE else 8)


def test_a_stream_goes_on_for_the_queries_that_it_needs() -> None:
    clock = VirtualTime()
    found = run_stream(SINGLE, subject(Timed(clock, lambda _: 0.1, [], "")), FEEDS, 1.0, clock)
    assert (found.queries >= 64, found.duration_s <= 7.0) == (True, True)
    assert found.value == pytest.approx(100.0)


def test_a_stream_that_takes_too_long_for_them_has_no_percentile() -> None:
    clock = VirtualTime()
    found = run_stream(MULTI, subject(Timed(clock, lambda _: 0.1, [], "")), FEEDS, 1.0, clock)
    assert found.value is None
    assert found.needs == 662
    assert found.why == f"{found.queries} queries in {found.duration_s:.3g} s, 662 are needed"
    assert 10.0 <= found.duration_s <= 10.3


def test_the_warm_up_is_in_no_figure() -> None:
    clock = VirtualTime()
    engine = Timed(clock, lambda n: 1.0 if n < 2 else 0.01, [], "")
    found = run_stream(SINGLE, subject(engine), FEEDS, 10.0, clock)
    assert found.latency is not None
    assert found.latency.max_ms == pytest.approx(10.0)
    offline = run_offline(
        subject(Timed(clock, lambda n: 1.0 if n < 1 else 0.01, [], "")), FEEDS, 1, 1.0, clock
    )
    assert offline.value == pytest.approx(100.0)


def test_offline_counts_samples() -> None:
    clock = VirtualTime()
    found = run_offline(subject(Timed(clock, lambda _: 0.02, [], "")), FEEDS, 4, 1.0, clock)
    assert (found.scenario, found.metric, found.batch) == (OFFLINE, "samples/s", 4)
    assert found.value == pytest.approx(200.0)


def server(slo_ms: float, seconds: float, serve: Callable[..., np.ndarray], count: int = 1) -> Any:
    clock = VirtualTime()
    engines = [Timed(clock, lambda _: 0.0005, [], "") for _ in range(count)]
    return run_server(subject(*engines), FEEDS, slo_ms, seconds, serve=serve, clock=clock)


def queue(service_s: float, servers: int = 1) -> Callable[..., np.ndarray]:
    """First come first served by `servers` that take `service_s` each, in exact time."""

    def serve(
        _engines: Any, _feeds: Any, due_s: np.ndarray, _slo_s: float, _most: int
    ) -> np.ndarray:
        free = [0.0] * servers
        latencies = []
        for due in due_s:
            at = free.index(min(free))
            free[at] = max(due, free[at]) + service_s
            latencies.append(free[at] - due)
        return np.array(latencies)

    return serve


@pytest.mark.parametrize("servers", [1, 2])
def test_the_rate_of_a_server_is_the_highest_that_keeps_the_bound(servers: int) -> None:
    serve = queue(0.001, servers)
    found = server(5.0, 60.0, serve, servers)
    assert (found.scenario, found.metric, found.slo_ms) == (SERVER, "queries/s", 5.0)
    assert found.value is not None

    def share_late(rate: float) -> float:
        due = np.cumsum(np.random.default_rng(99).exponential(1 / rate, 100_000))
        return float((serve([], {}, due, 0, 0) > 0.005).mean())

    assert share_late(found.value) <= 0.012
    assert share_late(found.value * 1.1) > 0.01
    assert found.queries >= found.value * 50


def test_a_rate_that_holds_only_in_a_short_run_is_lowered() -> None:
    """Past 20 s queries take twice as long."""
    seen: list[tuple[int, float]] = []

    def serve(_e: Any, _f: Any, due_s: np.ndarray, slo_s: float, _most: int) -> np.ndarray:
        rate = len(due_s) / due_s[-1]
        seen.append((len(due_s), rate))
        limit = 100.0 if due_s[-1] > 20 else 120.0
        return np.full(len(due_s), slo_s * (0.5 if rate < limit else 2.0))

    found = server(10.0, 60.0, serve)
    assert found.value is not None
    assert 85 <= found.value <= 105
    assert found.duration_s == pytest.approx(60.0, rel=0.05)


def test_a_service_slower_than_the_bound_has_no_rate() -> None:
    found = server(5.0, 20.0, queue(0.006))
    assert found.value is None
    assert found.why == "p99 is not within 5 ms at 3.31 queries/s, the lowest rate tried"


class Stalling(FakeEngine):
    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if len(self.batches) == 5:
            time.sleep(0.3)
        return super().__call__(feeds)


def test_latency_counts_from_the_time_at_which_a_query_was_due() -> None:
    """One call stalls for 0.3 s: those that are due meanwhile wait for it."""
    found = replay([Stalling()], FEEDS, np.arange(20) * 0.01, 10.0, 100)
    assert found[5] >= 0.3
    for late in range(6, 15):
        assert found[late] >= 0.3 - (late - 5) * 0.01
    assert np.isfinite(found).all()


def test_no_query_is_answered_before_it_is_due() -> None:
    begun = time.perf_counter()
    replay([FakeEngine(), FakeEngine()], FEEDS, np.array([0.0, 0.1, 0.2]), 10.0, 100)
    assert time.perf_counter() - begun >= 0.2


class Meeting(FakeEngine):
    """Its first call waits for the first of the other."""

    def __init__(self, both: threading.Barrier) -> None:
        super().__init__(latency_s=0.05)
        self.both = both

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if not self.batches:
            self.both.wait()
        return super().__call__(feeds)


def test_queries_go_to_all_engines_that_are_free() -> None:
    both = threading.Barrier(2, timeout=60)
    engines = [Meeting(both), Meeting(both)]
    found = replay(engines, FEEDS, np.zeros(4), 1e3, 100)
    assert sum(len(engine.batches) for engine in engines) == 4
    assert min(len(engine.batches) for engine in engines) >= 1
    assert found.min() >= 0.05
    assert found.max() >= 0.1  # a backlog


def test_a_rate_that_has_failed_is_given_up_and_what_is_left_is_late() -> None:
    engine = FakeEngine(latency_s=0.02)
    found = replay([engine], FEEDS, np.zeros(200), 0.001, 3)
    assert len(engine.batches) == 4
    assert int((found > 0.001).sum()) == 200
    assert int(np.isinf(found).sum()) == 196


class Failing(FakeEngine):
    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        raise BadInput(f"a.onnx: refused {list(feeds)}")


@pytest.mark.parametrize("order", [0, 1])
def test_a_failing_engine_ends_the_run(order: int) -> None:
    engines: Sequence[FakeEngine] = [Failing(), FakeEngine()][:: 1 - 2 * order]
    before = set(threading.enumerate())
    with pytest.raises(BadInput, match="refused"):
        replay(engines, FEEDS, np.arange(1000) * 0.001, 10.0, 1000)
    assert set(threading.enumerate()) <= before
