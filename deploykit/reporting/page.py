"""Write a report as one HTML file without network, second file or script, and as Markdown.

Every string of the document is escaped, and the page's policy forbids it to load or run anything.
Markdown has the order of the page. The same document gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.core.files import LOOK
from deploykit.evaluation.formatting import Table, html_table, safe
from deploykit.reporting.charts import Chart, charts, draw, served_chart
from deploykit.reporting.tables import (
    details,
    gates,
    machine,
    serving_table,
    summary,
)

CSS = "".join(p.read_text(encoding="utf-8") for p in (LOOK, Path(__file__).with_name("report.css")))
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
CONCLUSIONS = 6  # most after the headline; the others are at the end


@dataclass(frozen=True)
class Parts:
    """Charts of a document, notes on what they leave out, its first tables, and others."""

    charts: Sequence[Chart]
    notes: Sequence[str]
    short: Sequence[Table]
    tables: Sequence[Table]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Parts:
        return cls(*charts(document), [summary(document)], details(document))


def report_page(document: Mapping[str, Any], parts: Parts | None = None) -> str:
    """Return the page: headline, first chart, conclusions, tables, other charts, method, JSON."""
    document = printable(document)
    parts = parts or Parts.of(document)
    first, *others = [figure_html(each) for each in parts.charts] or [""]
    others += [f"<p>{safe(sentence)}</p>" for sentence in parts.notes]
    folded = [
        f"<details><summary>{safe(each.title)}</summary>{html_table(each, caption=False)}</details>"
        for each in parts.tables
    ]
    sentences = [f"<li>{safe(sentence)}</li>" for sentence in document["verdict"][1:]]
    conclusions = f"<ul>{''.join(sentences[:CONCLUSIONS])}</ul>" * bool(sentences)
    if more := "".join(sentences[CONCLUSIONS:]):
        title = "Further conclusions"
        folded.insert(0, f"<details><summary>{title}</summary><ul>{more}</ul></details>")
    conclusions += html_table(gates(document), caption=False) * bool(document["gates"])
    busy = bool(document.get("invalid"))
    short = "".join(html_table(each, caption=len(parts.short) > 1) for each in parts.short)
    notes = "".join(f"<li>{safe(note)}</li>" for note in document["notes"])
    command, table = document["command"] or "not recorded", machine(document)
    method = f'<p>To repeat it:</p><pre tabindex="0"><code>{safe(command)}</code></pre>'
    method += f"<ul>{notes}</ul>" * bool(notes)
    method += f"<h3>{safe(table.title)}</h3>{html_table(table, caption=False)}" * bool(table.rows)
    # no string can end the element with the JSON
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    folded.append(
        '<p class="note">The whole of report.json is embedded in this page, in the element '
        f'"report-data".</p><script type="application/json" id="report-data">{raw}</script>'
    )
    sections = [
        ("Summary", "conclusions", conclusions),
        ("In short", "short", "" if busy else short),
        ("What the measurements show", "charts", "".join(others)),
        ("How it was measured", "method", method),
        ("Everything", "everything", "".join(folded)),
    ]
    content = [
        f'<section aria-labelledby="{name}"><h2 id="{name}">{safe(title)}</h2>{html}</section>'
        for title, name, html in sections
        if html
    ]
    head = [_headline(document, short if busy else ""), first, *content]
    return html_page(str(document["title"]), "\n".join(head))


def html_page(title: str, content: str) -> str:
    """Return a complete page around `content`."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{safe(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"{content}\n</main>\n</body>\n</html>\n"
    )


def _headline(document: Mapping[str, Any], figures: str) -> str:
    """Return title and verdict; `figures`, before it, where the machine was busy."""
    first = (document["verdict"] or ["No verdict."])[0]
    unmet = not all(gate["passed"] for gate in document["gates"])
    kind = "verdict doubt" if document["throttled"] or unmet else "verdict"
    kind = "verdict busy" if figures else kind
    quick = ' <span class="tag">short timings</span>' if document["quick"] else ""
    return (
        f'<header><p class="over">deploykit report · {safe(document["created"])}{quick}</p>'
        f'<h1>{safe(document["title"])}</h1>{figures}<p class="{kind}">{safe(first)}</p></header>'
    )


def figure_html(figure: Chart) -> str:
    return (
        f"<figure><h2>{safe(figure.title)}</h2>{draw(figure)}"
        f"<figcaption>{safe(figure.caption)}</figcaption></figure>"
    )


def printable(value: Any) -> Any:
    """Return the document without control characters that HTML forbids."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c in "\n\t\u202f" else "�" for c in value)
    if isinstance(value, Mapping):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable(item) for item in value]
    return value


def report_html(document: Mapping[str, Any]) -> str:
    """Return the verdict, the short table and the charts of a report for a notebook."""
    sentences = document["verdict"][: 1 + CONCLUSIONS]
    verdict = "".join(f"<p>{safe(sentence)}</p>" for sentence in sentences)
    shown = f"<h3>{safe(document['title'])}</h3>{verdict}{html_table(summary(document))}"
    return shown + _frame(charts(document)[0])


def load_html(result: Mapping[str, Any]) -> str:
    """Return the row of a load test, and its latency by percentile, for a notebook."""
    document = {"serving": [result]}
    chart = served_chart(document)
    return html_table(serving_table(document)) + _frame([chart] if chart else [])


def _frame(drawn: Sequence[Chart]) -> str:
    if not drawn:
        return ""
    page = safe(html_page("Charts", "".join(map(figure_html, drawn))))
    return (
        f'<iframe srcdoc="{page}" title="Charts" sandbox="" '
        f'style="width: 100%; height: 560px; border: 0"></iframe>'
    )


def markdown(document: Mapping[str, Any], parts: Parts | None = None) -> str:
    """Return the same Markdown for the same document. Strings of the document are escaped."""
    parts = parts or Parts.of(document)
    command = document["command"].splitlines() or ["(command not recorded)"]
    sentences = [_text(sentence) for sentence in document["verdict"]]
    everything = (gates(document), *parts.tables)
    lines = [
        f"# {_text(document['title'])}\n",
        *(f"{sentence}\n" for sentence in sentences[: 1 + CONCLUSIONS]),
        *(line for table in parts.short for line in table_lines(table)),
        "## How it was measured\n",
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
