"""What a notebook shows of results: tables that need no script, and charts in a frame."""

from __future__ import annotations

import re
from dataclasses import is_dataclass, replace
from html import unescape
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.notebook import Shown
from deploykit.core.tensors import parse_spec
from deploykit.evaluation.evaluation import evaluate
from deploykit.evaluation.html_tables import evaluation_html, parity_html
from deploykit.reporting.report import Report, write
from tests.support.fake_engine import FakeEngine
from tests.support.measure.browser import CHROMIUM, loaded
from tests.support.measure.simulated import simulated
from tests.support.onnx_zoo import mnist_like, save


def test_results_show_their_tables(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = save(mnist_like(), tmp_path / "a<b>.onnx")
    images = np.zeros((3, 1, 28, 28), np.float32)
    np.savez(tmp_path / "data.npz", image=images, labels=np.zeros(3, np.int64))
    made = dk.build(str(model), "cpu", out=str(tmp_path / "built.onnx"))
    half = dk.quantize(str(model), "fp16")
    assert half.path.parent == model.parent  # next to the model that a string names
    for result, shown in (
        (made, "built.onnx"),
        (half, "<table"),
        (dk.compare(str(model), str(made.path)), "compared with"),
        (dk.inspect(str(model)), "float32"),
        (dk.predict(str(made.path), tmp_path / "data.npz", tmp_path / "o.npz"), "accuracy"),
        (dk.doctor(), "inspect, profiles"),
    ):
        html = result._repr_html_()
        assert "<table" in html
        assert shown in html
        assert "a<b>" not in html
        assert "Interval" not in html
    with dk.serve({"m": model}, grpc_port=None) as server:
        assert f'<a href="{server.url}">' in server._repr_html_()


def test_every_result_and_type_has_a_table_and_a_short_repr(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")
    named = page.split("## Types")[1].split("## Errors")[0]
    found = re.findall(r"^::: (deploykit\S+)\.(\w+)$", named, re.MULTILINE)
    public = [getattr(import_module(module), name) for module, name in found]
    kinds = [each for each in public if isinstance(each, type)]
    assert len(kinds) > 15
    assert [kind.__name__ for kind in kinds if not hasattr(kind, "_repr_html_")] == []
    long = [kind.__name__ for kind in kinds if is_dataclass(kind) and not issubclass(kind, Shown)]
    assert long == []  # a dataclass's own `repr`
    model = save(mnist_like(), tmp_path / "a<b>.onnx")
    planned = dk.plan(model)
    assert len(repr(planned)) < 600
    assert "jetson-orin-nano-8gb" in planned._repr_html_()
    with dk.load(model) as engine:
        shown = (planned, engine, dk.inspect(model), dk.profile("l4"), dk.Artefact.open(model))
        for each in (*shown, dk.doctor(), dk.Shapes(), engine.inputs[0], dk.client("http://x:1")):
            html = each._repr_html_()
            assert html.startswith("<table")
            assert "a<b>" not in html
            assert len(repr(each)) < 2000
        assert "float32[N,1,28,28]" in engine._repr_html_()


def test_a_comparison_of_reports_is_a_table_of_its_figures(tmp_path: Path) -> None:
    for name, slower in (("a", 1.0), ("b", 1.2)):
        write(simulated(1, slower), tmp_path / name)
    html = dk.compare_reports(tmp_path / "a", tmp_path / "b")._repr_html_()
    assert html.count("<td>throughput</td>") == html.count("<td>p50</td>") == 3
    assert "slower" in html


def test_an_answer_is_a_table_of_its_keys() -> None:
    answers = ({"label": "<cat>", "score": 0.9}, {"label": "dog", "score": 0.5})
    found = dk.Answered(Path("m.onnx"), "classify", "cpu", ("a.jpg", "b.jpg"), answers)
    html = found._repr_html_()
    assert "<th>label</th><th>score</th>" in html
    assert "<td>&lt;cat&gt;</td><td>0.9</td>" in html


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
    html = replace(report.serving[0], latency=None, ok=0)._repr_html_()
    assert "<table>" in html
    assert "<iframe" not in html  # without an answer there is no chart


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
