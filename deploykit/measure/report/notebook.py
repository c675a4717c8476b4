"""Show results in a notebook: tables as HTML, charts in a frame that keeps its styles to itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from deploykit.core.evidence import Evaluation, Parity
from deploykit.measure.report.chart import Figure
from deploykit.measure.report.figures import charts
from deploykit.measure.report.html import figure_html, html_page, html_table
from deploykit.measure.report.percentile_figures import served_chart
from deploykit.measure.report.tables import Table, parity_table, serving_table, summary

if TYPE_CHECKING:
    from deploykit.measure.load.result import LoadResult
    from deploykit.measure.report.report import Report

_FRAME_PX = 560  # height: one chart with its caption; more of them scroll


def report_html(report: Report) -> str:
    """The verdict, the short table and the charts."""
    document = report.to_dict()
    verdict = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.verdict)
    drawn, _ = charts(document)
    return f"<h3>{escape(report.title)}</h3>{verdict}{html_table(summary(document))}" + _frame(
        drawn
    )


def load_html(result: LoadResult) -> str:
    """The row of a load test, and its latency by percentile."""
    document = {"serving": [result.to_dict()]}
    chart = served_chart(document)
    return html_table(serving_table(document)) + _frame([chart] if chart else [])


def parity_html(parity: Parity) -> str:
    """A row for each output and batch size."""
    return html_table(parity_table(parity.to_dict()))


def evaluation_html(evaluation: Evaluation) -> str:
    """What was decided and why, above the rows of the parity."""
    verdict = "passed" if evaluation.passed else "NOT passed"
    rows = (("result", verdict), ("reason", evaluation.why), ("measured", evaluation.describe()))
    table = Table("Evaluation", ("", ""), rows, (0, 1))
    by = "No bound applies to this error: the evaluation above decides."
    return html_table(table) + html_table(parity_table(evaluation.parity.to_dict(), by))


def model_facts(
    inputs: Iterable[object], outputs: Iterable[object], precision: Mapping[str, int]
) -> dict[str, object]:
    """What `facts_html` shows of a model."""
    return {
        "inputs": ", ".join(map(str, inputs)),
        "outputs": ", ".join(map(str, outputs)),
        "nodes by precision": ", ".join(f"{name} {count}" for name, count in precision.items()),
    }


def facts_html(title: str, facts: Mapping[str, object]) -> str:
    """A table of names and values, under a title; values that are None or empty are left out."""
    rows = tuple((name, str(value)) for name, value in facts.items() if value not in (None, ""))
    return html_table(Table(title, ("", ""), rows, (0, 1)))


def _frame(drawn: Sequence[Figure]) -> str:
    if not drawn:
        return ""
    page = escape(html_page("Charts", "".join(map(figure_html, drawn))))
    return (
        f'<iframe srcdoc="{page}" title="Charts" sandbox="" '
        f'style="width: 100%; height: {_FRAME_PX}px; border: 0"></iframe>'
    )
