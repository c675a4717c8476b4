"""The full list of options: a new or changed one is a line of a file that is reviewed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import deploykit as dk
from deploykit.cli import deploy, make, plan, prove, serve
from deploykit.cli.main import app

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


CALLS: dict[Callable[..., None], Any] = {
    make.train: dk.train,
    make.export: dk.export,
    make.quantize: dk.quantize,
    plan.plan: dk.plan,
    prove.compare: dk.compare,
    serve.load: dk.load_test,
    deploy.bundle: dk.bundle,
}  # these hand `locals()` on, where mypy sees nothing
OWN = {
    "as_json",
    "compare_devices",
    "axis",
    "fail_on_regression",
    "token_file",
}  # handed on changed


@pytest.mark.parametrize("command", CALLS, ids=lambda command: command.__name__)
def test_a_command_gives_what_its_function_takes(command: Callable[..., None]) -> None:
    given = inspect.signature(command).parameters.keys() - OWN
    assert given <= inspect.signature(CALLS[command]).parameters.keys()
