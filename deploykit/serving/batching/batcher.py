"""One queue in front of the engines of a model: collects requests into batches and runs them.

`queue` decides which requests run together. Each engine has a thread; a short batch runs on the
event loop's own thread, because handing Python's lock from one thread to another and back costs
more than a run of a small model. An idle engine waits only where the policy has a delay, and on the
loop's own thread for the rest of a burst.

An engine that computes elsewhere, on a GPU, gets the next batch while it runs the last one, so that
it does not wait for its thread. With an SLO it gets none in advance: the policy of the SLO
expects a request to wait for one batch at most.

The requests of a failed batch run again one by one, once, so that a bad one fails alone. After
running out of memory they do not: more runs would keep the memory full. Nothing runs on a lost GPU.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import thread_time_ns
from typing import NamedTuple

import numpy as np

from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    DeviceLost,
    Expired,
    OutOfMemory,
    Overloaded,
    first_line,
)
from deploykit.core.subprocesses import INSIDE
from deploykit.core.tensors import MOST_STRINGS, TensorSpec, carrier
from deploykit.engines.engine import Arrays, Closing, Engine, InFlight
from deploykit.serving.batching.buckets import Buckets
from deploykit.serving.batching.queue import (
    NEVER_US,
    BatchPolicy,
    BatchRun,
    Pending,
    RequestQueue,
    Watcher,
    stack,
)
from deploykit.serving.batching.slo import Steering

log = logging.getLogger(__name__)

Stack = Callable[[Sequence[Pending]], Arrays]
Cut = Callable[[Pending, dict[str, np.ndarray]], dict[str, np.ndarray]]
Deliver = Callable[[Sequence[Pending]], None]
# runs a function on the event loop's thread, in one of its next turns
CallSoon = Callable[[Callable[[], None]], object]


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Return a function that returns the seconds left of `timeout_s`."""
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if timeout_s is None else max(0.0, end_s - time.monotonic())


def mark_expired(requests: Sequence[Pending], now_us: int) -> None:
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


SLOW_US = 10_000  # the time of a slow batch: values such as denormal numbers can cause it
PAUSE_US = 5_000_000  # how long no batch runs inline after a slow one
GATHER_US = 500
SPIN_US = 100  # a single client got 10 to 20 % more replies, on 2 cores
_SINGLE = 8  # batches of one request in a row, after which no others are expected
_ALL = 1 << 60
_LONGEST_SLEEP_S = 3600.0
_LARGE_BYTES = 64 << 10  # larger outputs are copied out of the memory of the batch


@dataclass(frozen=True)
class Loop:
    """The event loop that requests come from, as a Batcher needs it.

    Attributes:
        deliver: gets the requests that finished together, once per batch.
        call_soon: runs a function on the event loop once what has been received is read; for
            callers that submit only on the loop's thread. Batches of up to `inline_max_rows` rows
            then run on that thread, except for PAUSE_US after a batch that computed for longer than
            SLOW_US. After a batch of several requests the next one waits while each turn of the
            loop brings more of them, at most GATHER_US.
        spin_us: while requests come one at a time, the loop does not sleep for so long after each,
            so that the next request of the same client is answered sooner.
    """

    deliver: Deliver = deliver_inline
    clock_us: Callable[[], int] = monotonic_us
    call_soon: CallSoon | None = None
    spin_us: int = SPIN_US


class EngineFailed(DeploykitError):  # noqa: N818 - named as its siblings in core/errors.py
    """The engine raised, or returned other outputs than declared; the log has the details."""


