"""Read the style sheet that the report and the dashboard share."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_suffix("")
NAMES = ("look.css",)


def asset(name: str) -> str:
    """The text of one of `NAMES`."""
    return (FOLDER / name).read_text(encoding="utf-8")
