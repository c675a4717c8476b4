"""Run batches on one thread per engine; keep several in flight where the engine can.

An engine that computes elsewhere, on a GPU, gets the next batch while it runs the last one, so that
it does not wait for this thread. Not with an SLO: its policy expects a request to wait for one
batch at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from deploykit.serving.batching.delivery import countdown
from deploykit.serving.batching.dispatch import NEVER_US, Dispatch, Worker
from deploykit.serving.batching.policy import Pending
from deploykit.serving.batching.runner import Flight

_LONGEST_SLEEP_S = 3600.0


class ThreadExecutor:
    """Starts a thread for each worker; each sleeps until a batch is due for its engine."""

    def __init__(self, dispatch: Dispatch, workers: Sequence[Worker]) -> None:
        self.close_engines = False  # when its thread ends
        self._dispatch = dispatch
        self._workers = workers
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(worker,),
                name=f"engine {dispatch.name} {number}",
                daemon=True,
            )
            for number, worker in enumerate(workers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        self._dispatch.idle.pop().wake.release()

    def join(self, timeout_s: float | None) -> None:
        left_s = countdown(timeout_s)
        for thread in self._threads:
            thread.join(left_s())

    @property
    def ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, worker: Worker) -> None:
        if worker.runner.slots > 1 and self._dispatch.steering is None:
            self._loop_overlapping(worker)
        else:
            self._loop(worker)
        if self.close_engines:
            worker.runner.engine.close()

    def _loop(self, worker: Worker) -> None:
        dispatch = self._dispatch
        while True:
            batch, late, now_us = self._wait(worker)
            dispatch.finish(late, now_us)
            if batch:
                dispatch.run(worker, batch, now_us)
                del batch  # frees its inputs before the next batch is taken
            elif not late:
                break

    def _loop_overlapping(self, worker: Worker) -> None:
        """As `_loop`, but submit the next batch before waiting for the last; answer in order."""
        dispatch, runner, flights = self._dispatch, worker.runner, deque[Flight]()
        while True:
            batch, late, now_us = self._next(worker) if flights else self._wait(worker)
            dispatch.finish(late, now_us)
            if batch:
                flights.append(runner.start(batch, worker.idle_us(batch, now_us)))
            elif not late and not flights:
                break
            if flights and (not batch or len(flights) == runner.slots):
                flight = flights.popleft()
                dispatch.run(worker, flight.batch, flight.started_us, flight=flight)
                del flight
            del batch  # as in `_loop`
            runner.since_us = flights[0].started_us if flights else None

    def _next(self, worker: Worker) -> tuple[list[Pending], list[Pending], int]:
        """What is due now, for an engine that runs a batch already; nothing if another is free."""
        with self._dispatch.lock:
            running = worker.running
            worker.idle_since_us = NEVER_US
            if not all(each.running for each in self._workers):
                return [], [], 0
            found = self._dispatch.take(worker)
            worker.running = [*running, *found[0]]
            return found

    def _wait(self, worker: Worker) -> tuple[list[Pending], list[Pending], int]:
        """The next batch and the requests that expired meanwhile; both empty: closed."""
        dispatch = self._dispatch
        worker.idle_since_us = NEVER_US
        with dispatch.lock:
            while True:
                batch, late, now_us = dispatch.take(worker)
                ended = worker.runner.lost or (dispatch.closing and not dispatch.queue.count)
                if batch or late or ended:
                    return batch, late, now_us
                self._sleep(worker, now_us)

    def _sleep(self, worker: Worker, now_us: int) -> None:
        """Release the lock until `wake`, or until a delay or a deadline passes."""
        dispatch = self._dispatch
        timeout_s = -1.0
        if dispatch.queue.count:
            timeout_s = max(1, dispatch.queue.next_us() - now_us) / 1e6
            timeout_s = min(timeout_s, _LONGEST_SLEEP_S)
        worker.idle_since_us = min(worker.idle_since_us, now_us)
        dispatch.idle.append(worker)
        dispatch.lock.release()
        woken = worker.wake.acquire(timeout=timeout_s)
        dispatch.lock.acquire()
        if not woken:
            if worker in dispatch.idle:
                dispatch.idle.remove(worker)
            else:
                dispatch.lock.release()  # another thread will wake it, or runs its engine inline
                worker.wake.acquire()
                dispatch.lock.acquire()
