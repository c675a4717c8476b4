"""The only place that prints: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from deploykit.core.errors import DeploykitError, GateFailed

_QUIET_S = 5.0  # between two progress lines where the terminal cannot rewrite one


class Result(Protocol):
    """What a verb returns."""

    def to_dict(self) -> dict[str, Any]: ...


def show(result: Result, text: str, *, as_json: bool) -> None:
    """Print one JSON document, or the text made for people."""
    print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if as_json else text)


def line(text: str) -> None:
    """Print one line on stdout and flush it: a reader of a pipe waits for it."""
    print(text, flush=True)


def note(text: str) -> None:
    """Print one line on stderr."""
    print(text, file=sys.stderr, flush=True)


def error(exc: DeploykitError) -> None:
    """The `error:` line and, where there is one, the `hint:` line."""
    note(f"error: {one_line(exc.message)}")
    if exc.hint:
        note(f"hint: {one_line(exc.hint)}")


def one_line(text: str) -> str:
    """Printable characters only: a file's name or a tensor's must not write on the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


@contextlib.contextmanager
def shown_on_failure(as_json: bool, text: Callable[[Any], str]) -> Iterator[None]:
    """When a gate fails, show what was measured before the error is."""
    try:
        yield
    except GateFailed as exc:
        if exc.result is not None:
            show(exc.result, text(exc.result), as_json=as_json)
        raise


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by their widest cell; the first is left-aligned, the others right-aligned."""
    cells = [[one_line(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        first, *others = zip(row, widths, strict=True)
        parts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(parts).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


class Progress:
    """A progress line on stderr: rewritten in place on a terminal, now and then elsewhere."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.rewrites = sys.stderr.isatty()
        self.last_s = -_QUIET_S
        self.open = False

    def __call__(self, text: str, share: float) -> None:
        message = f"{self.what}: {share * 100:3.0f} %  {one_line(text)}"
        if self.rewrites:
            print(f"\r\x1b[2K{message}", end="", file=sys.stderr, flush=True)
            self.open = True
        elif time.monotonic() - self.last_s >= _QUIET_S:
            self.last_s = time.monotonic()
            note(message)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.open:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
