"""Run slow work on other threads and its continuation on the event loop's thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from deploykit.runtimes.engine import Closing

log = logging.getLogger(__name__)

T = TypeVar("T")
Result = Callable[[], T]  # returns what the work returned, or raises what it raised
Offload = Callable[[Callable[[], Any], Callable[[Result[Any]], None]], None]


def run_inline(work: Callable[[], T], then: Callable[[Result[T]], None]) -> None:
    """An Offload without a thread."""
    then(work)


class ThreadOffload(Closing):
    """An Offload on `threads` threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop = loop
        self._pool = ThreadPoolExecutor(threads, "deploykit offload")

    def __call__(self, work: Callable[[], T], then: Callable[[Result[T]], None]) -> None:
        def done(future: Future[T]) -> None:
            try:
                self._loop.call_soon_threadsafe(then, future.result)
            except RuntimeError:  # the loop is closed
                log.error("offloaded work finished after the shutdown")

        self._pool.submit(work).add_done_callback(done)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
