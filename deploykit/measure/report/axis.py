"""Axes with round ticks, linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploykit.measure.report.formatting import SPACE

LOG_FROM = 20  # an axis whose values span more than this is logarithmic, and says so
Ticks = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; `ticks`: positions and labels."""

    low: float
    high: float
    log: bool
    ticks: Ticks

    def at(self, value: float, start: float, end: float) -> float:
        """The pixel of a value between the pixels `start` and `end` of the two ends."""
        low, high, value = self.low, self.high, value
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return start + (value - low) / (high - low) * (end - start)


def make_axis(
    values: Sequence[float], *, log: bool | None = None, zero: bool = False, ticks: Ticks = ()
) -> Axis:
    """An axis over one or more finite values. `log` None: where they span much. `zero`: from 0."""
    low, high = min(values), max(values)
    if low > 0 and (high / low > LOG_FROM if log is None else log):
        return _log_axis(low, high, ticks)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = next(n for n in range(20) if n == 19 or _is_whole(step * 10**n))
    found = [(i * step, tick(i * step, digits)) for i in range(first, last + 1)]
    return Axis(first * step, last * step, False, ticks or found)


def tick(value: float, digits: int | None = None) -> str:
    """A round number on an axis: 0.3, 10, 12 500; with `digits` decimals if given."""
    if digits is None and abs(value) < 1000:
        text = f"{value:.12f}".rstrip("0").rstrip(".")
    else:
        text = f"{value:,.{digits or 0}f}".replace(",", SPACE)
    return text.replace("-", "−")


def _is_whole(value: float) -> bool:
    return value > 0.5 and abs(value - round(value)) < 1e-9 * value


def _log_axis(low: float, high: float, ticks: Ticks) -> Axis:
    low, high = (low / 1.15, high * 1.15) if low < high else (low / 2, high * 2)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[tuple[float, str]] = []
    for steps in ((1,), (1, 3), (1, 2, 5)):  # the fewest that give three ticks
        places = [float(f"{step}e{power}") for power in decades for step in steps]
        found = [(place, tick(place)) for place in places if low <= place <= high]
        if len(found) >= 3:
            break
    return Axis(low, high, True, ticks or found)


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    steps = (m * power for m in (1, 2, 2.5, 5, 10))
    return next(step for step in steps if step >= raw * (1 - 1e-9))
