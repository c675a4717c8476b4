"""Write a report as one HTML file that needs no network, no second file and no script.

Every string of the document is escaped, and the page's own policy lets it load and run nothing. The
same document gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploykit.core.files import asset
from deploykit.evaluation.html_tables import Table, _e, html_table
from deploykit.reporting.charts import Figure, draw
from deploykit.reporting.figures import charts
from deploykit.reporting.tables import best_by_batch, details, machine, summary

CSS = asset("look.css") + Path(__file__).with_name("report.css").read_text(encoding="utf-8")
_NAMES = (
    "setup",
    "precision",
    "load",
    "layer",
    "operator",
)  # columns of a chart's table that hold no figures
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def report_page(document: Mapping[str, Any]) -> str:
    """The whole page: headline, first chart, conclusions, tables, other charts, method, all."""
    document = printable(document)
    drawn, missing = charts(document)
    first, *others = [figure_html(each) for each in drawn] or [""]
    best = best_by_batch(document)
    sections = [
        _headline(document),
        first,
        _conclusions(document),
        section_html("In short", "short", html_table(summary(document), caption=False)),
        *([section_html(best.title, "best", html_table(best, caption=False))] if best.rows else []),
        section_html(
            "What the measurements show",
            "charts",
            "".join(others) + "".join(f"<p>{_e(sentence)}</p>" for sentence in missing),
        ),
        section_html("How it was measured", "method", _method(document)),
        section_html(
            "Everything",
            "everything",
            "".join(
                f"<details><summary>{_e(table.title)}</summary>"
                f"{html_table(table, caption=False)}</details>"
                for table in details(document)
            )
            + raw_html(document),
        ),
    ]
    return html_page(str(document["title"]), "\n".join(sections))


def html_page(title: str, content: str) -> str:
    """A page of its own around `content`."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_e(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"{content}\n</main>\n</body>\n</html>\n"
    )


def _headline(document: Mapping[str, Any]) -> str:
    """The first sentence of the verdict; it is the doubt where there is one."""
    first = (document["verdict"] or ["No verdict."])[0]
    unmet = not all(gate["passed"] for gate in document["gates"])
    kind = "verdict doubt" if document["invalid"] or document["throttled"] or unmet else "verdict"
    quick = ' <span class="tag">short timings</span>' if document["quick"] else ""
    return (
        f'<header><p class="over">deploykit report · {_e(document["created"])}{quick}</p>'
        f'<h1>{_e(document["title"])}</h1><p class="{kind}">{_e(first)}</p></header>'
    )


def _conclusions(document: Mapping[str, Any]) -> str:
    """The other sentences of the verdict, and the gates."""
    sentences = "".join(f"<li>{_e(sentence)}</li>" for sentence in document["verdict"][1:])
    content = (f"<ul>{sentences}</ul>" if sentences else "") + _gates(document)
    return section_html("What it comes to", "conclusions", content) if content else ""


def _gates(document: Mapping[str, Any]) -> str:
    items = [
        f'<li class="{"met" if gate["passed"] else "unmet"}">'
        f"<strong>{'✓ met' if gate['passed'] else '✗ NOT met'}</strong> "
        f"{_e(gate['name'])} <span>{_e(gate['detail'])}</span></li>"
        for gate in document["gates"]
    ]
    return f'<ul class="gates">{"".join(items)}</ul>' if items else ""


def section_html(title: str, name: str, content: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{_e(title)}</h2>{content}</section>'


def figure_html(figure: Figure) -> str:
    """Return a chart with its finding, and its data as a table."""
    names = [i for i, name in enumerate(figure.columns) if name in _NAMES]
    table = Table(figure.title, figure.columns, figure.rows, tuple(names))
    return (
        f"<figure><h2>{_e(figure.title)}</h2>{draw(figure)}"
        f"<figcaption>{_e(figure.finding)}</figcaption><details><summary>The figures of this chart"
        f"</summary>{html_table(table, caption=False)}</details></figure>"
    )


def _method(document: Mapping[str, Any]) -> str:
    notes = "".join(f"<li>{_e(note)}</li>" for note in document["notes"])
    table = machine(document)
    return (
        "<p>To repeat it:</p>"
        f'<pre tabindex="0"><code>{_e(document["command"] or "not recorded")}</code></pre>'
        + (f"<ul>{notes}</ul>" if notes else "")
        + f"<h3>{_e(table.title)}</h3>{html_table(table, caption=False)}" * bool(table.rows)
    )


def raw_html(document: Mapping[str, Any]) -> str:
    """JSON in an element. `<` is written \\u003c, so that no string in it can end the element."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<p class="note">The whole of report.json is embedded in this page, in the element '
        f'"report-data".</p><script type="application/json" id="report-data">{text}</script>'
    )


def printable(value: Any) -> Any:
    """The same document without the control characters that HTML does not allow."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c in "\n\t\u202f" else "�" for c in value)
    if isinstance(value, Mapping):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable(item) for item in value]
    return value
