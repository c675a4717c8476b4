"""What people read: the page, its Markdown, and what a notebook shows of any result."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import is_dataclass, replace
from html import escape, unescape
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.evidence import Gate, Interval
from deploykit.core.json_value import Shown
from deploykit.evaluation.formatting import spread
from deploykit.reporting.page import CSS, markdown, report_page
from deploykit.reporting.report import Accuracy, NotMeasured, Report, write
from deploykit.reporting.verdict import verdict
from tests.support.measure.simulated import plain, simulated
from tests.support.onnx_zoo import mnist_like, save

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "circle", "path", "rect", "br", "link", "img"}
HOSTILE = "</script><script>alert('x')</script>\"'&\0\x1b"


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text; complains about bad nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.elements if tag in tags]


def data_of(text: str, name: str) -> Any:
    return json.loads(text.split(f'id="{name}">')[1].split("</script>")[0])


def page_of(report: Report, **changes: Any) -> str:
    return report_page(replace(report, **changes).to_dict())


def test_the_page_needs_nothing_else(report: Report) -> None:
    text = report_page(report.to_dict())
    found = Page(text)
    for attrs in (attrs for _, attrs in found.elements):
        assert not {"src", "href", "srcset", "onclick", "onload", "style"} & attrs.keys()
    assert found.all("link", "img", "iframe", "object") == []
    data = "application/json"
    assert [attrs["type"] for attrs in found.all("script")] == [data]
    assert not re.search(r"url\(|@import", CSS)
    policy = [a for a in found.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    rules = str(policy[0]["content"])
    assert rules.startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert "script-src" not in rules
    assert len(text.encode()) < 1_000_000


def test_parts_are_in_order_and_ids_are_unique(report: Report) -> None:
    text = page_of(report)
    found = Page(text)
    parts = ['class="verdict"', "<svg ", 'id="short"', 'id="charts"', 'id="method"']
    places = [text.index(part) for part in (*parts, 'id="everything"')]
    assert places == sorted(places)
    assert text.split('class="verdict">')[1].split("</p>")[0] == report.verdict[0]
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    ids = Counter(attrs["id"] for _, attrs in found.elements if "id" in attrs)
    assert max(ids.values()) == 1
    for _, attrs in found.elements:
        assert set(str(attrs.get("aria-labelledby") or "").split()) <= ids.keys()
    assert found.all("html") == [{"lang": "en"}]
    titles = re.findall(r'<h2 id="[^"]*">([^<]*)', text)
    regions = [attrs["aria-label"] for attrs in found.all("div") if attrs.get("role") == "region"]
    assert len(titles) > 4
    assert len({*titles, *regions}) == len(titles) + len(set(regions))  # each landmark has a name


def test_charts_have_a_caption_and_tables_name_their_rows_and_columns(report: Report) -> None:
    text = page_of(report)
    figures = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        assert re.search(r'<svg class="plot" role="img" aria-label="[^"]+">', figure)
        assert re.search(r"<figcaption>[^<]{20,}</figcaption>", figure)
    for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        head, body = table.split("</thead>")
        for row in re.findall(r"<tr>.*?</tr>", body):
            assert row.startswith('<tr><th scope="row">')
            assert row.count("<td") == head.count('scope="col"') - 1
    cells = re.findall("<t[dh][^>]*>(.*?)</t[dh]>", text, re.DOTALL)
    texts = {re.sub("<[^>]+>", "", cell) for cell in cells}
    for point in report.points:  # the data of the charts
        assert {
            spread(each.to_dict()) for each in (point.latency.p50_ms, point.throughput_per_s)
        } <= texts
    assert '<td class="n">1.84 <small>[' in text
    assert ".n { text-align: right" in CSS


def test_hostile_names_are_shown_and_not_run(report: Report) -> None:
    hostile = replace(
        report,
        title=HOSTILE,
        command=HOSTILE,
        created=HOSTILE,
        baseline=HOSTILE,
        verdict=(HOSTILE, HOSTILE),
        gates=(Gate(HOSTILE, False, HOSTILE),),
        machine={HOSTILE: HOSTILE, "gpus": [{"name": HOSTILE, "driver": HOSTILE}]},
        artefacts=({"file": HOSTILE, "sha256": HOSTILE},),
        parity=({**report.parity[0], "a": HOSTILE, "b": HOSTILE},),
        points=tuple(
            replace(p, label=p.label + HOSTILE, note=HOSTILE, scenario=HOSTILE, device=HOSTILE)
            for p in report.points
        ),
        serving=(replace(report.serving[0], model=HOSTILE, errors={HOSTILE: 1}),),
        notes=(HOSTILE,),
    )
    text = report_page(hostile.to_dict())
    found = Page(text)  # raises on bad nesting
    assert len(found.all("script")) == 1
    assert "alert('x')" in "".join(found.texts["h1"])
    assert "\0" not in text
    assert "\x1b" not in text
    assert data_of(text, "report-data")["notes"][0].startswith("</script><script>")


def test_the_page_holds_the_document_and_says_a_thing_once(report: Report) -> None:
    sized = [replace(each, shapes={"x": (each.batch, 3, 8)}) for each in report.points]
    text = page_of(report, points=tuple(sized), gates=(Gate("parity", False, "error 1"),))
    document = replace(report, points=tuple(sized), gates=(Gate("parity", False, "error 1"),))
    assert data_of(text, "report-data") == json.loads(json.dumps(document.to_dict()))
    shown, _, _ = text.partition('<script type="application/json"')
    assert shown.count("no NVIDIA GPU on this machine") == 1
    assert "Inputs of the smallest batch: x 1×3×8." in shown
    assert "✗ NOT met" in shown


def test_a_report_with_nothing_in_it_has_sentences_and_no_empty_frames() -> None:
    text = report_page(Report("nothing", "2026", "").to_dict())
    Page(text)
    assert "<svg" not in text
    assert "<table>" not in text
    assert "not recorded" in text


def test_an_invalid_run_looks_different_at_the_top(report: Report) -> None:
    assert '<p class="verdict">' in report_page(report.to_dict())
    invalid = replace(report, invalid=("other load: stop it",))
    text = report_page(replace(invalid, verdict=verdict(invalid)).to_dict())
    assert '<p class="verdict busy">The machine was busy: other load: stop it. ' in text
    assert text.index("<table>") < text.index('class="verdict busy"')  # the figures come first
    assert text.count('aria-label="Table: In short"') == 1


def test_a_summary_has_six_conclusions_and_the_rest_is_below(report: Report) -> None:
    many = replace(report, verdict=tuple(f"Sentence {number}." for number in range(12)))
    text = report_page(many.to_dict())
    summary = text.split('id="conclusions"')[1].split("</section>")[0]
    assert re.findall(r"<li>Sentence (\d+)", summary) == ["1", "2", "3", "4", "5", "6"]
    assert "<li>Sentence 11." in text.split("Further conclusions")[1]
    shown, _, later = markdown(many.to_dict()).partition("## Everything")
    assert re.findall(r"^Sentence (\d+)", shown, re.MULTILINE) == [*"0123456"]
    assert "- Sentence 11." in later
    assert re.findall(r"<p>Sentence (\d+)", many._repr_html_()) == [*"0123456"]
    assert f"The baseline is {report.baseline}." in text  # of which the ratios are


def test_a_report_holds_no_folder_of_the_machine(report: Report, tmp_path: Path) -> None:
    kept = ["/sys/class/powercap", "http://host:8000/v2/models/m", "3/4 of a/b", "/layer1/conv"]
    kept.append("./a/b.onnx")
    mine = replace(
        report,
        command="/nas/me/bin/deploykit bench '/home/me/secret project/m.onnx' /nas/me/n.onnx "
        "--data=/disk2/me/d.npz 'D:\\me\\o.onnx' ./a/b.onnx -o /tmp/x/report",
        not_measured=(NotMeasured("OpenVINO", "pip install '/srv/clone/deploykit[openvino]'"),),
        provenance={"environment": {"LD_LIBRARY_PATH": "/opt/me/lib:/usr/me/lib64"}},
        notes=(*kept[:-1], "file:///home/me/notes.txt"),
    )
    write(replace(mine, verdict=verdict(mine)), tmp_path)
    for name in ("report.json", "report.md", "report.html"):
        text = (tmp_path / name).read_text("utf-8")
        assert not re.search(r"\bme[/\\]|secret|/tmp/x|/srv/clone|disk2|file:", text)
        assert all(each in text for each in (*kept, "--data=d.npz"))


IN_A_PHONE = """
<script type="module">
const found = [];
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBBox()]);
  texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
    if (p.x < q.x + q.width && p.x + p.width > q.x && p.y < q.y + q.height && p.y + p.height > q.y)
      found.push(a + ' / ' + b);
  }));
}
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
parent.document.title = document.querySelectorAll('svg text').length + ' texts, '
  + JSON.stringify(found) + ' overlap, ' + wide + ' beyond';
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_real_browser_shows_all_on_a_phone(report: Report, tmp_path: Path) -> None:
    long = "pip-install-" + "x" * 200
    wide = replace(report, title=long, not_measured=(NotMeasured(long, long),), notes=(long,))
    text = write(replace(wide, verdict=(long, *verdict(wide))), tmp_path).read_text()
    page = re.sub("<meta http-equiv=[^>]*>", "", text).replace("</body>", IN_A_PHONE + "</body>")
    frame = f'<iframe width="390" height="800" srcdoc="{escape(page)}"></iframe>'
    (tmp_path / "phone.html").write_text(f"<!doctype html><title>?</title>{frame}")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    quiet += ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    profile = [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [str(CHROMIUM), *quiet, *profile, (tmp_path / "phone.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r"<title>[1-9]\d+ texts, \[\] overlap, 0 beyond</title>", done.stdout)


def test_markdown_holds_the_verdict_the_tables_and_the_command(
    report: Report, tmp_path: Path
) -> None:
    hostile = (Accuracy("fp32", "<b>a|b`c*d[e]\nf", 540, Interval(0.9, 0.8, 0.95), None),)
    write(replace(report, accuracy=(*report.accuracy, *hostile)), tmp_path)
    text = plain((tmp_path / "report.md").read_text())
    assert "| &lt;b&gt;a\\|b\\`c\\*d\\[e\\] f |" in text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[:4] == [
        "# mnist-cnn on this machine",
        "## In short",
        "## How it was measured",
        "## Machine and versions",
    ]
    assert "    deploykit demo -o out/" in text
    assert "| int8 | top-1 accuracy | 540 |" in text
    widths = {line.count(" | ") for line in text.splitlines() if line.startswith("| logits")}
    assert widths == {7}


def test_every_result_and_type_has_a_table_and_a_short_repr(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    page = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")
    documented = page.split("## Types")[1].split("## Errors")[0]
    found = re.findall(r"^::: (deploykit\S+)\.(\w+)$", documented, re.MULTILINE)
    public = [getattr(import_module(module), name) for module, name in found]
    kinds = [each for each in public if isinstance(each, type)]
    assert len(kinds) > 15
    assert [kind.__name__ for kind in kinds if not hasattr(kind, "_repr_html_")] == []
    long = [kind.__name__ for kind in kinds if is_dataclass(kind) and not issubclass(kind, Shown)]
    assert long == []  # a dataclass's own `repr`
    model, data = save(mnist_like(), tmp_path / "a<b>.onnx"), tmp_path / "data.npz"
    np.savez(data, image=np.zeros((3, 1, 28, 28), np.float32), labels=np.zeros(3, np.int64))
    made = dk.build(str(model), "cpu", out=str(tmp_path / "built.onnx"))
    for name, slower in (("a", 1.0), ("b", 1.2)):
        write(simulated(1, slower), tmp_path / name)
    answers = ({"label": "<cat>", "score": 0.9}, {"label": "dog", "score": 0.5})
    with dk.load(model) as engine:
        for result, shown in (
            (made, "built.onnx"),
            (dk.compare(str(model), str(made.path)), "against a&lt;b&gt;.onnx"),
            (dk.inspect(str(model)), "float32"),
            (dk.predict(str(made.path), data, tmp_path / "o.npz"), "accuracy"),
            (dk.compare_reports(tmp_path / "a", tmp_path / "b"), "<td>throughput</td>"),
            (dk.Answered(Path("m"), "classify", "cpu", ("a", "b"), answers), "&lt;cat&gt;"),
            (engine, "float32[N,1,28,28]"),
            (dk.Artefact.open(model), "&lt;b&gt;"),
            (dk.Shapes(), "tf32"),
            (dk.client("http://x:1"), "http://x:1"),
        ):
            html = result._repr_html_()
            assert "<table" in html
            assert shown in html
            assert "a<b>" not in html
            assert "Interval" not in html
            assert len(repr(result)) < 2000
    assert len(repr(replace(simulated(1), title="long" * 1000))) < 2000
    many = dk.Answered(Path("m"), "classify", "cpu", tuple(map(str, range(50))), ())
    assert "19 and 30 more" in many._repr_html_()
    with dk.serve({"m": model}, grpc_port=None) as server:
        assert f'<a href="{server.url}">' in server._repr_html_()


def frame(html: str) -> str:
    return unescape(html.split('srcdoc="')[1].split('"')[0])


def test_reports_and_loads_show_their_tables_and_their_charts_in_a_frame(report: Report) -> None:
    html = report._repr_html_()
    assert report.verdict[0] in unescape(html)
    assert html.index("<table>") < html.index("<iframe")
    assert (html.count("<iframe"), 'sandbox=""' in html) == (1, True)
    assert frame(html).count("<figure>") == 4
    html = report.serving[0]._repr_html_()
    assert "32 connections" in html.split("<iframe")[0]
    assert frame(html).count("<figure>") == 1
    html = replace(report.serving[0], latency=None, ok=0)._repr_html_()
    assert ("<table>" in html, "<iframe" in html) == (True, False)  # no chart without an answer
