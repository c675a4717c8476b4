"""The full list of options: a new or changed one is a line of a file that is reviewed."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

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
