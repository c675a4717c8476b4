"""The gate: what passes, what fails and why, on labelled data, unlabelled data and none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import Arrays
from deploykit.evaluation.accuracy import Metric, find_metric, top1
from deploykit.evaluation.evaluation import evaluate
from tests.support.fake_engine import Function

TOP1 = find_metric("top1")
CLASSES = 10


def function(
    compute: Callable[[np.ndarray], dict[str, np.ndarray]], *outputs: str, axis0: int | str = "N"
) -> Function:
    """An engine of x float32[N,10]."""
    specs = outputs or (f"y:float32[N,{CLASSES}]",)
    return Function(lambda feeds: compute(feeds["x"]), f"x:float32[{axis0},{CLASSES}]", *specs)


def identity(sizes: list[int] | None = None) -> Function:
    """It notes the sizes of its batches."""
    return function(lambda x: (None if sizes is None else sizes.append(len(x))) or {"y": x.copy()})


def flipping() -> Function:
    """As `identity`, but wrong on the samples that carry a mark."""

    def compute(x: np.ndarray) -> dict[str, np.ndarray]:
        y = x.copy()
        marked = x[:, 0] < -50
        y[marked, (x.argmax(1)[marked] + 1) % CLASSES] = 51.0
        return {"y": y}

    return function(compute)


def noisy(db: float) -> Function:
    """Adds to each value so that the ratio of signal to noise is `db`."""
    factor = np.float32(1 + 10 ** (-db / 20))
    return function(lambda x: {"y": x * factor})


def nan() -> Function:
    return function(lambda x: {"y": x * np.float32(np.nan)})


def integer(shift: int) -> Function:
    return function(lambda x: {"y": x.argmax(1) + (np.arange(len(x)) == 0) * shift}, "y:int64[N]")


def samples_of(n: int, marked: int = 0, labelled: bool = True) -> Samples:
    """Every sample's largest value is its label's."""
    labels = np.arange(n) % (CLASSES - 1) + 1
    x = np.random.default_rng(n).standard_normal((n, CLASSES)).astype(np.float32)
    x[np.arange(n), labels] = 50.0
    x[:marked, 0] = -60.0
    return Samples({"x": x}, labels if labelled else None, "data.npz")


def test_each_engine_runs_once_per_batch_and_the_last_is_scored_against_its_own_labels() -> None:
    a, b = list[int](), list[int]()
    data = samples_of(70)
    found = evaluate(identity(a), identity(b), samples=data, metric=TOP1, batch_size=32)
    assert a == b == [32, 32, 6]
    assert (found.samples, found.drop.reference.value) == (70, 1.0)


def test_unchanged_answers_on_enough_samples_pass() -> None:
    found = evaluate(identity(), identity(), samples=samples_of(540), metric=TOP1)
    assert found.passed
    assert found.describe() == "drop 0.0 pp, -0.5 to 0.5, n = 540"
    assert found.why == "the upper end of the drop, 0.5114 pp, is within 1 pp"
    assert found.max_drop == 0.01


def test_the_upper_end_of_the_interval_decides_not_the_value() -> None:
    data = samples_of(540, marked=3)
    found = evaluate(identity(), flipping(), samples=data, metric=TOP1)
    assert found.drop.lost == 3
    assert found.drop.drop.value < 0.01 < found.drop.drop.high
    assert not found.passed
    assert "the measured value is within: about " in found.why
    assert evaluate(identity(), flipping(), samples=data, metric=TOP1, max_drop=0.02).passed
    found = evaluate(identity(), flipping(), samples=samples_of(540, marked=99), metric=TOP1)
    assert not found.passed
    assert found.why.endswith(" pp, is above 1 pp")  # not blamed on the samples


def test_too_few_samples_are_reported_with_the_number_needed() -> None:
    found = evaluate(identity(), identity(), samples=samples_of(64), metric=TOP1)
    assert not found.passed
    assert "64 samples cannot show it even without any drop, 276 are needed" in found.why
    assert not evaluate(identity(), identity(), samples=samples_of(275), metric=TOP1).passed
    assert evaluate(identity(), identity(), samples=samples_of(276), metric=TOP1).passed
    one_lost = evaluate(identity(), flipping(), samples=samples_of(276, marked=1), metric=TOP1)
    assert "the measured value is within" in one_lost.why
    few, enough = samples_of(380, labelled=False), samples_of(381, labelled=False)
    found = evaluate(identity(), noisy(40), samples=few, max_drop=0.01)
    assert "380 samples cannot show it even without any drop, 381 are needed" in found.why
    assert evaluate(identity(), noisy(40), samples=enough, max_drop=0.01).passed


def test_the_number_of_samples_needed_follows_from_the_spread_of_scores() -> None:
    metric = Metric("level", "", lambda outputs, _: outputs["y"][:, 0].astype(np.float64))
    shift = np.where(np.arange(20) % 2, 0.5, -0.5).astype(np.float32)[:, None]
    shaking = function(lambda x: {"y": x + shift})
    found = evaluate(identity(), shaking, samples=samples_of(20), metric=metric, max_drop=0.1)
    half = found.drop.drop.high
    assert half > 2.093024 * 0.5 * math.sqrt(20 / 19) / math.sqrt(20)  # t of 19
    needed = math.ceil(20 * (half / 0.1) ** 2)
    assert found.why == (
        f"the upper end of the drop, {half:.4g}, is above 0.1; "
        f"20 samples cannot show it even without any drop, {needed} are needed"
    )


@pytest.mark.parametrize("metric", [TOP1, None])
def test_nan_is_blamed_on_the_model_or_on_the_data_by_name(metric: Metric | None) -> None:
    found = evaluate(nan(), nan(), samples=samples_of(300), metric=metric)
    assert not found.passed
    assert found.drop is None
    assert "output 'y' at batch 32: no value is finite" in found.why
    with pytest.raises(GateFailed, match="NaN or infinity for 32 samples"):
        top1(np.full((32, 10), np.nan), np.zeros(32, np.int64), "data.npz")
    data = samples_of(300)
    data.inputs["x"][211, 3] = np.nan  # its batch has 31 good ones
    with pytest.raises(BadInput, match="input 'x' of sample 211 holds NaN or infinity"):
        evaluate(identity(), identity(), samples=data, metric=metric)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("labelled", [True, False])
def test_nan_where_the_reference_has_none_fails_anyway(odd: float, labelled: bool) -> None:
    def compute(x: np.ndarray) -> dict[str, np.ndarray]:
        y = x.copy()
        y[len(y) // 2, 0] = odd
        return {"y": y}

    broken = function(compute)
    found = evaluate(identity(), broken, samples=samples_of(540, labelled=labelled), metric=TOP1)
    assert (found.passed, found.drop, found.sqnr_db) == (False, None, -math.inf)
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.describe() == "NaN or infinity"
    assert found.why.startswith("output 'y' at batch 32: NaN or infinity in one")
    assert not evaluate(identity(), broken, samples=None).passed


def test_a_users_metric_never_gets_non_finite_outputs() -> None:
    """It may well raise on NaN: that would be reported as the metric's mistake."""
    seen: list[np.ndarray] = []

    def watch(outputs: Arrays, labels: np.ndarray) -> np.ndarray:
        seen.append(outputs["y"])
        return np.asarray(labels * 1.0)

    evaluate(identity(), nan(), samples=samples_of(8), metric=Metric("mine", "", watch))
    assert seen == []


