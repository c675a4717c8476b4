"""Rates, shares, differences and latencies with their two-sided 95 % intervals, in NumPy alone.

`benchmarks/coverage.py` simulates how often the intervals hold the truth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.evidence import ADJUSTED_WALD, Drop, Interval
from deploykit.core.json_value import Record

PAIRED_T = "paired t"
RARE_T = "paired t, one loss and one gain of the scores' whole range added"
FEWEST_EQUAL = 6  # equal differences: 0.5**6 is the first power within the 2.5 % on each side

NO_DIFFERENCE, PRACTICALLY_EQUAL = "no difference", "practically equal"
FASTER, SLOWER = "faster", "slower"
FEWEST_DEPENDENT = 20  # blocks that show whether they depend on each other
PRACTICAL = 0.02  # a smaller difference is of no use to anybody
PROCESS_SPREAD = 0.01  # standard deviation of a figure over processes, where only one was run

_TAIL = 0.025  # probability left out on each side
_Z = 1.959963984540054  # the normal distribution's 97.5 % point
_MANY = 10**6  # degrees of freedom of what is known
_CORRELATIONS = 1 - np.geomspace(1, 0.02, 24)  # correlations of neighbouring blocks, 0 to 0.98
_WEIGHTS = np.where(_CORRELATIONS == 0, 20.0, 1.0)  # before the blocks are seen


Values: TypeAlias = np.ndarray | Sequence[float]


def throughput(rows_per_block: Sequence[float], seconds_per_block: Sequence[float]) -> Interval:
    """Rows per second over all blocks, in order of time, with an interval over the blocks.

    The value is all rows over all seconds; blocks may differ in length (ratio estimator with its
    linearised variance: Cochran, Sampling Techniques, 3rd ed., section 2.11). From 20 blocks on
    the interval holds for blocks that depend on each other; fewer, at least two, have to be
    independent, as fresh processes are.
    """
    rows, seconds = np.asarray(rows_per_block, float), np.asarray(seconds_per_block, float)
    rate = float(rows.sum() / seconds.sum())
    half = half_width_of_series((rows - rate * seconds) / seconds.mean())
    return Interval(rate, max(0.0, rate - half), rate + half)


def proportion(successes: float, n: int) -> Interval:
    """Return the share of `n` trials with its Wilson score interval (Wilson, JASA 22, 1927).

    Trials that each succeed by a share of their own may be given by the sum of these: the interval
    is then rather too large than too small, as no other values in 0..1 vary as much as 0 and 1.
    """
    share = successes / n
    centre = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    low = 0.0 if successes == 0 else centre - half  # exact at the ends, where rounding would not be
    high = 1.0 if successes == n else centre + half
    return Interval(share, low, high)


def mean_score(scores: Values) -> Interval:
    """Return the mean of scores in 0..1, shape (samples,), with its interval over the samples.

    Scores of 0 and 1 only: Wilson's. Others, such as shares of a sample's characters, vary less:
    the t interval, within 0..1. A single score, or equal ones, have Wilson's too.
    """
    found = finite(scores, "scores")
    if bool(np.isin(found, (0, 1)).all()) or bool((found == found[0]).all()):
        return proportion(min(float(found.sum()), len(found)), len(found))
    return _share(_mean(found))


def pooled_share(successes: np.ndarray, trials: np.ndarray) -> Interval | None:
    """Return all successes by all trials of samples that have several, shape (samples,) each.

    The unit is a sample, as the trials of one depend on each other (pixels, boxes): the ratio
    estimator's interval, as in `throughput`. Where each sample has one trial, or all have the same
    share, Wilson's. None without a trial.
    """
    used = trials > 0
    if not used.any():
        return None
    share, n = successes[used] / trials[used], int(used.sum())
    if bool((trials[used] == 1).all()) or bool((share == share[0]).all()):
        return proportion(n * float(successes.sum() / trials.sum()), n)
    return _share(_mean(share, trials[used].astype(np.float64)))


def paired_drop(
    reference_scores: Values, candidate_scores: Values, metric: str, *, unit: str = "pp"
) -> Drop:
    """Compare scores of the same samples in the same order; shape (samples,), higher is better.

    Scores of 0 and 1 only: the adjusted Wald interval for a difference of paired proportions
    (Bonett and Price, J. Educational and Behavioral Statistics 37(4), 2012: one is added to each of
    the two discordant counts), which keeps a width when nothing or everything changed. So do scores
    of two other values, such as 0 and 100, in their own unit. Any other scores: the paired t
    interval with the same addition, a loss and a gain of the whole range of the scores: a loss that
    is rare and large is missing from most small samples, and their spread says nothing of it.
    """
    reference, candidate = (finite(s, metric) for s in (reference_scores, candidate_scores))
    n = len(reference)
    lost = int((candidate < reference).sum())
    gained = int((candidate > reference).sum())
    values = np.unique(np.concatenate((reference, candidate)))
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 1:  # shares
        low, high = 0.0, 1.0
    elif low == high:
        low, high = min(0.0, low), max(0.0, high)
    span = high - low
    if bool(np.isin(values, (low, high)).all()):
        up, down = (lost + 1) / (n + 2), (gained + 1) / (n + 2)
        half = _Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
        ends = max(-1.0, up - down - half), min(1.0, up - down + half)
        drop = _through(lambda part: part * span, Interval((lost - gained) / n, *ends))
        method = ADJUSTED_WALD
        shares = (proportion(int((s == high).sum()), n) for s in (reference, candidate))
        before, after = (_through(lambda part: part * span + low, share) for share in shares)
    else:
        differences = reference - candidate
        rare = _mean(np.concatenate((differences, (span, -span))))
        value = float(differences.mean())
        drop, method = Interval(value, min(value, rare.low), max(value, rare.high)), RARE_T
        before, after = _mean(reference), _mean(candidate)
    return Drop(metric, n, before, after, drop, lost, gained, unit, method)


def relative_rise(
    reference_scores: Values, candidate_scores: Values, weights: Values, metric: str
) -> Drop:
    """Compare log-likelihoods of the same samples: how much perplexity rises, as a fraction.

    Scores: each sample's mean log-likelihood per token, shape (samples,); `weights`: its tokens, so
    that long samples count as in the perplexity of all the data; samples of weight 0 are left
    out. The rise is exp(mean difference) - 1, its interval the paired one carried through exp,
    which keeps its coverage. Samples are the clusters, as the tokens of one are not independent
    (Miller, "Adding Error Bars to Evals", arXiv:2411.00640); the weighted mean has the ratio
    estimator's variance, as in `throughput`. Raises BadInput where no label counts.
    """
    reference, candidate = (finite(s, metric) for s in (reference_scores, candidate_scores))
    tokens = np.asarray(weights, np.float64)
    used = tokens > 0
    if not used.any():
        raise BadInput(f"{metric}: no sample has a label that counts")
    reference, candidate, tokens = reference[used], candidate[used], tokens[used]
    differences = reference - candidate
    n = len(differences)
    if 2 <= n < FEWEST_EQUAL and bool((differences == differences[0]).all()):
        # from 6 on the interval is that one value, as the sign test's on the median would be
        raise BadInput(
            f"{metric}: all {n} differences are equal, so their spread is unknown",
            hint=f"{FEWEST_EQUAL} samples or more are needed, better some hundred",
        )
    rise = _through(lambda value: _exp(value) - 1, _mean(differences, tokens))
    before, after = (_through(_exp, _mean(-s, tokens)) for s in (reference, candidate))
    lost, gained = int((differences > 0).sum()), int((differences < 0).sum())
    return Drop(metric, n, before, after, rise, lost, gained, "%", PAIRED_T)


def samples_to_show_no_drop(max_drop: float) -> int:
    """Return the fewest samples on which unchanged scores of 0 and 1 show a drop <= max_drop.

    Where nothing changed the upper end of `paired_drop` is z * sqrt(2) / (n + 2).
    """
    return max(1, math.ceil(_Z * math.sqrt(2) / max_drop - 2))


def ratio(
    a: Sequence[float], b: Sequence[float], *, tests: int = 1, assumed: float = 0.0
) -> Interval:
    """Return the geometric mean of a[i]/b[i], with an interval on the logs.

    `a[i]` and `b[i]` come from the same round, or process, so that drift that hits both cancels.
    The interval is as in `throughput`. At least two are needed. `tests`: the intervals of so many
    ratios hold together (Bonferroni: Dunn, JASA 56, 1961). `assumed`: a standard deviation of the
    logs that the rounds cannot show, and that comes on top.
    """
    logs = np.log(np.asarray(a, float)) - np.log(np.asarray(b, float))
    tail = _TAIL / tests
    half = math.hypot(half_width_of_series(logs, tail), assumed * t_quantile(_MANY, tail))
    mean = float(logs.mean())
    return _through(_exp, Interval(mean, mean - half, mean + half))


def difference(times: Interval) -> str:
    """Classify a ratio of two rates: NO_DIFFERENCE, PRACTICALLY_EQUAL, FASTER or SLOWER.

    No difference: the interval holds 1, so that the sides may be equal. Practically equal: all of
    it is within 2 % of 1, or they differ for certain but by less than 2 %, which is of no use.
    """
    if times.low <= 1 <= times.high:
        within = times.low > 1 - PRACTICAL and times.high < 1 + PRACTICAL
        return PRACTICALLY_EQUAL if within else NO_DIFFERENCE
    if abs(times.value - 1) < PRACTICAL:
        return PRACTICALLY_EQUAL
    return FASTER if times.value > 1 else SLOWER


@cache
def t_quantile(freedom: int, tail: float = _TAIL) -> float:
    """Return the 1 - `tail` (97.5 %) point of Student's t; `freedom`: degrees, 1 or more."""
    if freedom < 1:
        raise BadInput("an interval needs 2 values or more")
    angles, inside = _t_table(freedom)
    return math.sqrt(freedom) * math.tan(np.interp(1 - 2 * tail, inside, angles))


