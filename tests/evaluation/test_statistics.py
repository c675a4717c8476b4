from __future__ import annotations

import math

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.evaluation.statistics import (
    FEWEST_DEPENDENT,
    difference,
    pooled_share,
    proportion,
    ratio,
    t_quantile,
    throughput,
)
from tests.support.measure.stats_coverage import COVERED, RUNS, holds


@pytest.mark.parametrize(
    ("freedom", "table"),  # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    [
        *[(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262)],
        *[(10, 2.228), (30, 2.042), (60, 2.000), (100, 1.984)],
    ],
)
def test_t_quantile_is_the_tables(freedom: int, table: float) -> None:
    assert t_quantile(freedom) == pytest.approx(table, abs=5e-4)


def test_t_quantile_is_smooth_where_the_method_changes_and_ends_at_the_normal() -> None:
    steps = [t_quantile(n) - t_quantile(n + 1) for n in (199, 200, 201)]
    assert steps[0] > steps[1] > steps[2] > 0
    assert t_quantile(10**7) == pytest.approx(1.959964, abs=1e-6)


def test_throughput_is_all_rows_over_all_seconds() -> None:
    rate = throughput([100, 300], [1.0, 2.0])
    assert rate.value == pytest.approx(400 / 3)


def test_throughput_of_equal_blocks_has_the_t_interval_of_their_rates() -> None:
    rate = throughput([198, 200, 202, 204, 196], [2.0] * 5)
    half = 2.7764451 * np.std([99, 100, 101, 102, 98], ddof=1) / math.sqrt(5)
    assert (rate.value, rate.low, rate.high) == pytest.approx((100, 100 - half, 100 + half))


def test_throughput_of_a_steady_rate_is_certain_whatever_the_blocks_lengths() -> None:
    rate = throughput([100, 200, 600], [1.0, 2.0, 6.0])
    assert (rate.low, rate.high) == pytest.approx((100, 100))


def test_throughput_never_goes_below_zero() -> None:
    assert throughput([1, 1000], [1.0, 1.0]).low == 0.0


def test_throughput_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(21)
    rows = 1000 * (1 + 0.05 * random.standard_normal((RUNS, 5)))
    covered = np.mean([holds(throughput(blocks, [2.0] * 5), 500) for blocks in rows])
    assert COVERED[0] <= covered <= COVERED[1]


def dependent(random: np.random.Generator, correlation: float, size: int) -> np.ndarray:
    """A normal AR(1) series of variance 1."""
    series = [random.standard_normal()]
    for news in math.sqrt(1 - correlation**2) * random.standard_normal(size - 1):
        series.append(correlation * series[-1] + news)
    return np.array(series)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6, 0.9])
def test_intervals_hold_where_blocks_depend_on_each_other(correlation: float) -> None:
    """A t interval holds the truth in 95, 86, 67 and 31 % of these runs."""
    random = np.random.default_rng(round(10 * correlation))
    rate = ratios = 0
    for _ in range(200):
        series = np.exp(0.02 * dependent(random, correlation, FEWEST_DEPENDENT))
        seconds = random.uniform(0.9, 1.1, len(series))
        rate += holds(throughput(500 * series * seconds, seconds), 500 * math.exp(2e-4))
        ratios += holds(ratio(500 * series, [500.0] * len(series)), 1.0)
    assert min(rate, ratios) >= 0.92 * 200


def test_independent_blocks_pay_little_for_those_that_are_not() -> None:
    random = np.random.default_rng(5)
    widths = []
    for _ in range(100):
        rates = 500 + random.standard_normal(20)
        found = throughput(rates, [1.0] * 20)
        widths.append((found.high - found.low) / (2 * 2.093 * rates.std(ddof=1) / math.sqrt(20)))
    assert 1.0 < np.median(widths) < 1.3


def test_twenty_equal_blocks_are_certain() -> None:
    assert throughput([7.0] * 20, [2.0] * 20) == Interval(3.5, 3.5, 3.5)


