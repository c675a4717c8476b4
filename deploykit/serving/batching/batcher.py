"""One queue in front of the engines of a model: collects requests into batches and runs them.

`queue` decides which requests run together, `runner` how a batch runs, `threads` and `inline` on
which thread. An idle engine waits only where the policy has a delay, and on the loop's own thread
for the rest of a burst.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deploykit.core.errors import Overloaded
from deploykit.runtimes.engine import Closing, Engine
from deploykit.serving.batching.buckets import Buckets
from deploykit.serving.batching.delivery import (
    CallSoon,
    Deliver,
    deliver_inline,
    mark_expired,
    monotonic_us,
)
from deploykit.serving.batching.dispatch import NEVER_US, Dispatch, Executor, Worker
from deploykit.serving.batching.inline import InlineExecutor
from deploykit.serving.batching.policy import BatchPolicy, Pending, Watcher
from deploykit.serving.batching.queue import RequestQueue
from deploykit.serving.batching.runner import Runner, device_lost
from deploykit.serving.batching.slo import Steering
from deploykit.serving.batching.stacking import Splitter, stack
from deploykit.serving.batching.threads import ThreadExecutor


class Retired(Overloaded):
    """The engines were replaced: submit to the model's new Batcher."""


class Batcher(Closing):
    """A bounded queue and the engines that empty it.

    `deliver` gets the requests that finished together, once per batch. Every submitted request is
    delivered exactly once, unless it is cancelled. `hung_us`: an engine whose call takes longer is
    counted as hung. `call_soon` (see InlineExecutor) is for callers with an event loop on whose
    thread alone they submit; batches of up to `inline_max_rows` rows then run on that thread.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        policy: BatchPolicy,
        *,
        deliver: Deliver = deliver_inline,
        clock_us: Callable[[], int] = monotonic_us,
        watcher: Watcher | None = None,
        name: str = "engine",
        buckets: Buckets | None = None,
        steering: Steering | None = None,
        hung_us: int = NEVER_US,
        close_engines: bool = False,
        call_soon: CallSoon | None = None,
        spin_us: int = 0,
        spare_core: bool = True,
    ) -> None:
        self._queue = RequestQueue(policy)
        self._clock_us = clock_us
        self._hung_us = hung_us
        self._retired = False
        self._dispatch = Dispatch(
            name, self._queue, deliver, clock_us, watcher or Watcher(), steering
        )
        cut = buckets.cut if buckets else None
        split = Splitter(engines[0].outputs, joined=policy.max_batch > 0, cut=cut)
        join = buckets.stack if buckets else stack
        self._workers = [
            Worker(Runner(engine, name, join, split, clock_us, instance=number))
            for number, engine in enumerate(engines)
        ]
        self._threads = ThreadExecutor(self._dispatch, self._workers)
        self._threads.close_engines = close_engines
        self._inline: InlineExecutor | None = None
        if call_soon:
            self._inline = InlineExecutor(self._dispatch, call_soon, spin_us, spare_core=spare_core)
        self._executor: Executor = self._inline or self._threads
        self._threads.start()

    @property
    def inline_max_rows(self) -> float:
        """Batches of up to this many rows run on the event loop's thread."""
        return self._inline.max_rows if self._inline else 0

    @inline_max_rows.setter
    def inline_max_rows(self, rows: float) -> None:
        if self._inline:
            self._inline.max_rows = rows

    @property
    def watcher(self) -> Watcher:
        return self._dispatch.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher) -> None:
        self._dispatch.watcher = watcher

    @property
    def engines(self) -> int:
        """How many run in this process."""
        return len(self._workers)

    @property
    def lost(self) -> bool:
        """Whether an engine has lost its GPU; then no request is accepted."""
        return self._dispatch.lost

    @property
    def waiting(self) -> int:
        """Requests in the queue, not yet with an engine."""
        return self._queue.count

    def take_most_waiting(self) -> int:
        """The largest number of waiting requests since the last call."""
        queue = self._queue
        with self._dispatch.lock:
            most, queue.most = max(queue.most, queue.count), queue.count
        return most

    @property
    def unanswered(self) -> int:
        """Requests accepted and not yet delivered: waiting or with an engine."""
        with self._dispatch.lock:
            return self._queue.count + sum(
                not request.finished for worker in self._workers for request in worker.running
            )

    @property
    def policy(self) -> BatchPolicy:
        """The current policy: with an SLO, batch, delay and queue change over time."""
        return self._queue.policy

    @property
    def hung(self) -> int:
        """Number of engines whose call is not expected to return any more."""
        limit_us = self._clock_us() - self._hung_us
        since = [worker.runner.since_us for worker in self._workers]
        return sum(each is not None and each <= limit_us for each in since)

    @property
    def ended(self) -> bool:
        """Whether every thread has ended: after `close` or `retire`, unless an engine hangs."""
        return self._threads.ended

    def submit(self, request: Pending) -> None:
        """Queue a checked request; `deliver` gets it exactly once.

        Raises Overloaded if the queue is full or closed.
        """
        dispatch, queue = self._dispatch, self._queue
        with dispatch.lock:
            if not dispatch.closing and queue.fits(request.rows):
                if queue.add(request) and dispatch.idle:
                    self._executor.wake()
                return
        raise self._refusal()

    def _refusal(self) -> Overloaded:
        if self._retired:
            return Retired("the engine was replaced")
        dispatch, policy = self._dispatch, self.policy
        dispatch.watcher.record_refusal()
        if dispatch.lost:
            return device_lost(dispatch.name)
        if dispatch.closing:
            return shutting_down()
        if self.waiting < policy.queue:
            return Overloaded(
                f"model '{dispatch.name}' could not answer within `slo_ms`",
                hint="try again later, or allow more time with a larger `slo_ms`",
            )
        return Overloaded(
            f"the queue of model '{dispatch.name}' is full ({policy.queue} requests)",
            hint="try again later, or start the server with a larger `queue`",
        )

    def cancel(self, request: Pending) -> bool:
        """Remove a waiting request. False if an engine is running it or has run it."""
        with self._dispatch.lock:
            if not self._queue.remove(request):
                return False
            request.finished = True
        self.watcher.record_cancellation()
        return True

    def expire(self) -> None:
        """Answer requests past their deadline, even while all engines are busy; call it often.

        With an SLO it also updates the policy.
        """
        dispatch, now_us = self._dispatch, self._clock_us()
        with dispatch.lock:
            late = self._queue.take_late(now_us)
            for worker in self._workers:
                late += [r for r in worker.running if not r.finished and r.give_up_us <= now_us]
            mark_expired(late, now_us)
            if dispatch.steering is not None:
                self._queue.policy = dispatch.steering.step(now_us, self._queue.added_rows)
        dispatch.finish(late, now_us)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> int:
        """Accept no more requests; answer the queued ones, or refuse them without `drain`.

        Returns how many requests are still unanswered after `timeout_s`: 0 unless an engine hangs.
        """
        self._dispatch.stop(None if drain else shutting_down())
        self._threads.join(timeout_s)
        return self.unanswered

    def retire(self) -> None:
        """Accept no more; answer queued requests, then close the engines. Does not wait."""
        self._retired = self._threads.close_engines = True
        self._dispatch.stop(None)


def shutting_down() -> Overloaded:
    return Overloaded("the server is shutting down", hint="send the request elsewhere")
