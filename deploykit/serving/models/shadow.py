"""Repeat some of the live requests on a reference engine and count disagreements.

Serving never waits for it: a sample is copied, or dropped while the reference has one already.

A row disagrees if, in any output,
- floats differ by more than MAX_ERROR, relative to the row's largest reference value. Class
  scores (see `class_axis`) may differ by up to ten times that as long as the highest class is the
  same: those of quantised models vary by a few per cent;
- other values differ at all.
The alarm considers recent rows only, and needs enough of them: see `exceeds`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from queue import Full, Queue

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.subprocesses import INSIDE
from deploykit.engines.engine import Arrays, Closing, Engine
from deploykit.engines.tasks import class_axis
from deploykit.evaluation.statistics import proportion
from deploykit.serving.batching.buckets import relative_errors
from deploykit.serving.batching.queue import BatchRun, Watcher
from deploykit.serving.observe.metrics import Sample
from deploykit.serving.options import VERSION

log = logging.getLogger(__name__)

EVERY = 97  # requests for a sample: a prime, so that clients that take turns are all sampled
LONGEST_US = 1_000_000  # the longest time without a sample
ALARM = 0.01  # share of the rows
WINDOW_ROWS = 2000  # rows that the alarm considers
_LEAST_SCALE = 1e-6  # of the values of a row
LEAST = 3  # disagreeing rows before there can be an alarm
MAX_ERROR = 1e-2
# Share of the time in which the reference may run. A low thread priority would not help: preempted
# while it holds the GIL, the thread would stall the server (p99 of 10 to 365 ms with nice 19).
DUTY = 0.25


class Shadow(Watcher, Closing):
    """Samples one in `every` requests of a model, and one after each second without a sample.

    The caller closes `reference`.
    """

    def __init__(self, name: str, reference: Engine, *, every: int = EVERY) -> None:
        self._name = name
        self._reference = reference
        self._every = every
        self._batched = all(spec.batched for spec in (*reference.inputs, *reference.outputs))
        self._count = 0  # requests since the last sample
        self._sampled_us = -LONGEST_US
        self._samples = Queue[tuple[Arrays, Arrays] | None](1)  # inputs and outputs; None: the end
        self._closing = threading.Event()
        self._recent = deque[bool](maxlen=WINDOW_ROWS)  # whether each row disagreed
        self._rows = self._disagreements = self._dropped = 0
        self._max_error = 0.0
        self.alarming = False
        self._thread = threading.Thread(target=self._loop, name=f"shadow {name}", daemon=True)
        self._thread.start()

    def record_run(self, run: BatchRun) -> None:
        """Copy a sampled request for the reference; called on an engine's thread."""
        for request in run.requests:
            self._count += 1  # engines' threads race here: a lost count does not matter
            if self._count < self._every and run.started_us - self._sampled_us < LONGEST_US:
                continue
            self._count, self._sampled_us = 0, run.started_us
            if self._samples.full() or self._closing.is_set():
                self._dropped += 1
                continue
            inputs, outputs = (
                {name: array.copy() for name, array in each.items()}
                for each in (request.feeds, request.outputs)
            )
            try:
                self._samples.put_nowait((inputs, outputs))
            except Full:  # another engine's thread was faster
                self._dropped += 1

    def samples(self) -> list[Sample]:
        labels = {"model": self._name, "version": VERSION}
        values = {
            "deploykit_shadow_total": self._rows,
            "deploykit_shadow_disagreements_total": self._disagreements,
            "deploykit_shadow_dropped_total": self._dropped,
            "deploykit_shadow_max_error": self._max_error,
            "deploykit_shadow_alarm": self.alarming,
        }
        return [Sample(name, labels, value) for name, value in values.items()]

    def close(self) -> None:
        """End the thread after its current sample; drop the queued one."""
        self._closing.set()
        if not self._samples.full():
            self._samples.put(None)
        self._thread.join()

    # -- the thread of the reference engine ----------------------------------------------------

    def _loop(self) -> None:
        while (sample := self._samples.get()) is not None and not self._closing.is_set():
            (feeds, outputs), began_s = sample, time.monotonic()
            try:
                with INSIDE:
                    expected = self._reference(feeds)
                found = compare_outputs(outputs, expected, feeds, MAX_ERROR, batched=self._batched)
                self._record(*found)
            except Exception as exc:  # noqa: BLE001 - a failure must not affect the server
                text = f"{type(exc).__name__}: {first_line(exc)}"
                log.warning("shadow of model '%s': the reference failed: %s", self._name, text)
                self._dropped += 1
            self._closing.wait((time.monotonic() - began_s) * (1 / DUTY - 1))

    def _record(self, wrong: np.ndarray, max_error: float) -> None:
        self._recent.extend(wrong.tolist())
        self._disagreements += int(wrong.sum())
        self._max_error = max(self._max_error, max_error)
        recent, rows = sum(self._recent), len(self._recent)
        alarm = exceeds(recent, rows, ALARM)
        if alarm and not self.alarming:
            log.warning(
                "shadow of model '%s': %d of the last %d rows disagree with the reference, more "
                "than the %g allowed",
                *(self._name, recent, rows, ALARM),
            )
        self.alarming = alarm
        self._rows += len(wrong)


def exceeds(disagreements: int, rows: int, threshold: float) -> bool:
    """Return whether the share of disagreeing rows is above `threshold`, with 95 % confidence."""
    return disagreements >= LEAST and proportion(disagreements, rows).low > threshold


def compare_outputs(
    live: Arrays, reference: Arrays, feeds: Arrays, max_error: float, *, batched: bool
) -> tuple[np.ndarray, float]:
    """Compare the outputs of one request row by row along axis 0; as one row unless `batched`.

    Returns whether each row disagrees, and the largest relative error: inf where only one side is
    finite.
    """
    rows = len(next(iter(reference.values()))) if batched else 1
    wrong = np.zeros(rows, bool)
    worst = 0.0
    for name, want in reference.items():
        got = live.get(name)
        if got is None or got.shape != want.shape:
            return np.ones(rows, bool), math.inf
        got_RK, want_RK = got.reshape(rows, -1), want.reshape(rows, -1)
        if want.dtype.kind != "f":
            wrong |= (got_RK != want_RK).any(axis=1)
            continue
        errors = relative_errors(got_RK, want_RK, _LEAST_SCALE)
        worst = max(worst, float(errors.max(initial=0.0)))
        over = errors > max_error
        axis = class_axis(name, want, feeds) if batched else None
        if axis is not None:
            other = (got.argmax(axis) != want.argmax(axis)).reshape(rows, -1).any(axis=1)
            over &= other | (errors > 10 * max_error)
        wrong |= over
    return wrong, worst


def check_reference(served: Engine, reference: Engine) -> None:
    """Raise BadInput unless `reference` has the same inputs and output names as `served`."""
    (takes, gives), (wanted, named) = (
        (
            [(spec.name, spec.dtype, len(spec.shape)) for spec in engine.inputs],
            {spec.name for spec in engine.outputs},
        )
        for engine in (reference, served)
    )
    if takes != wanted or gives != named:
        ours, others = (
            ", ".join(map(str, (*engine.inputs, *engine.outputs))) for engine in (served, reference)
        )
        raise BadInput(f"the shadow's inputs and outputs are {others}, those of the engine {ours}")
