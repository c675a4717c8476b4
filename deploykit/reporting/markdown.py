"""Write a report as Markdown, for pull requests, wikis and terminals, in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deploykit.evaluation.formatting import Table
from deploykit.reporting.figures import charts
from deploykit.reporting.html import CONCLUSIONS
from deploykit.reporting.tables import details, gates, machine, summary


def markdown(document: Mapping[str, Any]) -> str:
    """Return the same Markdown for the same document. Strings of the document are escaped."""
    drawn, missing = charts(document)
    command = document["command"].splitlines() or ["(command not recorded)"]
    sentences = [_text(sentence) for sentence in document["verdict"]]
    everything = (gates(document), *details(document))
    lines = [
        f"# {_text(document['title'])}\n",
        *(f"{sentence}\n" for sentence in sentences[: 1 + CONCLUSIONS]),
        *table_lines(summary(document)),
        "## What the measurements show\n",
        *(f"- **{chart.title}.** {_text(chart.finding)}" for chart in drawn),
        *(f"- {_text(sentence)}" for sentence in missing),
        "\n## How it was measured\n",
        f"Made {_text(document['created'])} with:\n",
        *(f"    {line}" for line in command),
        "",
        *(f"- {_text(note)}" for note in document["notes"]),
        "",
        *table_lines(machine(document)),
        "## Everything\n",
        *(f"- {sentence}" for sentence in sentences[1 + CONCLUSIONS :]),
        "",
        *(line for table in everything for line in table_lines(table, level=3)),
    ]
    return re.sub("\n{3,}", "\n\n", "\n".join(lines).rstrip()) + "\n"


def table_lines(table: Table, level: int = 2) -> list[str]:
    if not table.rows:
        return []
    rule = ["---" if i in table.text else "---:" for i in range(len(table.columns))]
    rows = [_row(table.columns), "| " + " | ".join(rule) + " |", *map(_row, table.rows)]
    note = ["", _text(table.note)] if table.note else []
    return [f"{'#' * level} {_text(table.title)}", "", *rows, *note, ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_text(cell) for cell in cells) + " |"


def _text(text: str) -> str:
    """Return `text` on one line, escaped for Markdown."""
    line = re.sub(r"[ \r\n]", " ", text)
    line = re.sub(r"([\\`*_|\[\]])", r"\\\1", line)
    return line.replace("<", "&lt;").replace(">", "&gt;")
