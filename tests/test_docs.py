"""The documentation: its site builds without a warning, and what it shows works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.measure.report.report import Report
from scripts.class_tables import PAGES as TABLES
from scripts.class_tables import written
from tests.support.blocks import blocks, run_page, unknown_options
from tests.support.campaign import only_in_a_campaign

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
LONG = {"howto-resnet", "howto-detector", "howto-bert"}  # they take minutes of CPU time
RUNNABLE = [
    pytest.param(page, id=page.stem, marks=[only_in_a_campaign] if page.stem in LONG else [])
    for page in PAGES
    if blocks(page, "sh", "python")
]


@pytest.fixture(scope="session")
def helps() -> dict[str, str]:
    """The `--help` text of each command."""

    def text(*words: str) -> str:
        command = [sys.executable, "-m", "deploykit", *words, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    from typer.main import get_command

    from deploykit.cli.main import app

    return {name: text(name) for name in get_command(app).commands}


@pytest.mark.slow
def test_site_builds_in_strict_mode(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert "quantize" in text
    pages = {path.with_suffix("").name for path in tmp_path.glob("*.html")}
    assert {page.stem for page in PAGES} <= pages


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("page", RUNNABLE)
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    for module in ("torch", "onnxscript", "sklearn", "onnxruntime", "tritonclient"):
        pytest.importorskip(module)
    for file in (ROOT / "docs" / "files").glob("*"):
        shutil.copy(file, tmp_path)
    assert run_page(page, tmp_path)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_commands_that_are_only_shown_have_options_that_exist(
    page: Path, helps: dict[str, str]
) -> None:
    assert not unknown_options(page, helps)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_block_names_its_language(page: Path) -> None:
    fences = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(fences[::2]), "a fence without a language"
    assert set(fences[::2]) <= {"sh", "python", "console", "text", "toml", "json", "yaml"}


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)
def test_the_tables_name_every_class_and_key(page: Path) -> None:
    """When this fails: python scripts/class_tables.py."""
    assert page.read_text(encoding="utf-8") == written(page)


def test_the_page_on_reports_explains_every_key_at_the_top() -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    rows = text.partition("## Keys")[2].partition("\n###")[0].splitlines()
    first = " ".join(row.split("|")[1] for row in rows if row.startswith("| `"))
    keys = Report(title="", created="", command="").to_dict()
    assert sorted(re.findall(r"`(\w+)`", first)) == sorted(keys)
