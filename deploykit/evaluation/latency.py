"""Percentiles of latencies, with 95 % intervals for calls that depend on each other.

Consecutive calls are similar (a stall slows several) and rounds differ (another clock, another
load), so the width comes from the spread over rounds: the share of calls at or below the percentile
is taken of each round, and the interval of its log-odds gives the ranks of the bounds. It holds for
rounds that depend on each other, from 20 on. Where there are too few independent calls there is no
interval, and so no figure.

`benchmarks/coverage.py` simulates how often the intervals hold the truth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.core.json_value import Record
from deploykit.evaluation.statistics import FEWEST_DEPENDENT, finite, half_width_of_series

Calls = np.ndarray | Sequence[float]

_TAIL = 0.025  # probability left out on each side
_SLICES = 60  # slices that one long series is cut into
_FEWEST_ROUNDS = 5  # the fewest that joining rounds leaves
_INDEPENDENT = 1.3  # calls per independent call; less is within the error of the estimate
_MARGIN = 3  # times as many calls where they depend on each other, as that is estimated too
_ROUND = 10  # independent calls that a round needs, so that rounds do not depend on each other


@dataclass(frozen=True)
class Latency(Record):
    """Latencies of `samples` calls; a percentile is None where they are too few for an interval.

    `needs`: by percentile, such as "p99_ms", the number of calls that its interval would need; it
    has none where too many calls had no answer. `lost`: those calls, which are not in `samples` and
    count as infinitely late.
    """

    samples: int
    p50_ms: Interval | None
    p90_ms: Interval | None
    p99_ms: Interval | None
    max_ms: float
    needs: Mapping[str, int] = field(default_factory=dict)
    lost: int = 0

    @staticmethod
    def of(*rounds_s: Calls, short_s: Sequence[Calls] = ()) -> Latency:
        """Compute the percentiles of latencies in seconds, in order of time, without the warm-up.

        Each of `rounds_s` has shape (calls,). A single one is cut into slices. A call without an
        answer is inf. `short_s`: the same calls in more, shorter rounds, if there are any, which
        show a drift. Raises BadInput where there is no call with an answer.
        """
        rounds, short = ([_calls(each) for each in part] for part in (rounds_s, short_s))
        ordered = np.sort(np.concatenate(rounds))
        answered = finite(ordered[ordered < np.inf], "latencies")
        found = {f"p{q}_ms": _percentile(rounds, short, ordered, q) for q in (50, 90, 99)}
        needs = {name: each for name, each in found.items() if isinstance(each, int)}
        p50, p90, p99 = (
            each if isinstance(each, Interval) and each.high < math.inf else None
            for each in found.values()
        )
        lost = len(ordered) - len(answered)
        return Latency(len(answered), p50, p90, p99, float(answered[-1]) * 1e3, needs, lost)


def _calls(calls_s: Calls) -> np.ndarray:
    """Convert to integer nanoseconds; inf is allowed. Raises BadInput on none and on NaN."""
    calls = np.round(np.asarray(calls_s, np.float64), 9)
    finite(np.minimum(calls, np.finfo(np.float64).max), "latencies")
    return calls


def fewest_calls(q: float) -> int:
    """Return the fewest independent calls whose extremes bound the q-th percentile: p99 needs 368.

    All of n calls are below the percentile, or all above it, with the probability share^n, share
    being the larger of q/100 and 1 - q/100 (Conover, Practical Nonparametric Statistics, 3rd ed.,
    section 3.2).
    """
    return math.ceil(math.log(_TAIL) / math.log(max(q, 100 - q) / 100))


def _percentile(
    rounds: list[np.ndarray], short: list[np.ndarray], ordered: np.ndarray, q: int
) -> Interval | int:
    n, fewest = len(ordered), fewest_calls(q)
    if n < fewest:
        return fewest
    if len(rounds) == 1:
        most = min(_SLICES, n // _FEWEST_ROUNDS)
        rounds = np.array_split(rounds[0], most if most >= FEWEST_DEPENDENT else _FEWEST_ROUNDS)
    value = _at(ordered, n * q / 100)
    if value == math.inf:
        return Interval(value, value, value)
    marks = {value, _at(ordered, n / 2)} if q > 50 else {value}
    short = short or rounds
    alike = _calls_per_independent(rounds, marks)
    while len(rounds) >= 2 * _FEWEST_ROUNDS and min(map(len, rounds)) < _ROUND * alike:
        rounds = [np.concatenate(rounds[at : at + 2]) for at in range(0, len(rounds) - 1, 2)]
        alike = _calls_per_independent(rounds, marks)
    if alike >= _INDEPENDENT:
        least = max(_MARGIN * fewest * alike, _ROUND * alike * len(rounds))
        if n < least:
            return math.ceil(least)
    ranks = _ranks((rounds, short), value, n, q / 100)
    if ranks is None:
        return 2 * n
    low, high = (float(ordered[rank - 1]) for rank in ranks)
    ninth = _at(ordered, n * 0.9)  # inf, where more than a tenth is lost
    drift = max(_drift(each, ninth if ninth < math.inf else value) for each in (rounds, short))
    low, high = min(low, value * (1 - drift)), max(high, value * (1 + drift))
    return Interval(value * 1e3, max(low, 0.0) * 1e3, high * 1e3)


def _at(ordered: np.ndarray, rank: float) -> float:
    """Return the sample of that rank, from 1, rounded up: a latency that really happened."""
    return float(ordered[math.ceil(rank) - 1])


def _calls_per_independent(rounds: Sequence[np.ndarray], marks: set[float]) -> float:
    """Return how many consecutive calls carry the information of one independent call.

    This is the integrated autocorrelation time, within rounds, of being above any of `marks`,
    summed up to five times itself (Sokal, Monte Carlo Methods in Statistical Mechanics, 1996,
    section 3).
    """
    size = min(map(len, rounds))
    calls = np.stack([each[:size] for each in rounds])
    return max(_autocorrelation_time(calls > mark) for mark in marks)


def _autocorrelation_time(above: np.ndarray) -> float:
    """Return the time for values 0 and 1, shape (rounds, calls)."""
    size = above.shape[1]
    centred = above - above.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * size, axis=1)
    products = np.fft.irfft((spectrum * spectrum.conj()).real.sum(axis=0))[:size]
    if products[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(products / products[0]) - 1
    ends = np.flatnonzero(np.arange(size) >= 5 * times)
    return max(1.0, float(times[ends[0] if len(ends) else -1]))


def _ranks(
    cuts: Sequence[Sequence[np.ndarray]], value: float, n: int, share: float
) -> tuple[int, int] | None:
    """The ranks (from 1) of the samples that bound the percentile; None: outside the samples.

    The share of calls up to `value` has the ratio estimator's variance over rounds, as in
    `throughput`; its log-odds keep the bounds of a share near 1 apart from it. `cuts`: the calls in
    long rounds and in short ones, of which many show a slow drift; the wider interval counts.
    """
    half = 0.0
    for rounds in cuts:
        sizes = np.array([len(each) for each in rounds])
        below = np.array([np.count_nonzero(each <= value) for each in rounds])
        shares = (below - below.sum() / n * sizes) / sizes.mean()
        half = max(half, half_width_of_series(shares) / (share * (1 - share)))
    odds = math.log(share / (1 - share))
    low = math.floor(n / (1 + math.exp(min(half - odds, 700.0))))
    high = math.ceil(n / (1 + math.exp(-half - odds)))
    return (low, min(high, n)) if low >= 1 and high <= n else None


def _drift(rounds: Sequence[np.ndarray], most: float) -> float:
    """Return the uncertainty of the calls' level, as a share: a clock shifts every percentile.

    The level of a round is the mean of its calls, each of at most `most`: rare long ones do not
    count.
    """
    levels = np.array([np.minimum(each, most).mean() for each in rounds])
    return half_width_of_series(levels) / float(levels.mean())


# A histogram keeps all calls of a run in a few hundred numbers. It follows HdrHistogram (a bound on
# the relative error over any range) with equal steps of the logarithm.

GROWTH = 1.01  # from one bin to the next
_MOST_BINS = 10_000  # 1.01^10000 us: more than the age of the universe
_SHORTEST_US = 1e-3  # one nanosecond: a clock's step, and no logarithm of 0


@dataclass(frozen=True)
class CallHistogram(Record):
    """The number of calls in each bin: bin i is from 1.01^i up to 1.01^(i+1) microseconds.

    `bins`: the numbers i of the bins that hold calls, ascending. `counts`: the calls of each.
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
        """Count calls in seconds, shape (calls,)."""
        calls_us = np.maximum(np.asarray(calls_s) * 1e6, _SHORTEST_US)
        steps = np.log(calls_us) / math.log(GROWTH)
        bins, counts = np.unique(np.floor(steps + 1e-9).astype(np.int64), return_counts=True)
        return CallHistogram(tuple(bins.tolist()), tuple(counts.tolist()))

    @property
    def calls(self) -> int:
        return sum(self.counts)


def percentile_ms(histogram: Mapping[str, Sequence[int]], q: float) -> float:
    """Return the q-th percentile (0 to 100, nearest rank) in ms, at most half a bin (0.5 %) off.

    `histogram`: the JSON of a CallHistogram, of one call or more.
    """
    total = sum(histogram["counts"])
    rank = max(1, math.ceil(total * q / 100 - 1e-9))
    ends = itertools.accumulate(histogram["counts"])
    ended = (index for index, end in zip(histogram["bins"], ends, strict=True) if end >= rank)
    return float(GROWTH ** (next(ended) + 0.5)) / 1e3  # the geometric middle of the bin
