"""Results in a notebook: a table that needs no script, and the charts in a frame."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from deploykit.core.tensors import parse_spec
from deploykit.evaluation.evaluation import evaluate
from deploykit.evaluation.html_tables import evaluation_html, parity_html
from deploykit.reporting.report import Report
from tests.support.fake_engine import FakeEngine
from tests.support.measure.browser import CHROMIUM, loaded


def frame(html: str) -> str:
    """The page inside the frame."""
    return unescape(html.split('srcdoc="')[1].split('"')[0])


def test_a_report_shows_its_verdict_its_table_and_its_charts(report: Report) -> None:
    html = report._repr_html_()
    assert report.verdict[0] in unescape(html)
    assert html.index("<table>") < html.index("<iframe")
    assert html.count("<iframe") == 1
    assert 'sandbox=""' in html
    assert frame(html).count("<figure>") == 4


def test_a_load_result_shows_its_row_and_its_percentiles(report: Report) -> None:
    html = report.serving[0]._repr_html_()
    assert "32 connections" in html.split("<iframe")[0]
    assert frame(html).count("<figure>") == 1


def test_a_load_result_without_an_answer_has_no_chart(report: Report) -> None:
    from dataclasses import replace

    html = replace(report.serving[0], latency=None, ok=0)._repr_html_()
    assert "<table>" in html
    assert "<iframe" not in html


def test_an_evaluation_shows_its_verdict_above_its_parity() -> None:
    engine = FakeEngine()
    engine.inputs = (parse_spec("x:float32[N,4]"),)
    found = evaluate(engine, FakeEngine(), samples=None, names=("a<b", "c"))
    html = evaluation_html(found)
    assert "passed" in html
    assert found.why in unescape(html)
    assert "the evaluation above decides" in html
    assert "the bound of" not in html
    assert "within the bound of" in parity_html(found.parity)
    assert "Parity of c with a&lt;b" in html
    assert html.count("<table>") == 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_real_browser_draws_the_charts_of_the_frame(report: Report, tmp_path: Path) -> None:
    (tmp_path / "frame.html").write_text(frame(report._repr_html_()), encoding="utf-8")
    shown = loaded(tmp_path / "frame.html", tmp_path / "profile")
    assert len(re.findall(r'<svg class="plot" ', shown)) == 4
