"""Whether the ratios of one report hold together, in runs whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp

import numpy as np
import pytest

from deploykit.benchmarking.timing import PROCESSES
from deploykit.core.evidence import Interval
from deploykit.evaluation.statistics import FASTER, SLOWER, difference
from deploykit.reporting.points import Point
from deploykit.reporting.report import Report
from deploykit.reporting.verdict import verdict
from tests.support.measure.simulated import bare_point

BASE, COPY = "fp32 CPU", "copy"
# inferences/s of each of five processes, of one run of a model against its copy, by batch and setup
A_COPY_THAT_SEEMED_FASTER = {
    (1, 1, BASE): (36645, 29776, 57348, 29223, 40015),
    (1, 2, BASE): (127838, 127269, 105236, 127758, 107728),
    (1, 1, COPY): (41492, 29079, 53146, 28579, 37969),
    (1, 2, COPY): (128078, 127842, 104028, 126702, 110729),
    (8, 1, BASE): (111668, 118933, 144660, 143351, 160864),
    (8, 2, BASE): (204308, 225735, 207200, 210665, 200485),
    (8, 1, COPY): (116790, 123514, 180971, 152469, 167941),
    (8, 2, COPY): (219060, 225712, 230617, 232362, 209864),
}


def point(
    label: str, batch: int, sessions: int, rates: Sequence[float], processes: int | None = None
) -> Point:
    value = float(np.mean(rates))
    return bare_point(
        f"{label}, {sessions} sessions" if sessions > 1 else label,
        batch,
        sessions=sessions,
        threads=3 - sessions,
        rounds=20,
        throughput_per_s=Interval(value, value * 0.9, value * 1.1),
        round_rates=tuple(rates),
        processes=len(rates) if processes is None else processes,
    )


def report(points: Sequence[Point]) -> Report:
    return Report(
        "copy", "", "", baseline=BASE, points=tuple(points), asked=(COPY, f"{COPY}, 2 sessions")
    )


def headline(found: Report) -> str:
    return verdict(replace(found, verdict=()))[0]


def test_a_copy_that_seemed_faster_in_one_of_several_rows_is_no_difference() -> None:
    """Alone, two sessions at batch 8 would be 1.07 times as fast [1.01, 1.13]."""
    rows = A_COPY_THAT_SEEMED_FASTER.items()
    found = report([point(label, n, count, rates) for (n, count, label), rates in rows])
    assert headline(found).startswith(
        "No difference between copy, 2 sessions and the baseline fp32 CPU, 2 sessions at batch 8"
    )
    (pair,) = ([p for p in found.points if p.batch == 8 and p.sessions == 2],)
    alone, together = (
        Report("", "", "", baseline=BASE, points=tuple(pair)).speedup(pair[1], pair[0]),
        found.speedup(pair[1], pair[0]),
    )
    assert (alone.value, alone.low, alone.high) == pytest.approx((1.066, 1.010, 1.125), abs=1e-3)
    assert alone.value == together.value
    assert together.low < 1 < together.high


Random = np.random.Generator
BATCHES, SESSIONS = (1, 2, 4, 8, 16, 32), (1, 2)


def simulated(random: Random, processes: int, spread: float, times: float) -> Report:
    """All setups of a process drift together; each differs by `spread` on top, in each process."""
    points = []
    for batch in BATCHES:
        drift = 0.02 * random.standard_normal(processes)
        for label, factor in ((BASE, 1.0), (COPY, times)):
            for count in SESSIONS:
                logs = drift + spread * random.standard_normal(processes)
                rate = 1000 * factor * count * min(batch, 8)
                points.append(point(label, batch, count, [rate * exp(each) for each in logs]))
    return report(points)


def differs(found: Report) -> bool:
    """Whether anything in the report says that the copy is faster, or slower, than its like."""
    by_key = {(p.label.replace(COPY, BASE), p.batch, p.label): p for p in found.points}
    likes = [
        found.speedup(p, by_key[like, batch, like])
        for (like, batch, label), p in by_key.items()
        if label != like
    ]
    said = any(difference(each) in (FASTER, SLOWER) for each in likes)
    return said or not headline(found).startswith(("No difference", "copy"))


@pytest.mark.parametrize("processes", [5, PROCESSES])
def test_a_copy_differs_nowhere_in_19_of_20_reports(processes: int) -> None:
    random = np.random.default_rng(13)
    said = sum(differs(simulated(random, processes, 0.02, 1.0)) for _ in range(150))
    assert said <= 0.05 * 150


def test_every_ratio_of_a_report_holds_the_truth_in_95_percent() -> None:
    random = np.random.default_rng(14)
    held = 0
    for _ in range(150):
        found = simulated(random, PROCESSES, 0.03, 0.8)
        truth = {BASE: 1.0, COPY: 0.8}
        held += all(
            each.ratio.low
            <= truth[each.label.partition(",")[0]] * (2 if "sessions" in each.label else 1)
            <= each.ratio.high
            for each in found.speedups
        )
    assert held >= 0.93 * 150


def test_five_percent_slower_is_found_nine_times_of_ten_by_default() -> None:
    random = np.random.default_rng(15)
    runs = [headline(simulated(random, PROCESSES, 0.01, 0.95)) for _ in range(60)]
    found = [each for each in runs if each.startswith("copy") and " is 0.9" in each]
    assert len(found) >= 54


def test_one_process_leaves_room_for_what_it_cannot_show() -> None:
    """Rounds that agree to 0.1 % say nothing of how processes differ, by 1 % each."""

    def around(rate: float) -> Sequence[float]:
        return [rate * 0.999, rate * 1.001] * 10

    slower = [point(BASE, 1, 1, around(1000), 1), point(COPY, 1, 1, around(975), 1)]
    assert "No difference" in headline(report(slower))
    slower = [point(BASE, 1, 1, around(1000), 1), point(COPY, 1, 1, around(950), 1)]
    assert headline(report(slower)).startswith("copy is 0.950")
