"""The page: complete, self-contained, escaped, readable in light and dark."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.evidence import Gate
from deploykit.evaluation.formatting import spread
from deploykit.reporting.html import CSS, report_page
from deploykit.reporting.markdown import markdown
from deploykit.reporting.report import NotMeasured, Report, write
from deploykit.reporting.verdict import verdict
from tests.support.measure.browser import CHROMIUM, loaded

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
    """The JSON that a page holds under this name."""
    return json.loads(text.split(f'id="{name}">')[1].split("</script>")[0])


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


def test_headings_are_in_order_and_ids_are_unique(report: Report) -> None:
    found = Page(report_page(report.to_dict()))
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    ids = Counter(attrs["id"] for _, attrs in found.elements if "id" in attrs)
    assert max(ids.values()) == 1
    for _, attrs in found.elements:
        for name in str(attrs.get("aria-labelledby") or "").split():
            assert name in ids
    assert found.all("html") == [{"lang": "en"}]
    titles = re.findall(r'<h2 id="[^"]*">([^<]*)', report_page(report.to_dict()))
    regions = [attrs["aria-label"] for attrs in found.all("div") if attrs.get("role") == "region"]
    assert len(titles) > 4
    assert len({*titles, *regions}) == len(titles) + len(set(regions))  # each landmark has a name


def test_the_order_is_verdict_chart_table_charts_method_everything(report: Report) -> None:
    text = report_page(report.to_dict())
    parts = ('class="verdict"', "<svg ", 'id="short"', "<table>", 'id="charts"')
    places = [text.index(part) for part in parts]
    places += [text.index(part) for part in ('id="method"', 'id="everything"')]
    assert places == sorted(places)
    shown = text.split('class="verdict">')[1].split("</p>")[0]
    assert shown == report.verdict[0]


def test_every_chart_has_a_written_finding_and_its_data_as_a_table(report: Report) -> None:
    text = report_page(report.to_dict())
    figures = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        assert re.search(r'<svg class="(plot|bar)" role="img" aria-label="[^"]+">', figure)
        assert re.search(r"<figcaption>[^<]{20,}</figcaption>", figure)
    cells = re.findall("<t[dh][^>]*>(.*?)</t[dh]>", text, re.DOTALL)
    texts = {re.sub("<[^>]+>", "", cell) for cell in cells}
    for point in report.points:
        values = (point.latency.p50_ms, point.throughput_per_s)
        assert {spread(each.to_dict()) for each in values if each} <= texts


def test_tables_name_their_rows_and_columns_and_align_figures(report: Report) -> None:
    text = report_page(report.to_dict())
    for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        head, body = table.split("</thead>")
        assert "<th scope=" in head
        columns = head.count('scope="col"')
        for row in re.findall(r"<tr>.*?</tr>", body):
            assert row.startswith('<tr><th scope="row">')
            assert row.count("<td") == columns - 1
    assert '<td class="n">1.84 <small>[' in text
    assert ".n { text-align: right" in CSS


def test_the_document_is_embedded_whole(report: Report) -> None:
    text = report_page(report.to_dict())
    assert data_of(text, "report-data") == json.loads(json.dumps(report.to_dict()))


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


def test_a_report_with_nothing_in_it_has_sentences_and_no_empty_frames() -> None:
    text = report_page(Report("nothing", "2026", "").to_dict())
    Page(text)
    assert "<svg" not in text
    assert "<table>" not in text
    assert "were not measured" in text
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
    assert f"× {report.baseline}, same batch" in text  # which baseline the ratios are of


def test_a_report_holds_no_folder_of_the_machine(report: Report, tmp_path: Path) -> None:
    """Nor does its JSON: it is made to be shared."""
    mine = replace(
        report,
        command="/nas/me/bin/deploykit bench '/home/me/secret project/m.onnx' /nas/me/n.onnx "
        "--data=/disk2/me/d.npz 'D:\\me\\o.onnx' ./a/b.onnx -o /tmp/x/report",
        not_measured=(NotMeasured("OpenVINO", "pip install '/srv/clone/deploykit[openvino]'"),),
        provenance={"environment": {"LD_LIBRARY_PATH": "/opt/me/lib:/usr/me/lib64"}},
        notes=(
            "read from /sys/class/powercap",
            "http://host:8000/v2/models/m",
            "3/4 of a/b",
            "/layer1/conv",
            "file:///home/me/notes.txt",
        ),
    )
    write(replace(mine, verdict=verdict(mine)), tmp_path)
    for name in ("report.json", "report.md", "report.html"):
        text = (tmp_path / name).read_text("utf-8")
        assert not re.search(r"\bme[/\\]|secret|/tmp/x|/srv/clone|disk2|file:", text)
        assert "--data=d.npz" in text
        assert "./a/b.onnx" in text
        assert "/sys/class/powercap" in text
        assert "http://host:8000/v2/models/m" in text
        assert "3/4 of a/b" in text
        assert "/layer1/conv" in text


NARROW = """
<script type="module">
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
parent.document.title = 'beyond ' + wide + ' of ' + document.documentElement.clientWidth;
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_phone_need_not_scroll_sideways(report: Report, tmp_path: Path) -> None:
    long = "pip-install-" + "x" * 200
    wide = replace(report, title=long, not_measured=(NotMeasured(long, long),), notes=(long,))
    text = write(replace(wide, verdict=(long, *verdict(wide))), tmp_path).read_text()
    page = re.sub("<meta http-equiv=[^>]*>", "", text).replace("</body>", NARROW + "</body>")
    (tmp_path / "page.html").write_text(page)
    source = page.replace("&", "&amp;").replace('"', "&quot;")
    frame = f'<iframe width="390" height="800" srcdoc="{source}"></iframe>'
    (tmp_path / "phone.html").write_text(f"<!doctype html><title>?</title>{frame}")
    shown = loaded(tmp_path / "phone.html", tmp_path / "profile")
    assert re.search("<title>beyond 0 of 3[789][0-9]</title>", shown), shown[:200]


