"""A clock and the answers of a batcher that a test turns by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from deploykit.core.tensors import InputKey
from deploykit.engines.engine import Arrays
from deploykit.serving.batching.batcher import Batcher, deliver_inline
from deploykit.serving.batching.queue import NEVER_US, Pending
from tests.support.serving.running import WAIT_S

KEY = (("x", "FP32", (4,)),)


class Clock:
    us = 0

    def __call__(self) -> int:
        return self.us


class Answers:
    """Collects finished requests in the order they came, their threads, how they were grouped."""

    def __init__(self) -> None:
        self.groups: list[list[Pending]] = []
        self.order: list[float] = []
        self.threads: list[int] = []
        self._came = threading.Semaphore(0)

    def deliver(self, requests: Sequence[Pending]) -> None:
        self.groups.append(list(requests))
        deliver_inline(requests)

    def done(self, request: Pending) -> None:
        self.order.append(float(request.feeds["x"][0, 0]))
        self.threads.append(threading.get_ident())
        self._came.release()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._came.acquire(timeout=WAIT_S)


def row(value: float, count: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((count, 4), value, np.float32)}


def submit(
    batcher: Batcher,
    feeds: Arrays,
    rows: int,
    key: InputKey,
    done: Callable[[Pending], None],
    *,
    wait_us: int = NEVER_US,
    give_up_us: int = NEVER_US,
    priority: int = 0,
) -> Pending:
    """Submit a request that may wait `wait_us` and is answered within `give_up_us`."""
    now_us = batcher._clock_us()
    last_us = now_us + give_up_us
    deadline_us = min(now_us + wait_us, last_us)
    request = Pending(feeds, rows, key, done, now_us, deadline_us, last_us, priority)
    batcher.submit(request)
    return request


def asleep(batcher: Batcher) -> None:
    """Wait until the engine's thread sleeps: before that it takes what comes by itself."""
    for _ in range(WAIT_S * 1000):
        with batcher._lock:
            if len(batcher._idle) == len(batcher._workers):
                return
        threading.Event().wait(0.001)
    raise AssertionError("the engine's thread never slept")
