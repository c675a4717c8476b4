"""Percentiles, rates and differences with their 95 % intervals. Pure NumPy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A measured value and its 95 % interval; units stand in the name of whatever holds it."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}
