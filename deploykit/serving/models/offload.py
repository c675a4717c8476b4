"""Run slow work on other threads and its continuation on the event loop's thread.

Work waits in a lane with work of about its size, so that a small request never waits for large
ones; in a lane, clients take turns. The threads wait for a loop that falls behind: many small
results would keep it from its other work. The time limit of a piece of work holds even if it never
returns.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import NoReturn, TypeVar

from deploykit.core.errors import DeploykitError, Expired, Overloaded
from deploykit.engines.engine import Closing
from deploykit.pipelines.threads import NOBODY, FairThreads, Peer

log = logging.getLogger(__name__)

T = TypeVar("T")
Result = Callable[[], T]  # returns the result of the work, or raises its error
HUGE_BYTES = 8 << 20
_AHEAD = 16  # results of a thread that the loop has not taken, before the thread waits for it
_PATIENCE_S = 1.0  # the longest that it waits


class Lane(IntEnum):
    """The size of a piece of work, by the time that it may take on one core."""

    SMALL = 0  # some ms
    LARGE = 1  # some tenths of a second
    HUGE = 2  # longer, or with much memory: one at a time


# runs work, then its continuation on the event loop's thread with the result: see ThreadOffload
Offload = Callable[..., None]


class ThreadOffload(Closing):
    """Runs work on `threads` threads for each lane but the last, which has one.

    `run` schedules the continuation on the loop's thread, now or in one of its next turns. `peer`:
    whose work it is. The result raises Expired after `limit_s`. Raises Overloaded if no work can
    be started.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: int,
        run: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._loop = loop
        self._run = run or (lambda work: work())
        self._threads = {
            lane: FairThreads(1 if lane is Lane.HUGE else threads, f"deploykit {lane.name.lower()}")
            for lane in Lane
        }
        self._ahead = {lane: threading.Semaphore(_AHEAD * threads) for lane in Lane}

    def __call__(
        self,
        work: Callable[[], T],
        then: Callable[[Result[T]], None],
        *,
        lane: Lane = Lane.SMALL,
        peer: Peer = NOBODY,
        limit_s: float | None = None,
    ) -> None:
        timer: asyncio.TimerHandle | None = None
        jobs = [(work, then)]  # empty once `then` is called
        del work, then  # else `run` would keep the request of a client that has gone

        def run() -> None:
            places = self._ahead[lane]
            result: Result[T] = _expire
            ahead = places.acquire(timeout=_PATIENCE_S)
            for todo, _ in jobs[:]:
                result = _result_of(todo)

            def go_on() -> None:
                if ahead:
                    places.release()
                finish(result)

            try:
                self._loop.call_soon_threadsafe(self._run, go_on)
            except RuntimeError:  # the loop is closed
                log.error("offloaded work finished after the shutdown")

        def finish(result: Result[T]) -> None:
            if timer is not None:
                timer.cancel()
            if jobs:
                jobs.pop()[1](result)

        try:
            self._threads[lane].submit(run, peer)
        except RuntimeError as exc:  # the system has no more threads, or the shutdown has begun
            raise Overloaded("no thread can be started; try again later") from exc
        if limit_s is not None:
            timer = self._loop.call_later(limit_s, finish, _expire)

    def close(self) -> None:
        for threads in self._threads.values():
            threads.close()


def _result_of(work: Callable[[], T]) -> Result[T]:
    """Run `work`; return a function that returns its result or raises its error."""
    try:
        result = work()
    except BaseException as exc:  # noqa: BLE001 - its caller gets it
        # free the frames of this thread, and with them the request: code that raises the error
        # again forms a cycle with it until the garbage collector runs
        if isinstance(exc, DeploykitError):
            exc.__traceback__ = exc.__cause__ = exc.__context__ = None
        return partial(raise_error, exc)
    return lambda: result


def raise_error(error: BaseException) -> NoReturn:
    raise error


def _expire() -> NoReturn:
    raise Expired(
        "the request was not decoded, or its answer not encoded, within its time limit",
        hint="send smaller requests or fewer at once, or allow more time (`timeout_ms`)",
    )
