"""How much memory a setup takes: the most that a fresh process of its own had resident."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api.artefacts import Progress
from deploykit.core.apart import run_apart

if TYPE_CHECKING:
    from deploykit.measure.report.report import PeakMemory
    from deploykit.measure.timing.sweep import Point, Setup
    from deploykit.runtimes.engine import Arrays

_CALLS = 3
_HIGHEST = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def measure_memory(
    setups: Sequence[Setup],
    points: Sequence[Point],
    feeds: Callable[[int], Arrays],
    on_progress: Progress | None = None,
) -> tuple[PeakMemory, ...]:
    """Of each label at the largest batch that it was timed at; none where the system has no figure.

    `setups` and `feeds` have to be picklable, as for `sweep_apart`.
    """
    from deploykit.measure.report.report import PeakMemory

    largest: dict[str, int] = {}
    for point in points:
        largest[point.label] = max(point.batch, largest.get(point.label, 0))
    found = []
    for setup in setups:
        batch = largest.get(setup.label)
        if batch is None or (setup.batches and batch not in setup.batches):
            continue
        if on_progress is not None:
            on_progress(f"{setup.label}: memory", 1.0)
        peak = run_apart("bench: a process whose memory is read", _peak_bytes, setup, feeds, batch)
        found += [PeakMemory(setup.label, batch, peak)] * bool(peak)
    return tuple(found)


def _peak_bytes(
    setup: Setup, feeds: Callable[[int], Arrays], batch: int, _on_progress: Progress
) -> int:
    """In the process of its own; 0 where /proc does not tell."""
    inputs = feeds(batch)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(setup.engines()) for _ in range(setup.sessions)]
        for engine in engines:
            for _ in range(_CALLS):
                engine(inputs)
        return sum(map(_highest_bytes, (os.getpid(), *_children())))


def _highest_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        match = _HIGHEST.search(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
        return int(match[1]) * 1024 if match else 0
    return 0


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, task.read_text(encoding="utf-8").split())
