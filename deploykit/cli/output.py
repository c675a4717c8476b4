"""Print results on stdout, notes and errors on stderr; no other module prints."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from deploykit.core.errors import DeploykitError, GateFailed
from deploykit.evaluation.formatting import Table

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_STYLES = {  # first word of a line, or a cell -> its ANSI style on a terminal
    "note:": "33",
    "warning:": "33",
    "wrote": "32",
    "pass": "32",
    "works": "32",
    "fail": "31",
    "does not work": "31",
}
_NARROW = 16  # least width to which text wraps

Part = str | Table
spell: Callable[[str], str] = str  # spells parameter names as the running command does


def open_streams() -> None:
    """Make both streams accept any text; one that the caller closed (`>&-`) discards it."""
    while (free := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(free, True)  # else the next file opened here, or in a child, becomes it
    os.close(free)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open until exit
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def show(result: Any, parts: Sequence[Part], *, as_json: bool) -> None:
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
    """Print lines and tables; on a terminal with colours, and no wider than it is."""
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            lines += _table_lines(part, width)
        else:
            first = part.lstrip().partition(" ")[0]
            lines += [_styled(each, first) for each in _text(part).split("\n")]
    line("\n".join(lines))


def _styled(text: str, word: str) -> str:
    return colour(text, _STYLES[word], sys.stdout) if word in _STYLES else text


def _table_lines(table: Table, width: int | None) -> list[str]:
    """Fit a table into `width`: drop empty columns, then wrap text, then continue below."""
    cells = [[one_line(cell) for cell in row] for row in (table.columns, *table.rows)]
    columns = dict(enumerate(zip(*cells, strict=True)))
    widths = {at: max(map(len, column)) for at, column in columns.items()}

    def excess(kept: Sequence[int]) -> int:
        return sum(widths[at] + 2 for at in kept) - 2 - (width or sys.maxsize)

    kept = list(columns)
    if excess(kept) > 0:
        kept = [at for at in kept if at == 0 or set(columns[at][1:]) - {"", "-"}]
    for at in sorted(kept, key=lambda at: -widths[at]):
        if (more := excess(kept)) > 0:
            head, *body = columns[at]
            parts = [*head.split(), *(body if at == 0 or at not in table.text else [])]
            longest = max(map(len, parts), default=0)
            floor = _NARROW if at and at in table.text else 0
            least = max(floor, longest if at else min(longest, (width or 0) // 2))
            widths[at] = min(widths[at], max(least, widths[at] - more))
    blocks = [kept[:1]]
    for at in kept[1:]:
        if excess([*blocks[-1], at]) > 0 and len(blocks[-1]) > 1:
            blocks.append(kept[:1])
        blocks[-1].append(at)
    lines = []
    for block in blocks:
        for number, row in enumerate(cells if any(table.columns) else cells[1:]):
            wrapped = [textwrap.wrap(row[at], widths[at] or 1) or [""] for at in block]
            for several in itertools.zip_longest(*wrapped, fillvalue=""):
                padded = [
                    _styled(c.ljust(widths[at]) if at in table.text else c.rjust(widths[at]), c)
                    for at, c in zip(block, several, strict=True)
                ]
                text = "  ".join(padded).rstrip()
                lines.append(bold(text) if any(table.columns) and number == 0 else text)
            if number == 0 and any(table.columns):
                lines.append("  ".join("-" * widths[at] for at in block))
        lines += [""] * (block is not blocks[-1])
    return lines


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


class Progress(contextlib.ExitStack):
    """Shows progress; call it with the current step and the completed share, 0 to 1.

    The bar takes one line of stderr and is erased at the end; other output on stderr goes above
    it, and so does what the user's code prints, as stdout is for the result. Log lines and a bar
    would mix, so `-v` prints a line for each step instead, with the seconds since the start.
    """

    def __init__(self, what: str, *, bar_only: bool = False) -> None:
        super().__init__()
        self.what, self.bar_only, self.step = what, bar_only, ""
        self.started_s, self.last_s = time.monotonic(), -_QUIET_S
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
            self.callback(self.bar.stop)
            self.task = self.bar.add_task("", total=None, what=self.what)  # it pulses
        self.enter_context(contextlib.redirect_stdout(sys.stderr))
        return self

    def __call__(self, text: str, share: float) -> None:
        message = one_line(text)
        if self.bar is not None:
            self.bar.update(self.task, total=1.0, completed=share, description=message)
            return
        now_s = time.monotonic()
        verbose = logging.root.isEnabledFor(logging.INFO)
        step = _NUMBERS.sub("", message)  # "32/540 samples" and "64/540 samples" are one step
        due = not self.bar_only and now_s - self.last_s >= (1.0 if verbose else _QUIET_S)
        if due or (verbose and step != self.step):
            self.step, self.last_s = step, now_s
            after = f", after {now_s - self.started_s:.1f} s" if verbose else ""
            note(f"{self.what}: {share * 100:3.0f} %  {message}{after}")
