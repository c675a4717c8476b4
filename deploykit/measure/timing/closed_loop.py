"""Call engines in a closed loop for a set time, one or several at once, and time every call.

The garbage collector is off meanwhile, and the clock is the caller's.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from deploykit.runtimes.engine import Arrays, Engine

Clock = Callable[[], int]  # nanoseconds, monotonic

_POLL_S = 0.5  # between two checks for Ctrl-C


@runtime_checkable
class RunsLoop(Protocol):
    """An engine that is called in a loop somewhere else; see `closed_loop`."""

    def run_loop(self, feeds: Arrays, length_ns: int, stop: Callable[[], bool]) -> array[int]: ...


@dataclass(frozen=True)
class Block:
    """Each call's nanoseconds, shape (calls,), the rows in all of them, and rows per second."""

    calls_ns: np.ndarray
    rows: int
    rate: float

    @property
    def seconds(self) -> float:
        return self.rows / self.rate


def run_block(
    engines: Sequence[Engine],
    feeds: Arrays,
    batch: int,
    length_s: float,
    clock: Clock,
    *,
    settle_s: float = 0.0,
    in_flight: int = 1,
) -> Block:
    """Call each engine in a loop for `length_s`, all at once if there are several.

    `in_flight` above 1, for one engine: that many calls of `submit` at a time, each timed from its
    start to its end; those that are not over at the end of the block are not counted.

    A call that has begun is finished, so there is at least one. `settle_s`: an untimed start of at
    least one call, 0 for none. The rate is the sum of the sessions' own rates, each up to the end
    of its last call; the others keep calling until then, so that all of it ran under full load.
    """
    length_ns, settle_ns = round(length_s * 1e9), round(settle_s * 1e9)
    with no_garbage_collection():
        if in_flight > 1:
            if settle_ns:
                _loop_overlapping(engines[0], feeds, settle_ns, clock, in_flight)
            return _loop_overlapping(engines[0], feeds, length_ns, clock, in_flight, batch)
        if len(engines) == 1:
            if settle_ns:
                closed_loop(engines[0], feeds, settle_ns, clock)
            sessions = [closed_loop(engines[0], feeds, length_ns, clock)]
        else:
            sessions = _run_together(engines, feeds, settle_ns, length_ns, clock)
    calls_ns = [np.frombuffer(calls, dtype=np.int64) for calls in sessions]
    return Block(
        calls_ns=np.concatenate(calls_ns),
        rows=batch * sum(len(calls) for calls in calls_ns),
        rate=sum(batch * len(calls) / (max(1, int(calls.sum())) / 1e9) for calls in calls_ns),
    )


def closed_loop(
    engine: Engine,
    feeds: Arrays,
    length_ns: int,
    clock: Clock,
    stop: Callable[[], bool] | None = None,
) -> array[int]:
    """Nanoseconds of each call, from the end of the last: they sum to the time that passed.

    An engine that has a `run_loop` of its own, in another process, runs it there.
    """
    if isinstance(engine, RunsLoop):
        return engine.run_loop(feeds, length_ns, stop or bool)
    calls = array("q")
    last = clock()
    end = last + length_ns
    while True:
        engine(feeds)
        now = clock()
        calls.append(now - last)
        last = now
        if now >= end or (stop is not None and stop()):
            return calls


def _loop_overlapping(
    engine: Engine, feeds: Arrays, length_ns: int, clock: Clock, in_flight: int, batch: int = 1
) -> Block:
    calls, waiting = array("q"), deque((clock(), engine.submit(feeds)) for _ in range(in_flight))
    begun = waiting[0][0]
    while True:
        started, call = waiting.popleft()
        call.result()
        now = clock()
        calls.append(now - started)
        if now - begun >= length_ns:
            break
        waiting.append((now, engine.submit(feeds)))
    for _, call in waiting:
        call.result()
    rows = batch * len(calls)
    return Block(np.frombuffer(calls, dtype=np.int64), rows, rows / (max(1, now - begun) / 1e9))


class _Gate:
    """Opens for all when the last of `count` has arrived, or when it is forced."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._open = threading.Event()
        self.is_open = self._open.is_set
        self.wait = self._open.wait
        self.force = self._open.set

    def arrive(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._open.set()


def _run_together(
    engines: Sequence[Engine], feeds: Arrays, settle_ns: int, length_ns: int, clock: Clock
) -> list[array[int]]:
    """One thread per engine; they start together. The first failure stops all and is raised."""
    # this thread arrives last: after Ctrl-C inside `submit` no session is left waiting
    ready, done, stop = _Gate(len(engines) + 1), _Gate(len(engines)), threading.Event()

    def give_up() -> None:
        stop.set()
        ready.force()
        done.force()

    def session(engine: Engine) -> array[int]:
        try:
            if settle_ns:
                closed_loop(engine, feeds, settle_ns, clock, stop.is_set)
            ready.arrive()
            ready.wait()
            calls = closed_loop(engine, feeds, length_ns, clock, stop.is_set)
            done.arrive()
            while not done.is_open():  # keep the load up until the others' last call ends
                engine(feeds)
        except BaseException:
            give_up()
            raise
        return calls

    with ThreadPoolExecutor(len(engines), thread_name_prefix="deploykit-session") as pool:
        try:
            futures = [pool.submit(session, engine) for engine in engines]
            ready.arrive()
            while wait(futures, timeout=_POLL_S).not_done:
                pass  # without a timeout a signal just before the wait would go unnoticed
        except BaseException:
            give_up()
            raise
        return [future.result() for future in futures]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No collection inside; afterwards as before.

    No collection before: with torch loaded it takes a third of a second, for every block.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
