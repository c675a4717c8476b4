"""Run one batch on one engine and set the outputs or the error of each request.

The requests of a failed batch run again one by one, once, so that a bad one fails alone. After
running out of memory they do not: more runs would keep the memory full. Nothing runs on a lost GPU.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    DeviceLost,
    OutOfMemory,
    Overloaded,
    first_line,
)
from deploykit.core.subprocesses import INSIDE
from deploykit.core.tensors import MOST_STRINGS, TensorSpec, carrier
from deploykit.engines.engine import Arrays, Engine, InFlight
from deploykit.serving.batching.queue import NEVER_US, BatchRun, Pending, Watcher

log = logging.getLogger(__name__)

_LARGE_BYTES = 64 << 10  # larger outputs are copied out of the memory of the batch

Stack = Callable[[Sequence[Pending]], Arrays]
Cut = Callable[[Pending, dict[str, np.ndarray]], dict[str, np.ndarray]]


class EngineFailed(DeploykitError):  # noqa: N818 - named as its siblings in core/errors.py
    """The engine raised, or returned other outputs than declared; the log has the details."""


def stack(batch: Sequence[Pending]) -> Arrays:
    """Join the requests' rows along axis 0, in order; one request's arrays are aligned instead."""
    if len(batch) == 1:
        return {name: align(array) for name, array in batch[0].feeds.items()}
    names = batch[0].feeds
    return {name: np.concatenate([request.feeds[name] for request in batch]) for name in names}


def align(array: np.ndarray) -> np.ndarray:
    """Return the array aligned, as native libraries need it: received bytes may begin anywhere."""
    return array if array.flags.aligned else array.copy()


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
        *,
        overlaps: bool = True,
    ) -> None:
        self.engine = engine
        self.running: Sequence[Pending] = ()
        self.wake = threading.Lock()
        self.wake.acquire()
        self.idle_since_us = NEVER_US
        self.since_us: int | None = None
        self.busy_us = 0
        self.lost = False
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
