"""The page's files: nothing from elsewhere, nothing inline, and a policy that holds it to that."""

from __future__ import annotations

import re

import pytest

from deploykit.serving.web.page import FILES
from tests.support.serving.running import Running

TEXTS = {name: body.decode() for name, (_, body) in FILES.items()}


def test_nothing_is_loaded_from_elsewhere() -> None:
    for name, text in TEXTS.items():
        found = set(re.findall(r"https?://[^\s\"')]+", text))
        assert found <= {"http://www.w3.org/2000/svg"}, name  # a namespace, not an address


def test_nothing_is_inline_and_nothing_is_parsed_as_html() -> None:
    page = TEXTS["/"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|javascript:", page)
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            found = re.findall(
                r"\.innerHTML\s*=[^=]|outerHTML|insertAdjacent|\beval\b|Function\(", text
            )
            assert found == [], name
            assert "document.write" not in text


def test_every_file_that_is_asked_for_is_there() -> None:
    asked = set(re.findall(r'(?:href|src)="(/[^"]+)"', TEXTS["/"]))
    for text in TEXTS.values():
        asked |= {f"/{name}" for name in re.findall(r'from "\./([a-z]+\.js)"', text)}
    assert asked - set(FILES) == {"/docs", "/metrics"}
    assert set(FILES) - {"/", "/docs.js"} <= asked  # that one is the page's at /docs


@pytest.mark.parametrize("target", sorted(FILES))
def test_the_server_gives_each_file_with_a_strict_policy(server: Running, target: str) -> None:
    reply = server.ask("GET", target)
    content_type, body = FILES[target]
    assert (reply.status, reply.body) == (200, body)
    assert reply.headers["content-type"] == content_type
    policy = reply.headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert not any("unsafe" in part for part in policy)
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert server.ask("POST", target).status == 405
