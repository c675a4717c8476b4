"""What this machine is, which hardware targets there are, and the demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploykit.cli import output, texts
from deploykit.cli.types import Json


def register(app: typer.Typer) -> None:
    for command in (doctor, profiles, demo):
        app.command()(command)


def doctor(as_json: Json = False) -> None:
    """Show what this machine has, and which commands will therefore work."""
    from deploykit.api import doctor as health

    result = health.doctor()
    output.show(result, texts.health(result), as_json=as_json)


def profiles(
    name: Annotated[str | None, typer.Argument(help="One profile in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the hardware targets, with their figures and sources."""
    from deploykit.core.profile import load_profile, profile_names

    found = [load_profile(item) for item in ([name] if name else profile_names())]
    if as_json:
        documents = [profile.to_dict() for profile in found]
        output.line(json.dumps(documents[0] if name else documents, indent=2, ensure_ascii=False))
    else:
        output.line(texts.profile(found[0]) if name else texts.profiles(found))


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for artefacts and report.")
    ] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="Short timings, marked as such.")] = False,
    as_json: Json = False,
) -> None:
    """Train, export, quantise, build, compare, measure and serve a small model on real data."""
    from deploykit.api import demo as tour

    with output.Progress("demo") as progress:
        result = tour.demo(out, quick=quick, on_progress=progress, on_step=output.note)
    output.show(result, texts.demo(result), as_json=as_json)
