"""The documentation: its site builds without a warning, and what it shows works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deploykit
from deploykit.reporting.report import Report
from scripts.class_tables import PAGES as TABLES
from scripts.class_tables import SCHEMA, schema, written
from tests.support.blocks import BEGIN, begun, blocks, commands, run_page
from tests.support.campaign import only_in_a_campaign

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
LONG = {"howto-resnet", "howto-detector", "howto-bert"}  # they take minutes of CPU time
RUNNABLE = [
    pytest.param(page, id=page.stem, marks=[only_in_a_campaign] if page.stem in LONG else [])
    for page in PAGES
    if blocks(page, "sh", "python")
]


@pytest.fixture(scope="module", name="begun")
def begun_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of BEGIN ran."""
    for module in ("torch", "onnxscript", "sklearn", "onnxruntime"):
        pytest.importorskip(module)
    return begun(tmp_path_factory.mktemp("begun"))


def test_the_page_on_the_python_api_has_every_public_name_and_no_other() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (deploykit\S+)\.(\w+)$", page, re.M)
    members = re.search(r"members: \[(.+)\]", page)
    assert members is not None
    objects = {f"{module}:{name}" for module, name in shown if name != "errors"}
    objects |= {f"deploykit.core.errors:{name}" for name in members[1].split(", ")}
    options = {"deploykit.serving.options:ServeOptions"}  # whose fields `dk.serve` takes
    assert objects - options == set(deploykit._PUBLIC.values())


def test_the_site_builds_as_the_makefile_does(tmp_path: Path) -> None:
    """`make docs` without its venv. With --quiet, --strict would count no warning."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^docs: venv\n\t\$\(BIN\)/(.+)$", makefile, re.MULTILINE)
    assert recipe is not None
    program, *words = recipe[1].split()
    assert program == "mkdocs"
    assert "--strict" in words
    assert not {"-q", "--quiet"} & set(words)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words, "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    text = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert "quantize" in text
    pages = {path.with_suffix("").name for path in tmp_path.glob("*.html")}
    assert {page.stem for page in PAGES} <= pages


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("page", RUNNABLE)
def test_code_blocks_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for module in ("torch", "onnxscript", "sklearn", "onnxruntime", "tritonclient"):
        pytest.importorskip(module)
    for file in (ROOT / "docs" / "files").glob("*"):
        shutil.copy(file, tmp_path)
    done = BEGIN if BEGIN[0] in commands(page) else []
    if done:
        shutil.copytree(request.getfixturevalue("begun"), tmp_path, dirs_exist_ok=True)
    run_page(page, tmp_path, done)


@pytest.mark.slow
@pytest.mark.torch
def test_code_blocks_of_the_readme_run(begun: Path, tmp_path: Path) -> None:
    assert commands(README)[: len(BEGIN)] == BEGIN
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    run_page(README, tmp_path, BEGIN)
    assert (tmp_path / "report/report.html").is_file()


@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.stem)
def test_every_block_names_its_language(page: Path) -> None:
    fences = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(fences[::2]), "a fence without a language"
    assert set(fences[::2]) <= {"sh", "python", "console", "text", "toml", "json", "yaml"}


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)
def test_the_tables_name_every_class_and_key(page: Path) -> None:
    """When this fails: python scripts/class_tables.py."""
    assert page.read_text(encoding="utf-8") == written(page)


def test_the_schema_of_reports_is_that_of_the_classes() -> None:
    """When this fails: python scripts/class_tables.py."""
    assert SCHEMA.read_text(encoding="utf-8") == schema()


def test_the_page_on_reports_explains_every_key_at_the_top() -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    rows = text.partition("## Keys")[2].partition("\n###")[0].splitlines()
    first = " ".join(row.split("|")[1] for row in rows if row.startswith("| `"))
    keys = Report(title="", created="", command="").to_dict()
    assert sorted(re.findall(r"`(\w+)`", first)) == sorted(keys)
