"""A measured value with its 95 % interval, and a drop in a score."""

from __future__ import annotations

from dataclasses import dataclass

from deploykit.core.json_value import Record

ADJUSTED_WALD = "adjusted Wald for paired proportions"


@dataclass(frozen=True)
class Interval(Record):
    """A measured value and its 95 % interval; the unit is in the name of what holds it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Drop(Record):
    """How much worse a candidate scores than a reference on the same `n` samples.

    `drop` is positive when the candidate is worse. `unit`: "pp", a difference of shares (0.01 is
    one percentage point); "%", perplexity's relative rise (0.01 is one per cent); "", the score's
    own unit. `lost` and `gained`: the samples on which the candidate's score is lower, and higher.
    `method`: how the interval of `drop` was made.
    """

    metric: str
    n: int
    reference: Interval
    candidate: Interval
    drop: Interval
    lost: int
    gained: int
    unit: str = "pp"
    method: str = ADJUSTED_WALD

    def describe(self) -> str:
        """For people: "drop 0.4 pp, 0.1 to 0.7, n = 540" (pp: percentage points)."""
        digits, scale = (1 if self.n < 1000 else 2), (100 if self.unit else 1)
        value, low, high = (
            f"{round(part * 100, digits) + 0.0:.{digits}f}"  # + 0.0 turns -0.0 into 0.0
            if self.unit and abs(part) < 1000  # a perplexity can rise without bound
            else f"{part * scale:.3g}"
            for part in (self.drop.value, self.drop.low, self.drop.high)
        )
        what = f"{self.metric} rise" if self.unit == "%" else "drop"
        unit = f" {self.unit}" if self.unit else ""
        return f"{what} {value}{unit}, {low} to {high}, n = {self.n}"
