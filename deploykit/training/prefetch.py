"""Make the next batches while a step runs, and measure how long a step waited for its batch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Part = TypeVar("Part")
Made = TypeVar("Made")


def prefetch(make: Callable[[Part], Made], parts: Sequence[Part], workers: int) -> Iterator[Made]:
    """`make` of each part, in order. `workers` threads, each on one core, make as many ahead."""
    workers = min(workers, len(parts))
    if workers < 1:
        yield from map(make, parts)
        return
    threads, started, go = torch.get_num_threads(), threading.Semaphore(0), threading.Event()

    def begin() -> None:
        torch.set_num_threads(1)  # of this thread, but of MKL in all of them
        started.release()
        go.wait()

    pool = ThreadPoolExecutor(workers, "batches", begin)
    try:
        pending: deque[Future[Made]] = deque(pool.submit(make, each) for each in parts[:workers])
        for _ in pending:
            started.acquire()
        torch.set_num_threads(threads)
        go.set()
        for number in range(len(parts)):
            made = pending.popleft().result()
            if number + workers < len(parts):
                pending.append(pool.submit(make, parts[number + workers]))
            yield made
    finally:
        go.set()
        pool.shutdown(cancel_futures=True)


class WaitClock:
    """How long `device` had nothing to compute, as its next batch was not there.

    On the CPU, the time inside of `with`. A GPU still computes then: its own clock takes the time
    from the end of a step to the arrival of the next batch. Not yet run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds, self._started = 0.0, 0.0
        self._events: list[Any] = []

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._record()

    def __exit__(self, *_: object) -> None:
        self._record()
        self._seconds += 0.0 if self._on_gpu else time.perf_counter() - self._started

    def _record(self) -> None:
        if self._on_gpu:
            make_event: Any = torch.cuda.Event
            event = make_event(enable_timing=True)
            event.record()
            self._events.append(event)

    @property
    def seconds(self) -> float:
        """All so far; of a GPU once it has come to the last batch."""
        pairs, self._events = zip(self._events[::2], self._events[1::2], strict=True), []
        for step_end, arrival in pairs:
            arrival.synchronize()
            self._seconds += step_end.elapsed_time(arrival) / 1e3
        return self._seconds