class Splitter:
    """Checks the outputs of one engine and gives each request its own rows of them.

    `joined`: axis 0 of every output is the batch. `cut` removes a request's padding, if any.
    """

    def __init__(
        self, outputs: Sequence[TensorSpec], *, joined: bool, cut: Cut | None = None
    ) -> None:
        self._declared = [(spec.name, np.dtype(carrier(spec.dtype))) for spec in outputs]
        self._joined = joined
        self._cut = cut

    def __call__(self, batch: Sequence[Pending], outputs: Mapping[str, np.ndarray]) -> None:
        """Set each request's `outputs`. On EngineFailed, none are set."""
        total_bytes = self.check(outputs, sum([request.rows for request in batch]))
        if len(batch) == 1:
            batch[0].outputs = dict(outputs)
        else:
            start = 0
            arrays = [(name, outputs[name]) for name, _ in self._declared]
            for request in batch:
                end = start + request.rows
                request.outputs = {name: array[start:end] for name, array in arrays}
                start = end
        if self._cut is not None:
            for request in batch:
                request.outputs = self._cut(request, request.outputs)
        if total_bytes > _LARGE_BYTES:
            # Copy large views of the memory of the whole batch, or of the engine: a slow client
            # would keep all of it alive, or make ONNX Runtime's arena grow, although only the
            # array's own bytes are counted in the memory budget.
            for request in batch:
                for name, array in request.outputs.items():
                    if array.nbytes > _LARGE_BYTES and not array.flags.owndata:
                        request.outputs[name] = array.copy()

    def check(self, outputs: Mapping[str, np.ndarray], rows: int) -> int:
        """Return the outputs' bytes. Raises EngineFailed if they cannot be of `rows` rows."""
        total_bytes = 0
        for name, dtype in self._declared:
            array = outputs.get(name)
            if array is None or array.dtype != dtype:
                got = "nothing" if array is None else array.dtype.name
                raise EngineFailed(f"the engine returned {got} for output '{name}' ({dtype})")
            total_bytes += array.nbytes
            shape = array.shape
            if self._joined and (not shape or shape[0] != rows):
                raise EngineFailed(
                    f"the engine returned shape {list(shape)} for output '{name}', "
                    f"{rows} rows were expected"
                )
        return total_bytes


class Flight(NamedTuple):
    """A batch whose call was started, with its outputs if they are there already.

    `call` is the error if it could not be started, and None if each request is to run alone.
    `idle_us`: see BatchRun.
    """

    batch: Sequence[Pending]
    started_us: int
    stacked_us: int
    submitted_us: int
    idle_us: int
    call: InFlight | dict[str, np.ndarray] | Exception | None


