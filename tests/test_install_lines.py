"""The lines to install with are the same wherever they stand, and their extras exist."""

from __future__ import annotations

import re
from pathlib import Path

from deploykit.core.files import read_toml

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"^\$ pip install '\.\[([\w,-]+)\]'", re.MULTILINE)


def extras(page: str) -> list[str]:
    return LINE.findall((ROOT / page).read_text(encoding="utf-8"))


def test_readme_and_first_page_have_the_same_four_lines_and_jetsons_page_one_of_them() -> None:
    four = extras("README.md")
    assert len(four) == 4
    assert extras("docs/index.md") == four
    (jetson,) = extras("docs/jetson.md")
    assert jetson in four
    assert ["tensorrt" in line for line in four] == [True, False, False, False]


def test_every_extra_that_is_named_exists_and_none_is_installed_against_another() -> None:
    known = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    for page in ("README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))):
        for line in re.findall(r"'\.\[([\w,-]+)\]'", (ROOT / page).read_text(encoding="utf-8")):
            names = line.split(",")
            assert set(names) <= set(known), (page, line)
            assert not {"cpu", "gpu"} <= set(names), (page, line)


def test_the_first_page_names_every_extra_of_users() -> None:
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8").partition("## Install")[2]
    known = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    named = set(re.findall(r"[\w-]+", page.partition("\n## ")[0]))
    assert set(known) - {"dev", "lint", "tensorrt", "quantize"} <= named
