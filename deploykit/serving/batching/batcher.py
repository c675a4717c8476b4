"""One queue in front of one or more Engines of a model, and the thread of each Engine.

In: requests (arrays by input name, rows along axis 0) from any thread. Out: each request's own
rows, or its error, handed to `deliver` once per batch. Which requests run together is decided in
`lanes`, how a batch is run in `runner`; here are the lock, the threads and the clock. An idle
engine never waits unless the policy's delay says so. A short batch need not change threads at all:
two threads that hand Python's lock to and fro cost more than a small model's run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from deploykit.core.errors import DeploykitError, Overloaded
from deploykit.core.tensors import InputKey
from deploykit.runtimes.engine import Arrays, Closing, Engine
from deploykit.serving.batching.buckets import Buckets
from deploykit.serving.batching.delivery import Deliver, Later, deliver_here, expired, monotonic_us
from deploykit.serving.batching.policy import BatchPolicy, Pending, Watcher
from deploykit.serving.batching.queue import Lanes
from deploykit.serving.batching.runner import Runner, gone
from deploykit.serving.batching.slo import Steering
from deploykit.serving.batching.stacking import Splitter, stack

log = logging.getLogger(__name__)

_NEVER_US = 1 << 60
_LONGEST_SLEEP_S = 3600.0


class Retired(Overloaded):
    """These engines were replaced: another Batcher has the model's queue now."""


