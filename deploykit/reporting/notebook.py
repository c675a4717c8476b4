"""Show results in a notebook: tables as HTML, charts in a frame that keeps its styles to itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from deploykit.evaluation.html_tables import (
    html_table,
)
from deploykit.reporting.charts import Figure
from deploykit.reporting.figures import charts, served_chart
from deploykit.reporting.html import figure_html, html_page
from deploykit.reporting.tables import serving_table, summary

_FRAME_PX = 560  # height: one chart with its caption; more of them scroll


def report_html(document: Mapping[str, Any]) -> str:
    """The verdict, the short table and the charts."""
    verdict = "".join(f"<p>{escape(sentence)}</p>" for sentence in document["verdict"])
    drawn, _ = charts(document)
    return f"<h3>{escape(document['title'])}</h3>{verdict}{html_table(summary(document))}" + _frame(
        drawn
    )


def load_html(result: Mapping[str, Any]) -> str:
    """The row of a load test, and its latency by percentile."""
    document = {"serving": [result]}
    chart = served_chart(document)
    return html_table(serving_table(document)) + _frame([chart] if chart else [])


def _frame(drawn: Sequence[Figure]) -> str:
    if not drawn:
        return ""
    page = escape(html_page("Charts", "".join(map(figure_html, drawn))))
    return (
        f'<iframe srcdoc="{page}" title="Charts" sandbox="" '
        f'style="width: 100%; height: {_FRAME_PX}px; border: 0"></iframe>'
    )
