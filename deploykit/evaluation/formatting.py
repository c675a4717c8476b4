"""Format figures: three digits, a narrow space for thousands, fixed units; and tables of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPACE = "\u202f"  # narrow, no-break: groups thousands, and separates a value from its unit
MISSING = "–"
Parts = Mapping[str, Any]  # {"value", "low", "high"}: an Interval in JSON


@dataclass(frozen=True)
class Table:
    """Cells under the names of the columns, for a terminal, Markdown and HTML.

    The first column names the row. `text`: the columns (from 0) without figures.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Sequence[int] = (0,)
    note: str = ""


def number(value: float) -> str:
    """12345 -> "12 300", 1.234 -> "1.23", 0.0456 -> "0.0456"; never an exponent."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    for _ in range(2):  # twice, as 9.996 becomes 10.0, with one decimal less
        digits = 2 - math.floor(math.log10(abs(value)))
        value = round(value, digits)
    return f"{value:,.{max(digits, 0)}f}".replace(",", SPACE).replace("-", "−")


def count(value: int) -> str:
    """Return an integer in full: 12345 -> "12 345"."""
    return f"{value:,}".replace(",", SPACE).replace("-", "−")


def spread(parts: Parts | None, scale: float = 1.0) -> str:
    """Return a value and its interval: "1.80 [1.70, 1.90]"; JSON's null is infinity."""
    if parts is None:
        return MISSING
    value, low, high = (
        "∞" if parts[key] is None else number(parts[key] * scale)
        for key in ("value", "low", "high")
    )
    return f"{value} [{low}, {high}]"


def percent(parts: Parts, n: int) -> str:
    """Return a share and its interval in per cent, with the digits that `n` samples can carry."""
    value, low, high = _digits(parts, n)
    return f"{value}{SPACE}% [{low}, {high}]"


def points(parts: Parts | None, n: int) -> str:
    """Return a difference of shares in percentage points: "0.2 pp (−0.3 to 0.7)"."""
    if parts is None:
        return MISSING
    value, low, high = _digits(parts, n)
    return f"{value}{SPACE}pp ({low} to {high})"


def _digits(parts: Parts, n: int) -> list[str]:
    digits, values = 1 if n < 1000 else 2, (parts[key] * 100 for key in ("value", "low", "high"))
    # + 0.0: no minus zero
    return [f"{round(x, digits) + 0.0:.{digits}f}".replace("-", "−") for x in values]