def test_a_gate_that_was_not_met_is_written_out(report: Report) -> None:
    text = report_page(replace(report, gates=(Gate("parity", False, "error 1"),)).to_dict())
    assert '<li class="unmet"><strong>✗ NOT met</strong> parity' in text


def test_the_page_says_a_thing_once(report: Report) -> None:
    """What was not measured stood there three times, and each title of a table twice."""
    shown, _, _ = report_page(report.to_dict()).partition('<script type="application/json"')
    assert shown.count("no NVIDIA GPU on this machine") == 1
    assert "best GPU" not in shown
    assert "<caption>" not in shown


def test_the_sizes_of_the_inputs_are_next_to_the_short_table(report: Report) -> None:
    sized = [replace(each, shapes={"x": (each.batch, 3, 8)}) for each in report.points]
    page = report_page(replace(report, points=tuple(sized)).to_dict())
    assert "Inputs of the smallest batch: x 1×3×8." in page


OVERLAPS = """
<script type="module">
const found = [];
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBBox()]);
  texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
    if (p.x < q.x + q.width && p.x + p.width > q.x && p.y < q.y + q.height && p.y + p.height > q.y)
      found.push(a + ' / ' + b);
  }));
}
document.title = 'texts ' + document.querySelectorAll('svg text').length + ' overlaps '
  + JSON.stringify(found);
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_real_browser_lays_out_no_text_of_a_chart_over_another(
    report: Report, tmp_path: Path
) -> None:
    text = write(report, tmp_path).read_text()
    open_to_scripts = re.sub("<meta http-equiv=[^>]*>", "", text)
    (tmp_path / "probe.html").write_text(open_to_scripts.replace("</body>", OVERLAPS + "</body>"))
    shown = loaded(tmp_path / "probe.html", tmp_path / "profile")
    title = re.search("<title>(texts [1-9][^<]*)</title>", shown)
    assert title is not None
    assert title[1].endswith("overlaps []")
