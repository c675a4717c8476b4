"""How often an interval has to hold the truth, for the tests of statistics."""

from __future__ import annotations

from deploykit.core.evidence import Interval

RUNS = 1000
# 95 % nominal; a share of 1000 runs varies by 0.7 %, and whole ranks and counts may add a little
COVERED = (0.93, 0.975)


def holds(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval.low <= truth <= interval.high