def test_outputs_that_are_all_zero_are_a_warning() -> None:
    nothing = function(lambda x: {"y": np.zeros_like(x)})
    found = evaluate(nothing, nothing, samples=samples_of(40))
    assert (found.passed, found.agreement) == (True, None)
    assert "'y' is 0 everywhere" in found.why
    assert found.describe() == "outputs that are 0 everywhere"


def test_a_fixed_batch_runs_at_its_size_and_leaves_the_rest_out() -> None:
    sizes: list[int] = []
    a, b = identity(sizes), function(lambda x: {"y": x.copy()}, axis0=4)
    found = evaluate(a, b, samples=samples_of(14), metric=TOP1)
    assert sizes == [4, 4, 4]
    assert found.samples == 12
    with pytest.raises(BadInput, match="3 samples do not fill the model's fixed batch of 4"):
        evaluate(a, b, samples=samples_of(3), metric=TOP1)


@pytest.mark.parametrize(("db", "passed"), [(15.5, True), (14.5, False)])
def test_without_labels_fifteen_decibels_are_the_bound(db: float, passed: bool) -> None:
    found = evaluate(identity(), noisy(db), samples=samples_of(64, labelled=False), metric=TOP1)
    assert found.passed is passed
    assert found.sqnr_db == pytest.approx(db, abs=0.01)
    assert f"SQNR {db} dB is {'15 dB or more' if passed else 'below 15 dB'}" in found.why
    assert not evaluate(identity(), noisy(9.5), samples=None).passed
    unused = evaluate(identity(), noisy(20), samples=samples_of(64))  # labels without a metric
    assert (unused.drop, unused.passed) == (None, True)


def test_the_worst_output_decides() -> None:
    specs = (f"y:float32[N,{CLASSES}]", f"z:float32[N,{CLASSES}]")
    a = function(lambda x: {"y": x, "z": x}, *specs)
    b = function(lambda x: {"y": x, "z": x * np.float32(0.5)}, *specs)
    found = evaluate(a, b, samples=samples_of(8, labelled=False))
    assert not found.passed
    assert found.why.startswith("output 'z' at batch 8: SQNR 6.0 dB")


