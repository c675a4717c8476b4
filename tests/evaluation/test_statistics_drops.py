"""Intervals of what a candidate loses against its reference, and the samples they take."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Drop, Interval
from deploykit.evaluation.statistics import (
    paired_drop,
    proportion,
    relative_rise,
    samples_to_show_agreement,
    samples_to_show_no_drop,
)
from tests.support.measure.stats_coverage import COVERED, RUNS, holds


def scores(both: int, lost: int, gained: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Reference and candidate, right (1) or wrong (0), in an order that keeps the pairs."""
    pairs = [(1, 1)] * both + [(1, 0)] * lost + [(0, 1)] * gained + [(0, 0)] * neither
    reference, candidate = np.array(pairs).T
    return reference, candidate


def test_drop_of_right_and_wrong_is_bonett_and_prices_interval() -> None:
    drop = paired_drop(*scores(both=12, lost=7, gained=1, neither=1), "top-1")
    # by hand: (7+1)/23 - (1+1)/23 = 0.26087, its variance (10/23 - 0.26087**2)/23 = 0.015945
    assert drop.drop.value == pytest.approx(6 / 21)
    assert (drop.drop.low, drop.drop.high) == pytest.approx((0.0134, 0.5084), abs=1e-4)
    assert (drop.lost, drop.gained, drop.n) == (7, 1, 21)
    assert drop.reference == proportion(19, 21)
    assert drop.candidate == proportion(13, 21)


def test_drop_keeps_a_width_when_nothing_changed() -> None:
    drop = paired_drop(*scores(both=500, lost=0, gained=0, neither=40), "top-1").drop
    assert drop.value == 0
    assert drop.low == -drop.high
    assert 0.003 < drop.high < 0.008  # the rule of three gives 3/540 = 0.0056


def test_drop_stays_within_one() -> None:
    drop = paired_drop(*scores(both=0, lost=30, gained=0, neither=0), "top-1").drop
    assert (drop.value, drop.high) == (1.0, 1.0)


def test_drop_is_negative_when_the_candidate_is_better() -> None:
    assert paired_drop([0, 0, 1, 1], [1, 1, 1, 1], "top-1").drop.value == -0.5


def test_drop_of_other_scores_is_the_paired_t_interval_with_a_loss_and_a_gain_added() -> None:
    reference, differences = np.array([0.5, 0.7, 0.9]), np.array([0.1, 0.2, 0.3])
    drop = paired_drop(reference, reference - differences, "IoU")
    added = np.array([0.1, 0.2, 0.3, 1, -1])
    half = 2.7764451 * added.std(ddof=1) / math.sqrt(5)
    assert (drop.drop.low, drop.drop.high) == pytest.approx((0.12 - half, 0.12 + half))
    assert drop.drop.value == pytest.approx(0.2)
    assert (drop.lost, drop.gained) == (3, 0)
    assert drop.reference.value == pytest.approx(0.7)


@pytest.mark.parametrize(("lost", "gained"), [(0.03, 0.01), (0.02, 0.02), (0.1, 0.02)], ids=str)
def test_drop_covers_the_truth_as_often_as_it_says(lost: float, gained: float) -> None:
    random = np.random.default_rng(22)
    covered = 0
    for _ in range(RUNS):
        fate = random.random(540)
        reference = np.where(fate < lost, 1, np.where(fate < lost + gained, 0, 1))
        candidate = np.where(fate < lost, 0, 1)
        covered += holds(paired_drop(reference, candidate, "top-1").drop, lost - gained)
    assert COVERED[0] <= covered / RUNS <= COVERED[1]


def test_drop_of_other_scores_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(23)
    covered = 0
    for _ in range(RUNS):
        reference = random.beta(8, 2, 100)
        candidate = reference - random.normal(0.01, 0.03, 100)
        covered += holds(paired_drop(reference, candidate, "IoU").drop, 0.01)
    assert covered / RUNS >= COVERED[0]


@pytest.mark.parametrize("n", [10, 30, 100])
@pytest.mark.parametrize("noise", [0.0, 0.001])
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


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_right_and_wrong_in_percent_have_the_interval_of_shares(scale: float) -> None:
    share = paired_drop(*scores(40, 3, 1, 6), "top-1", unit="")
    scaled = paired_drop(*(part * scale for part in scores(40, 3, 1, 6)), "top-1", unit="")
    assert scaled.method == share.method
    for name in ("drop", "reference", "candidate"):
        wide, narrow = getattr(scaled, name), getattr(share, name)
        got, want = (wide.value, wide.low, wide.high), (narrow.value, narrow.low, narrow.high)
        assert got == pytest.approx([scale * part for part in want])


@pytest.mark.parametrize("value", [-3.0, 0.0, 0.4, 1.0, 100.0])
def test_scores_that_are_all_one_value_have_a_width(value: float) -> None:
    drop = paired_drop(np.full(8, value), np.full(8, value), "mine", unit="").drop
    assert drop.value == 0
    assert drop.low < -0.1 * abs(value)
    assert drop.high > 0.1 * abs(value)
    assert drop.high > 0


@pytest.mark.parametrize(
    ("reference", "candidate", "problem"),
    [
        ([1, 0], [1], "2 scores of the reference, 1 of the candidate"),
        ([], [], "top-1 of the reference"),
        ([1, 0.5], [1, math.nan], "top-1 of the candidate"),
        ([1.5, 0.5, 3], [1, 0.5, 2, 2], "3 scores of the reference, 4 of the candidate"),
    ],
)
def test_drop_refuses_scores_that_cannot_be_paired(
    reference: list[float], candidate: list[float], problem: str
) -> None:
    with pytest.raises(BadInput, match=problem):
        paired_drop(reference, candidate, "top-1")