class _Worker:
    """An Engine's thread and what it is at."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.running: Sequence[Pending] = ()
        self.wake = threading.Lock()  # held; released once to end one sleep
        self.wake.acquire()
        self.free_us = 0  # since when it sleeps, if it does


class Batcher(Closing):
    """A bounded queue, and the threads that empty it.

    `deliver` gets the requests that were finished together, once per batch: an event loop needs
    one wake-up for them all. What `submit` took is delivered once, unless it is cancelled.
    `hung_us`: a call of an engine that takes longer is taken for one that never ends. `later` is
    for callers with an event loop on whose thread alone they submit: it runs a function there once
    what has been received is read. Then batches of up to `here_rows` rows run on that thread, which
    for `spin_us` after one does not sleep: who asks again at once is answered sooner.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        policy: BatchPolicy,
        *,
        deliver: Deliver = deliver_here,
        clock_us: Callable[[], int] = monotonic_us,
        watcher: Watcher | None = None,
        name: str = "engine",
        buckets: Buckets | None = None,
        steering: Steering | None = None,
        hung_us: int = _NEVER_US,
        close_engines: bool = False,
        later: Later | None = None,
        spin_us: int = 0,
    ) -> None:
        self.here_rows: float = 0
        self.watcher = watcher or Watcher()
        self.lost = False  # an engine's GPU is gone; nothing is taken any more
        self._lanes = Lanes(policy)
        self._deliver = deliver
        self._clock_us = clock_us
        self._name = name
        self._steering = steering
        self._hung_us = hung_us
        self._close_engines = close_engines
        self._later = later
        self._looking = False  # `later` has been asked to `_look`
        self._spin_us = spin_us
        self._spinning = False
        self._awake_us = 0
        self._closing = False
        self._retired = False
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []  # asleep, and nobody woke them yet
        split = Splitter(
            engines[0].outputs,
            joined=policy.max_batch > 0,
            cut=buckets.cut if buckets else None,
        )
        self._workers = [
            _Worker(
                Runner(
                    engine,
                    name,
                    stack=buckets.stack if buckets else stack,
                    split=split,
                    clock_us=clock_us,
                    instance=number,
                )
            )
            for number, engine in enumerate(engines)
        ]
        self._threads = [
            threading.Thread(
                target=self._loop, args=(worker,), name=f"engine {name} {number}", daemon=True
            )
            for number, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the queue, not yet with an engine."""
        return self._lanes.count

    @property
    def unanswered(self) -> int:
        """Requests taken and not yet delivered: waiting or with an engine."""
        with self._lock:
            return self._lanes.count + sum(
                not request.finished for worker in self._workers for request in worker.running
            )

    @property
    def policy(self) -> BatchPolicy:
        """As it is now: with an SLO its batch, delay and queue change all the time."""
        return self._lanes.policy

    @property
    def hung(self) -> int:
        """How many engines are in a call for so long that they are not expected back."""
        limit_us = self._clock_us() - self._hung_us
        since = [worker.runner.since_us for worker in self._workers]
        return sum(each is not None and each <= limit_us for each in since)

    @property
    def ended(self) -> bool:
        """Whether every thread is through: after `close` or `retire`, unless an engine hangs."""
        return not any(thread.is_alive() for thread in self._threads)

    def submit(
        self,
        feeds: Arrays,
        rows: int,
        key: InputKey,
        done: Callable[[Pending], None],
        *,
        wait_us: int = _NEVER_US,
        give_up_us: int = _NEVER_US,
        priority: int = 0,
        trace: str | None = None,
        decode_us: int = 0,
    ) -> Pending:
        """Queue one request, checked already; `done` is called later, exactly once, by `deliver`.

        It may wait `wait_us` for an engine, and is answered within `give_up_us` whatever the
        engine does. Raises Overloaded when the queue is full or closed.
        """
        now_us = self._clock_us()
        last_us = now_us + give_up_us
        deadline_us = now_us + wait_us
        if deadline_us > last_us:
            deadline_us = last_us
        request = Pending(
            feeds, rows, key, done, now_us, deadline_us, last_us, priority, trace, decode_us
        )
        lanes = self._lanes
        with self._lock:
            if not self._closing and lanes.fits(rows):
                if lanes.add(request) and self._idle:
                    if self._later is None:
                        self._idle.pop().wake.release()
                    elif not self._looking:
                        self._looking = True
                        self._later(self._look)
                return request
        raise self._refusal()

    def _refusal(self) -> Overloaded:
        if self._retired:
            return Retired("the engine was replaced")
        self.watcher.refused()
        if self.lost:
            return gone(self._name)
        if self._closing:
            return Overloaded("the server is shutting down", hint="send the request elsewhere")
        policy = self.policy
        if self.waiting < policy.queue:
            return Overloaded(
                f"model '{self._name}' could not answer within --slo-ms",
                hint="try again later, or allow more time with a larger --slo-ms",
            )
        return Overloaded(
            f"the queue of model '{self._name}' is full ({policy.queue} requests)",
            hint="try again later, or start the server with a larger --queue",
        )

    def cancel(self, request: Pending) -> bool:
        """Take back a request that nobody waits for. False when an engine has it or had it."""
        with self._lock:
            if not self._lanes.remove(request):
                return False
            request.finished = True
        self.watcher.cancelled()
        return True

    def expire(self) -> None:
        """Answer what is past its deadline, even while all engines are busy; called now and then.

        With an SLO it is also when batch and delay are set anew.
        """
        now_us = self._clock_us()
        with self._lock:
            late = self._lanes.take_late(now_us)
            for worker in self._workers:
                late += [r for r in worker.running if not r.finished and r.give_up_us <= now_us]
            expired(late, now_us)
            if self._steering is not None:
                self._lanes.policy = self._steering.step(now_us, self._lanes.added_rows)
        self._end(late, now_us)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> int:
        """Take no more; answer what is queued (or refuse it, without `drain`); end the threads.

        Returns how many requests are still unanswered after `timeout_s`: 0 unless an engine hangs.
        """
        self._shut(None if drain else Overloaded("the server is shutting down"))
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end_s is None else max(0.0, end_s - time.monotonic()))
        return self.unanswered

    def retire(self) -> None:
        """Take no more; answer what is queued, then close the engines. Does not wait for it."""
        self._retired = self._close_engines = True
        self._shut(None)

    def _shut(self, error: DeploykitError | None) -> None:
        """Take no more; with an `error` that is also the answer to what waits."""
        with self._lock:
            self._closing = True
            refused = self._lanes.take_all() if error is not None else []
            for request in refused:
                request.finished = True
                request.error = error
            for worker in self._idle:
                worker.wake.release()
            self._idle.clear()
        self._end(refused, self._clock_us())

    def _end(
        self, requests: Sequence[Pending], now_us: int, deliver: Deliver | None = None
    ) -> None:
        """Hand back requests that are marked as finished."""
        for request in requests:
            if request.error is not None:
                try:
                    self.watcher.failed(request, now_us)
                except Exception:  # whoever watches must not keep the answers
                    log.exception("model '%s': watching a failure failed", self._name)
        if requests:
            (deliver or self._deliver)(requests)

    # -- the event loop's thread ---------------------------------------------------------------

    def _look(self) -> None:
        """Give what waits to an idle engine: run it here if that is short, else wake its thread."""
        self._looking = False
        with self._lock:
            if not self._idle or not self._lanes.count:
                return
            worker = self._idle.pop()
            waits = self.policy.max_delay_us  # its thread can, until the delay has passed
            if waits or not self.here_rows or self._lanes.rows > self.here_rows:
                worker.wake.release()
                return
            batch, late, now_us = self._next(worker)
        try:
            self._end(late, now_us)
            if batch:
                self._run(worker, batch, now_us, deliver_here)
        finally:
            self._rest(worker)

    def _rest(self, worker: _Worker) -> None:
        """An engine has run here: its thread sleeps on, unless it is to end."""
        with self._lock:
            worker.free_us = self._clock_us()
            if self._closing:
                worker.wake.release()
                return
            self._idle.append(worker)
            self._awake_us = worker.free_us + self._spin_us
            if self._later is None:
                return
            if self._looking:
                return
            if self._lanes.count:
                self._looking = True
                self._later(self._look)  # after reading what has come meanwhile
            elif self._spin_us and not self._spinning:
                self._spinning = True
                self._later(self._spin)

    def _spin(self) -> None:
        """Keep the loop awake, by asking for a turn, until something comes or it is time."""
        self._spinning = not self._looking and self._clock_us() < self._awake_us
        if self._spinning and self._later is not None:
            self._later(self._spin)

    # -- an engine's thread --------------------------------------------------------------------

    def _loop(self, worker: _Worker) -> None:
        while True:
            batch, late, now_us = self._take(worker)
            self._end(late, now_us)
            if batch:
                self._run(worker, batch, now_us, self._deliver)
                del batch  # its inputs, before the next ones come
            elif not late:
                break
        if self._close_engines:
            worker.runner.engine.close()

    def _take(self, worker: _Worker) -> tuple[list[Pending], list[Pending], int]:
        """Wait for the next batch. Also the expired ones met on the way; both empty: closed."""
        worker.free_us = _NEVER_US
        with self._lock:
            while True:
                batch, late, now_us = self._next(worker)
                ended = worker.runner.lost or (self._closing and not self._lanes.count)
                if batch or late or ended:
                    return batch, late, now_us
                self._sleep(worker, now_us)

    def _next(self, worker: _Worker) -> tuple[list[Pending], list[Pending], int]:
        """The batch that is due, what has expired, and the time; under the lock."""
        lanes, now_us = self._lanes, self._clock_us()
        late = lanes.take_late(now_us)
        expired(late, now_us)
        batch: list[Pending] = []
        if not worker.runner.lost:
            batch = worker.running = lanes.take(now_us, hurry=self._closing)
        if batch and lanes.count and self._idle:
            self._idle.pop().wake.release()  # what is left may be due for another engine
        return batch, late, now_us

    def _sleep(self, worker: _Worker, now_us: int) -> None:
        """Give the lock away until something is to do, or something that waits is due."""
        wait_s = -1.0
        if self._lanes.count:
            wait_s = max(1, self._lanes.next_us() - now_us) / 1e6
            wait_s = min(wait_s, _LONGEST_SLEEP_S)
        worker.free_us = min(worker.free_us, now_us)
        self._idle.append(worker)
        self._lock.release()
        woken = worker.wake.acquire(timeout=wait_s)
        self._lock.acquire()
        if not woken:
            if worker in self._idle:
                self._idle.remove(worker)
            else:
                self._lock.release()  # somebody wakes it, or runs its engine: see `_look`
                worker.wake.acquire()
                self._lock.acquire()

    def _run(
        self, worker: _Worker, batch: Sequence[Pending], now_us: int, deliver: Deliver
    ) -> None:
        idle_us = 0
        if worker.free_us < now_us:
            idle_us = sum(now_us - max(r.arrived_us, worker.free_us) for r in batch)
        errors = worker.runner.run(batch, self.watcher, idle_us)
        ended_us = self._clock_us()
        finished = []
        with self._lock:
            for request, error in zip(batch, errors, strict=True):
                if not request.finished:
                    request.finished = True
                    request.error = error
                    finished.append(request)
            worker.running = ()
            if self._steering is not None and not any(errors):
                self._steering.ran(batch, now_us, ended_us)
        if worker.runner.lost:
            self.lost = True
            self._shut(gone(self._name))
        self._end(finished, ended_us, deliver)
