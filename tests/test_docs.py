"""README and docs: the site builds without a warning, and what they show is there and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import deploykit
from deploykit.cli.main import app
from deploykit.core.files import read_toml
from deploykit.reporting.report import Report
from scripts.class_tables import PAGES as TABLES
from scripts.class_tables import SCHEMA, schema, written
from scripts.pages import BEGIN, begun, blocks, commands, place, run, run_page
from scripts.shown_lines import ELSEWHERE, PAGES, README, SHOWN
from tests.support.campaign import only_in_a_campaign
from tests.support.cli.command import Run, one_process
from tests.support.installed import needs

ROOT = Path(__file__).resolve().parent.parent
LONG = {"howto-resnet", "howto-detector", "howto-bert"}  # they take minutes of CPU time
RUNNABLE = [
    pytest.param(page, id=page.stem, marks=[only_in_a_campaign] if page.stem in LONG else [])
    for page in PAGES
    if blocks(page, "sh", "python")
]


@pytest.fixture(scope="module", name="begun")
def begun_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of BEGIN ran."""
    return begun(tmp_path_factory.mktemp("begun"))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One for the command lines and programs of all pages but the README."""
    with one_process(env=place(), cwd=tmp_path_factory.mktemp("process")) as call:
        yield call


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("page", RUNNABLE)
def test_code_blocks_run(
    page: Path, tmp_path: Path, process: Run, request: pytest.FixtureRequest
) -> None:
    needs("torch", "onnxscript", "sklearn", "onnxruntime", "tritonclient")
    for file in (ROOT / "docs" / "files").glob("*"):
        shutil.copy(file, tmp_path)
    done = BEGIN if BEGIN[0] in commands(page) else []
    if page.stem == "index":
        done = commands(README)  # it shows some of them, in their order
        shown = [command for command in commands(page) if command in done]
        assert shown == [command for command in done if command in shown]
    elif done:
        shutil.copytree(request.getfixturevalue("begun"), tmp_path, dirs_exist_ok=True)
    run_page(page, tmp_path, done, None if page == README or page.stem in LONG else process)
    if page == README:
        assert commands(README)[: len(BEGIN)] == BEGIN
        assert (tmp_path / "report/report.html").is_file()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.nvidia
def test_nvidias_parser_takes_what_the_readme_bundles(tmp_path: Path) -> None:
    needs("torch", "onnxscript", "sklearn", "onnxruntime")
    pytest.importorskip("tensorrt", reason="NVIDIA's parser and builder are not here")
    shutil.copytree(begun(tmp_path), tmp_path, dirs_exist_ok=True)
    bundled = 0
    for command in commands(README):
        if command[1] in ("quantize", "bundle"):
            run(command, tmp_path)
        if command[1] == "bundle":
            profile, out = (command[command.index(name) + 1] for name in ("--profile", "-o"))
            (model,) = (tmp_path / out / "model").glob("*.onnx")
            run(["deploykit", "build", str(model), "--profile", profile, "--check"], tmp_path)
            bundled += 1
    assert bundled


@pytest.mark.parametrize("line", SHOWN)
def test_a_line_in_a_console_block_parses(line: str) -> None:
    assert set(ELSEWHERE) <= {part for words in SHOWN.values() for part in words}
    _, name, *words = SHOWN[line]
    root = typer.main.get_command(app)
    command = root.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, words, parent=typer.Context(root))


@only_in_a_campaign
@pytest.mark.torch
def test_every_line_in_a_console_block_runs(tmp_path: Path) -> None:
    needs("torch", "onnxscript", "safetensors", "PIL")
    command = [sys.executable, "-m", "scripts.shown_lines", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_the_readme_is_short_and_shows_every_command_and_the_line_from_training_to_serving() -> (
    None
):
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"deploykit {name}" in text or f"make {name}" in text, name
    words = [command[1] for command in commands(README)]
    assert {"train", "export", "quantize", "build", "compare", "bench", "load", "-c"} <= {*words}
    assert words.count("serve") == 1
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


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
    needs("material", "mkdocstrings")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^docs: venv\n\t\$\(BIN\)/mkdocs (.+)$", makefile, re.MULTILINE)
    assert recipe is not None
    words = recipe[1].split()
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
    assert "quantize" in (tmp_path / "api.html").read_text(encoding="utf-8")
    pages = {path.with_suffix("").name for path in tmp_path.glob("*.html")}
    assert {page.stem for page in PAGES[1:]} <= pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_names_its_language(page: Path) -> None:
    fences = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(fences[::2]), "a fence without a language"
    assert set(fences[::2]) <= {"sh", "python", "console", "text", "toml", "json", "yaml"}


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)
def test_tables_and_schema_are_those_of_the_classes(page: Path) -> None:
    """When this fails: python scripts/class_tables.py."""
    assert page.read_text(encoding="utf-8") == written(page)
    assert SCHEMA.read_text(encoding="utf-8") == schema()


def test_the_page_on_reports_explains_every_key_at_the_top() -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    rows = text.partition("## Keys")[2].partition("\n###")[0].splitlines()
    first = " ".join(row.split("|")[1] for row in rows if row.startswith("| `"))
    keys = Report(title="", created="", command="").to_dict()
    assert sorted(re.findall(r"`(\w+)`", first)) == sorted(keys)


def test_the_lines_to_install_with_are_the_same_everywhere_and_their_extras_exist() -> None:
    text = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
    line = re.compile(r"^\$ pip install '\.\[([\w,-]+)\]'", re.MULTILINE)
    four = line.findall(text["README"])
    assert ["tensorrt" in each for each in four] == [True, False, False, False]
    assert line.findall(text["index"]) == four
    (jetson,) = line.findall(text["jetson"])
    assert jetson in four
    known = set(read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"])
    for page in text.values():
        for extras in re.findall(r"'\.\[([\w,-]+)\]'", page):
            names = set(extras.split(","))
            assert names <= known, extras
            assert not {"cpu", "gpu"} <= names, extras  # one is installed against the other
    section = text["index"].partition("## Install")[2].partition("\n## ")[0]
    assert known - {"dev", "lint", "tensorrt", "quantize"} <= set(re.findall(r"[\w-]+", section))
