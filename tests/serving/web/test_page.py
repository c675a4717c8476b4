"""The page's files: nothing external or inline, a strict security policy, and its charts."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from deploykit.evaluation.formatting import MISSING, count, number
from deploykit.serving.web import page
from deploykit.serving.web.page import FILES
from tests.support.node import evaluate, needs_node
from tests.support.serving.running import Running

SOURCES = {name: body.decode() for name, (_, body) in FILES.items()}


def test_the_page_loads_nothing_from_other_hosts() -> None:
    for name, text in SOURCES.items():
        found = set(re.findall(r"https?://[^\s\"')]+", text))
        assert found <= {"http://www.w3.org/2000/svg"}, name  # a namespace, not an address


def test_the_page_has_no_inline_code_and_parses_no_html() -> None:
    page = SOURCES["/"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|javascript:", page)
    for name, text in SOURCES.items():
        if name.endswith(".js"):
            found = re.findall(
                r"\.innerHTML\s*=[^=]|outerHTML|insertAdjacent|\beval\b|Function\(", text
            )
            assert found == [], name
            assert "document.write" not in text


def test_every_referenced_file_exists_and_every_file_is_referenced() -> None:
    referenced = {f"/{name}" for name in re.findall(r'(?:href|src)="([^"]+)"', SOURCES["/"])}
    for text in SOURCES.values():
        referenced |= {f"/{name}" for name in re.findall(r'from "\./([a-z]+\.js)"', text)}
    assert referenced - set(FILES) == {"/docs", "/metrics"}
    assert set(FILES) - {"/", "/docs.js"} <= referenced  # that one is the page's at /docs


@pytest.mark.parametrize("target", [*sorted(FILES), "/docs"])
def test_each_file_is_served_with_a_strict_content_security_policy(
    server: Running, target: str
) -> None:
    reply = server.ask("GET", target)
    if target in FILES:
        content_type, body = FILES[target]
        assert (reply.status, reply.body) == (200, body)
        assert reply.headers["content-type"] == content_type
    policy = reply.headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert not any("unsafe" in part for part in policy)
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert server.ask("POST", target).status == 405


# -- The charts and numbers of the dashboard


CHARTS = Path(page.__file__).with_suffix("") / "charts.js"

SVG = "{http://www.w3.org/2000/svg}"


@needs_node
def test_the_page_writes_numbers_as_the_report_does() -> None:
    values = [0, 12345, 1.234, 9.996, 999.6, 0.0456, -3.2, 1e-7, 0.5, 100, 1e6, 42, 7.25e8]
    assert evaluate(CHARTS, "v.x.map((x) => m.number(x))", x=values) == list(map(number, values))
    assert evaluate(CHARTS, "m.number(null)") == MISSING
    axis = evaluate(CHARTS, "m.axis([7.0, 11.3], {zero: true})")
    assert [text for _, text in axis["ticks"]] == ["0.0", "2.5", "5.0", "7.5", "10.0", "12.5"]
    whole = [0, 7, 999, 1000, 12345, -12]
    assert evaluate(CHARTS, "v.x.map((x) => m.count(x))", x=whole) == list(map(count, whole))


@needs_node
def test_names_are_escaped() -> None:
    line = {"label": "<i>", "look": 1, "marks": [{"x": 0, "y": 1}, {"x": 1, "y": 2}]}
    svg = evaluate(CHARTS, "m.draw(v.c)", c={"alt": "a<b", "series": [line, line]})
    assert ET.fromstring(svg).get("aria-label") == "a<b"
    assert "<i>" in [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert evaluate(CHARTS, "m.draw({series: [], alt: ''})") == ""