class Runner:
    """One engine, called by one thread at a time, and the requests that it is running.

    `since_us`: when its running call began. `busy_us`: how long the last batch took. `wake`: the
    lock that its thread sleeps on; one release ends one sleep. `slots`: how many batches may be in
    flight. `ended_us`: the end of the last one.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        stack: Stack,
        split: Splitter,
        clock_us: Callable[[], int],
        queue: RequestQueue,
        *,
        overlaps: bool = True,
    ) -> None:
        self.engine = engine
        self.queue = queue
        self.running: Sequence[Pending] = ()
        self.wake = threading.Lock()
        self.wake.acquire()
        self.idle_since_us = NEVER_US
        self.since_us: int | None = None
        self.busy_us = 0
        self.lost = False
        self.retired = False  # it ends once its queue is empty
        self.closes = False  # whether its thread closes the engine at its end
        self._name = name
        self._stack = stack
        self._split = split
        self._clock_us = clock_us
        self._strings = any(spec.dtype == "string" for spec in engine.inputs)
        self.slots = engine.slots if overlaps and not self._strings else 1
        self.ended_us = 0

    def start(self, batch: Sequence[Pending], started_us: int, *, alone: bool = False) -> Flight:
        """Start a batch; `finish` has to follow, in the same order.

        It runs at once if the engine has a single slot, or if the request is run again `alone`.
        """
        stacked_us = started_us
        if self.since_us is None:  # else an earlier batch is still running
            self.since_us = started_us
        idle_us, since_us = 0, self.idle_since_us
        if since_us < started_us and not alone:
            from_us = [r.arrived_us if r.arrived_us > since_us else since_us for r in batch]
            idle_us = len(batch) * started_us - sum(from_us)
        call: InFlight | dict[str, np.ndarray] | Exception | None = None
        if not self._strings or len(batch) == 1 or _count_strings(batch) <= MOST_STRINGS:
            try:
                feeds = self._stack(batch)
                stacked_us = self._clock_us()
                with INSIDE:
                    if alone or self.slots == 1:
                        call = self.engine(feeds)
                    else:
                        call = self.engine.submit(feeds)
            except Exception as exc:  # noqa: BLE001 - `finish` reports it, in the order of batches
                call = exc.with_traceback(None)  # the traceback would keep the joined inputs
        return Flight(batch, started_us, stacked_us, self._clock_us(), idle_us, call)

    def finish(self, flight: Flight, watchers: Sequence[Watcher]) -> list[DeploykitError | None]:
        """Return an error for each request of a batch, None where its outputs are set.

        Reports runs to `watchers`. Sets `lost` when the GPU is gone.
        """
        batch = flight.batch
        if flight.call is not None:
            error = self._finish(flight, watchers)
            if error is None or len(batch) == 1 or isinstance(error, Overloaded):
                return [error] * len(batch)
        errors: list[DeploykitError | None] = []
        for request in batch:
            if self.lost:
                errors += [device_lost(self._name)] * (len(batch) - len(errors))
                break
            errors.append(
                self._finish(self.start([request], self._clock_us(), alone=True), watchers)
            )
        return errors

    def _finish(self, flight: Flight, watchers: Sequence[Watcher]) -> DeploykitError | None:
        """Wait for one call of the engine. Sets each request's outputs, or returns the error."""
        batch, started_us, stacked_us, ran_us, idle_us, call = flight
        try:
            if isinstance(call, Exception):
                raise call
            if isinstance(call, dict):
                outputs = call
            else:
                assert call is not None
                with INSIDE:
                    outputs = call.result()
                waited_us = max(0, self.ended_us - ran_us)  # for the batch before it
                started_us, stacked_us = started_us + waited_us, stacked_us + waited_us
                ran_us = self._clock_us()
            self._split(batch, outputs)
        except Exception as exc:  # noqa: BLE001 - the engine's thread must survive any error
            self.ended_us = self._clock_us()
            self.busy_us = self.ended_us - started_us
            name = self._name
            if isinstance(exc, EngineFailed):
                log.error("model '%s': %s", name, exc.message)
                return exc.with_traceback(None)  # the traceback and the batch refer to each other
            log.error("model '%s': %s: %s", name, type(exc).__name__, first_line(exc))
            if isinstance(exc, DeviceLost):
                self.lost = True
                return device_lost(name)
            if isinstance(exc, (OutOfMemory, MemoryError)):
                return Overloaded(
                    f"model '{name}': out of memory in a batch of {len(batch)} requests",
                    hint="try again later, with fewer rows, or start the server with less "
                    "`max_batch`",
                )
            hint = "the server's log says why"
            if isinstance(exc, BadInput):  # the engine rejects what passed our own checks
                what = "the engine refused the values or the shape of this request"
                return BadInput(f"model '{name}': {what}", hint=hint)
            return EngineFailed(f"model '{name}': the engine failed on this request", hint=hint)
        finally:
            self.since_us = None
        ended_us = self.ended_us = self._clock_us()
        self.busy_us = ended_us - started_us
        in_us, out_us = self.engine.last_copies_us
        served = [request for request in batch if not request.finished]
        stack_us, split_us = stacked_us - started_us, ended_us - ran_us
        engine_us = max(0, ran_us - stacked_us - in_us - out_us)
        run = BatchRun(served, started_us, stack_us, in_us, engine_us, out_us, split_us, idle_us)
        for watcher in watchers:
            try:
                watcher.record_run(run)
            except Exception:  # a failing watcher must not end the engine's thread
                log.exception("model '%s': recording a batch failed", self._name)
        return None


def _count_strings(batch: Sequence[Pending]) -> int:
    arrays = (array for request in batch for array in request.feeds.values())
    return sum([array.size for array in arrays if array.dtype.kind == "O"])


def device_lost(name: str) -> Overloaded:
    """Return the error that every request gets once a GPU is lost."""
    hint = "send the request elsewhere, or try again when the server was started again"
    return Overloaded(f"model '{name}': the GPU is lost to this server, which will stop", hint=hint)


