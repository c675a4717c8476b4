"""The page's files: nothing from elsewhere, nothing inline, readable in light and in dark."""

from __future__ import annotations

import re

import pytest

from deploykit.serving.web.page import FILES
from tests.support.contrast import contrast
from tests.support.serving.running import Running

TEXTS = {name: body.decode() for name, (_, body) in FILES.items()}
THEME = re.compile(r"--([a-z0-9-]+): (#[0-9a-f]{6});")


def themes() -> dict[str, dict[str, str]]:
    light, dark = TEXTS["/page.css"].split("@media (prefers-color-scheme: dark)")
    return {
        "light": dict(THEME.findall(light)),
        "dark": dict(THEME.findall(dark.split("* {")[0])),
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_a_contrast_of_4_5_and_graphics_of_3(theme: str) -> None:
    colours = themes()[theme]
    assert len(colours) == 19
    for ground in ("ground", "card"):
        for text in ("ink", "quiet", "good", "bad", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    for look in range(9):
        assert contrast(colours[f"c{look}"], colours["card"]) >= 3, look


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
    assert set(FILES) - {"/"} <= asked


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
