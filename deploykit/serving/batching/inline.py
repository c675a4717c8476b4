"""Run short batches on the event loop's own thread.

Handing Python's lock from one thread to another and back costs more than a run of a small model.
"""

from __future__ import annotations

from time import thread_time_ns

from deploykit.serving.batching.delivery import CallSoon, deliver_inline
from deploykit.serving.batching.dispatch import Dispatch, Worker

SLOW_US = 10_000  # of one batch: values, such as denormal numbers, can make short ones slow
PAUSE_US = 1_000_000  # after a slow batch
LONGEST_PAUSE_US = 64 * PAUSE_US
GATHER_US = 500
_SINGLE = 8  # batches of one request in a row: no others come meanwhile
_ALL = 1 << 60


class InlineExecutor:
    """Runs batches of up to `max_rows` rows inline; wakes the engine's thread for longer ones.

    `call_soon` runs a function on the event loop once what has been received is read. After a batch
    of several requests the next one waits while each turn of the loop brings more of them, at most
    GATHER_US. For `spin_us` after an inline run the loop does not sleep, so that the next request
    of the same client is answered sooner; without a `spare_core` only while requests come one at a
    time, as it would take time from others. After a batch that computed for longer than SLOW_US the
    thread runs all batches for PAUSE_US; twice as long each time, if the next slow one follows
    within that time.
    """

    def __init__(
        self, dispatch: Dispatch, call_soon: CallSoon, spin_us: int, *, spare_core: bool = True
    ) -> None:
        self.max_rows: float = 0
        self._dispatch = dispatch
        self._call_soon = call_soon
        self._spin_us = spin_us
        self._spare_core = spare_core
        self._scheduled = False  # `call_soon` was given `_run_next`
        self._seen = 0  # requests in the queue one turn ago
        self._gather_until_us = 0
        self._single = 1  # batches of one request since the last of several
        self._spinning = False
        self._spin_until_us = 0
        self._paused_until_us = 0
        self._pause_us = PAUSE_US

    def wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._seen = 0
            self._call_soon(self._run_next)

    def _run_next(self) -> None:
        """Dispatch the next batch: inline when it is short, else on its engine's thread."""
        self._scheduled = False
        dispatch = self._dispatch
        with dispatch.lock:
            queue = dispatch.queue
            if not dispatch.idle or not queue.count:
                return
            rows, policy = queue.rows, queue.policy
            if not self._single and rows < policy.max_batch and self._gathers(queue.count):
                self._scheduled = True
                self._call_soon(self._run_next)
                return
            worker = dispatch.idle.pop()
            delay_us = policy.max_delay_us  # only the thread can wait for it to pass
            slow = self._paused_until_us and dispatch.clock_us() < self._paused_until_us
            long = min(rows, policy.max_batch) > self.max_rows  # more rows than one batch may wait
            if delay_us or not self.max_rows or long or slow:
                worker.wake.release()
                return
            batch, late, now_us = dispatch.take(worker)
            self._seen = _ALL  # what is left has waited for this batch already
            self._single = 0 if len(batch) > 1 else self._single + 1
        computed_ns = thread_time_ns()
        try:
            dispatch.finish(late, now_us)
            if batch:
                dispatch.run(worker, batch, now_us, deliver_inline)
        finally:
            self._release(worker, computed_ns)

    def _gathers(self, count: int) -> bool:
        """Whether to wait for another turn of the loop; `count`: the requests in the queue."""
        if count <= self._seen:
            return False
        now_us = self._dispatch.clock_us()
        if not self._seen:
            self._gather_until_us = now_us + GATHER_US
        self._seen = count
        return now_us < self._gather_until_us

    def _release(self, worker: Worker, computed_ns: int) -> None:
        """An inline run is over: the engine is idle again, unless its thread is to end."""
        dispatch = self._dispatch
        with dispatch.lock:
            worker.idle_since_us = dispatch.clock_us()
            slow = worker.runner.busy_us > SLOW_US  # by the clock, which other programs pass too
            if slow and thread_time_ns() - computed_ns > SLOW_US * 1000:
                self._pause(worker.idle_since_us)
            if dispatch.closing:
                worker.wake.release()
                return
            dispatch.idle.append(worker)
            self._spin_until_us = worker.idle_since_us + self._spin_us
            if self._scheduled:
                return
            if dispatch.queue.count:
                self._scheduled = True
                self._call_soon(self._run_next)  # after reading what was received meanwhile
            elif self._spins() and not self._spinning:
                self._spinning = True
                self._call_soon(self._spin)

    def _pause(self, now_us: int) -> None:
        again = self._paused_until_us and now_us < self._paused_until_us + self._pause_us
        self._pause_us = min(2 * self._pause_us, LONGEST_PAUSE_US) if again else PAUSE_US
        self._paused_until_us = now_us + self._pause_us

    def _spins(self) -> bool:
        return self._spin_us > 0 and (self._spare_core or self._single >= _SINGLE)

    def _spin(self) -> None:
        """Keep the loop awake until a request comes or the time is over."""
        dispatch = self._dispatch
        self._spinning = not self._scheduled and dispatch.clock_us() < self._spin_until_us
        if self._spinning:
            self._call_soon(self._spin)
