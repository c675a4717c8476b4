"""MLPerf's scenarios: their percentiles and rates by a virtual clock, and `bench` with them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.benchmarking.scenarios import (
    early_stopping_ms,
    most_above,
    replay,
    run_scenarios,
    run_server,
    run_stream,
)
from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.engines.engine import Arrays
from tests.support.fake_engine import FakeEngine
from tests.support.measure.virtual_time import Timed, VirtualTime, feeds

FEEDS = feeds(1)


def subject(latency_s: Callable[[int], float], count: int = 1) -> tuple[list[Timed], VirtualTime]:
    clock = VirtualTime()
    return [Timed(clock, latency_s, [], "") for _ in range(count)], clock


def test_percentiles_need_as_many_queries_as_in_loadgen() -> None:
    """In published logs "would discard" is one less than the rank from the top of the latency."""
    for queries, discarded in ((2048, 172), (7469, 685), (2116, 178), (2145, 181)):
        assert most_above(queries, 90) - 1 == discarded
    for percentile, fewest in ((90, 64), (99, 662)):
        assert early_stopping_ms(np.ones(fewest - 1), percentile) is None
        assert early_stopping_ms(np.ones(fewest), percentile) == 1000.0


@pytest.mark.parametrize(("q", "value"), [(90, 20.0), (99, 40.0)])
def test_a_stream_gives_its_percentile(q: float, value: float) -> None:
    """Of 100 calls one takes 40 ms and nineteen take 20 ms; the warm-up takes a second."""

    def latency_s(n: int) -> float:
        return 1.0 if n < 2 else 0.04 if n % 100 == 2 else 0.02 if n % 5 == 2 else 0.01

    (engine,), clock = subject(latency_s)
    found = run_stream(q, engine, FEEDS, 1, 30.0, clock)
    assert found["value"] == pytest.approx(value)
    assert found["queries"] >= 2400
    assert found["latency"].max_ms == pytest.approx(40.0)
    assert not {"needs", "why"} & found.keys()


def test_a_stream_goes_on_for_the_queries_that_it_needs_or_has_no_percentile() -> None:
    (engine,), clock = subject(lambda _: 0.1)
    found = run_stream(90, engine, FEEDS, 1, 1.0, clock)
    assert (found["queries"] >= 64, found["duration_s"] <= 7.0) == (True, True)
    assert found["value"] == pytest.approx(100.0)
    found = run_stream(99, engine, FEEDS, 1, 1.0, clock)
    assert (found["value"], found["needs"]) == (None, 662)
    few = f"{found['queries']} queries in {found['duration_s']:.3g} s, 662 are needed"
    assert found["why"] == few
    assert 10.0 <= found["duration_s"] <= 10.3


def server(slo_ms: float, seconds: float, serve: Callable[..., np.ndarray], count: int = 1) -> Any:
    engines, clock = subject(lambda _: 0.0005, count)
    return run_server(engines, FEEDS, slo_ms, seconds, serve=serve, clock=clock)


def queue(service_s: float, servers: int = 1) -> Callable[..., np.ndarray]:
    """First come first served by `servers` that take `service_s` each, in exact time."""

    def serve(_engines: Any, _feeds: Any, due_s: np.ndarray, *_limits: float) -> np.ndarray:
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

    def share_late(rate: float) -> float:
        due = np.cumsum(np.random.default_rng(99).exponential(1 / rate, 100_000))
        return float((serve([], {}, due, 0, 0) > 0.005).mean())

    assert share_late(found["value"]) <= 0.012
    assert share_late(found["value"] * 1.1) > 0.01
    assert found["queries"] >= found["value"] * 50


def test_a_rate_that_holds_only_in_a_short_run_is_lowered() -> None:
    def serve(_e: Any, _f: Any, due_s: np.ndarray, slo_s: float, _most: int) -> np.ndarray:
        limit = 100.0 if due_s[-1] > 20 else 120.0
        late = len(due_s) / due_s[-1] >= limit
        return np.full(len(due_s), slo_s * (2.0 if late else 0.5))

    found = server(10.0, 60.0, serve)
    assert 85 <= found["value"] <= 105
    assert found["duration_s"] == pytest.approx(60.0, rel=0.05)
    found = server(5.0, 20.0, queue(0.006))
    assert "value" not in found
    assert found["why"] == "p99 is not within 5 ms at 3.31 queries/s, the lowest rate tried"


class Stalling(FakeEngine):
    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if len(self.batches) == 5:
            time.sleep(0.3)
        return super().__call__(feeds)


def test_latency_counts_from_the_time_at_which_a_query_was_due() -> None:
    """One call stalls for 0.3 s: those that are due meanwhile wait for it."""
    begun = time.perf_counter()
    found = replay([Stalling()], FEEDS, np.arange(20) * 0.02, 10.0, 100)
    assert time.perf_counter() - begun >= 0.38  # none is answered before it is due
    assert found[5] >= 0.3
    for late in range(6, 15):
        assert found[late] >= 0.3 - (late - 5) * 0.02
    assert np.isfinite(found).all()


def test_a_rate_that_has_failed_is_given_up_and_what_is_left_is_late() -> None:
    engine = FakeEngine(latency_s=0.02)
    found = replay([engine], FEEDS, np.zeros(200), 0.001, 3)
    assert len(engine.batches) == 4
    assert int((found > 0.001).sum()) == 200
    assert int(np.isinf(found).sum()) == 196


class Failing(FakeEngine):
    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        raise BadInput(f"a.onnx: refused {list(feeds)}")


def test_a_failing_engine_ends_the_run() -> None:
    before = set(threading.enumerate())
    with pytest.raises(BadInput, match="refused"):
        replay([FakeEngine(), Failing()], FEEDS, np.arange(1000) * 0.001, 10.0, 1000)
    assert set(threading.enumerate()) <= before


ALL = ["offline", "single-stream", "multi-stream", "server"]


def setup(label: str, **more: Any) -> Setup:
    return Setup(label, FakeEngine, **{"file": "a.onnx", "precision": "fp32", "threads": 1, **more})


def chosen(
    name: str, rates: dict[str, float], *setups: Setup, batches: tuple[int, ...] = (1, 8)
) -> list[tuple[str, int]]:
    """The label and samples of a query of each result, where the sweep found these `rates`."""
    timed = sweep(setups, batches, Timing(0.0, 0.002, 2), feeds)
    points = [
        replace(each, throughput_per_s=Interval(*[rates[each.label] * each.batch] * 3))
        for each in timed
    ]
    slo_ms = 1e6 if name == "server" else None
    found = run_scenarios([name], setups, points, 0.02, slo_ms, feeds)
    return [(each.label, each.batch) for each in found]


def test_each_scenario_runs_in_the_settings_that_were_fastest_for_it() -> None:
    one, two, other = setup("one"), setup("two", sessions=2), setup("other", file="b.onnx")
    apart, eight = setup("apart", sessions=2, processes=True), setup("eight", batches=(8,))
    rates = {"one": 1.0, "two": 2.0, "apart": 3.0, "eight": 1.5, "other": 2.0}
    assert chosen("single-stream", rates, one, two) == [("one", 1)]
    assert chosen("single-stream", rates, one, other) == [("one", 1), ("other", 1)]
    assert chosen("multi-stream", rates, one, two, eight) == [("eight", 8)]
    assert chosen("multi-stream", rates, one, batches=(4,)) == [("one", 8)]
    assert chosen("offline", rates, one, two) == [("two", 8)]
    assert chosen("server", rates, one, two, apart) == [("two", 1)]
    assert chosen("offline", {**rates, "one": 9.0}, one, two) == [("one", 8)]


def test_an_engine_that_takes_no_such_query_has_no_value() -> None:
    small = Setup("small", lambda: FakeEngine(max_batch=4), file="a.onnx")
    points = sweep([small], (1, 4), Timing(0.0, 0.04, 2), feeds)
    (found,) = run_scenarios(["multi-stream"], [small], points, 0.02, None, feeds)
    assert (found.value, found.why) == (None, "it takes no query of 8 samples")


def timed(path: Path, **options: Any) -> dk.Report:
    short = {"batches": (1, 8), "seconds": 0.05, "device": "cpu"}
    return dk.bench([path], out=path.parent / "report", **{**short, **options})


def test_a_bench_with_scenarios_reports_them(affine_onnx: Path, onnxruntime_alone: None) -> None:
    report = timed(affine_onnx, scenarios=ALL, slo_ms=10_000.0)
    found = {each.scenario: each for each in report.scenarios}
    assert [(name, each.metric) for name, each in found.items()] == list(
        zip(ALL, ("samples/s", "p90 ms", "p99 ms", "queries/s"), strict=True)
    )
    assert found["offline"].value == max(p.throughput_per_s.value for p in report.points)
    assert found["single-stream"].value or found["single-stream"].needs == 64
    assert (found["multi-stream"].batch, found["server"].slo_ms) == (8, 10_000.0)
    words = " ".join(report.verdict).replace("\u202f", " ")
    assert "Server (p99 within 10 000 ms):" in words
    page = (affine_onnx.parent / "report" / "report.md").read_text("utf-8")
    assert "| single-stream | fp32 CPU | fp32 |" in page
    assert {point.scenario for point in report.points} == {"closed-loop"}


@pytest.mark.parametrize(
    ("scenario", "slo_ms", "problem"),
    [
        ("offfline", None, "`scenario` offfline: no such scenario"),
        ("server", None, "`scenario` server needs `slo_ms`"),
        ("server", math.nan, "`slo_ms` must be a number above 0"),
    ],
)
def test_scenarios_that_make_no_sense_are_refused_before_anything_is_timed(
    affine_onnx: Path, scenario: str, slo_ms: float | None, problem: str
) -> None:
    with pytest.raises(dk.BadInput, match=problem):
        timed(affine_onnx, scenarios=[scenario], slo_ms=slo_ms)
    assert not (affine_onnx.parent / "report").exists()
