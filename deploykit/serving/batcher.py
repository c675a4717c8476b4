"""Join requests into batches and run them, one thread per Engine.

In: requests (arrays by input name, rows along axis 0) from any thread. Out: each request's own
rows, or its error, handed to `deliver` once per batch. The policy, `due`, is pure; the thread, the
clock and the condition variable stand round it. An idle engine never waits unless `max_delay_us`
says so.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from deploykit.core.errors import DeploykitError, Expired, Overloaded, first_line
from deploykit.runtimes.engine import Arrays, Closing, Engine
from deploykit.serving.policy import BatchPolicy, BatchRun, Key, Pending, Watcher, due

log = logging.getLogger(__name__)


class EngineFailed(DeploykitError):  # noqa: N818 - named as its siblings in core/errors.py
    """The engine raised, or returned something else than it promised; the log says what."""


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


def deliver_here(requests: Sequence[Pending]) -> None:
    """Call each request's `done` on the thread that finished it."""
    for request in requests:
        request.done(request)


class Batcher(Closing):
    """A bounded queue in front of one Engine, and the thread that empties it.

    `deliver` gets the requests that were finished together, once per batch: an event loop needs
    one wake-up for them all. What `submit` took is delivered once, unless it is cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        policy: BatchPolicy,
        *,
        deliver: Callable[[Sequence[Pending]], None] = deliver_here,
        clock_us: Callable[[], int] = monotonic_us,
        watcher: Watcher | None = None,
        name: str = "engine",
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._deliver = deliver
        self._clock_us = clock_us
        self._watcher = watcher or Watcher()
        self._name = name
        self._outputs = {spec.name: spec.dtype for spec in engine.outputs}
        self._queue: deque[Pending] = deque()
        self._running: Sequence[Pending] = ()
        self._closing = False
        self._changed = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._loop, name=f"engine {name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the queue, not yet with the engine."""
        return len(self._queue)

    @property
    def unanswered(self) -> int:
        """Requests taken and not yet delivered: waiting or with the engine."""
        with self._changed:
            return len(self._queue) + sum(not request.finished for request in self._running)

    def submit(
        self,
        feeds: Arrays,
        rows: int,
        key: Key,
        done: Callable[[Pending], None],
        *,
        wait_us: int = 1 << 60,
        give_up_us: int = 1 << 60,
    ) -> Pending:
        """Queue one request, checked already; `done` is called later, exactly once, by `deliver`.

        It may wait `wait_us` for the engine, and is answered within `give_up_us` whatever the
        engine does. Raises Overloaded when the queue is full or closed.
        """
        now_us = self._clock_us()
        last_us = now_us + give_up_us
        request = Pending(feeds, rows, key, done, now_us, min(now_us + wait_us, last_us), last_us)
        with self._changed:
            if not self._closing and len(self._queue) < self._policy.queue:
                self._queue.append(request)
                self._changed.notify()
                return request
        self._watcher.refused()
        if self._closing:
            raise Overloaded("the server is shutting down", hint="send the request elsewhere")
        raise Overloaded(
            f"the queue of model '{self._name}' is full ({self._policy.queue} requests)",
            hint="try again later, or start the server with a larger --queue",
        )

    def cancel(self, request: Pending) -> bool:
        """Take back a request that nobody waits for. False when the engine has it or had it."""
        with self._changed:
            if request not in self._queue:
                return False
            self._queue.remove(request)
            request.finished = True
        self._watcher.cancelled()
        return True

    def expire(self) -> None:
        """Answer what is past its deadline, even while the engine is busy; called now and then."""
        now_us = self._clock_us()
        with self._changed:
            late = self._take_late(now_us)
            hung = [r for r in self._running if not r.finished and r.give_up_us <= now_us]
            self._expired(hung, now_us)
        if late or hung:
            self._deliver(late + hung)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> int:
        """Take no more; answer what is queued (or refuse it, without `drain`); end the thread.

        Returns how many requests are still unanswered after `timeout_s`: 0 unless the engine hangs.
        """
        refused: list[Pending] = []
        with self._changed:
            self._closing = True
            if not drain:
                refused.extend(self._queue)
                self._queue.clear()
            for request in refused:
                request.finished = True
                request.error = Overloaded("the server is shutting down")
            self._changed.notify_all()
        if refused:
            self._deliver(refused)
        self._thread.join(timeout_s)
        return self.unanswered

    # -- the engine's thread -------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            batch, late = self._take()
            if late:
                self._deliver(late)
            if batch:
                self._run(batch)
            elif not late:
                return

    def _take(self) -> tuple[list[Pending], list[Pending]]:
        """Wait for the next batch. Also the expired ones met on the way; both empty: closed."""
        with self._changed:
            while True:
                now_us = self._clock_us()
                late = self._take_late(now_us)
                take = due(self._queue, self._policy, now_us)
                if self._closing and self._queue:
                    take = take or len(self._queue)  # what is there is one batch: it only waited
                batch = [self._queue.popleft() for _ in range(take)]
                self._running = batch
                if batch or late or (self._closing and not self._queue):
                    return batch, late
                self._changed.wait(self._wait_s(now_us))

    def _take_late(self, now_us: int) -> list[Pending]:
        """Take what is past its deadline out of the queue, wherever it stands there."""
        late = [request for request in self._queue if request.deadline_us <= now_us]
        for request in late:
            self._queue.remove(request)
        self._expired(late, now_us)
        return late

    def _wait_s(self, now_us: int) -> float | None:
        """Until the oldest waiting request is late or expired; None when nothing waits."""
        if not self._queue:
            return None
        oldest = self._queue[0]
        at_us = min(oldest.arrived_us + self._policy.max_delay_us, oldest.deadline_us)
        return max(1, at_us - now_us) / 1e6

    def _expired(self, requests: Sequence[Pending], now_us: int) -> None:
        for request in requests:
            request.finished = True
            waited_ms = (now_us - request.arrived_us) / 1e3
            request.error = Expired(
                f"the request waited {waited_ms:.0f} ms, past its time limit",
                hint="send fewer requests at once, or allow more time ('timeout', --timeout-ms)",
            )
            self._watcher.failed(request, now_us)

    def _run(self, batch: Sequence[Pending]) -> None:
        """Run a batch; if it fails, its requests one by one, so that none fails its neighbours."""
        error = self._try(batch)
        if error is not None and len(batch) > 1:
            errors = [self._try([request]) for request in batch]
        else:
            errors = [error] * len(batch)
        now_us = self._clock_us()
        finished = []
        with self._changed:
            for request, error in zip(batch, errors, strict=True):
                if not request.finished:
                    request.finished = True
                    request.error = error
                    finished.append(request)
            self._running = ()
        for request in finished:
            if request.error is not None:
                self._watcher.failed(request, now_us)
        self._deliver(finished)

    def _try(self, batch: Sequence[Pending]) -> DeploykitError | None:
        """One call of the engine. Sets each request's outputs, or returns why it could not."""
        started_us = self._clock_us()
        try:
            feeds = _stack(batch)
            stacked_us = self._clock_us()
            outputs = self._engine(feeds)
            ran_us = self._clock_us()
            self._split(batch, outputs)
        except EngineFailed as exc:
            log.error("model '%s': %s", self._name, exc.message)
            return exc
        except Exception as exc:  # noqa: BLE001 - whatever an engine raises, this thread must live on
            log.error("model '%s': %s: %s", self._name, type(exc).__name__, first_line(exc))
            return EngineFailed(
                f"model '{self._name}': the engine failed on this request",
                hint="the server's log says why",
            )
        ended_us = self._clock_us()
        in_time = [request for request in batch if not request.finished]
        stack_us, engine_us, split_us = (
            stacked_us - started_us,
            ran_us - stacked_us,
            ended_us - ran_us,
        )
        self._watcher.ran(BatchRun(in_time, started_us, stack_us, engine_us, split_us))
        return None

    def _split(self, batch: Sequence[Pending], outputs: Mapping[str, np.ndarray]) -> None:
        rows = sum(request.rows for request in batch) if self._policy.max_batch else None
        for name, dtype in self._outputs.items():
            array = outputs.get(name)
            if array is None or array.dtype.name != dtype:
                got = "nothing" if array is None else array.dtype.name
                raise EngineFailed(f"the engine returned {got} for output '{name}' ({dtype})")
            if rows is not None and (array.ndim == 0 or array.shape[0] != rows):
                raise EngineFailed(
                    f"the engine returned shape {list(array.shape)} for output '{name}', "
                    f"{rows} rows were expected"
                )
        if rows is None or len(batch) == 1:
            batch[0].outputs = dict(outputs)
            return
        ends = itertools.accumulate(request.rows for request in batch)
        for request, end in zip(batch, ends, strict=True):
            start = end - request.rows
            request.outputs = {name: outputs[name][start:end] for name in self._outputs}


def _stack(batch: Sequence[Pending]) -> Arrays:
    if len(batch) == 1:
        return batch[0].feeds
    names = batch[0].feeds
    return {name: np.concatenate([request.feeds[name] for request in batch]) for name in names}
