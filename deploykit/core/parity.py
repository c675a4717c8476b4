"""The numeric difference of two engines on the same inputs, and its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from deploykit.core.errors import GateFailed
from deploykit.core.json_value import Record

# Two float32 programs differ by the rounding of both, and by that of other kernels.
FLOAT32_MARGIN = 8.0
MOST = 0.1  # what float32 itself gives allows no more: two different models would pass


@dataclass(frozen=True)
class ParityRow(Record):
    """Difference of one output between two engines at one batch size; non-finite values left out.

    `error` is what a bound applies to: max |a-b| / max |a|, relative to the output's own `scale`,
    max |a|; where all of a is 0 and b is not, it is 1. It is infinite where `problem` says that no
    bound can be met: NaN, infinity on one side only, integers that differ. `float32_error`: what
    float32 itself gives, that is the same error of a against itself in float64 or in another batch;
    None where it was not measured.
    `max_rel`: max |a-b| / max(|a|, 1e-6). `sqnr_db`: signal to noise, infinite when equal.
    `agreement`: share of equal argmax over the classes, of samples, tokens or pixels, or of boxes
    that both found; `answers` says of which, and is empty where an output shows neither.
    `mean_iou`: of the classes of pixels, or of the boxes that both found. Boxes that only one of
    the two found are an `error` of their share. `finite`: every value of both sides is finite.
    `places_match`: NaN and the infinities are at the same places on both sides. `floating`: neither
    integers nor booleans.
    """

    output: str
    batch: int
    values: int
    max_abs: float
    max_rel: float
    rms: float
    sqnr_db: float
    agreement: float | None
    finite: bool
    error: float
    problem: str = ""
    places_match: bool = True
    floating: bool = True
    scale: float | None = None
    float32_error: float | None = None
    answers: str = ""
    mean_iou: float | None = None

    @property
    def zero(self) -> bool:
        """All of it is 0 on both sides, so that equality shows nothing."""
        return self.floating and self.values > 0 and self.scale == 0 and self.error == 0


@dataclass(frozen=True)
class Parity(Record):
    """Outputs of `b` compared with those of `a`, the reference; the bound is on `ParityRow.error`.

    A row's bound is `max_error`, or 8 times its `float32_error` where that is more, up to 0.1.
    `data_sha256`: of the file with the inputs; empty for seeded random ones.
    """

    a: str
    b: str
    rows: tuple[ParityRow, ...]
    max_error: float
    data_sha256: str = ""

    shown: ClassVar[tuple[str, ...]] = ("passed", "why")

    @property
    def worst(self) -> ParityRow:
        """The row with the largest error, of those above their bound if any is."""
        return max(self.rows, key=lambda row: (row.error > self.bound(row), row.error))

    @property
    def passed(self) -> bool:
        return all(row.error <= self.bound(row) for row in self.rows)

    def bound(self, row: ParityRow) -> float:
        """The largest error that `row` may have."""
        return max(self.max_error, min(MOST, FLOAT32_MARGIN * (row.float32_error or 0.0)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Outputs on which nothing was shown."""
        found = []
        for name in dict.fromkeys(row.output for row in self.rows):
            rows = [row for row in self.rows if row.output == name]
            what = "holds no value" if not any(row.values for row in rows) else "is 0 everywhere"
            if all(row.zero or not row.values for row in rows):
                found.append(f"output '{name}' {what} on these inputs: that shows nothing")
        return tuple(found)

    @property
    def why(self) -> str:
        """The worst row in one line."""
        worst = self.worst
        found = worst.problem or (
            f"error {worst.error:.3g} is {'within' if self.passed else 'above'} "
            f"{self.bound(worst):.3g}"
        )
        if (worst.float32_error or 0.0) > self.max_error and not worst.problem:
            found += f"; float32 itself gives {worst.float32_error:.3g}"
        where = f"against {self.a}: output '{worst.output}' at batch {worst.batch}"
        return "; ".join((f"{where}: {found}", *self.warnings))

    def raise_if_over(self) -> None:
        """Raise GateFailed naming the worst row unless every error is within the bound."""
        if not self.passed:
            raise GateFailed(
                f"{self.b} {self.why}",
                hint=None
                if self.worst.problem
                else "error is max |a-b| / max |a|; see the other rows for where it begins",
            )
