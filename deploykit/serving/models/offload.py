"""Run slow work on other threads and its continuation on the event loop's thread.

Work waits in a lane with work of about its size, so that a small request never waits for large
ones. In a lane the client whose work has taken the least time is next (start-time fair queuing;
Goyal et al., 1996): whatever one client sends, another waits for the work that runs, not for what
the first has queued. The threads wait for a loop that falls behind: many small results would keep
it from its other work. The time limit of a piece of work holds even if it never returns.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, Protocol, TypeVar

from deploykit.core.errors import DeploykitError, Expired, Overloaded
from deploykit.engines.engine import Closing

log = logging.getLogger(__name__)

T = TypeVar("T")
Result = Callable[[], T]  # returns the result of the work, or raises its error
HUGE_BYTES = 8 << 20
_AHEAD = 16  # results of a thread that the loop has not taken, before the thread waits for it
_PATIENCE_S = 1.0  # the longest that it waits
_CLIENTS = 256  # above so many, the times of idle ones are not kept


class Lane(IntEnum):
    """The size of a piece of work, by the time that it may take on one core."""

    SMALL = 0  # some ms
    LARGE = 1  # some tenths of a second
    HUGE = 2  # longer, or with much memory: one at a time


class Offload(Protocol):
    """Runs `work`, then `then` on the event loop's thread with the result.

    `client`: whose work it is, such as a connection. The result raises Expired after `limit_s`.
    Raises Overloaded if no work can be started.
    """

    def __call__(
        self,
        work: Callable[[], T],
        then: Callable[[Result[T]], None],
        *,
        lane: Lane = Lane.SMALL,
        client: Hashable = None,
        limit_s: float | None = None,
    ) -> None: ...


def run_inline(work: Callable[[], T], then: Callable[[Result[T]], None], **_: object) -> None:
    """Run `work` without a thread. It has the signature of Offload."""
    then(work)


class ThreadOffload(Closing):
    """Runs work on `threads` threads for each lane but the last, which has one.

    `run` schedules the continuation on the loop's thread, now or in one of its next turns.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: int,
        run: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._loop = loop
        self._run = run or (lambda work: work())
        self._queues = {
            lane: FairQueue(1 if lane is Lane.HUGE else threads, lane.name.lower()) for lane in Lane
        }
        self._ahead = {lane: threading.Semaphore(_AHEAD * threads) for lane in Lane}

    def __call__(
        self,
        work: Callable[[], T],
        then: Callable[[Result[T]], None],
        *,
        lane: Lane = Lane.SMALL,
        client: Hashable = None,
        limit_s: float | None = None,
    ) -> None:
        timer: asyncio.TimerHandle | None = None
        waiting: list[Callable[[Result[T]], None]] = [then]  # it is called once
        places, held = self._ahead[lane], list[bool]()  # whether it has one of the places

        def run() -> T:
            if places.acquire(timeout=_PATIENCE_S):
                held.append(True)
            return work()

        def finish(result: Result[T]) -> None:
            if held:
                held.pop()
                places.release()
            if timer is not None:
                timer.cancel()
            if waiting:
                waiting.pop()(result)

        def expire() -> None:
            future.cancel()
            finish(_expired)

        def on_done(future: Future[Any]) -> None:
            try:
                self._loop.call_soon_threadsafe(self._run, partial(finish, future.result))
            except RuntimeError:  # the loop is closed
                log.error("offloaded work finished after the shutdown")

        try:
            future = self._queues[lane].submit(run, client)
        except RuntimeError as exc:  # the system has no more threads, or the shutdown has begun
            raise Overloaded("no thread can be started; try again later") from exc
        if limit_s is not None:
            timer = self._loop.call_later(limit_s, expire)
        future.add_done_callback(on_done)

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()


@dataclass(eq=False, slots=True)
class _Client:
    """One client's work. `spent_s`: the virtual time at which its next work may start."""

    spent_s: float
    running: int = 0
    waiting: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)


class FairQueue:
    """Threads that take the work of the client that has used them for the shortest time."""

    def __init__(
        self, threads: int, name: str, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, f"deploykit {name}")
        self._lock = threading.Lock()
        self._clients: dict[Hashable, _Client] = {}  # empty while nothing waits or runs
        self._clock_s = clock_s
        self._now_s = 0.0  # the virtual time: that of the client whose work was started last

    def submit(self, work: Callable[[], T], client: Hashable) -> Future[T]:
        """Queue `work` of a client. Raises RuntimeError if no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            if len(self._clients) >= _CLIENTS:
                self._clients = {key: c for key, c in self._clients.items() if not c.idle}
            found = self._clients.setdefault(client, _Client(self._now_s))
            if found.idle:
                found.spent_s = max(found.spent_s, self._now_s)
            found.waiting.append((future, work))
        try:
            self._pool.submit(self._run_next)
        except RuntimeError:
            future.cancel()
            raise
        return future

    def close(self) -> None:
        """Start no more work, and wait for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [job for each in self._clients.values() for job in each.waiting]
            self._clients.clear()
        for future, _ in waiting:
            future.cancel()

    def _run_next(self) -> None:
        with self._lock:
            ready = [each for each in self._clients.values() if each.waiting]
            if not ready:
                return
            client = min(ready, key=lambda each: (each.spent_s, each.running))
            future, work = client.waiting.popleft()
            client.running += 1
            self._now_s = max(self._now_s, client.spent_s)
        begun_s = self._clock_s()
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as exc:  # noqa: BLE001 - its caller gets it
                # free the frames of this thread, and with them the request: code that raises the
                # error again forms a cycle with it until the garbage collector runs
                if isinstance(exc, DeploykitError):
                    exc.__traceback__ = exc.__cause__ = exc.__context__ = None
                future.set_exception(exc)
            else:
                future.set_result(result)
                del result
        with self._lock:
            client.running -= 1
            client.spent_s += self._clock_s() - begun_s
            if all(each.idle for each in self._clients.values()):
                self._clients.clear()
        del future, work  # else this thread keeps them until its next work


def _expired() -> Any:
    raise Expired(
        "the request was not decoded, or its answer not encoded, within its time limit",
        hint="send smaller requests or fewer at once, or allow more time (`timeout_ms`)",
    )