@lru_cache(maxsize=16)
def _t_table(freedom: int) -> tuple[np.ndarray, np.ndarray]:
    """Return angles a from 0, and P(|T| < sqrt(freedom) tan a): the integral of a cosine's power.

    It is right to 1e-6 (Abramowitz and Stegun, 26.7.1, with t = sqrt(freedom) tan a).
    """
    angles = np.linspace(0, min(math.pi / 2, 40 / math.sqrt(freedom)), 1 << 15)
    density = np.cos(angles) ** (freedom - 1)
    inside = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return angles, inside / inside[-1]


def _share(mean: Interval) -> Interval:
    return Interval(mean.value, max(0.0, mean.low), min(1.0, mean.high))


def _mean(values: np.ndarray, weights: np.ndarray | None = None) -> Interval:
    if weights is None:
        weights = np.ones(len(values))
    mean = float((weights * values).sum() / weights.sum())
    half = _half_width(weights * (values - mean) / weights.mean())
    return Interval(mean, mean - half, mean + half)


def _through(function: Callable[[float], float], interval: Interval) -> Interval:
    """Return the interval of an increasing function of the value."""
    return Interval(function(interval.value), function(interval.low), function(interval.high))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # beyond, a float has no number for it, nor has JSON


def _half_width(values: np.ndarray, tail: float = _TAIL) -> float:
    quantile = t_quantile(len(values) - 1, tail)  # first, as it refuses a single value
    return quantile * float(values.std(ddof=1)) / math.sqrt(len(values))


