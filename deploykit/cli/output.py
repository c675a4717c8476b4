"""Print results on stdout, notes and errors on stderr; no other module prints."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from deploykit.core.errors import DeploykitError, GateFailed
from deploykit.evaluation.formatting import Table

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


_STYLES = {  # first word of a line, or a cell -> its style on a terminal
    "note:": "yellow",
    "warning:": "yellow",
    "wrote": "green",
    "pass": "green",
    "works": "green",
    "fail": "red",
    "does not work": "red",
}


Part = str | Table
spell: Callable[[str], str] = str  # spells parameter names as the running command does


class JsonResult(Protocol):
    """The result of an API function."""

    def to_dict(self) -> dict[str, Any]: ...


def open_streams() -> None:
    """Make both streams accept any text; one that the caller closed (`>&-`) discards it."""
    while (free := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # else the next opened file would become standard output
    os.close(free)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open until exit
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def show(result: JsonResult, parts: Sequence[Part], *, as_json: bool) -> None:
    """Print one JSON document, or lines and tables for people."""
    if as_json:
        show_json(result.to_dict())
    else:
        show_parts(parts)


def show_json(document: Any) -> None:
    import json  # late: `--help` does not need it

    ascii_only = sys.stdout.encoding.lower() not in ("utf-8", "utf8")
    line(json.dumps(document, indent=2, ensure_ascii=ascii_only))


def show_parts(parts: Sequence[Part]) -> None:
    """Print with rich on a terminal, as plain text elsewhere."""
    if not is_terminal(sys.stdout):
        line("\n".join(_text(part) if isinstance(part, str) else _plain(part) for part in parts))
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    styles: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(highlight=False, color_system=styles)  # None: no styles
    for part in parts:
        if isinstance(part, str):
            first = part.lstrip().partition(" ")[0]
            console.print(Text(_text(part), style=_STYLES.get(first, "")), soft_wrap=True)
            continue
        head = any(part.columns)
        table = RichTable(box=None, show_header=head, pad_edge=False, padding=(0, 2, 0, 0))
        for at, name in enumerate(part.columns):
            whole = not any(" " in row[at] for row in part.rows)  # names stay whole, to be copied
            side: Literal["left", "right"] = "left" if at in part.text else "right"
            table.add_column(name, justify=side, overflow="fold", no_wrap=whole)
        for row in part.rows:
            table.add_row(*(Text(one_line(cell), style=_STYLES.get(cell, "")) for cell in row))
        console.print(table)


def _plain(table: Table) -> str:
    """Return the table as plain text, with columns as wide as their widest cell."""
    cells = [[one_line(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        pairs = enumerate(zip(row, widths, strict=True))
        parts = [c.ljust(w) if at in table.text else c.rjust(w) for at, (c, w) in pairs]
        lines.append("  ".join(parts).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]] if any(table.columns) else lines[1:])


def _text(part: str) -> str:
    """Return printable lines, as strings from a file must not control the terminal."""
    return "\n".join(map(one_line, spell(part).split("\n")))


def line(text: str) -> None:
    """Print on stdout and flush, so that the reader of a pipe gets the line at once."""
    print(text, flush=True)


def note(text: str) -> None:
    """Print one line on stderr, if stderr can still be written."""
    with contextlib.suppress(OSError):
        print(spell(text), file=sys.stderr, flush=True)


def note_line(text: str) -> None:
    """Print a note of a library function on stderr."""
    note(f"note: {one_line(text)}")


def command_line() -> str:
    """Return the running command as a shell would read it, to repeat it."""
    import shlex  # late: `--help` does not need it

    return shlex.join(["deploykit", *sys.argv[1:]])


def error(exc: DeploykitError) -> None:
    """Print the `error:` line and, if there is a hint, the `hint:` line."""
    note(colour("error:", "31;1", sys.stderr) + f" {one_line(exc.message)}")
    if exc.hint:
        note(colour("hint:", "36", sys.stderr) + f" {one_line(exc.hint)}")


def one_line(text: str) -> str:
    """Keep printable characters only, as names in files must not control the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colour(text: str, code: str, stream: TextIO) -> str:
    """Return `text` in an ANSI style if the terminal supports it and NO_COLOR is not set."""
    plain = os.environ.get("NO_COLOR") or not is_terminal(stream)
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"


def bold(text: str) -> str:
    return colour(text, "1", sys.stdout)


@contextlib.contextmanager
def shown_on_failure(as_json: bool, parts: Callable[[Any], Sequence[Part]]) -> Iterator[None]:
    """If a gate fails, show the measurements before the error."""
    try:
        yield
    except GateFailed as exc:
        if exc.result is not None:
            show(exc.result, parts(exc.result), as_json=as_json)
        raise


# The progress of a command: a bar with the time left on a terminal, else a line every 5 s.

_QUIET_S = 5.0  # interval of lines where there is no bar
_NUMBERS = re.compile(r"[\d,.]+")


class Progress:
    """Shows progress; call it with the current step and the completed share, 0 to 1.

    The bar takes one line of stderr and is erased at the end; other output on stderr goes above
    it. Log lines and a bar would mix, so `-v` prints a line for each step instead, with the
    seconds since the start.
    """

    def __init__(self, what: str, *, bar_only: bool = False) -> None:
        self.what, self.bar_only = what, bar_only
        self.last_s = -_QUIET_S
        self.started_s = time.monotonic()
        self.step = ""
        self.bar: Bar | None = None
        self.task: Any = None

    def __enter__(self) -> Progress:
        if is_terminal(sys.stderr) and not logging.root.handlers:
            from rich import progress
            from rich.console import Console

            self.bar = progress.Progress(
                progress.TextColumn("{task.fields[what]}", markup=False),
                progress.BarColumn(bar_width=20),
                progress.TaskProgressColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}", markup=False),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                refresh_per_second=4,
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=None, what=self.what)  # it pulses
        return self

    def __call__(self, text: str, share: float) -> None:
        message = one_line(text)
        if self.bar is not None:
            self.bar.update(self.task, total=1.0, completed=share, description=message)
            return
        now_s = time.monotonic()
        verbose = logging.root.isEnabledFor(logging.INFO)
        step = _NUMBERS.sub("", message)  # "32/540 samples" and "64/540 samples" are one step
        if verbose and step != self.step:
            due = True
        else:
            due = not self.bar_only and now_s - self.last_s >= (1.0 if verbose else _QUIET_S)
        if due:
            self.step, self.last_s = step, now_s
            after = f", after {now_s - self.started_s:.1f} s" if verbose else ""
            note(f"{self.what}: {share * 100:3.0f} %  {message}{after}")

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()
