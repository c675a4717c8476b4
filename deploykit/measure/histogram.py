"""Keep every call of a run in a few hundred numbers, so that percentiles can be taken again.

Bins grow by 1 %: bin i holds the calls from 1.01^i up to 1.01^(i+1) microseconds. That is the idea
of HdrHistogram (a bound on the relative error over any range) with equal steps of the logarithm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.measure.statistics import finite

GROWTH = 1.01  # from one bin to the next
_MOST_BINS = 10_000  # 1.01^10000 us: more than the age of the universe
_SHORTEST_US = 1e-3  # one nanosecond: a clock's step, and no logarithm of 0


@dataclass(frozen=True)
class CallHistogram(Record):
    """How many calls fell into each bin: bin i is from 1.01^i up to 1.01^(i+1) microseconds.

    `bins`: the numbers i of the bins that hold calls, rising. `counts`: the calls of each.
    """

    bins: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.bins, self.bins[1:], strict=False))
        known = all(abs(index) < _MOST_BINS for index in self.bins)
        whole = len(self.bins) == len(self.counts) and min(self.counts, default=1) >= 1
        if not (rising and known and whole):
            raise BadInput("a histogram has rising bins, with a count of 1 or more for each")

    @staticmethod
    def of(calls_s: np.ndarray | Sequence[float]) -> CallHistogram:
        """Of calls in seconds, shape (calls,). Raises BadInput on none, or on one below 0."""
        calls_us = finite(calls_s, "latencies") * 1e6
        if calls_us.min() < 0:
            raise BadInput(f"a latency is 0 or more, got {calls_us.min():g} us")
        steps = np.log(np.maximum(calls_us, _SHORTEST_US)) / math.log(GROWTH)
        bins, counts = np.unique(np.floor(steps + 1e-9).astype(np.int64), return_counts=True)
        return CallHistogram(tuple(bins.tolist()), tuple(counts.tolist()))

    @property
    def calls(self) -> int:
        return sum(self.counts)


def percentile_ms(histogram: Mapping[str, Sequence[int]], q: float) -> float:
    """The q-th percentile (0 to 100, nearest rank) in ms, at most half a bin (0.5 %) off.

    `histogram`: the JSON of a CallHistogram. Raises BadInput outside 0 to 100, or when it is empty.
    """
    total = sum(histogram["counts"])
    if not 0 <= q <= 100 or not total:
        raise BadInput(f"a percentile from 0 to 100 of one call or more, got {q:g} of {total}")
    rank = max(1, math.ceil(total * q / 100 - 1e-9))
    ends = itertools.accumulate(histogram["counts"])
    ended = (index for index, end in zip(histogram["bins"], ends, strict=True) if end >= rank)
    return middle_ms(next(ended))


def middle_ms(index: int) -> float:
    """The (geometric) middle of a bin, in ms."""
    return float(GROWTH ** (index + 0.5)) / 1e3
