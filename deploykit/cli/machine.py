"""`deploykit doctor`, `profiles` and `demo`: this machine, the hardware targets, the whole tour."""

from __future__ import annotations

from pathlib import Path

from deploykit.cli import hardware, output, tables
from deploykit.cli.options import FORCE, JSON, described
from deploykit.cli.progress import Progress


@described(JSON)
def doctor(as_json: bool = False) -> None:
    """Show what this machine has and which commands work on it.

    Example: deploykit doctor
    """
    from deploykit.api import doctor as health

    result = health.doctor()
    output.show(result, hardware.doctor(result), as_json=as_json)


@described(f"PROFILE  Show this profile in full\n{JSON}")
def profiles(name: str | None = None, as_json: bool = False) -> None:
    """List the hardware targets with their figures and sources.

    Example: deploykit profiles jetson-orin-nano-8gb@15W
    """
    from deploykit.core.profile import load_profile, profile_names

    found = [load_profile(item) for item in ([name] if name else profile_names())]
    if as_json:
        documents = [profile.to_dict() for profile in found]
        output.show_json(documents[0] if name else documents)
    else:
        output.show_parts(hardware.card(found[0]) if name else hardware.profiles(found))


@described(f"""
-o --out DIR           Folder for the models and the report
{FORCE}
--quick                Measure briefly; the report is marked as such
{JSON}""")
def demo(
    out: Path = Path("out"), force: bool = False, quick: bool = False, as_json: bool = False
) -> None:
    """Run all steps, from training to serving, on real data.

    Example: deploykit demo --quick -o out
    """
    from deploykit.api import demo as tour

    with Progress("demo") as progress:
        result = tour.demo(out, force=force, quick=quick, on_progress=progress, on_step=output.note)
    output.show(result, tables.demo(result), as_json=as_json)
