"""Time engines in several fresh processes, one after the other, each with its share of the rounds.

Where a process lies in memory, and on which cores its threads begin, changes its speed by a per
cent or so for as long as it lives: no number of rounds in one process shows that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from deploykit.core.apart import run_apart
from deploykit.core.errors import BadInput
from deploykit.measure.outside import Watch, Window
from deploykit.measure.timing.sweep import (
    Measured,
    Point,
    Progress,
    Setup,
    Timing,
    make_point,
    time_setups,
)
from deploykit.runtimes.engine import Arrays, Engine

PROCESSES = 10  # even, for the order; five leave several ratios no narrow interval together


def sweep_apart(
    setups: Sequence[Setup],
    batches: Sequence[int],
    timing: Timing,
    feeds: Callable[[int], Arrays],
    on_progress: Progress | None = None,
    *,
    processes: int = PROCESSES,
    watch: Watch | None = None,
) -> list[Point]:
    """As `sweep`, with `seconds` and `rounds` shared among fresh processes.

    Each opens the engines anew, in another order, and warms up. `setups`
    and `feeds` have to be picklable. Raises also OutOfMemory and DeploykitError, where one ends.
    """
    if processes < 2:
        raise BadInput(f"`processes` must be 2 or more for an interval, got {processes}")
    share = replace(
        timing, seconds=timing.seconds / processes, rounds=max(2, timing.rounds // processes)
    )
    watch = watch or Watch()
    parts: dict[tuple[int, str], list[Measured]] = {}
    for number in range(processes):

        def step(what: str, done: float, number: int = number) -> None:
            if on_progress is not None:
                on_progress(what, (number + done) / processes)

        found, windows = run_apart(
            "bench: a process that measures",
            _time_here,
            (setups, batches, share, feeds),
            (watch.proc, watch.sys),
            number,
            os.getpid(),
            on_progress=step,
        )
        watch.windows += windows
        for each in found:
            parts.setdefault((each.batch, each.setup.label), []).append(each)
    return [make_point(part) for part in parts.values()]


def _time_here(
    run: tuple[Sequence[Setup], Sequence[int], Timing, Callable[[int], Arrays]],
    folders: tuple[Path, Path],
    number: int,
    parent: int,
    on_progress: Progress,
) -> tuple[list[Measured], list[Window]]:
    """In the process of its own."""
    watch = Watch((parent,), *folders)
    found = time_setups(*run, on_progress, watch=watch, number=number)
    for each in found:
        each.setup = replace(each.setup, engines=_closed)  # engines cannot be sent
    return found, watch.windows


def _closed() -> Engine:
    raise BadInput("the engine was open in another process")
