from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from deploykit.benchmarking.timing import (
    Block,
    Measured,
    Setup,
    Timing,
    Warmth,
    make_point,
    sweep,
)
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from deploykit.evaluation.statistics import FASTER, SLOWER, difference, ratio
from deploykit.reporting.points import Point
from tests.support.fake_engine import FakeEngine

SHORT = Timing(0.0, 0.04, rounds=4)


def feeds(batch: int) -> Arrays:
    return random_feeds(FakeEngine().inputs, {"N": batch})


class Noting(FakeEngine):
    """Writes its label when it is called first."""

    def __init__(self, label: str, folder: Path) -> None:
        super().__init__()
        self.label, self.folder = label, folder

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if not self.batches:
            with (self.folder / "journal").open("a") as journal:
                journal.write(f"{self.label} {os.getpid()}\n")
        return super().__call__(feeds)


def dying() -> FakeEngine:
    os._exit(7)


def refusing() -> FakeEngine:
    raise BadInput("no such file")


def test_each_process_is_fresh_and_every_second_begins_at_the_other_end(tmp_path: Path) -> None:
    setups = [Setup(label, partial(Noting, label, tmp_path)) for label in "AB"]
    steps: list[tuple[str, float]] = []
    points = sweep(setups, [1, 2], SHORT, feeds, lambda *step: steps.append(step), processes=2)
    journal = [line.split() for line in (tmp_path / "journal").read_text().splitlines()]
    assert [label for label, _ in journal] == ["A", "B", "B", "A"]
    assert len({pid for _, pid in journal}) == 2
    assert str(os.getpid()) not in {pid for _, pid in journal}
    assert [(point.label, point.batch) for point in points] == [
        ("A", 1),
        ("B", 1),
        ("A", 2),
        ("B", 2),
    ]
    for point in points:
        assert (point.processes, point.rounds, len(point.round_rates)) == (2, 4, 2)
        assert point.histogram is not None
        assert point.samples >= 4
    assert steps[-1] == ("done", 1.0)
    assert steps[0] == ("A, batch 1: warm-up", 0.0)
    assert [share for _, share in steps] == sorted(share for _, share in steps)


@pytest.mark.parametrize(
    ("engines", "error", "says"),
    [
        (dying, DeploykitError, "a process that measures: its process ended with code 7"),
        (refusing, BadInput, "no such file"),
    ],
)
def test_what_goes_wrong_there_is_one_error_here(
    engines: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        sweep([Setup("A", engines)], [1], SHORT, feeds, processes=2)  # type: ignore[arg-type]


def simulated(
    random: np.random.Generator, call_ms: float, drift: np.ndarray | None = None
) -> Point:
    """Processes that differ by 1 %, of rounds that differ by 0.5 %.

    `drift`: of the logarithms, shape (processes, rounds); five of four rounds without any.
    """
    parts = []
    for levels in np.zeros((5, 4)) if drift is None else drift:
        own = call_ms * np.exp(0.01 * random.standard_normal())
        blocks = []
        for level in levels:
            calls = own * np.exp(
                level + 0.005 * random.standard_normal() + 0.02 * random.standard_normal(99)
            )
            calls_ns = (calls * 1e6).astype(np.int64)
            blocks.append(Block(calls_ns, 99, 99 / (calls_ns.sum() / 1e9)))
        setup = Setup("A", FakeEngine)
        parts.append(Measured(setup, 1, "cpu", "fake", {}, Warmth(), {}, blocks))
    return make_point(parts)


def test_processes_that_differ_are_no_difference_and_five_percent_are() -> None:
    random = np.random.default_rng(5)
    false = found = held = 0
    for _ in range(100):
        a, b, slower = (simulated(random, each) for each in (5.0, 5.0, 5.25))
        false += difference(ratio(a.round_rates, b.round_rates)) in (FASTER, SLOWER)
        found += difference(ratio(slower.round_rates, a.round_rates)) == SLOWER
        held += a.throughput_per_s.low <= 200 <= a.throughput_per_s.high
    assert false <= 5
    assert found >= 95
    assert held >= 90


def test_intervals_over_processes_hold_the_truth_where_the_machine_drifts_meanwhile() -> None:
    random, runs = np.random.default_rng(6), 60
    rates_held = p50_held = 0
    for _ in range(runs):
        drift, level = [], 0.02 * random.standard_normal()
        for _ in range(60):
            level = 0.9 * level + 0.02 * np.sqrt(1 - 0.9**2) * random.standard_normal()
            drift.append(level)
        found = simulated(random, 5.0, np.reshape(drift, (10, 6)))
        p50 = found.latency.p50_ms
        assert p50 is not None
        rates_held += found.throughput_per_s.low <= 200 <= found.throughput_per_s.high
        p50_held += p50.low <= 5.0 <= p50.high
    assert min(rates_held, p50_held) > 0.85 * runs  # 0.7 over the ten processes alone