def half_width_of_series(values: np.ndarray, tail: float = _TAIL) -> float:
    """Return half the width of the mean's interval, for a series of values that may be dependent.

    Neighbours are taken to correlate by an unknown amount (a normal AR(1) process; Bayes with a
    flat prior on mean and log scale, half on no correlation and the rest even in its time scale),
    and the interval holds all but twice `tail` over what the values leave possible. Too few values
    leave anything possible: they are taken as independent.
    """
    n = len(values)
    if n < FEWEST_DEPENDENT:
        return _half_width(values, tail)
    correlation, free = _CORRELATIONS, 1 - _CORRELATIONS**2
    centred = values - values.mean()
    news = centred[1:] - correlation[:, None] * centred[:-1]  # the innovations of the AR(1) process
    precision = 1 + (n - 1) * (1 - correlation) / (1 + correlation)
    mean = (centred[0] + news.sum(axis=1) / (1 + correlation)) / precision
    news -= mean[:, None] * (1 - correlation[:, None])
    squares = (centred[0] - mean) ** 2 + (news**2).sum(axis=1) / free
    if not squares.all():
        return 0.0
    log_weight = np.log(_WEIGHTS) - (np.log(free) + np.log(squares)) * (n - 1) / 2
    weight = np.exp(log_weight - np.log(precision) / 2 - log_weight.max())
    weight /= weight.sum()
    rest = 1 - correlation
    variance = (1 + correlation) / rest - 2 * correlation * (1 - correlation**n) / (n * rest**2)
    errors = np.sqrt(squares / (n - 1) * variance / n)
    low, high = 0.0, float(errors.max()) * t_quantile(n - 1, tail)
    for _ in range(40):
        middle = (low + high) / 2
        angles = np.arctan(middle / errors / math.sqrt(n - 1))
        inside = weight @ np.interp(angles, *_t_table(n - 1))
        low, high = (middle, high) if inside < 1 - 2 * tail else (low, middle)
    return high


