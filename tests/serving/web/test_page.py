"""The page's files: nothing external or inline, a strict security policy, and its charts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from deploykit import __version__
from deploykit.evaluation.formatting import MISSING, count, number
from deploykit.serving.observe.metrics import STAGES
from deploykit.serving.web import page
from deploykit.serving.web.page import FILES
from tests.support.fake_engine import FakeEngine
from tests.support.node import evaluate, needs_node
from tests.support.serving.running import GatedEngine, Running, infer_json, request, running

SOURCES = {name: body.decode() for name, (_, body) in FILES.items()}


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


Eventually = Callable[[Callable[[], bool]], None]


def test_status_counts_requests_and_their_stages(eventually: Eventually) -> None:
    noted = FakeEngine()
    noted.notes = ("runs on the CPU: requested cuda:0",)  # type: ignore[attr-defined]
    with running({"a": FakeEngine(), "b": noted}, queue=77) as server:
        before = server.ask("GET", "/status").json
        assert (
            server.ask("POST", "/v2/models/b/infer", infer_json([1, 2, 3, 4], [1, 4])).status == 200
        )
        server.ask("POST", "/v2/models/b/infer", b"{}")
        now = server.ask("GET", "/status").json
        a, b = now["models"]
        assert (a["name"], b["name"]) == ("a", "b")
        assert (a["rows"], b["rows"], b["batches"]) == (0, 1, {"1": 1})
        assert b["outcomes"]["success"] == b["outcomes"]["bad_request"] == 1
        assert sum(b["request"]["counts"]) == 1
        assert len(b["request"]["counts"]) == len(now["buckets_us"]) + 1
        assert list(b["stages_us"]) == list(STAGES)
        assert 0 < sum(b["stages_us"].values()) <= b["request"]["us"]
        assert b["stages_us"]["decode"] > 0
        assert b["stages_us"]["encode"] > 0
        assert (b["max_batch"], b["queue"], b["device"]) == (32, 77, "cpu")
        assert b["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        assert now["version"] == __version__
        assert now["at_us"] > before["at_us"]
        assert now["not_ready"] is b["not_ready"] is None
        assert b["notes"] == ["runs on the CPU: requested cuda:0"]
        eventually(lambda: server.ask("GET", "/status").json["process"] is not None)
        process = server.ask("GET", "/status").json["process"]
        assert process["resident_bytes"] > 10 << 20
        # two readings of the process, with times: the page computes the CPU share from them
        eventually(lambda: server.ask("GET", "/status").json["process"]["at_s"] > process["at_s"])
        connection = server.connect()
        server.server.repository.drain()
        reply = connection.ask(request("GET", "/status")).json
        assert reply["not_ready"] == "the server is shutting down"
        assert reply["models"][0]["not_ready"] == "the server is shutting down"


def test_status_has_the_most_that_waited_since_the_last_one(eventually: Eventually) -> None:
    """The chart showed 0 where the tile showed 8: when the loop has time, nothing waits."""
    engine = GatedEngine(max_batch=1)
    with running({"m": engine}, max_batch=1) as server:
        engine.warm = True
        body = infer_json([1, 2, 3, 4], [1, 4])
        raws = [server.connect() for _ in range(4)]
        for raw in raws:
            raw.send(request("POST", "/v2/models/m/infer", body))
            assert raw is not raws[0] or engine.entered.acquire(timeout=20)  # it waits no more
        eventually(lambda: server.server.repository.models["m"].batcher.waiting == 3)
        engine.gate.set()
        assert [raw.status() for raw in raws] == [200] * 4
        looks = [server.ask("GET", "/status").json["models"][0]["waiting"] for _ in range(2)]
        assert looks == [3, 0]
