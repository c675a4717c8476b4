"""Which of several points is fastest, and from which batch on one setup is ahead of another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deploykit.core.errors import BadInput
from deploykit.measure.statistics import PRACTICAL, PROCESS_SPREAD, Interval
from deploykit.measure.timing.sweep import Point

_SURE = 1.96  # standard deviations


def crossover(
    points_a: Sequence[Point], points_b: Sequence[Point], by: str = "throughput"
) -> int | None:
    """The smallest batch measured on both from which a is ahead of b and stays ahead; None: never.

    Ahead: the 95 % intervals do not touch, by "throughput" or by "p50" latency, and the figures
    differ by more than is practically equal, and by more than one process differs from another
    where the points were timed in one. Nothing is interpolated. Raises BadInput when no batch was
    measured on both, or one twice on one side.
    """
    side_a, side_b = _by_batch(points_a), _by_batch(points_b)
    common = sorted(side_a.keys() & side_b.keys(), reverse=True)
    if not common:
        raise BadInput("no batch size was measured on both sides, so there is no crossover")
    found = None
    for batch in common:
        if not _ahead(side_a[batch], side_b[batch], by):
            break
        found = batch
    return found


def best(points: Sequence[Point], by: str = "throughput") -> Point:
    """The point of highest throughput, or by "p50" of lowest median latency; the first of equals.

    Raises BadInput when there is none, or none with enough samples for a median.
    """
    figures = [(figure.value, point) for point in points if (figure := _figure(point, by))]
    if not figures:
        raise BadInput(f"no point has a {by} figure")
    choose = min if by == "p50" else max
    return choose(figures, key=lambda pair: pair[0])[1]


def _figure(point: Point, by: str) -> Interval | None:
    if by not in ("throughput", "p50"):
        raise BadInput(f"points compare by 'throughput' or 'p50', not by '{by}'")
    return point.throughput_per_s if by == "throughput" else point.latency.p50_ms


def _ahead(a: Point, b: Point, by: str) -> bool:
    ours, theirs = _figure(a, by), _figure(b, by)
    if ours is None or theirs is None:
        return False
    if by == "p50":
        ours, theirs = theirs, ours
    alone = sum(point.processes == 1 for point in (a, b))
    least = max(PRACTICAL, _SURE * PROCESS_SPREAD * math.sqrt(alone))
    return ours.low > theirs.high and ours.value >= theirs.value * (1 + least)


def _by_batch(points: Sequence[Point]) -> dict[int, Point]:
    found: dict[int, Point] = {}
    for point in points:
        if point.batch in found:
            raise BadInput(f"batch {point.batch} is there twice on one side of a crossover")
        found[point.batch] = point
    return found
