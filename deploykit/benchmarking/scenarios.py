"""Time an engine in MLPerf's scenarios: single-stream, multi-stream, offline and server.

Queries and metrics are those of MLPerf Inference (mlcommons/inference_policies,
inference_rules.adoc). The caller chooses the durations, so results are not MLPerf results.
Percentiles follow LoadGen's early-stopping rule: the reported value is, with 99 % confidence, no
less than the true percentile; with fewer queries than that needs there is none.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from deploykit.benchmarking.timing import (
    Clock,
    Setup,
    in_threads,
    no_garbage_collection,
    run_block,
)
from deploykit.core.errors import BadInput
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.evaluation.statistics import Latency
from deploykit.reporting.report import Point, ScenarioResult

OFFLINE, SINGLE, MULTI, SERVER = SCENARIOS = ("offline", "single-stream", "multi-stream", "server")
SAMPLES = {SINGLE: 1, MULTI: 8, SERVER: 1}  # samples per query
_PERCENTILE = {SINGLE: 90.0, MULTI: 99.0, SERVER: 99.0}
_FROM_POINT = ("label", "precision", "device", "runtime", "settings")
_CONFIDENCE = 0.99
_LONGEST = 10  # multiple of `seconds`, to reach the queries that a percentile needs
_WARM_UP = 0.2  # share of `seconds`, before the run
_CLOSE = 1.02  # the bisection ends when its bounds are closer
_LOWER = 0.97  # factor, after a rate that held only in a short run
_SPIN_NS = 100_000  # a sleep may end this late, so spin before a query


def early_stopping_ms(latencies_s: np.ndarray, q: float) -> float | None:
    """Return the bound of the q-th percentile in ms; None if it needs more queries.

    The bound is the t-th highest latency. t is the largest number for which at most t of n queries
    exceed the true percentile with a probability of at most 1 % (LoadGen, early_stopping.cc,
    tolerance 0).
    """
    n = len(latencies_s)
    discard = most_above(n, q)
    return float(np.sort(latencies_s)[n - discard]) * 1e3 if discard >= 1 else None


def most_above(n: int, q: float) -> int:
    """Return how many of `n` queries may exceed a bound of the q-th percentile.

    The largest t for which the binomial distribution of n and 1 - q/100 gives t or fewer with a
    probability of at most 1 %; -1 where n is too small even for none.
    """
    share = 1 - q / 100
    k = np.arange(1, math.ceil(n * share) + 1)
    steps = np.log((n - k + 1) / k) + math.log(share / (1 - share))
    logs = n * math.log(1 - share) + np.concatenate(([0.0], np.cumsum(steps)))
    return int(np.searchsorted(np.cumsum(np.exp(logs)), 1 - _CONFIDENCE, side="right")) - 1


def fewest_queries(q: float, above: int = 1) -> int:
    """Return the fewest queries of which `above` may exceed it: 64 for p90, 662 for p99."""
    n = above + 1
    while most_above(n, q) < above:
        n += 1
    return n


def run_stream(
    q: float,
    engine: Engine,
    feeds: Arrays,
    samples: int,
    seconds: float,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, Any]:
    """Run queries one after the other for `seconds`, or longer for what the percentile needs.

    Return fields of a ScenarioResult, as `run_server` does.
    """
    needs = fewest_queries(q)
    calls: list[np.ndarray] = []
    spent_s, count = 0.0, 0
    run_block([engine], feeds, samples, seconds * _WARM_UP, clock)
    while spent_s < seconds or (count < needs and spent_s < _LONGEST * seconds):
        block = run_block([engine], feeds, samples, seconds / 5, clock)
        calls.append(block.calls_ns / 1e9)
        spent_s += block.seconds
        count += len(block.calls_ns)
    value = early_stopping_ms(np.concatenate(calls), q)
    measured: dict[str, Any] = {"value": value, "queries": count, "duration_s": spent_s}
    measured["latency"] = Latency.of(*calls)
    if value is None:
        few = f"{count} queries in {spent_s:.3g} s, {needs} are needed"
        measured |= {"needs": needs, "why": few}
    return measured


def run_server(
    engines: Sequence[Engine],
    feeds: Arrays,
    slo_ms: float,
    seconds: float,
    *,
    serve: Callable[..., np.ndarray] | None = None,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, Any]:
    """Bisect for the highest rate of Poisson arrivals that keeps p99 within `slo_ms`.

    A rate holds if p99 is within the bound with 99 % confidence. Each rate is tried in a short
    run, which ends as soon as it has failed. The highest that holds is run for `seconds`, and a
    slightly lower one if that fails.
    `serve(engines, feeds, due_s, slo_s, most_late)` returns latencies; the default is `replay`.
    """
    slo_s = slo_ms / 1e3
    fewest = fewest_queries(_PERCENTILE[SERVER])
    seeds = itertools.count()

    def latencies(rate: float, length_s: float) -> np.ndarray:
        count = max(fewest, math.ceil(rate * length_s))
        gaps = np.random.default_rng(next(seeds)).exponential(1 / rate, count)
        most_late = most_above(count, _PERCENTILE[SERVER])
        return (serve or replay)(engines, feeds, np.cumsum(gaps), slo_s, most_late)

    def holds(found: np.ndarray) -> bool:
        return int((found > slo_s).sum()) <= most_above(len(found), _PERCENTILE[SERVER])

    block = run_block(engines, feeds, 1, seconds * _WARM_UP, clock)
    short_s = seconds / 10
    lowest = fewest / (_LONGEST * seconds)
    low, high = 0.0, max(block.rate, lowest)  # an engine that never waits is the upper bound
    if holds(latencies(high, short_s)):
        low = high
    while high / max(low, lowest) > _CLOSE:
        middle = math.sqrt(max(low, lowest) * high)
        low, high = (middle, high) if holds(latencies(middle, short_s)) else (low, middle)
    while low >= lowest:
        found = latencies(low, seconds)
        if holds(found):
            measured = {"value": low, "queries": len(found), "duration_s": len(found) / low}
            return {**measured, "latency": Latency.of(found)}
        low *= _LOWER
    why = f"p99 is not within {slo_ms:g} ms at {lowest:.3g} queries/s, the lowest rate tried"
    return {"why": why}


def replay(
    engines: Sequence[Engine], feeds: Arrays, due_s: np.ndarray, slo_s: float, most_late: int
) -> np.ndarray:
    """Return latencies in s, shape (queries,), of queries due at `due_s` after now, in order.

    An engine takes the next query when it is free. Latency counts from the due time, so it
    includes a backlog. Once more than `most_late` queries took longer than `slo_s`, the remaining
    ones are abandoned, with infinite latency.
    """
    clock = time.perf_counter_ns
    due_ns = clock() + 1_000_000 + (due_s * 1e9).astype(np.int64)
    ended = np.full(len(due_s), math.inf)
    numbers, late = itertools.count(), [0]

    def work(engine: Engine, stop: threading.Event) -> None:
        for number in numbers:
            if number >= len(due_ns) or late[0] > most_late or stop.is_set():
                return
            due = int(due_ns[number])
            if (left := due - clock()) > _SPIN_NS:
                time.sleep((left - _SPIN_NS) / 1e9)  # until the query is due
            while clock() < due:
                time.sleep(0)
            engine(feeds)
            ended[number] = took = (clock() - due) / 1e9
            late[0] += took > slo_s

    with no_garbage_collection():
        in_threads(engines, work)
    return ended


def check_scenarios(names: Sequence[str], slo_ms: float | None) -> None:
    """Raise BadInput for an unknown scenario, and for "server" without `slo_ms`."""
    for name in names:
        if name not in SCENARIOS:
            raise BadInput(
                f"`scenario` {name}: no such scenario", hint=f"one of: {', '.join(SCENARIOS)}"
            )
    if SERVER in names and slo_ms is None:
        raise BadInput("`scenario` server needs `slo_ms`, the bound of p99", hint="`slo_ms` 15")


def run_scenarios(
    names: Sequence[str],
    setups: Sequence[Setup],
    points: Sequence[Point],
    seconds: float,
    slo_ms: float | None,
    feeds: Callable[[int], Arrays],
    on_progress: Progress = no_progress,
) -> list[ScenarioResult]:
    """Run each scenario on each file and device, in the settings that are fastest in `points`."""
    results = []
    for name in dict.fromkeys(names):
        for setup, point in _fastest(name, setups, points):
            batch = SAMPLES.get(name, point.batch)
            metric = {OFFLINE: "samples/s", SERVER: "queries/s"}.get(name)
            result = ScenarioResult(
                scenario=name,
                **{key: getattr(point, key) for key in _FROM_POINT},
                batch=batch,
                metric=metric or f"p{_PERCENTILE[name]:.0f} ms",
                value=point.throughput_per_s.value,
                queries=point.samples,
                duration_s=point.duration_s,
                latency=None,
                slo_ms=slo_ms if name == SERVER else None,
            )
            if name != OFFLINE:  # of which the point is a run
                on_progress(f"{setup.label}: {name}", 1.0)
                measured: dict[str, Any] = {"value": None, "queries": 0, "duration_s": 0.0}
                measured |= _run(name, setup, feeds, seconds, slo_ms)
                result = replace(result, **measured)
            results.append(result)
    return results


def _run(
    name: str, setup: Setup, feeds: Callable[[int], Arrays], seconds: float, slo_ms: float | None
) -> dict[str, Any]:
    batch = SAMPLES[name]
    with ExitStack() as stack:
        engines = setup.open(stack)
        engine, inputs = engines[0], engines[0].inputs
        fixed = inputs[0].shape[0] if inputs and inputs[0].shape else batch
        if (isinstance(fixed, int) and fixed != batch) or batch > (engine.max_batch or batch):
            return {"why": f"it takes no query of {batch} samples"}
        if name == SERVER and slo_ms is not None:
            return run_server(engines, feeds(batch), slo_ms, seconds)
        return run_stream(_PERCENTILE[name], engine, feeds(batch), batch, seconds)


def _fastest(
    name: str, setups: Sequence[Setup], points: Sequence[Point]
) -> list[tuple[Setup, Point]]:
    """Return, by file and device, the setup fastest near a query's size, and its point."""
    found: dict[tuple[str, str], tuple[tuple[int, float], Setup, Point]] = {}
    for point, setup in itertools.product(points, setups):
        if (
            not setup.made(point)
            or (name in (SINGLE, MULTI) and setup.sessions > 1)
            or (name == SERVER and setup.processes)
        ):
            continue
        away = 0 if name == OFFLINE else abs(point.batch - SAMPLES[name])
        rank, key = (away, -point.throughput_per_s.value), (setup.file, point.device)
        if key not in found or rank < found[key][0]:
            found[key] = (rank, setup, point)
    return [(setup, point) for _, setup, point in found.values()]
