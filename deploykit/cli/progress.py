"""How far a command is: a bar with the time left on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from deploykit.cli import output

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_QUIET_S = 5.0  # between two lines where there is no bar
_NUMBERS = re.compile(r"[\d,.]+")


class Progress:
    """Call it with what is being done and the share that is done, 0 to 1.

    The bar takes one line of stderr and is erased at the end; what is printed on stderr meanwhile
    goes above it. Log lines and a bar would mix, so that `-v` gives lines: one for each step, with
    the seconds since the start.
    """

    def __init__(self, what: str, *, bar_only: bool = False) -> None:
        self.what, self.bar_only = what, bar_only
        self.last_s = -_QUIET_S
        self.started_s = time.monotonic()
        self.step = ""
        self.bar: Bar | None = None
        self.task: Any = None

    def __enter__(self) -> Progress:
        if output.is_terminal(sys.stderr) and not logging.root.handlers:
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
        message = output.one_line(text)
        if self.bar is not None:
            self.bar.update(self.task, total=1.0, completed=share, description=message)
            return
        now_s = time.monotonic()
        verbose = logging.root.isEnabledFor(logging.INFO)
        step = _NUMBERS.sub("", message)  # "32/540 samples" goes on with the step of "64/540"
        if verbose and step != self.step:
            due = True
        else:
            due = not self.bar_only and now_s - self.last_s >= (1.0 if verbose else _QUIET_S)
        if due:
            self.step, self.last_s = step, now_s
            after = f", after {now_s - self.started_s:.1f} s" if verbose else ""
            output.note(f"{self.what}: {share * 100:3.0f} %  {message}{after}")

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()
