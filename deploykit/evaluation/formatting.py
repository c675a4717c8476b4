"""Format figures: three digits, a narrow space for thousands, fixed units; and tables of them.

A `Table` is for a terminal, Markdown and HTML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

SPACE = "\u202f"  # narrow, no-break: groups thousands, and separates a value from its unit
MISSING = "–"
Json = Mapping[str, Any]
Parts = Json  # {"value", "low", "high"}: an Interval in JSON


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


def spread(parts: Parts | None) -> str:
    """Return a value and its interval: "1.80 [1.70, 1.90]"; JSON's null is infinity."""
    if parts is None:
        return MISSING
    value, low, high = (or_infinite(parts[key]) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def percent(parts: Parts, n: int, unit: str = "%") -> str:
    """Return a share and its interval times 100, with the digits that `n` samples can carry.

    `unit`: "pp", percentage points, for a difference of shares: "0.2 pp [−0.3, 0.7]".
    """
    digits = 1 if n < 1000 else 2
    value, low, high = (
        f"{round(parts[key] * 100, digits) + 0.0:.{digits}f}".replace("-", "−")  # no minus zero
        for key in ("value", "low", "high")
    )
    return f"{value}{SPACE}{unit} [{low}, {high}]"


def or_infinite(value: float | None) -> str:
    return "∞" if value is None else number(value)


def html_table(table: Table, *, caption: bool = True) -> str:
    """A table that scrolls by itself where the page is narrow. The first column names the row."""
    if not table.rows:
        return ""
    kinds = ["" if i in table.text else ' class="n"' for i in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{kind}>{safe(name)}</th>'
        for kind, name in zip(kinds, table.columns, strict=True)
    )
    rows = ""
    for first, *others in table.rows:
        cells = zip(kinds[1:], others, strict=True)
        found = (f"<td{kind}>{_cell(x) if kind else safe(x)}</td>" for kind, x in cells)
        rows += f'<tr><th scope="row">{safe(first)}</th>{"".join(found)}</tr>'
    title = f"<caption>{safe(table.title)}</caption>" if caption else ""
    note = f'<p class="note">{safe(table.note)}</p>' if table.note else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Table: {safe(table.title)}">'
        f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _cell(text: str) -> str:
    """Return a figure with its interval on a second line, so that tables stay narrow."""
    value, bracket, interval = text.partition(" [")
    return f"{safe(value)} <small>[{safe(interval)}</small>" if bracket else safe(text)


def safe(text: object) -> str:
    """Return a text as HTML shows it."""
    return escape(str(text))
