"""Run one batch on one engine and set the outputs or the error of each request.

The requests of a failed batch run again one by one, once, so that a bad one fails alone. After
running out of memory they do not: more runs would keep the memory full. Nothing runs on a lost GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, OutOfMemory, Overloaded, first_line
from deploykit.core.subprocesses import INSIDE
from deploykit.core.tensors import MOST_STRINGS, TensorSpec, carrier
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.engines.engine import Arrays, Engine, InFlight
from deploykit.serving.batching.queue import BatchRun, Pending, Watcher

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
        self._declared = tuple(
            _Declared(spec.name, np.dtype(carrier(spec.dtype)), spec.shape) for spec in outputs
        )
        self._joined = joined
        self._cut = cut

    def __call__(self, batch: Sequence[Pending], outputs: Mapping[str, np.ndarray]) -> None:
        """Set each request's `outputs`. On EngineFailed, none are set."""
        self.check(outputs, sum([request.rows for request in batch]))
        if len(batch) == 1:
            batch[0].outputs = dict(outputs)
        else:
            start = 0
            arrays = [(declared.name, outputs[declared.name]) for declared in self._declared]
            for request in batch:
                end = start + request.rows
                request.outputs = {name: array[start:end] for name, array in arrays}
                start = end
        if self._cut is not None:
            for request in batch:
                request.outputs = self._cut(request, request.outputs)
        if sum([array.nbytes for array in outputs.values()]) > _LARGE_BYTES:
            for request in batch:
                _own_large(request.outputs)

    def check(self, outputs: Mapping[str, np.ndarray], rows: int) -> None:
        """Raise EngineFailed unless these can be the outputs of `rows` rows."""
        for declared in self._declared:
            array = outputs.get(declared.name)
            if array is None or array.dtype != declared.dtype:
                got = "nothing" if array is None else array.dtype.name
                raise EngineFailed(
                    f"the engine returned {got} for output '{declared.name}' ({declared.dtype})"
                )
            shape = array.shape
            if self._joined and (not shape or shape[0] != rows):
                raise EngineFailed(
                    f"the engine returned shape {list(shape)} for output '{declared.name}', "
                    f"{rows} rows were expected"
                )
            if shape != declared.seen:
                declared.check(shape)


def _own_large(outputs: dict[str, np.ndarray]) -> None:
    """Copy large arrays that are views of the whole batch's memory, or of the engine's.

    A slow client would keep that memory alive, or make ONNX Runtime's arena grow, although only the
    array's own bytes are counted in the memory budget.
    """
    for name, array in outputs.items():
        if array.nbytes > _LARGE_BYTES and not array.flags.owndata:
            outputs[name] = array.copy()


class _Declared:
    """The declared dtype and shape of one output. `seen`: the last shape that passed the check."""

    __slots__ = ("axes", "dtype", "name", "seen")

    def __init__(self, name: str, dtype: np.dtype[Any], axes: tuple[int | str, ...]) -> None:
        self.name = name
        self.dtype = dtype
        self.axes = axes
        self.seen: tuple[int, ...] | None = None

    def check(self, shape: tuple[int, ...]) -> None:
        fits = len(shape) == len(self.axes) and all(
            isinstance(want, str) or want == got for want, got in zip(self.axes, shape, strict=True)
        )
        if not fits:
            raise EngineFailed(
                f"the engine returned shape {list(shape)} for output '{self.name}', which is "
                f"[{', '.join(map(str, self.axes))}]"
            )
        self.seen = shape


log = logging.getLogger(__name__)


class Flight(NamedTuple):
    """A batch whose call was started, or failed to start. `idle_us`: see BatchRun."""

    batch: Sequence[Pending]
    started_us: int
    stacked_us: int
    submitted_us: int
    idle_us: int
    call: InFlight | Exception

    def result(self) -> dict[str, np.ndarray]:
        if isinstance(self.call, Exception):
            raise self.call
        return self.call.result()


