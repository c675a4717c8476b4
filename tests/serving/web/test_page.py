"""The page's files: nothing external, nothing inline, and a strict content security policy."""

from __future__ import annotations

import re

import pytest

from deploykit.serving.web.page import FILES
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