@pytest.mark.parametrize(
    ("interval", "found"),
    [
        (Interval(1.3, 1.2, 1.4), "faster"),
        (Interval(0.7, 0.6, 0.8), "slower"),
        (Interval(1.3, 0.9, 1.9), "no difference"),
        (Interval(1.0, 0.97, 1.01), "no difference"),
        (Interval(1.0, 0.99, 1.01), "practically equal"),
        (Interval(1.015, 1.01, 1.02), "practically equal"),
        (Interval(0.985, 0.98, 0.99), "practically equal"),
        (Interval(1.021, 1.02, 1.022), "faster"),
    ],
)
def test_a_difference_has_a_name(interval: Interval, found: str) -> None:
    assert difference(interval) == found


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [([5], [1.0]), ([], []), ([5, 6], [1.0]), ([5, 6], [1.0, 0.0]), ([5, math.nan], [1.0, 1.0])],
    ids=str,
)
def test_throughput_refuses_blocks_without_a_spread(
    rows: list[float], seconds: list[float]
) -> None:
    with pytest.raises(BadInput):
        throughput(rows, seconds)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_proportion_is_wilsons_interval(successes: int, n: int, low: float, high: float) -> None:
    share = proportion(successes, n)  # Newcombe, Statistics in Medicine 17 (1998), 857: method 3
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-5)
    assert share.value == successes / n


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_proportion_refuses_what_is_none(successes: int, n: int) -> None:
    with pytest.raises(BadInput, match="not a proportion"):
        proportion(successes, n)


def test_ratio_is_the_geometric_mean_of_the_rounds() -> None:
    assert ratio([2.0, 8.0], [1.0, 1.0]).value == pytest.approx(4.0)


def test_ratio_the_other_way_round_is_the_inverse() -> None:
    a, b = [10.0, 12.0, 11.0], [5.0, 5.5, 5.4]
    there, back = ratio(a, b), ratio(b, a)
    assert (there.value, there.low, there.high) == pytest.approx(
        (1 / back.value, 1 / back.high, 1 / back.low)
    )


def rounds(random: np.random.Generator, rate: float, drift: np.ndarray) -> np.ndarray:
    """Five rates: 1.5 % noise of their own on a drift that both sides share."""
    noisy: np.ndarray = rate * drift * np.exp(0.015 * random.standard_normal(5))
    return noisy


def test_a_against_itself_shows_no_difference_at_the_nominal_rate() -> None:
    random = np.random.default_rng(24)
    covered = 0
    for _ in range(RUNS):
        drift = np.exp(0.2 * random.standard_normal(5))
        covered += holds(ratio(rounds(random, 100, drift), rounds(random, 100, drift)), 1.0)
    assert COVERED[0] <= covered / RUNS <= COVERED[1]


def test_five_percent_slower_is_found_nine_times_of_ten() -> None:
    random = np.random.default_rng(25)
    found = 0
    for _ in range(RUNS):
        drift = np.exp(0.2 * random.standard_normal(5))
        found += ratio(rounds(random, 95, drift), rounds(random, 100, drift)).high < 1
    assert found / RUNS >= 0.9


@pytest.mark.parametrize(
    ("a", "b"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([], [])], ids=str
)
def test_ratio_refuses_what_has_no_spread_or_no_sense(a: list[float], b: list[float]) -> None:
    with pytest.raises(BadInput):
        ratio(a, b)


def test_a_share_of_pixels_has_the_spread_of_its_samples_not_that_of_yes_and_no() -> None:
    """100 answers of a sample vary less than one: Wilson's interval is three times as wide."""
    random = np.random.default_rng(7)
    covered, widths = 0, []
    for _ in range(500):
        trials = random.integers(50, 150, 60)
        found = pooled_share(random.binomial(trials, random.beta(16, 8, 60)), trials)
        assert found is not None
        widths.append(found.high - found.low)
        covered += found.low <= 2 / 3 <= found.high
    assert 0.92 < covered / 500 < 0.98
    wilson = proportion(40, 60)
    assert np.mean(widths) < 0.4 * (wilson.high - wilson.low)


def test_samples_of_one_answer_or_without_a_spread_have_wilsons_interval() -> None:
    ones = np.ones(50, np.int64)
    assert pooled_share(ones, ones) == proportion(50, 50)
    assert pooled_share(90 * ones, 90 * ones) == proportion(50, 50)
    assert pooled_share(0 * ones, 0 * ones) is None
