"""The memory of a setup is that of a process that holds nothing else."""

from __future__ import annotations

from functools import partial

import numpy as np

from deploykit.benchmarking.limits import measure_memory
from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from tests.support.fake_engine import FakeEngine

EXTRA_MB = 200


class Large(FakeEngine):
    """Holds so many MB, that the system has had to give it."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.held = np.ones(megabytes * 125_000)


def feeds(batch: int) -> Arrays:
    return random_feeds(FakeEngine().inputs, {"N": batch})


def test_each_setup_has_the_peak_of_its_own_process() -> None:
    setups = [
        Setup("small", FakeEngine),
        Setup("large", partial(Large, EXTRA_MB), batches=(4,)),
        Setup("never timed", FakeEngine),
    ]
    points = sweep(setups[:2], [1, 4], Timing(0.0, 0.01, 2), feeds)
    steps: list[str] = []
    small, large = measure_memory(setups, points, feeds, lambda what, _: steps.append(what))
    assert (small.label, small.batch, large.label, large.batch) == ("small", 4, "large", 4)
    more_mb = (large.peak_bytes - small.peak_bytes) / 1e6
    assert 0.8 * EXTRA_MB < more_mb < 1.5 * EXTRA_MB
    assert small.peak_bytes < 1e9  # not what this test process had
    assert steps == ["small: memory", "large: memory"]
