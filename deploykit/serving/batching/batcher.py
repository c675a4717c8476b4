"""One queue in front of the engines of a model: collects requests into batches and runs them.

`queue` decides which requests run together, `runner` how a batch runs, `threads` and `inline` on
which thread. An idle engine waits only where the policy has a delay, and on the loop's own thread
for the rest of a burst.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from time import thread_time_ns
from typing import Protocol

from deploykit.core.errors import DeploykitError, Expired, Overloaded
from deploykit.engines.engine import Closing, Engine
from deploykit.serving.batching.buckets import Buckets
from deploykit.serving.batching.queue import BatchPolicy, Pending, RequestQueue, Watcher
from deploykit.serving.batching.runner import Flight, Runner, Splitter, device_lost, stack
from deploykit.serving.batching.slo import Steering

# How finished requests go back to their sender: type aliases and the default implementation.

log = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Pending]], None]
CallSoon = Callable[
    [Callable[[], None]], object
]  # runs a function on the event loop's thread, soon


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """A function that returns the seconds left of `timeout_s`."""
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if timeout_s is None else max(0.0, end_s - time.monotonic())


def mark_expired(requests: Sequence[Pending], now_us: int) -> None:
    """Mark requests as finished, past their deadline."""
    for request in requests:
        request.finished = True
        waited_ms = (now_us - request.arrived_us) / 1e3
        request.error = Expired(
            f"the request waited {waited_ms:.0f} ms, past its time limit",
            hint="send fewer requests at once, or allow more time ('timeout', `timeout_ms`)",
        )


def deliver_inline(requests: Sequence[Pending]) -> None:
    """Call each request's `done` on this thread; one that fails does not affect the others."""
    for request in requests:
        try:
            request.done(request)
        except Exception:  # any bug in one reply: the other requests get theirs
            log.exception("delivering the result of a request failed")


# Take a batch from the queue, run it on an engine and deliver its results.
#
# Both executors use this: `threads` gives each engine a thread, `inline` runs short batches on
# the
# event loop. It holds the one lock of a model's queue.

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


# Run short batches on the event loop's own thread.
#
# Handing Python's lock from one thread to another and back costs more than a run of a small
# model.

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


# Run batches on one thread per engine; keep several in flight where the engine can.
#
# An engine that computes elsewhere, on a GPU, gets the next batch while it runs the last one, so
# that
# it does not wait for this thread. Not with an SLO: its policy expects a request to wait for one
# batch at most.

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
