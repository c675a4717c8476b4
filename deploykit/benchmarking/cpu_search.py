"""Search for a model's fastest CPU settings, on the inputs of the run.

Each choice is timed once, for one window. The best with one session and with several (these also
as processes) are then timed in turns, so most of the time goes to likely winners.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from deploykit.benchmarking.timing import Clock, run_block
from deploykit.core.errors import OutOfMemory
from deploykit.engines.engine import Arrays, Engine
from deploykit.reporting.report import (
    CLOSED_LOOP,
    BestCpu,
    CpuSettings,
    CpuTrial,
    Point,
    runtime_of,
)

_FINALISTS = 2  # with one session, and with several
_ROUNDS = 3
_SETTLE = 0.25  # untimed start, as a share of a window
_PROCESSES_FROM_S = 0.05  # shorter windows take less time than a process start


def best_cpu(points: Sequence[Point], wrong: Collection[str]) -> tuple[BestCpu, ...]:
    """Return the fastest per batch size, without the labels in `wrong`, whose outputs are wrong."""
    usable = [
        point
        for point in points
        if point.device == "cpu" and point.scenario == CLOSED_LOOP and point.label not in wrong
    ]
    found = []
    for batch in dict.fromkeys(point.batch for point in usable):
        rivals = [point for point in usable if point.batch == batch]
        best = max(rivals, key=lambda point: point.throughput_per_s.value)
        names = ", ".join(dict.fromkeys(map(runtime_of, rivals)))
        why = f"the fastest of {len(rivals)} columns on the CPU ({names})"
        fastest = (best.label, best.precision, best.runtime, best.settings, best.throughput_per_s)
        found.append(BestCpu(batch, *fastest, why))
    return tuple(found)


def choices(cores: Collection[int], runtime: str = "onnxruntime") -> list[CpuSettings]:
    """Return settings that fill each number of cores, and one session with fewer threads.

    Only ONNX Runtime's threads may spin, and torch has one pool of them per process.
    """
    spins, found = runtime == "onnxruntime", dict[CpuSettings, None]()
    for total in cores:
        for size in (each for each in range(1, total + 1) if total % each == 0):
            for sessions, threads in ((1, size), (size, total // size)):
                # one thread never waits
                for spinning in (False, True)[: min(threads, 2)] if spins else (None,):
                    found[CpuSettings(sessions, threads, spinning, runtime == "torch")] = None
    return list(found)


def search_cpu(
    candidates: Sequence[CpuSettings],
    open_session: Callable[[CpuSettings], Engine],
    feeds: Arrays,
    batch: int,
    window_s: float,
    *,
    clock: Clock = time.perf_counter_ns,
) -> tuple[CpuTrial, ...]:
    """Measure rows per second of `candidates`, and of the best in processes, best first."""

    def race(runners: Sequence[CpuSettings], rounds: int = 1) -> dict[CpuSettings, float]:
        """Time the engines in turns; return each one's median rows per second."""
        rates: dict[CpuSettings, list[float]] = {each: [] for each in runners}
        with contextlib.ExitStack() as stack:
            engines = {
                each: [stack.enter_context(open_session(each)) for _ in range(each.sessions)]
                for each in runners
            }
            settle_s = window_s * _SETTLE
            for number in range(rounds):
                for each in runners if number % 2 == 0 else reversed(runners):
                    block = run_block(
                        engines[each], feeds, batch, window_s, clock, settle_s=settle_s
                    )
                    rates[each].append(block.rate)
        return {each: statistics.median(found) for each, found in rates.items()}

    first: dict[CpuSettings, float] = {}
    no_memory = None
    for each in candidates:
        try:
            first |= race([each])
        except OutOfMemory as exc:
            no_memory = exc
    if not first:
        raise no_memory or ValueError("no candidates")
    several = _ranked(first, lambda each: each.sessions > 1)[:_FINALISTS]
    apart = [replace(each, processes=True) for each in several[: window_s >= _PROCESSES_FROM_S]]
    alone = _ranked(first, lambda each: each.sessions == 1)[:_FINALISTS]
    final = list(dict.fromkeys((*alone, *several, *apart)))
    with contextlib.suppress(OutOfMemory):
        last = race(final, _ROUNDS)
        lost = _ranked(first, lambda each: each not in last)
        return tuple(CpuTrial(each, (first | last)[each]) for each in (*_ranked(last), *lost))
    return tuple(CpuTrial(each, first[each]) for each in _ranked(first))


def _ranked(
    rates: Mapping[CpuSettings, float], which: Callable[[CpuSettings], bool] = lambda _: True
) -> list[CpuSettings]:
    return sorted(filter(which, rates), key=lambda each: -rates[each])