def test_agreement_is_reported_with_its_interval_and_bounded_where_a_bound_is_given() -> None:
    data = samples_of(256, marked=4, labelled=False)
    found = evaluate(identity(), flipping(), samples=data)
    assert found.agreement.value == 252 / 256
    assert found.describe().startswith("agreement 98.4 %, 96.1 to 99.4, n = 256; SQNR ")
    assert (found.passed, found.max_drop) == (True, None)
    found = evaluate(identity(), flipping(), samples=data, max_drop=0.03)
    assert not found.passed
    assert found.why.startswith("up to 3.948 % of the samples are answered differently, above 3")
    assert evaluate(identity(), flipping(), samples=data, max_drop=0.04).passed


def test_agreement_of_sequences_is_the_share_of_equal_places() -> None:
    def swap(x: np.ndarray) -> dict[str, np.ndarray]:
        y = x.copy()
        y[0, 0] = np.roll(y[0, 0], 1)
        return {"y": y}

    data = Samples({"x": samples_of(8).inputs["x"].reshape(8, 2, 5)}, None, "d")
    engines = [function(each, "y:float32[N,2,5]") for each in (lambda x: {"y": x.copy()}, swap)]
    for engine in engines:
        engine.inputs = (parse_spec("x:float32[N,2,5]"),)
    assert evaluate(*engines, samples=data).agreement.value == 15 / 16


@pytest.mark.parametrize("data", [samples_of(540, labelled=False), None], ids=["data", "random"])
def test_integer_outputs_alone_are_gated_on_agreement(data: Samples | None) -> None:
    assert evaluate(integer(0), integer(0), samples=data).passed
    found = evaluate(integer(0), integer(1), samples=data)
    assert (found.passed, found.sqnr_db) == (False, None)
    assert ("answered differently" if data else "1 of 1 integers or booleans differ") in found.why


def test_without_samples_random_inputs_of_several_batches_are_used() -> None:
    sizes: list[int] = []
    a, b = identity(sizes), noisy(30)
    found = evaluate(a, b, samples=None)
    assert sizes[-4:] == [1, 2, 7, 32]  # it showed first that these sizes run
    assert (found.passed, found.samples, found.agreement) == (True, None, None)
    assert found.describe() == "SQNR 30.0 dB on random inputs"
    equal = evaluate(identity(), identity(), samples=None)
    assert equal.describe() == "equal outputs on random inputs"
    b.max_batch = 4
    evaluate(a, b, samples=None)
    assert sizes[-3:] == [1, 2, 4]


def test_a_bound_that_bounds_nothing_is_refused_not_ignored() -> None:
    for bound in (0.0, -0.1, math.nan, math.inf):
        with pytest.raises(BadInput, match="`max_drop` must be"):
            evaluate(identity(), identity(), samples=samples_of(8), max_drop=bound)
    with pytest.raises(BadInput, match="`max_drop` needs samples"):
        evaluate(identity(), identity(), samples=None, max_drop=0.01)
    column = function(lambda x: {"y": x[:, :1]}, "y:float32[N,1]")
    data = samples_of(8, labelled=False)
    assert evaluate(column, column, samples=data).passed
    with pytest.raises(BadInput, match="no output holds an answer"):
        evaluate(column, column, samples=data, max_drop=0.01)


@pytest.mark.parametrize(
    ("values", "of_candidate", "shares", "passes", "said"),
    [
        ((1e-6, 1.0), (2e-6, 1.0), ("y",), True, True),  # a detector that finds nothing
        ((1e-6,), (2e-6,), ("y",), False, True),  # nothing else shows that it is right
        ((1e-6,), (1e-6,), ("y",), True, False),
        ((1e-6, 1.0), (2e-6, 0.0), ("y",), False, True),
        ((1e-6, 1.0), (2e-6, 1.0), (), False, False),  # a quantity may be small
        ((1e-6, 1.0), (2e-3, 1.0), ("y",), False, False),  # one that finds something
        ((0.5, 1.0), (0.9, 1.0), ("y",), False, False),
    ],
)
@pytest.mark.parametrize("samples", [None, samples_of(40, labelled=False)])
def test_shares_that_find_nothing_do_not_fail_by_their_noise(
    values: tuple[float, ...],
    of_candidate: tuple[float, ...],
    shares: tuple[str, ...],
    passes: bool,
    said: bool,
    samples: Samples | None,
) -> None:
    def engine(each: tuple[float, ...]) -> Function:
        outputs = dict(zip("yz", each, strict=False))
        specs = [f"{name}:float32[N,4]" for name in outputs]
        return function(lambda x: {n: np.full_like(x, v) for n, v in outputs.items()}, *specs)

    found = evaluate(engine(values), engine(of_candidate), samples=samples, shares=shares)
    assert found.passed is passes
    assert ("below 0.001 everywhere" in found.why) is said