class Batcher(Closing):
    """A bounded queue and the engines that empty it.

    Every submitted request is delivered exactly once, unless it is cancelled.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        policy: BatchPolicy,
        loop: Loop = Loop(),
        *,
        watchers: Sequence[Watcher] = (),
        name: str = "engine",
        buckets: Buckets | None = None,
        steering: Steering | None = None,
    ) -> None:
        """Start a thread for each engine, which the caller closes. `steering` adapts the policy."""
        self.inline_max_rows: float = 0
        self.watchers = watchers
        self.lost = False  # the GPU of an engine is gone; then no request is accepted
        self._name = name
        self._queue = RequestQueue(policy)
        self._deliver = loop.deliver
        self._clock_us = loop.clock_us
        self.steering = steering
        self._lock = threading.Lock()  # protects the queue and the attributes below
        self._idle: list[Runner] = []  # engines asleep and not yet woken
        self._closing = False
        self._has_loop = loop.call_soon is not None
        self._call_soon: CallSoon = loop.call_soon or (lambda _: None)
        self._spin_us = loop.spin_us
        self._scheduled = False  # whether `call_soon` was given `_run_next`
        self._seen = 0  # requests that were in the queue one turn ago
        self._gather_until_us = 0
        self._single = 1  # batches of one request since the last batch of several
        self._spinning = False
        self._spin_until_us = 0
        self._paused_until_us = 0
        cut = buckets.cut if buckets else None
        self._split = Splitter(engines[0].outputs, joined=policy.max_batch > 0, cut=cut)
        self._stack = buckets.stack if buckets else stack
        self._retired: list[Runner] = []  # those of replaced engines that may still run
        self._threads: list[threading.Thread] = []
        with self._lock:
            self._workers = self._start(engines, steering)

    def _start(self, engines: Sequence[Engine], steering: Steering | None) -> list[Runner]:
        """Return runners of a new queue; their threads wait for our lock. Raises RuntimeError."""
        queue = RequestQueue(self.policy)
        common = self._name, self._stack, self._split, self._clock_us, queue
        workers = [Runner(each, *common, overlaps=steering is None) for each in engines]
        try:
            for number, worker in enumerate(workers):
                name = f"engine {self._name} {number}"
                thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the system has no more threads
            self._retire(workers)
            raise
        self._queue = queue
        return workers

    def _retire(self, workers: Sequence[Runner]) -> None:
        """Let the threads end once their queue is empty. Needs the lock."""
        for worker in workers:
            worker.retired = True
            if worker in self._idle:
                self._idle.remove(worker)
                worker.wake.release()

    # -- state that others may read ----------------------------------------------------------------

    @property
    def engines(self) -> int:
        return len(self._workers)

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queues, not yet with an engine."""
        return sum(queue.count for queue in self._queues)

    @property
    def _queues(self) -> set[RequestQueue]:
        return {worker.queue for worker in (*self._retired, *self._workers)}

    def take_most_waiting(self) -> int:
        """Return the largest number of waiting requests since the last call."""
        queue = self._queue
        with self._lock:
            most, queue.most = max(queue.most, queue.count), queue.count
        return most

    @property
    def unanswered(self) -> int:
        """Return the number of requests accepted and not delivered: waiting or with an engine."""
        with self._lock:
            return self.waiting + sum(
                not request.finished
                for worker in (*self._retired, *self._workers)
                for request in worker.running
            )

    @property
    def policy(self) -> BatchPolicy:
        """Return the current policy: with an SLO, batch, delay and queue change over time."""
        return self._queue.policy

    @property
    def hung(self) -> int:
        """Return the number of engines whose call is not expected to return any more."""
        limit_us = self._clock_us() - self.policy.hung_us
        since = [worker.since_us for worker in self._workers]
        return sum(each is not None and each <= limit_us for each in since)

    def submit(self, request: Pending) -> None:
        """Queue a checked request; `deliver` gets it exactly once.

        Raises Overloaded if the queue is full or closed.
        """
        with self._lock:
            wakes = None if self._closing else self._queue.add(request)
            if wakes is not None:
                if wakes and self._idle:
                    if not self._has_loop:
                        self._idle.pop().wake.release()
                    elif not self._scheduled:
                        self._scheduled = True
                        self._seen = 0
                        self._call_soon(self._run_next)
                return
        if self.lost:
            request.error = device_lost(self._name)
        elif self._closing:
            request.error = shutting_down()
        elif self._queue.count < self.policy.queue:
            request.error = Overloaded(
                f"model '{self._name}' could not answer within `slo_ms`",
                hint="try again later, or allow more time with a larger `slo_ms`",
            )
        else:
            request.error = Overloaded(
                f"the queue of model '{self._name}' is full ({self.policy.queue} requests)",
                hint="try again later, or start the server with a larger `queue`",
            )
        for watcher in self.watchers:
            watcher.record_refusal(request)
        raise request.error

    def cancel(self, request: Pending) -> bool:
        """Remove a waiting request; return False if an engine is running it or has run it."""
        with self._lock:
            if not any(queue.remove(request) for queue in self._queues):
                return False
            request.finished = True
        for watcher in self.watchers:
            watcher.record_cancellation()
        return True

    def expire(self) -> None:
        """Answer requests past their deadline, even while all engines are busy; call it often.

        With an SLO it also updates the policy.
        """
        now_us = self._clock_us()
        with self._lock:
            late = [each for queue in self._queues for each in queue.take_late(now_us)]
            for worker in (*self._retired, *self._workers):
                late += [r for r in worker.running if not r.finished and r.give_up_us <= now_us]
            mark_expired(late, now_us)
            if self.steering is not None:
                self._queue.policy = self.steering.step(now_us)
        self._finish(late, now_us)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> int:
        """Accept no more requests; answer the queued ones, or refuse them without `drain`.

        Returns how many requests are still unanswered after `timeout_s`: 0 unless an engine hangs.
        """
        self._stop(None if drain else shutting_down())
        left_s = countdown(timeout_s)
        for thread in self._threads:
            thread.join(left_s())
        return self.unanswered

    def replace(
        self, engines: Sequence[Engine], steering: Steering | None, inline_max_rows: float
    ) -> None:
        """Run the next requests on these engines, which are closed here.

        So is each previous one, after those that wait: they were prepared for it. Raises Overloaded
        during the end, and RuntimeError without threads: then nothing has changed.
        """
        with self._lock:
            if self._closing:
                raise shutting_down()
            before, self._workers = self._workers, self._start(engines, steering)
            for worker in (*before, *self._workers):
                worker.closes = True
            self._retire(before)
            self._retired = [w for w in (*self._retired, *before) if w.running or w.queue.count]
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.steering, self.inline_max_rows = steering, inline_max_rows

    # -- a batch, on any thread --------------------------------------------------------------------

    def _take(self, worker: Runner) -> tuple[list[Pending], list[Pending], int]:
        """Return the batch that is due, the expired requests, and the time. Needs the lock."""
        queue, now_us = worker.queue, self._clock_us()
        late = queue.take_late(now_us)
        if late:
            mark_expired(late, now_us)
        batch: list[Pending] = []
        if not worker.lost:
            batch = worker.running = queue.take(now_us, hurry=self._closing or worker.retired)
        if batch and queue.count and self._idle:
            self._idle.pop().wake.release()  # the rest may be due for another engine
        return batch, late, now_us

    def _run(self, worker: Runner, flight: Flight, deliver: Deliver | None = None) -> None:
        """Finish the oldest batch in flight and deliver its results, by default as set up."""
        batch = flight.batch
        errors, ended_us = worker.finish(flight, self.watchers), worker.ended_us
        finished = []
        with self._lock:
            for request, error in zip(batch, errors, strict=True):
                if not request.finished:
                    request.finished = True
                    request.error = error
                    finished.append(request)
            worker.running = worker.running[len(batch) :]
            if self.steering is not None and not (worker.retired or any(errors)):
                self.steering.record_run(batch, flight.started_us, ended_us)
        if worker.lost:
            self.lost = True
            self._stop(device_lost(self._name))
        self._finish(finished, ended_us, deliver)

    def _stop(self, error: DeploykitError | None) -> None:
        """Accept no more requests. With an `error`, it answers every waiting request."""
        with self._lock:
            self._closing = True
            queues = self._queues if error is not None else ()
            refused = [each for queue in queues for each in queue.take_late(math.inf)]
            for request in refused:
                request.finished = True
                request.error = error
            for worker in self._idle:
                worker.wake.release()
            self._idle.clear()
        self._finish(refused, self._clock_us())

    def _finish(
        self, requests: Sequence[Pending], now_us: int, deliver: Deliver | None = None
    ) -> None:
        for request in requests:
            if request.error is None:
                continue
            for watcher in self.watchers:
                try:
                    watcher.record_failure(request, now_us)
                except Exception:  # a failing watcher must not hold up the replies
                    log.exception("model '%s': recording a failed request failed", self._name)
        if requests:
            (deliver or self._deliver)(requests)

    # -- on the event loop's thread ----------------------------------------------------------------

    def _run_next(self) -> None:
        """Dispatch the next batch: inline when it is short, else on its engine's thread."""
        self._scheduled = False
        with self._lock:
            queue = self._queue
            if not self._idle or not queue.count:
                return
            rows, policy = queue.rows, queue.policy
            if not self._single and rows < policy.max_batch and self._gathers(queue.count):
                self._scheduled = True
                self._call_soon(self._run_next)
                return
            worker, most = self._idle.pop(), self.inline_max_rows
            # more rows wait than an inline batch has, or there is a delay for the thread to wait
            long = policy.max_delay_us or (rows > most and policy.max_batch > most)
            slow = self._paused_until_us and self._clock_us() < self._paused_until_us
            if long or slow or not most:
                worker.wake.release()
                return
            batch, late, now_us = self._take(worker)
            self._seen = _ALL  # the remaining requests have waited for this batch already
            self._single = 0 if len(batch) > 1 else self._single + 1
        computed_ns = thread_time_ns()
        try:
            if late:
                self._finish(late, now_us)
            if batch:
                self._run(worker, worker.start(batch, now_us), deliver_inline)
        finally:
            self._release(worker, computed_ns)

    def _gathers(self, count: int) -> bool:
        """Return whether to wait for another turn of the loop. `count`: the queued requests."""
        if count <= self._seen:
            return False
        now_us = self._clock_us()
        if not self._seen:
            self._gather_until_us = now_us + GATHER_US
        self._seen = count
        return now_us < self._gather_until_us

    def _release(self, worker: Runner, computed_ns: int) -> None:
        """Mark the engine as idle after an inline run, unless its thread is to end."""
        with self._lock:
            now_us = worker.idle_since_us = self._clock_us()
            slow = worker.busy_us > SLOW_US  # by the clock; other programs may have run
            if slow and thread_time_ns() - computed_ns > SLOW_US * 1000:
                self._paused_until_us = now_us + PAUSE_US
            if self._closing or worker.retired:
                worker.wake.release()
                return
            self._idle.append(worker)
            self._spin_until_us = now_us + self._spin_us
            if self._scheduled:
                return
            if self._queue.count:
                self._scheduled = True
                self._call_soon(self._run_next)  # after reading what was received meanwhile
            elif self._spin_us and self._single >= _SINGLE and not self._spinning:
                self._spinning = True
                self._call_soon(self._spin)

    def _spin(self) -> None:
        self._spinning = not self._scheduled and self._clock_us() < self._spin_until_us
        if self._spinning:
            self._call_soon(self._spin)

    # -- on an engine's thread ---------------------------------------------------------------------

    def _work(self, worker: Runner) -> None:
        """Run batches until the end; with several slots, submit the next before the last is done.

        Answers are delivered in the order of the batches.
        """
        flights = deque[Flight]()
        while True:
            batch, late, now_us = self._take_more(worker) if flights else self._wait(worker)
            self._finish(late, now_us)
            if batch:
                flights.append(worker.start(batch, now_us))
            elif not late and not flights:
                break
            if flights and (not batch or len(flights) == worker.slots):
                self._run(worker, flights.popleft())
                worker.since_us = flights[0].started_us if flights else None
            del batch  # frees its inputs before the next batch is taken
        if worker.closes:
            worker.engine.close()

    def _take_more(self, worker: Runner) -> tuple[list[Pending], list[Pending], int]:
        """Return what is due for an engine that already runs a batch; nothing if one is idle."""
        with self._lock:
            running = worker.running
            worker.idle_since_us = NEVER_US
            if not all(each.running for each in self._workers):
                return [], [], 0
            found = self._take(worker)
            worker.running = [*running, *found[0]]
            return found

    def _wait(self, worker: Runner) -> tuple[list[Pending], list[Pending], int]:
        """Return the next batch and the newly expired requests; both are empty once closed.

        Meanwhile sleep until another thread wakes this one, or a delay or a deadline passes.
        """
        worker.idle_since_us = NEVER_US
        with self._lock:
            while True:
                batch, late, now_us = self._take(worker)
                ends = (self._closing or worker.retired) and not worker.queue.count
                if batch or late or ends or worker.lost:
                    return batch, late, now_us
                timeout_s = -1.0
                if worker.queue.count:
                    timeout_s = max(1, worker.queue.next_us() - now_us) / 1e6
                    timeout_s = min(timeout_s, _LONGEST_SLEEP_S)
                worker.idle_since_us = min(worker.idle_since_us, now_us)
                self._idle.append(worker)
                self._lock.release()
                woken = worker.wake.acquire(timeout=timeout_s)
                self._lock.acquire()
                if not woken and worker in self._idle:
                    self._idle.remove(worker)
                elif not woken:
                    self._lock.release()  # another thread will wake it, or runs its engine inline
                    worker.wake.acquire()
                    self._lock.acquire()


def shutting_down() -> Overloaded:
    return Overloaded("the server is shutting down", hint="send the request elsewhere")
