"""Repeat a share of the live requests on a reference engine and count disagreements.

Serving never waits for it: samples are copied into a short bounded queue, or dropped when it is
full.

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
from functools import reduce
from typing import NamedTuple

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.subprocesses import INSIDE
from deploykit.engines.answers import class_axis
from deploykit.engines.engine import Arrays, Closing, Engine
from deploykit.evaluation.statistics import proportion
from deploykit.serving.batching.buckets import relative_errors
from deploykit.serving.batching.queue import BatchRun, Watcher
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.oip.tensors import array_bytes
from deploykit.serving.options import VERSION

log = logging.getLogger(__name__)

RATE = 0.01  # share of the requests
LONGEST_US = 1_000_000  # the longest time without a sample
ALARM = 0.01  # share of the rows
QUEUE = 64  # sampled requests that may wait for the reference engine
QUEUE_BYTES = 64 << 20
WINDOW_ROWS = 2000  # rows that the alarm considers
_LEAST_SCALE = 1e-6  # of the values of a row
LEAST = 3  # disagreeing rows before there can be an alarm
MAX_ERROR = 1e-2
# Share of the time in which the reference may run. A low thread priority would not help: preempted
# while it holds the GIL, the thread would stall the server (p99 of 10 to 365 ms with nice 19).
DUTY = 0.25
_TURN = 0.6180339887498949  # the fractional part of the golden ratio spreads the samples evenly


class Comparison(NamedTuple):
    """The comparison of `rows` rows. `max_error`: relative; inf where only one side is finite."""

    rows: int = 0
    disagreements: int = 0
    max_error: float = 0.0

    def plus(self, other: Comparison) -> Comparison:
        most = max(self.max_error, other.max_error)
        wrong = self.disagreements + other.disagreements
        return Comparison(self.rows + other.rows, wrong, most)


class Shadow(Watcher, Closing):
    """Samples requests of one model: a `rate` of them, and one after each second without a sample.

    The caller closes `reference`. `alarm`: the share of disagreeing rows that raises the alarm.
    """

    def __init__(
        self, name: str, reference: Engine, *, rate: float = RATE, alarm: float = ALARM
    ) -> None:
        self._name = name
        self._reference = reference
        self._rate = rate
        self._alarm = alarm
        self._batched = all(spec.batched for spec in (*reference.inputs, *reference.outputs))
        self._count = 0  # requests seen, which decides what is sampled
        self._sampled_us = -LONGEST_US
        self._queue: deque[tuple[Arrays, Arrays, int]] = deque()  # inputs, outputs, bytes
        self._queued_bytes = 0
        self._closing = False
        self._changed = threading.Condition(threading.Lock())
        self._recent: deque[Comparison] = deque()
        self._total = Comparison()
        self._dropped = 0
        self.alarming = False
        self._thread = threading.Thread(target=self._loop, name=f"shadow {name}", daemon=True)
        self._thread.start()

    def record_run(self, run: BatchRun) -> None:
        """Copy sampled requests into the queue; called on an engine's thread."""
        for request in run.requests:
            self._count += 1  # engines' threads race here: a lost count does not matter
            late = run.started_us - self._sampled_us >= LONGEST_US
            if late or self._count * _TURN % 1.0 < self._rate:
                self._sampled_us = run.started_us
                self._sample(request.feeds, request.outputs)

    def _sample(self, feeds: Arrays, outputs: Arrays) -> None:
        size = sum(map(array_bytes, (*feeds.values(), *outputs.values())))
        with self._changed:
            full = len(self._queue) >= QUEUE or self._queued_bytes + size > QUEUE_BYTES
            if full or self._closing:
                self._dropped += 1
                return
            self._queued_bytes += size
        inputs, answers = (
            {name: array.copy() for name, array in each.items()} for each in (feeds, outputs)
        )
        with self._changed:
            self._queue.append((inputs, answers, size))
            self._changed.notify_all()

    def samples(self) -> list[Sample]:
        labels = {"model": self._name, "version": VERSION}
        with self._changed:
            values = {
                "deploykit_shadow_total": self._total.rows,
                "deploykit_shadow_disagreements_total": self._total.disagreements,
                "deploykit_shadow_dropped_total": self._dropped,
                "deploykit_shadow_max_error": self._total.max_error,
                "deploykit_shadow_alarm": self.alarming,
            }
        return [Sample(name, labels, value) for name, value in values.items()]

    def close(self) -> None:
        """End the thread after its current sample; drop the queued ones."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # -- the thread of the reference engine ----------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                feeds, outputs, size = self._queue.popleft()
                self._queued_bytes -= size
            began_s = time.monotonic()
            try:
                with INSIDE:
                    expected = self._reference(feeds)
                self._count_compared(
                    compare_outputs(outputs, expected, feeds, MAX_ERROR, batched=self._batched)
                )
            except Exception as exc:  # noqa: BLE001 - a failure must not affect the server
                text = f"{type(exc).__name__}: {first_line(exc)}"
                log.warning("shadow of model '%s': the reference failed: %s", self._name, text)
                with self._changed:
                    self._dropped += 1
            pause_s = (time.monotonic() - began_s) * (1 / DUTY - 1)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause_s)

    def _count_compared(self, found: Comparison) -> None:
        self._recent.append(found)
        recent = reduce(Comparison.plus, self._recent)
        while recent.rows > WINDOW_ROWS and len(self._recent) > 1:
            self._recent.popleft()
            recent = reduce(Comparison.plus, self._recent)
        alarm = exceeds(recent.disagreements, recent.rows, self._alarm)
        with self._changed:
            self._total = self._total.plus(found)
            began, self.alarming = alarm and not self.alarming, alarm
        if began:
            log.warning(
                "shadow of model '%s': %d of the last %d rows disagree with the reference, more "
                "than `shadow_alarm` %g allows",
                *(self._name, recent.disagreements, recent.rows, self._alarm),
            )


def exceeds(disagreements: int, rows: int, threshold: float) -> bool:
    """Return whether the share of disagreeing rows is above `threshold`, with 95 % confidence."""
    return disagreements >= LEAST and proportion(disagreements, rows).low > threshold


def compare_outputs(
    live: Arrays, reference: Arrays, feeds: Arrays, max_error: float, *, batched: bool
) -> Comparison:
    """Compare the outputs of one request row by row along axis 0; as one row unless `batched`."""
    rows = len(next(iter(reference.values()))) if batched else 1
    wrong = np.zeros(rows, bool)
    worst = 0.0
    for name, want in reference.items():
        got = live.get(name)
        if got is None or got.shape != want.shape:
            return Comparison(rows, rows, math.inf)
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
    return Comparison(rows, int(wrong.sum()), worst)


def check_reference(served: Engine, reference: Engine) -> None:
    """Raise BadInput unless `reference` has the same inputs and output names as `served`."""
    takes = [(spec.name, spec.dtype, len(spec.shape)) for spec in served.inputs]
    if [(spec.name, spec.dtype, len(spec.shape)) for spec in reference.inputs] != takes:
        raise BadInput(
            f"the shadow's inputs are {', '.join(map(str, reference.inputs))}, those of the engine "
            f"{', '.join(map(str, served.inputs))}"
        )
    missing = {spec.name for spec in served.outputs} ^ {spec.name for spec in reference.outputs}
    if missing:
        raise BadInput(f"only one of the shadow and the engine has the output '{min(missing)}'")
