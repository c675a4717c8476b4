"""Intervals of rates, drops and percentiles of latencies, and how often they hold the truth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.evaluation.statistics import (
    FEWEST_DEPENDENT,
    GROWTH,
    CallHistogram,
    Latency,
    fewest_calls,
    paired_drop,
    percentile_ms,
    pooled_share,
    proportion,
    ratio,
    relative_rise,
    samples_to_show_no_drop,
    t_quantile,
    throughput,
)
from tests.support import campaign

RUNS = 1000
# 95 % nominal; a share of 1000 runs varies by 0.7 %, and whole ranks and counts may add a little
COVERED = (0.93, 0.975)
Random = np.random.Generator


def holds(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval.low <= truth <= interval.high


def ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def test_t_quantile_is_the_tables_smooth_and_ends_at_the_normal() -> None:
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 9: 2.262, 30: 2.042, 60: 2.000, 100: 1.984}
    for freedom, value in table.items():
        assert t_quantile(freedom) == pytest.approx(value, abs=5e-4)
    steps = [t_quantile(n) - t_quantile(n + 1) for n in (199, 200, 201)]  # the method changes
    assert steps[0] > steps[1] > steps[2] > 0
    assert t_quantile(10**7) == pytest.approx(1.959964, abs=1e-6)


def test_throughput_is_all_rows_over_all_seconds_with_the_t_interval_of_its_blocks() -> None:
    assert throughput([100, 300], [1.0, 2.0]).value == pytest.approx(400 / 3)
    half = 2.7764451 * np.std([99, 100, 101, 102, 98], ddof=1) / math.sqrt(5)
    found = throughput([198, 200, 202, 204, 196], [2.0] * 5)
    assert ends(found) == pytest.approx((100, 100 - half, 100 + half))
    steady = throughput([100, 200, 600], [1.0, 2.0, 6.0])  # certain, whatever the blocks' lengths
    assert ends(steady) == pytest.approx((100, 100, 100))
    assert throughput([7.0] * 20, [2.0] * 20) == Interval(3.5, 3.5, 3.5)
    assert throughput([1, 1000], [1.0, 1.0]).low == 0.0


def dependent(random: Random, size: int, correlation: float) -> np.ndarray:
    """Normal values of variance 1 whose neighbours correlate."""
    from scipy.signal import lfilter

    noise = random.standard_normal(size) * math.sqrt(1 - correlation**2)
    first = [correlation * random.standard_normal()]
    return np.asarray(lfilter([1], [1, -correlation], noise, zi=first)[0])


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6, 0.9])
def test_intervals_hold_where_blocks_depend_on_each_other(correlation: float) -> None:
    """A t interval holds the truth in 95, 86, 67 and 31 % of these runs."""
    random = np.random.default_rng(round(10 * correlation))
    rate = ratios = 0
    for _ in range(200):
        series = np.exp(0.02 * dependent(random, FEWEST_DEPENDENT, correlation))
        seconds = random.uniform(0.9, 1.1, len(series))
        rate += holds(throughput(500 * series * seconds, seconds), 500 * math.exp(2e-4))
        ratios += holds(ratio(500 * series, [500.0] * len(series)), 1.0)
    assert min(rate, ratios) >= 0.92 * 200


def test_proportion_is_wilsons_interval() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), 857: method 3
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611)):
        share = proportion(successes, n)
        assert ends(share) == pytest.approx((successes / n, low, high), abs=5e-5)


def test_ratio_is_the_geometric_mean_of_the_rounds_and_turned_round_its_inverse() -> None:
    assert ratio([2.0, 8.0], [1.0, 1.0]).value == pytest.approx(4.0)
    a, b = [10.0, 12.0, 11.0], [5.0, 5.5, 5.4]
    back = ratio(b, a)
    assert ends(ratio(a, b)) == pytest.approx((1 / back.value, 1 / back.high, 1 / back.low))


def test_a_share_of_pixels_has_the_spread_of_its_samples_not_that_of_yes_and_no() -> None:
    """100 answers of a sample vary less than one: Wilson's interval is three times as wide."""
    random = np.random.default_rng(7)
    covered, widths = 0, []
    for _ in range(500):
        trials = random.integers(50, 150, 60)
        found = pooled_share(random.binomial(trials, random.beta(16, 8, 60)), trials)
        widths.append(found.high - found.low)
        covered += holds(found, 2 / 3)
    assert 0.92 < covered / 500 < 0.98
    wilson = proportion(40, 60)
    assert np.mean(widths) < 0.4 * (wilson.high - wilson.low)
    ones = np.ones(50, np.int64)
    assert pooled_share(ones, ones) == proportion(50, 50)
    assert pooled_share(90 * ones, 90 * ones) == proportion(50, 50)
    assert pooled_share(0 * ones, 0 * ones) is None


