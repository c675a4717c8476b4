"""Write a report as Markdown, for pull requests, wikis and terminals, in the order of the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploykit.evaluation.html_tables import Table
from deploykit.reporting.figures import charts
from deploykit.reporting.tables import best_by_batch, details, gates, machine, summary


def markdown(document: Mapping[str, Any]) -> str:
    """The same document gives the same Markdown. Strings of the document are escaped."""
    drawn, missing = charts(document)
    shown = [f"- **{chart.title}.** {_text(chart.finding)}" for chart in drawn]
    lines = [
        f"# {_text(document['title'])}",
        "",
        *(line for sentence in document["verdict"] for line in (_text(sentence), "")),
        *table_lines(summary(document)),
        *table_lines(best_by_batch(document)),
        "## What the measurements show",
        "",
        *shown,
        *(f"- {_text(sentence)}" for sentence in missing),
        "",
        "## How it was measured",
        "",
        f"Made {_text(document['created'])} with:",
        "",
        *(f"    {line}" for line in document["command"].splitlines() or ["(command not recorded)"]),
        "",
        *(line for note in document["notes"] for line in (f"- {_text(note)}",)),
        "",
        *table_lines(machine(document)),
        "## Everything",
        "",
        *(
            line
            for table in (gates(document), *details(document))
            for line in table_lines(table, level=3)
        ),
    ]
    text = "\n".join(lines).rstrip()
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text + "\n"


def table_lines(table: Table, level: int = 2) -> list[str]:
    if not table.rows:
        return []
    rule = ["---" if i in table.text else "---:" for i in range(len(table.columns))]
    rows = [_row(table.columns), "| " + " | ".join(rule) + " |", *map(_row, table.rows)]
    note = ["", _text(table.note)] if table.note else []
    return [f"{'#' * level} {_text(table.title)}", "", *rows, *note, ""]


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_text(cell) for cell in cells) + " |"


def _text(text: str) -> str:
    """`text` on one line, escaped for Markdown."""
    line = " ".join(text.split(" ")).replace("\r", " ").replace("\n", " ")
    for mark in "\\`*_|[]<>":
        line = line.replace(mark, {"<": "&lt;", ">": "&gt;"}.get(mark, "\\" + mark))
    return line