class Runner:
    """One engine, called by one thread at a time.

    `since_us`: when its running call began. `busy_us`: how long the last batch took. `slots`: how
    many batches may be in flight.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        stack: Stack,
        split: Splitter,
        clock_us: Callable[[], int],
        *,
        instance: int = 0,
    ) -> None:
        self.engine = engine
        self.since_us: int | None = None
        self.busy_us = 0
        self.lost = False
        self._name = name
        self._stack = stack
        self._split = split
        self._clock_us = clock_us
        self._instance = instance
        self._strings = any(spec.dtype == "string" for spec in engine.inputs)
        self.slots = 1 if self._strings else engine.slots
        self._ended_us = 0  # the end of the last flight

    def run(
        self,
        batch: Sequence[Pending],
        watcher: Watcher,
        idle_us: int = 0,
        flight: Flight | None = None,
    ) -> list[DeploykitError | None]:
        """Run the batch; return an error for each request, None where its outputs are set.

        Reports runs to `watcher`. `idle_us`: see BatchRun. `flight`: what `start` returned for
        `batch`. Sets `lost` when the GPU is gone.
        """
        if len(batch) == 1 or not self._strings or _count_strings(batch) <= MOST_STRINGS:
            error = self._try(batch, watcher, idle_us, flight)
            retried = len(batch) > 1 and error is not None and not isinstance(error, Overloaded)
            if not retried:
                return [error] * len(batch)
        errors: list[DeploykitError | None] = []
        for request in batch:
            if self.lost:
                errors += [device_lost(self._name)] * (len(batch) - len(errors))
                break
            errors.append(self._try([request], watcher, 0))
        return errors

    def start(self, batch: Sequence[Pending], idle_us: int) -> Flight:
        """Start a batch without waiting for it; `run` has to follow, in the same order."""
        started_us = stacked_us = self._clock_us()
        call: InFlight | Exception
        try:
            feeds = self._stack(batch)
            stacked_us = self._clock_us()
            with INSIDE:
                call = self.engine.submit(feeds)
        except Exception as exc:  # noqa: BLE001 - `run` reports it, after the batches before
            call = exc.with_traceback(None)  # the traceback would keep the joined inputs
        return Flight(batch, started_us, stacked_us, self._clock_us(), idle_us, call)

    def _try(
        self,
        batch: Sequence[Pending],
        watcher: Watcher,
        idle_us: int,
        flight: Flight | None = None,
    ) -> DeploykitError | None:
        """Call the engine once. Sets each request's outputs, or returns the error."""
        started_us = self.since_us = self._clock_us() if flight is None else flight.started_us
        try:
            if flight is None:
                feeds = self._stack(batch)
                stacked_us = self._clock_us()
                with INSIDE:
                    outputs = self.engine(feeds)
            else:
                stacked_us = flight.stacked_us
                with INSIDE:
                    outputs = flight.result()
            ran_us = self._clock_us()
            self._split(batch, outputs)
        except Exception as exc:  # noqa: BLE001 - the engine's thread must survive any error
            self.busy_us = self._clock_us() - started_us
            return self._error(exc, len(batch))
        finally:
            self.since_us = None
            if flight is not None:
                waited_us = max(0, self._ended_us - flight.submitted_us)  # for the batch before it
                self._ended_us = self._clock_us()
        if flight is not None:
            started_us, stacked_us = started_us + waited_us, stacked_us + waited_us
        ended_us = self._clock_us()
        self.busy_us = ended_us - started_us
        in_us, out_us = self.engine.last_copies_us
        run = BatchRun(
            [request for request in batch if not request.finished],
            started_us,
            stacked_us - started_us,
            in_us,
            max(0, ran_us - stacked_us - in_us - out_us),
            out_us,
            ended_us - ran_us,
            idle_us,
            self._instance,
        )
        try:
            watcher.record_run(run)
        except Exception:  # a failing watcher must not end the engine's thread
            log.exception("model '%s': recording a batch failed", self._name)
        return None

    def _error(self, exc: Exception, size: int) -> DeploykitError:
        """Return the error for the client, without paths and addresses; the log has the details."""
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
                f"model '{name}': out of memory in a batch of {size} requests",
                hint="try again later, with fewer rows, or start the server with less `max_batch`",
            )
        if isinstance(exc, BadInput):  # the engine rejects what passed our own checks
            return BadInput(
                f"model '{name}': the engine refused the values or the shape of this request",
                hint="the server's log says why",
            )
        return EngineFailed(
            f"model '{name}': the engine failed on this request",
            hint="the server's log says why",
        )


def _count_strings(batch: Sequence[Pending]) -> int:
    arrays = (array for request in batch for array in request.feeds.values())
    return sum([array.size for array in arrays if array.dtype.kind == "O"])


def device_lost(name: str) -> Overloaded:
    """Return the error that every request gets once a GPU is lost."""
    return Overloaded(
        f"model '{name}': the GPU is lost to this server, which will stop",
        hint="send the request elsewhere, or try again when the server was started again",
    )
