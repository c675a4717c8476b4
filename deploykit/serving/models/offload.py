"""Run slow work on other threads and its continuation on the event loop's thread.

Small and large work have queues and threads of their own: a small request never waits for large
ones, whatever those wait for. The time limit of a piece of work holds even if it never returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from deploykit.core.errors import DeploykitError, Expired, Overloaded
from deploykit.engines.engine import Closing

log = logging.getLogger(__name__)

T = TypeVar("T")
Result = Callable[[], T]  # returns the result of the work, or raises its error


class Offload(Protocol):
    """Runs `work`, then `then` on the event loop's thread with the result.

    The result raises Expired after `limit_s`. Raises Overloaded if no work can be started.
    """

    def __call__(
        self,
        work: Callable[[], T],
        then: Callable[[Result[T]], None],
        *,
        large: bool = False,
        limit_s: float | None = None,
    ) -> None: ...


def run_inline(
    work: Callable[[], T],
    then: Callable[[Result[T]], None],
    *,
    large: bool = False,  # noqa: ARG001 - an Offload's signature
    limit_s: float | None = None,  # noqa: ARG001
) -> None:
    """Run `work` without a thread. It has the signature of Offload."""
    then(work)


class ThreadOffload(Closing):
    """Runs work on `threads` threads for small work and as many for large.

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
        self._small = ThreadPoolExecutor(threads, "deploykit small")
        self._large = ThreadPoolExecutor(threads, "deploykit large")

    def __call__(
        self,
        work: Callable[[], T],
        then: Callable[[Result[T]], None],
        *,
        large: bool = False,
        limit_s: float | None = None,
    ) -> None:
        job = _Job(then)

        def on_done(future: Future[Any]) -> None:
            # free the frames of this thread, and with them the request: code that raises the error
            # again forms a cycle with it until the garbage collector runs
            error = None if future.cancelled() else future.exception()
            if isinstance(error, DeploykitError):
                error.__traceback__ = error.__cause__ = error.__context__ = None
            try:
                self._loop.call_soon_threadsafe(self._run, partial(job.finish, future.result))
            except RuntimeError:  # the loop is closed
                log.error("offloaded work finished after the shutdown")

        try:
            future = (self._large if large else self._small).submit(work)
        except RuntimeError as exc:  # the system has no more threads, or the shutdown has begun
            raise Overloaded("no thread can be started; try again later") from exc
        if limit_s is not None:
            job.timer = self._loop.call_later(limit_s, job.expire, future)
        future.add_done_callback(on_done)

    def close(self) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


class _Job:
    """The continuation of one piece of work, which is called once."""

    def __init__(self, then: Callable[[Result[Any]], None]) -> None:
        self._then: Callable[[Result[Any]], None] | None = then
        self.timer: asyncio.TimerHandle | None = None

    def finish(self, result: Result[Any]) -> None:
        then, self._then = self._then, None
        if self.timer is not None:
            self.timer.cancel()
        if then is not None:
            then(result)

    def expire(self, future: Future[Any]) -> None:
        then, self._then = self._then, None
        future.cancel()
        if then is not None:
            then(_expired)


def _expired() -> Any:
    raise Expired(
        "the request was not decoded, or its answer not encoded, within its time limit",
        hint="send smaller requests or fewer at once, or allow more time (`timeout_ms`)",
    )
