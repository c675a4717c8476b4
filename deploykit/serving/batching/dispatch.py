"""Take a batch from the queue, run it on an engine and deliver its results.

Both executors use this: `threads` gives each engine a thread, `inline` runs short batches on the
event loop. It holds the one lock of a model's queue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from deploykit.core.errors import DeploykitError
from deploykit.serving.batching.delivery import Deliver, mark_expired
from deploykit.serving.batching.policy import Pending, Watcher
from deploykit.serving.batching.queue import RequestQueue
from deploykit.serving.batching.runner import Flight, Runner, device_lost
from deploykit.serving.batching.slo import Steering

log = logging.getLogger(__name__)

NEVER_US = 1 << 60


class Worker:
    """One engine, the requests it is running, and the lock that its thread sleeps on."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.running: Sequence[Pending] = ()
        self.wake = threading.Lock()  # locked; one release ends one sleep
        self.wake.acquire()
        self.idle_since_us = NEVER_US

    def idle_us(self, batch: Sequence[Pending], now_us: int) -> int:
        """The sum of the times that the requests of `batch` waited for this idle engine."""
        since_us = self.idle_since_us
        if since_us >= now_us:
            return 0
        from_us = [r.arrived_us if r.arrived_us > since_us else since_us for r in batch]
        return len(batch) * now_us - sum(from_us)


class Executor(Protocol):
    """Decides on which thread the next batch runs."""

    def wake(self) -> None:
        """Requests are waiting and an engine is idle; called under the lock of Dispatch."""


class Dispatch:
    """The queue of one model and its idle engines. `lost`: an engine's GPU is gone."""

    def __init__(
        self,
        name: str,
        queue: RequestQueue,
        deliver: Deliver,
        clock_us: Callable[[], int],
        watcher: Watcher,
        steering: Steering | None,
    ) -> None:
        self.name = name
        self.queue = queue
        self.deliver = deliver
        self.clock_us = clock_us
        self.watcher = watcher
        self.steering = steering
        self.lock = threading.Lock()
        self.idle: list[Worker] = []  # asleep and not yet woken
        self.closing = False
        self.lost = False

    def take(self, worker: Worker) -> tuple[list[Pending], list[Pending], int]:
        """The batch that is due, the requests that expired, and the time. Needs the lock."""
        queue, now_us = self.queue, self.clock_us()
        late = queue.take_late(now_us)
        mark_expired(late, now_us)
        batch: list[Pending] = []
        if not worker.runner.lost:
            batch = worker.running = queue.take(now_us, hurry=self.closing)
        if batch and queue.count and self.idle:
            self.idle.pop().wake.release()  # the rest may be due for another engine
        return batch, late, now_us

    def run(
        self,
        worker: Worker,
        batch: Sequence[Pending],
        now_us: int,
        deliver: Deliver | None = None,
        flight: Flight | None = None,
    ) -> None:
        """Run a batch and deliver its results with `deliver`, or with the default.

        `flight`: the batch was started, and is the oldest of those in flight.
        """
        if flight is not None:
            idle_us = flight.idle_us
        else:
            idle_us = worker.idle_us(batch, now_us) if worker.idle_since_us < now_us else 0
        errors = worker.runner.run(batch, self.watcher, idle_us, flight)
        ended_us = self.clock_us()
        finished = []
        with self.lock:
            for request, error in zip(batch, errors, strict=True):
                if not request.finished:
                    request.finished = True
                    request.error = error
                    finished.append(request)
            worker.running = () if flight is None else worker.running[len(batch) :]
            if self.steering is not None and not any(errors):
                self.steering.record_run(batch, now_us, ended_us)
        if worker.runner.lost:
            self.lost = True
            self.stop(device_lost(self.name))
        self.finish(finished, ended_us, deliver)

    def stop(self, error: DeploykitError | None) -> None:
        """Accept no more requests. With an `error`, it answers every waiting request."""
        with self.lock:
            self.closing = True
            refused = self.queue.take_all() if error is not None else []
            for request in refused:
                request.finished = True
                request.error = error
            for worker in self.idle:
                worker.wake.release()
            self.idle.clear()
        self.finish(refused, self.clock_us())

    def finish(
        self, requests: Sequence[Pending], now_us: int, deliver: Deliver | None = None
    ) -> None:
        """Deliver requests that are marked as finished."""
        for request in requests:
            if request.error is not None:
                try:
                    self.watcher.record_failure(request, now_us)
                except Exception:  # a failing watcher must not hold up the replies
                    log.exception("model '%s': recording a failed request failed", self.name)
        if requests:
            (deliver or self.deliver)(requests)