@pytest.mark.parametrize("difference", [0.0, 0.25])
def test_equal_differences_have_a_width(difference: float) -> None:
    reference = np.array([0.5, 0.75, 1.0, 0.5, 0.25, 0.5])
    drop = paired_drop(reference, reference - difference, "IoU").drop
    assert drop.value == difference
    assert drop.low < difference - 0.1
    assert drop.high > difference + 0.1


def test_rise_of_perplexity_is_the_exponential_of_the_paired_interval() -> None:
    reference, differences = np.array([-2.0, -3.0, -2.5]), np.array([0.01, 0.02, 0.03])
    rise = relative_rise(reference, reference - differences, np.ones(3), "perplexity")
    half = 4.3026527 * 0.01 / math.sqrt(3)
    assert (rise.drop.value, rise.drop.low, rise.drop.high) == pytest.approx(
        (math.expm1(0.02), math.expm1(0.02 - half), math.expm1(0.02 + half))
    )
    assert rise.reference.value == pytest.approx(math.exp(2.5))
    assert rise.candidate.value == pytest.approx(math.exp(2.52))
    assert (rise.lost, rise.gained, rise.n) == (3, 0, 3)


def test_rise_of_perplexity_weighs_samples_by_their_tokens() -> None:
    rise = relative_rise([-1.0, -2.0], [-1.0, -2.3], [3, 1], "perplexity")
    assert rise.drop.value == pytest.approx(math.expm1(0.3 / 4))
    assert rise.reference.value == pytest.approx(math.exp(5 / 4))


def test_rise_of_perplexity_covers_the_truth_as_often_as_it_says() -> None:
    """Long samples rise more than short ones: unweighted it would miss the truth."""
    random = np.random.default_rng(24)
    covered = 0
    for _ in range(RUNS):
        tokens = random.integers(10, 100, 100)
        reference = -random.gamma(9, 0.3, 100)
        candidate = reference - random.normal(tokens / 5000, 0.03)
        rise = relative_rise(reference, candidate, tokens, "perplexity").drop
        # the mean of tokens^2/5000 over that of tokens, of integers from 10 to 99
        covered += holds(
            rise, math.expm1(np.sum(np.arange(10, 100) ** 2) / np.sum(np.arange(10, 100)) / 5000)
        )
    assert COVERED[0] <= covered / RUNS <= COVERED[1]


def test_rise_of_perplexity_has_a_number_however_bad_it_is() -> None:
    rise = relative_rise([-1.0, -2.0], [-1e4, -3e4], np.ones(2), "perplexity")
    json.dumps(rise.to_dict(), allow_nan=False)
    assert rise.drop.high > 1e300
    assert len(rise.describe()) < 60


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([0, 0, 0], "no sample has a label"),
        ([1, 0, 0], "2 values"),
        ([1, 1], "no sample"),
        ([1, 1, math.nan], "weights"),
        ([1, 1, -1], "no sample"),
    ],
)
def test_rise_of_perplexity_refuses_weights_that_are_none(
    weights: list[float], problem: str
) -> None:
    with pytest.raises(BadInput, match=problem):
        relative_rise([-1, -2, -3.5], [-1.5, -2, -3], weights, "perplexity")


@pytest.mark.parametrize("bound", [0.005, 0.01, 0.03, 0.2])
def test_the_fewest_samples_are_the_fewest(bound: float) -> None:
    fewest = samples_to_show_no_drop(bound)
    unchanged = [paired_drop(np.ones(n), np.ones(n), "top-1").drop for n in (fewest - 1, fewest)]
    assert unchanged[1].high <= bound < unchanged[0].high
    fewest = samples_to_show_agreement(bound)
    equal = [1 - proportion(n, n).low for n in (fewest - 1, fewest)]
    assert equal[1] <= bound < equal[0]


@pytest.mark.parametrize(
    ("n", "drop", "text"),
    [
        (540, Interval(0.0037, 0.0008, 0.0071), "drop 0.4 pp, 0.1 to 0.7, n = 540"),
        (540, Interval(-0.0002, -0.02, 0.0003), "drop 0.0 pp, -2.0 to 0.0, n = 540"),
        (10_000, Interval(0.0004, -0.0001, 0.0009), "drop 0.04 pp, -0.01 to 0.09, n = 10000"),
    ],
)
def test_drop_describes_itself(n: int, drop: Interval, text: str) -> None:
    share = Interval(0.9, 0.8, 1.0)
    assert Drop("top-1", n, share, share, drop, 0, 0).describe() == text


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("%", "perplexity rise 0.4 %, 0.1 to 0.7, n = 540"),
        ("", "drop 0.0037, 0.0008 to 0.0071, n = 540"),
    ],
)
def test_drop_describes_itself_in_its_unit(unit: str, text: str) -> None:
    share, drop = Interval(0.9, 0.8, 1.0), Interval(0.0037, 0.0008, 0.0071)
    assert Drop("perplexity", 540, share, share, drop, 0, 0, unit).describe() == text


def test_drop_as_json_is_whole() -> None:
    document = json.loads(json.dumps(paired_drop([1, 1, 0], [1, 0, 0], "top-1").to_dict()))
    assert document["metric"] == "top-1"
    assert (document["n"], document["lost"], document["gained"]) == (3, 1, 0)
    assert (document["unit"], document["method"]) == ("pp", "adjusted Wald for paired proportions")
    assert document["drop"]["value"] == pytest.approx(1 / 3)
    assert document["reference"]["value"] == pytest.approx(2 / 3)
    assert set(document["candidate"]) == {"value", "low", "high"}