def finite(values: Values, what: str) -> np.ndarray:
    """`values` as float64, shape (values,). Raises BadInput on none, NaN or infinity."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not bool(np.isfinite(array).all()):
        raise BadInput(f"{what}: a list of one or more finite numbers is needed")
    return array


# Percentiles of latencies. Consecutive calls are similar (a stall slows several) and rounds differ
# (another clock, another load), so the width comes from the spread over rounds: the share of calls
# at or below the percentile is taken of each round, and the interval of its log-odds gives the
# ranks of the bounds. It holds for rounds that depend on each other, from 20 on. Where there are
# too few independent calls there is no interval, and so no figure.

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
    def of(*rounds_s: Values, short_s: Sequence[Values] = ()) -> Latency:
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


def _calls(calls_s: Values) -> np.ndarray:
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
        count = min(_SLICES, n // _FEWEST_ROUNDS)
        rounds = np.array_split(rounds[0], count if count >= FEWEST_DEPENDENT else _FEWEST_ROUNDS)
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
    # short rounds, of which there are many, show a slow drift; the wider interval counts
    ninth = _at(ordered, n * 0.9)  # inf, where more than a tenth is lost
    most = ninth if ninth < math.inf else value
    halves, drifts = zip(*(_half_widths(x, value, n, most) for x in (rounds, short)), strict=True)
    share, drift = q / 100, max(drifts)
    half, odds = max(halves) / (share * (1 - share)), math.log(share / (1 - share))
    low = math.floor(n / (1 + math.exp(min(half - odds, 700.0))))
    high = math.ceil(n / (1 + math.exp(-half - odds)))
    if low < 1 or high > n:  # outside the samples
        return 2 * n
    low_s = min(_at(ordered, low), value * (1 - drift))
    high_s = max(_at(ordered, high), value * (1 + drift))
    return Interval(value * 1e3, max(low_s, 0.0) * 1e3, high_s * 1e3)


def _at(ordered: np.ndarray, rank: float) -> float:
    """Return the sample of that rank, from 1, rounded up: a latency that really happened."""
    return float(ordered[math.ceil(rank) - 1])


def _calls_per_independent(rounds: Sequence[np.ndarray], marks: set[float]) -> float:
    """Return how many consecutive calls carry the information of one independent call.

    This is the integrated autocorrelation time, within rounds, of being above any of `marks`,
    summed up to five times itself (Sokal, Monte Carlo Methods in Statistical Mechanics, 1996,
    section 3).
    """
    size, longest = min(map(len, rounds)), 1.0
    calls = np.stack([each[:size] for each in rounds])
    for mark in marks:
        above = calls > mark
        spectrum = np.fft.rfft(above - above.mean(axis=1, keepdims=True), 2 * size, axis=1)
        products = np.fft.irfft((spectrum * spectrum.conj()).real.sum(axis=0))[:size]
        if products[0] > 0:
            times = 2 * np.cumsum(products / products[0]) - 1
            ends = np.flatnonzero(np.arange(size) >= 5 * times)
            longest = max(longest, float(times[ends[0] if len(ends) else -1]))
    return longest


def _half_widths(
    rounds: Sequence[np.ndarray], value: float, n: int, most: float
) -> tuple[float, float]:
    """Return half the widths of the share of calls up to `value`, and of the calls' level.

    The share, of `n` calls, has the ratio estimator's variance over rounds, as in `throughput`; its
    log-odds keep the bounds of a share near 1 apart from it. The level of a round is the mean of
    its calls, each of at most `most`: rare long ones do not count. Its width is relative: a clock
    shifts every percentile.
    """
    sizes = np.array([len(each) for each in rounds])
    below = np.array([np.count_nonzero(each <= value) for each in rounds])
    levels = np.array([np.minimum(each, most).mean() for each in rounds])
    share = half_width_of_series((below - below.sum() / n * sizes) / sizes.mean())
    return share, half_width_of_series(levels) / float(levels.mean())


# A histogram keeps all calls of a run in a few hundred numbers. It follows HdrHistogram (a bound on
# the relative error over any range) with equal steps of the logarithm.

GROWTH = 1.01  # from one bin to the next
_SHORTEST_US = 1e-3  # one nanosecond: a clock's step, and no logarithm of 0


@dataclass(frozen=True)
class CallHistogram(Record):
    """The number of calls in each bin: bin i is from 1.01^i up to 1.01^(i+1) microseconds.

    `bins`: the numbers i of the bins that hold calls, ascending. `counts`: the calls of each.
    """

    bins: tuple[int, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(calls_s: np.ndarray | Sequence[float]) -> CallHistogram:
        """Count calls in seconds, shape (calls,)."""
        calls_us = np.maximum(np.asarray(calls_s) * 1e6, _SHORTEST_US)
        steps = np.log(calls_us) / math.log(GROWTH)
        bins, counts = np.unique(np.floor(steps + 1e-9).astype(np.int64), return_counts=True)
        return CallHistogram(tuple(bins.tolist()), tuple(counts.tolist()))


def percentile_ms(histogram: Mapping[str, Sequence[int]], q: float) -> float:
    """Return the q-th percentile (0 to 100, nearest rank) in ms, at most half a bin (0.5 %) off.

    `histogram`: the JSON of a CallHistogram, of one call or more.
    """
    total = sum(histogram["counts"])
    rank = max(1, math.ceil(total * q / 100 - 1e-9))
    ends = itertools.accumulate(histogram["counts"])
    ended = (index for index, end in zip(histogram["bins"], ends, strict=True) if end >= rank)
    return float(GROWTH ** (next(ended) + 0.5)) / 1e3  # the geometric middle of the bin
