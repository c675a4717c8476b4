"""Engines that move a clock of their own, and so are timed exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import groupby

import numpy as np

from deploykit.benchmarking.timing import Setup, Timing, Turns, make_point
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.reporting.report import Point
from tests.support.fake_engine import FakeEngine

QUICK = Timing(warmup_s=0.0, seconds=1.0, rounds=2)


def feeds(batch: int) -> Arrays:
    return random_feeds(FakeEngine().inputs, {"N": batch})


class VirtualTime(threading.local):
    """A clock of each thread's own that only engines move, so that every figure is exact."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Timed(FakeEngine):
    """A fake engine that moves a virtual clock and writes each call into a journal."""

    def __init__(
        self,
        clock: VirtualTime,
        latency_s: Callable[[int], float],
        journal: list[str],
        label: str,
        max_batch: int | None = None,
    ) -> None:
        super().__init__(max_batch=max_batch)
        self.clock = clock
        self.of_call = latency_s  # from the number of the call
        self.journal = journal
        self.label = label

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        outputs = super().__call__(feeds)
        self.clock.now_ns += round(self.of_call(len(self.batches) - 1) * 1e9)
        self.journal.append(self.label)
        return outputs


class Bench:
    """Makes setups of `Timed` engines and keeps every engine that was opened."""

    def __init__(self) -> None:
        self.clock = VirtualTime()
        self.journal: list[str] = []
        self.engines: list[Timed] = []
        self.fed: list[int] = []

    def setup(
        self,
        label: str,
        latency_s: float | Callable[[int], float] = 0.005,
        sessions: int = 1,
        max_batch: int | None = None,
    ) -> Setup:
        def open_engine() -> Timed:
            of_call = latency_s if callable(latency_s) else lambda _: latency_s
            engine = Timed(self.clock, of_call, self.journal, label, max_batch)
            self.engines.append(engine)
            return engine

        return Setup(label, open_engine, sessions=sessions, threads=1, precision="fp32")

    def feeds(self, batch: int) -> Arrays:
        self.fed.append(batch)
        return feeds(batch)

    def sweep(
        self,
        *setups: Setup,
        batches: tuple[int, ...] = (4,),
        timing: Timing = QUICK,
        on_progress: Progress = no_progress,
    ) -> list[Point]:
        turns = Turns(timing, on_progress, self.clock)
        return [make_point([each]) for each in turns.measure(setups, batches, self.feeds)]

    @property
    def order(self) -> str:
        """The labels in the order in which they were called, repetitions joined."""
        return "".join(label for label, _ in groupby(self.journal))