def scores(both: int, lost: int, gained: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Reference and candidate, right (1) or wrong (0), in an order that keeps the pairs."""
    pairs = [(1, 1)] * both + [(1, 0)] * lost + [(0, 1)] * gained + [(0, 0)] * neither
    reference, candidate = np.array(pairs).T
    return reference, candidate


def test_drop_of_right_and_wrong_is_bonett_and_prices_interval() -> None:
    drop = paired_drop(*scores(both=12, lost=7, gained=1, neither=1), "top-1")
    # by hand: (7+1)/23 - (1+1)/23 = 0.26087, its variance (10/23 - 0.26087**2)/23 = 0.015945
    assert ends(drop.drop) == pytest.approx((6 / 21, 0.0134, 0.5084), abs=1e-4)
    assert (drop.lost, drop.gained, drop.n) == (7, 1, 21)
    assert (drop.reference, drop.candidate) == (proportion(19, 21), proportion(13, 21))
    unchanged = paired_drop(*scores(both=500, lost=0, gained=0, neither=40), "top-1").drop
    assert (unchanged.value, unchanged.low) == (0, -unchanged.high)
    assert 0.003 < unchanged.high < 0.008  # the rule of three gives 3/540 = 0.0056
    all_lost = paired_drop(*scores(both=0, lost=30, gained=0, neither=0), "top-1").drop
    assert (all_lost.value, all_lost.high) == (1.0, 1.0)
    assert paired_drop([0, 0, 1, 1], [1, 1, 1, 1], "top-1").drop.value == -0.5


def test_drop_of_other_scores_is_the_paired_t_interval_with_a_loss_and_a_gain_added() -> None:
    reference, differences = np.array([0.5, 0.7, 0.9]), np.array([0.1, 0.2, 0.3])
    drop = paired_drop(reference, reference - differences, "IoU")
    half = 2.7764451 * np.array([0.1, 0.2, 0.3, 1, -1]).std(ddof=1) / math.sqrt(5)
    assert ends(drop.drop) == pytest.approx((0.2, 0.12 - half, 0.12 + half))
    assert (drop.lost, drop.gained) == (3, 0)
    assert drop.reference.value == pytest.approx(0.7)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_right_and_wrong_in_percent_have_the_interval_of_shares(scale: float) -> None:
    share = paired_drop(*scores(40, 3, 1, 6), "top-1", unit="")
    scaled = paired_drop(*(part * scale for part in scores(40, 3, 1, 6)), "top-1", unit="")
    assert scaled.method == share.method
    for name in ("drop", "reference", "candidate"):
        wanted = [scale * part for part in ends(getattr(share, name))]
        assert ends(getattr(scaled, name)) == pytest.approx(wanted)


@pytest.mark.parametrize("value", [-3.0, 0.0, 0.4, 1.0, 100.0])
def test_equal_scores_and_equal_differences_have_a_width(value: float) -> None:
    drop = paired_drop(np.full(8, value), np.full(8, value), "mine", unit="").drop
    assert drop.value == 0
    assert drop.low < -0.1 * abs(value)
    assert drop.high > max(0, 0.1 * abs(value))
    reference = np.array([0.5, 0.75, 1.0, 0.5, 0.25, 0.5])
    for loss in (0.0, 0.25):
        drop = paired_drop(reference, reference - loss, "IoU").drop
        assert drop.value == loss
        assert drop.low < loss - 0.1
        assert drop.high > loss + 0.1


def test_rise_of_perplexity_is_the_exponential_of_the_paired_interval() -> None:
    reference, differences = np.array([-2.0, -3.0, -2.5]), np.array([0.01, 0.02, 0.03])
    rise = relative_rise(reference, reference - differences, np.ones(3), "perplexity")
    half = 4.3026527 * 0.01 / math.sqrt(3)
    wanted = [math.expm1(each) for each in (0.02, 0.02 - half, 0.02 + half)]
    assert ends(rise.drop) == pytest.approx(wanted)
    assert rise.reference.value == pytest.approx(math.exp(2.5))
    assert rise.candidate.value == pytest.approx(math.exp(2.52))
    assert (rise.lost, rise.gained, rise.n) == (3, 0, 3)
    rise = relative_rise([-1.0, -2.0], [-1.0, -2.3], [3, 1], "perplexity")  # weighed by tokens
    assert rise.drop.value == pytest.approx(math.expm1(0.3 / 4))
    assert rise.reference.value == pytest.approx(math.exp(5 / 4))
    rise = relative_rise([-1.0, -2.0], [-1e4, -3e4], np.ones(2), "perplexity")
    json.dumps(rise.to_dict(), allow_nan=False)
    assert rise.drop.high > 1e300
    assert len(rise.describe()) < 60


def noisy_rates(random: Random, first: float) -> list[np.ndarray]:
    drift = np.exp(0.2 * random.standard_normal(5))
    return [n * drift * np.exp(0.015 * random.standard_normal(5)) for n in (first, 100)]


def top1(random: Random, lost: float, gained: float) -> bool:
    fate = random.random(540)
    reference = np.where(fate < lost, 1, np.where(fate < lost + gained, 0, 1))
    candidate = np.where(fate < lost, 0, 1)
    return holds(paired_drop(reference, candidate, "top-1").drop, lost - gained)


def perplexity(random: Random) -> bool:
    """Long samples rise more than short ones: unweighted it would miss the truth."""
    tokens, every = random.integers(10, 100, 100), np.arange(10, 100)
    reference = -random.gamma(9, 0.3, 100)
    rise = relative_rise(reference, reference - random.normal(tokens / 5000, 0.03), tokens, "p")
    return holds(rise.drop, math.expm1(np.sum(every**2) / np.sum(every) / 5000))


@pytest.mark.parametrize(
    "experiment",
    [
        lambda random: top1(random, 0.03, 0.01),
        lambda random: top1(random, 0.02, 0.02),
        lambda random: top1(random, 0.1, 0.02),
        perplexity,
    ],
)
def test_an_interval_holds_as_often_as_it_says(experiment: Callable[[Random], bool]) -> None:
    random = np.random.default_rng(24)
    assert COVERED[0] <= np.mean([experiment(random) for _ in range(RUNS)]) <= COVERED[1]


def test_five_percent_slower_is_found_nine_times_of_ten() -> None:
    random = np.random.default_rng(25)
    assert np.mean([ratio(*noisy_rates(random, 95)).high < 1 for _ in range(RUNS)]) >= 0.9


@pytest.mark.parametrize("n", [10, 30, 100])
@pytest.mark.parametrize("noise", [0.0, 0.001, 0.03])
def test_drop_covers_losses_that_are_rare(n: int, noise: float) -> None:
    """One sample in 20 loses all of its score: many sets of samples hold none of these."""
    random = np.random.default_rng(24)
    covered = passed = 0
    for _ in range(RUNS):
        reference = random.beta(8, 2, n)
        lost = random.random(n) < 0.05
        candidate = np.where(lost, 0, reference - random.normal(0, 1, n) * noise)
        drop = paired_drop(reference, candidate, "IoU").drop
        covered += holds(drop, 0.05 * 0.8)
        passed += drop.high <= 0.01
    assert covered / RUNS >= COVERED[0]
    assert passed / RUNS <= 0.025


@pytest.mark.parametrize("bound", [0.005, 0.01, 0.03, 0.2])
def test_the_fewest_samples_are_the_fewest(bound: float) -> None:
    fewest = samples_to_show_no_drop(bound)
    unchanged = [paired_drop(np.ones(n), np.ones(n), "top-1").drop for n in (fewest - 1, fewest)]
    assert unchanged[1].high <= bound < unchanged[0].high


SPREAD = 0.3
POINTS = {50: 0.0, 90: 1.281552, 99: 2.326348}  # of the normal distribution
LATENCY_RUNS = campaign.rounds(150, 300)
COVERED_BY_FEWER = (0.915, 0.985)  # 95 % nominal; a share of 150 runs varies by 1.8 %
HALF_A_BIN = math.sqrt(GROWTH) - 1 + 1e-9


def uneven(n: int) -> np.ndarray:
    """1 to n ms in an order in which neighbours do not depend on each other."""
    return np.random.default_rng(1).permutation(np.arange(1, n + 1)) / 1e3


def percentiles(latency: Latency) -> dict[int, Interval | None]:
    return {50: latency.p50_ms, 90: latency.p90_ms, 99: latency.p99_ms}


def test_a_percentile_is_the_nearest_rank_a_latency_that_happened() -> None:
    found = percentiles(Latency.of(uneven(1007)))
    values = {q: each.value for q, each in found.items() if each is not None}
    assert values == pytest.approx({50: 504.0, 90: 907.0, 99: 997.0}, rel=1e-12)
    assert Latency.of([0.001, 0.004] * 50).p50_ms.value == 1.0
    equal = Latency.of(*[[0.001] * 100] * 5)
    assert equal.p99_ms == Interval(1.0, 1.0, 1.0)
    rounds = (np.random.default_rng(9).random(size) for size in (1, 30, 7, 200, 3))
    assert Latency.of(*rounds).samples == 241


def calls(random: Random, rounds: int, size: int, correlation: float = 0.0) -> list[np.ndarray]:
    """Rounds of one series, log-normal around 1 s, with this correlation of neighbours."""
    series = np.exp(SPREAD * dependent(random, rounds * size, correlation))
    return list(series.reshape(rounds, size))


def drifting(random: Random, rounds: int, size: int) -> list[np.ndarray]:
    """Rounds that differ by 1 %, each rather like the one before, of calls that differ by 2 %."""
    noise = np.exp(0.02 * random.standard_normal((rounds, size)))
    return list(noise * np.exp(0.01 * dependent(random, rounds, 0.9))[:, None])


@pytest.mark.parametrize(
    ("rounds", "spread", "known"),
    [
        (lambda random: calls(random, 5, 400), SPREAD, (50, 90, 99)),
        (lambda random: calls(random, 1, 1000), SPREAD, (50, 90, 99)),
        (lambda random: calls(random, 5, 2000, 0.9), SPREAD, (50, 90)),
        (lambda random: drifting(random, 60, 100), math.hypot(0.02, 0.01), (50,)),
    ],
    ids=["independent", "one series", "0.9", "drifting"],
)
def test_the_interval_of_a_percentile_holds_the_truth_as_often_as_it_says(
    rounds: Callable[[Random], list[np.ndarray]], spread: float, known: tuple[int, ...]
) -> None:
    random = np.random.default_rng(20)
    runs = [percentiles(Latency.of(*rounds(random))) for _ in range(LATENCY_RUNS)]
    for q in known:
        truth_ms = 1e3 * math.exp(spread * POINTS[q])
        intervals = [each for run in runs if (each := run[q]) is not None]
        assert len(intervals) > 0.95 * LATENCY_RUNS
        held = np.mean([each.low <= truth_ms <= each.high for each in intervals])
        assert COVERED_BY_FEWER[0] <= held <= COVERED_BY_FEWER[1], q


@pytest.mark.parametrize(
    ("size", "correlation", "q"), [(2000, 0.9, 99), (2000, 0.99, 90), (10_000, 0.99, 99)]
)
def test_calls_that_depend_on_each_other_are_too_few_for_what_independent_ones_show(
    size: int, correlation: float, q: int
) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        assert Latency.of(*calls(random, 5, size // 5, correlation)).needs[f"p{q}_ms"] > size


def test_latency_reports_what_the_samples_allow() -> None:
    for q, fewest in ((50, 6), (90, 36), (99, 368)):
        assert fewest_calls(q) == fewest
        assert (q / 100) ** fewest <= 0.025 < (q / 100) ** (fewest - 1)
        assert Latency.of(uneven(fewest - 1)).needs[f"p{q}_ms"] == fewest
    few, some, many = Latency.of([0.002, 0.001, 0.003]), *map(Latency.of, map(uneven, (100, 4000)))
    assert (few.p50_ms, few.p90_ms, few.p99_ms, few.max_ms) == (None, None, None, 3.0)
    with pytest.raises(BadInput, match="finite numbers"):
        Latency.of([math.inf, math.inf])  # no call had an answer
    assert some.p90_ms is not None
    assert (some.p99_ms, some.needs) == (None, {"p99_ms": 368})
    assert many.p99_ms.low < 3960 == many.p99_ms.value < many.p99_ms.high
    assert (many.samples, many.needs) == (4000, {})
    assert json.loads(json.dumps(Latency.of([0.001] * 10).to_dict(), allow_nan=False)) == {
        "samples": 10,
        "p50_ms": {"value": 1.0, "low": 1.0, "high": 1.0},
        "p90_ms": None,
        "p99_ms": None,
        "max_ms": 1.0,
        "needs": {"p90_ms": 36, "p99_ms": 368},
        "lost": 0,
    }


@pytest.mark.parametrize("scale_s", [1e-7, 1e-3, 10.0, 1e4], ids=str)
@pytest.mark.parametrize("q", [0, 50, 90, 99, 100], ids=str)
def test_a_percentile_of_the_histogram_is_that_of_the_calls(scale_s: float, q: float) -> None:
    calls_s = np.random.default_rng(1).lognormal(0.0, 1.0, 5000) * scale_s
    exact_ms = float(np.quantile(calls_s, q / 100, method="inverted_cdf")) * 1e3
    found_ms = percentile_ms(CallHistogram.of(calls_s).to_dict(), q)
    assert found_ms == pytest.approx(exact_ms, rel=HALF_A_BIN)


def test_every_call_is_counted_in_one_bin() -> None:
    found = CallHistogram.of(np.random.default_rng(2).lognormal(-7.0, 0.5, 10_000))
    assert sum(found.counts) == 10_000
    assert len(found.bins) < 500
    assert CallHistogram.of([1.01e-6]).bins == (1,)  # the lower end of a bin belongs to it
    assert CallHistogram.of([1e-6, 1e-6]) == CallHistogram((0,), (2,))
    assert CallHistogram.of([0.0]).counts == (1,)  # a clock that did not move
