"""Rates, shares and differences with their 95 % intervals, in NumPy alone.

Every interval is two-sided, 95 %. Percentiles of latencies are in `latency`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.evidence import ADJUSTED_WALD, Drop, Interval

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
