"""The help pages, and completion in a shell."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from deploykit.cli.commands import reference
from deploykit.cli.main import app
from tests.support.cli.command import Run

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_commands_are_listed_in_groups_with_what_their_pages_say_first(run: Run) -> None:
    page = run("--help").out
    headings = [line for line in page.splitlines() if line.endswith(":")]
    assert headings == ["Make:", "Plan:", "Prove:", "Serve:", "Deploy:", "Machine:", "Options:"]
    assert "\x1b" not in page  # stdout is a pipe
    for name, command in COMMANDS.items():
        about = " ".join(command.help.partition("\n\n")[0].split())
        assert f" {name} {about}" in " ".join(page.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_page_has_an_example_that_parses_and_explains_every_option(
    run: Run, command: str
) -> None:
    page = run(command, "--help").out
    example = page.partition("Example:\n")[2].splitlines()[0].strip()
    program, name, *words = shlex.split(example)
    assert (program, name) == ("deploykit", command)
    COMMANDS[command].make_context(name, words, parent=typer.Context(typer.main.get_command(app)))
    assert f"Documentation: {reference()}\n" in page
    assert Path(reference()).is_file()
    assert not re.search(r"<\w+>", page)  # a type of Python
    for parameter in COMMANDS[command].params:
        assert parameter.help, parameter.name
        if not getattr(parameter, "is_flag", False):
            name, _ = parameter.get_help_record(typer.Context(COMMANDS[command])) or ("", "")
            assert parameter.metavar or "|" in name, parameter.name


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_a_page_is_as_wide_as_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    page = run("serve", "--help").out.partition("Options:")[2].partition("Documentation:")[0]
    widest = max(map(len, page.splitlines()))
    assert widest <= columns
    assert widest > min(columns, 110) - 25


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("quantize", "--to fp16|bf16|int8|int8-dynamic|fp8|int8-weight-only|int4-weight-only|auto"),
        ("quantize", "[default: fp32]"),
        ("export", "[default: 20, or what the profile needs]"),
        ("bench", "[default: 60, or 1.5 with --quick]"),
        ("serve", "--log text|json"),
        ("train", "--device auto|cpu|cuda "),
    ],
)
def test_choices_and_defaults_are_shown(run: Run, command: str, shown: str) -> None:
    assert shown in " ".join(run(command, "--help").out.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("deploykit qu", ["quantize"]),
        ("deploykit build m.onnx --profile jetson-orin-nano", ["jetson-orin-nano-4gb"]),
        ("deploykit train mni", ["mnist-cnn"]),
        ("deploykit quantize m.onnx --to int8", ["int8", "int8-dynamic", "int8-weight-only"]),
        ("deploykit serve --lo", ["--log"]),
    ],
)
def test_a_shell_completes_commands_profiles_recipes_and_choices(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: str, offered: list[str]
) -> None:
    monkeypatch.setenv("_DEPLOYKIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert set(offered) <= set(run().out.split())


def test_the_command_reference_in_the_docs_is_the_help() -> None:
    """When this fails: python scripts/cli_reference.py."""
    root = Path(__file__).resolve().parents[2]
    program = "import cli_reference as r; assert r.PAGE.read_text() == r.render()"
    subprocess.run([sys.executable, "-c", program], cwd=root / "scripts", check=True)


GOLDEN = Path(__file__).parent / "options.txt"


def listed() -> str:
    """One line for each parameter of each command: names, and whether it is required."""
    root = typer.main.get_command(app)
    lines = []
    for name, command in sorted(root.commands.items()):  # type: ignore[attr-defined]
        for parameter in command.params:
            names = " ".join([*parameter.opts, *parameter.secondary_opts])
            needed = " (required)" if parameter.required else ""
            if names != "--help -h":
                lines.append(f"{name}: {names}{needed}")
    return "\n".join(lines) + "\n"


def test_the_options_are_the_reviewed_ones(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(listed())
    assert listed() == GOLDEN.read_text()
