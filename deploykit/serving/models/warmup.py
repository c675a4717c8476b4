"""Run an engine at every expected shape before the first request, with zeros as inputs.

A batch size that fails here, or returns other outputs than declared, would fail every request:
the error names the shape.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from deploykit.core.errors import DeploykitError, DeviceLost, OutOfMemory, Unsupported, first_line
from deploykit.core.tensors import carrier, concrete
from deploykit.engines.engine import Arrays, Engine
from deploykit.serving.batching.runner import Splitter

log = logging.getLogger(__name__)

BETWEEN_US = 100_000  # the time for all batch sizes that no option names
AGAIN_US = 50_000  # shorter runs are repeated where times matter: a first run takes longer
SHORT_US = 2000
_RUNS = 3


class WarmUp:
    """Runs one engine under the name of its model. `max_batch` 0: axis 0 is not the batch.

    `lengths`: combinations of sizes of the axes that have buckets.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        clock_us: Callable[[], int],
        *,
        max_batch: int,
        lengths: Sequence[Mapping[str, int]] = ({},),
    ) -> None:
        self._name = name
        self._engine = engine
        self._clock_us = clock_us
        self._splitter = Splitter(engine.outputs, joined=max_batch > 0)
        self._joined = max_batch > 0
        self._batch_axis = str(engine.inputs[0].shape[0]) if max_batch else None
        self._lengths = lengths
        self._required = sorted({1, max_batch}) if max_batch else [1]
        powers = [1 << n for n in range(1, max_batch.bit_length())]
        self._between = [rows for rows in powers if rows < max_batch]

    def run(self, *, again_us: int = 0) -> dict[int, int]:
        """Return µs by rows at the longest lengths; nothing if the size of an axis is unknown.

        Runs are repeated, as long as they take less than `again_us` on average, and the shortest
        counts: other programs can make one run long. An error of the engine names model and shape;
        one that is not a DeploykitError becomes Unsupported.
        """
        known = {self._batch_axis, *self._lengths[0]}
        free = {
            axis
            for spec in self._engine.inputs
            for axis in spec.shape
            if isinstance(axis, str) and axis not in known
        }
        try:
            sizes = sorted((*self._required, *self._between), reverse=True)
            each = (self._zeros(rows, axes) for axes in reversed(self._lengths) for rows in sizes)
            self._engine.prepare(() if free else each, joined=self._joined)
        except OutOfMemory as exc:
            raise OutOfMemory(f"model '{self._name}': {exc.message}", hint=exc.hint) from exc
        if free:
            self._try_once()
            return {}
        times, spent_us = dict[int, int](), 0
        for rows in (*self._required, *self._between):
            if rows in self._between:
                spent_us += 2 * max([us for size, us in times.items() if size < rows])
                if spent_us > BETWEEN_US:
                    break
            for lengths in self._lengths:
                times[rows] = self._time(rows, lengths, again_us)
        if self._engine.trim():
            self._engine(self._zeros(1, self._lengths[0]))
        return times

    def _try_once(self) -> None:
        """Run with unknown axes of size 1. Raises DeviceLost, OutOfMemory."""
        try:
            self._engine(self._zeros(1, self._lengths[-1]))
        except (DeviceLost, OutOfMemory):
            raise
        except Exception as exc:  # noqa: BLE001 - the first request may have a size that it takes
            log.info("model '%s' was not warmed up: %s", self._name, first_line(exc))

    def _time(self, rows: int, lengths: Mapping[str, int], again_us: int) -> int:
        found: list[int] = []
        feeds = self._zeros(rows, lengths)
        while not found or (len(found) < _RUNS and sum(found) < _RUNS * again_us):
            started_us = self._clock_us()
            try:
                self._splitter.check(self._engine(feeds), rows)
            except Exception as exc:
                shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
                why = f"model '{self._name}' cannot run {shapes}:"
                if isinstance(exc, DeploykitError):
                    raise type(exc)(f"{why} {exc.message}", hint=exc.hint) from exc
                hint = "try a smaller `max_batch`"
                raise Unsupported(f"{why} {first_line(exc)}", hint=hint) from exc
            found.append(self._clock_us() - started_us)
        return min(found)

    def _zeros(self, rows: int, lengths: Mapping[str, int]) -> Arrays:
        sizes = {**lengths, str(self._batch_axis): rows}
        return {
            spec.name: np.full(concrete(spec, sizes), "", object)
            if spec.dtype == "string"
            else np.zeros(concrete(spec, sizes), carrier(spec.dtype))
            for spec in self._engine.inputs
        }


def short_rows(times: Mapping[int, int]) -> float:
    """Return the most rows that ran within SHORT_US, by `WarmUp.run`; inf if all did."""
    short = [rows for rows, us in times.items() if us <= SHORT_US]
    return math.inf if times and len(short) == len(times) else max(short, default=0)
