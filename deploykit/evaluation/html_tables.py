"""Tables of a report as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from deploykit.evaluation.formatting import MISSING, Table, count, number

Json = Mapping[str, Any]


def parity_table(parity: Json, decided_by: str = "") -> Table:
    """Return the errors, and whether they are within the bound, or what else decides."""
    shared = any(row.get("mean_iou") is not None for row in parity["rows"])
    rows = tuple(
        (
            row["output"],
            count(row["batch"]),
            count(row["values"]),
            *(or_infinite(row[key]) for key in ("error", "max_abs", "rms", "sqnr_db")),
            MISSING if row["agreement"] is None else number(row["agreement"] * 100),
            *((MISSING if row.get("mean_iou") is None else number(row["mean_iou"]),) * shared),
        )
        for row in parity["rows"]
    )
    names = ("output", "batch", "values", "error", "max abs", "rms", "SQNR (dB)", "argmax (%)")
    columns = names + ("mean IoU",) * shared
    within, bound = "within" if parity["passed"] else "NOT within", number(parity["max_error"])
    note = decided_by or f"{within} the bound of {bound} on max |a−b| / max |a|."
    return Table(f"Parity of {parity['b']} with {parity['a']}", columns, rows, (0,), note)


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
    rows = "".join(
        f'<tr><th scope="row">{safe(row[0])}</th>'
        + "".join(
            f"<td{kind}>{_cell(cell) if kind else safe(cell)}</td>"
            for kind, cell in zip(kinds[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
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
