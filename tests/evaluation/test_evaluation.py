"""The gate, its metrics and parity: what passes, what fails and why, and what is compared."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploykit.core.errors import BadInput, GateFailed, NotFound
from deploykit.core.evidence import Parity
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.samples import Samples, random_feeds
from deploykit.engines.tasks import class_axis
from deploykit.evaluation.accuracy import (
    Criterion,
    Metric,
    evaluate,
    find_metric,
    log_likelihood,
    same_answers,
    top1,
)
from deploykit.evaluation.divergence import Divergence, first_divergence, tensor_error
from deploykit.evaluation.parity import add_float32_errors, compare_engines, pair
from deploykit.graph.graph import Graph
from tests.support.fake_engine import FakeEngine, Function
from tests.support.graphs.data import samples, stored, with_weight
from tests.support.graphs.protos import calibrate, simulate, specs, to_half, to_pairs
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like, overflow, save

TOP1 = find_metric("top1")
CLASSES = 10


def function(
    compute: Callable[[np.ndarray], dict[str, np.ndarray]], *outputs: str, axis0: int | str = "N"
) -> Function:
    specs = outputs or (f"y:float32[N,{CLASSES}]",)
    return Function(lambda feeds: compute(feeds["x"]), f"x:float32[{axis0},{CLASSES}]", *specs)


def identity(sizes: list[int] | None = None) -> Function:
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
    labels = np.arange(n) % (CLASSES - 1) + 1
    x = np.random.default_rng(n).standard_normal((n, CLASSES)).astype(np.float32)
    x[np.arange(n), labels] = 50.0
    x[:marked, 0] = -60.0
    return Samples({"x": x}, labels if labelled else None, "data.npz")


def test_unchanged_answers_on_enough_samples_pass() -> None:
    found = evaluate(identity(), identity(), samples_of(540), Criterion(TOP1))
    assert found.passed
    assert found.describe() == "drop 0.0 pp, -0.5 to 0.5, n = 540"
    assert found.why == "the upper end of the drop, 0.5114 pp, is within 1 pp"
    assert found.max_drop == 0.01


def test_the_upper_end_of_the_interval_decides_not_the_value() -> None:
    data = samples_of(540, marked=3)
    found = evaluate(identity(), flipping(), data, Criterion(TOP1))
    assert found.drop.lost == 3
    assert found.drop.drop.value < 0.01 < found.drop.drop.high
    assert not found.passed
    assert "the measured value is within: about " in found.why
    assert evaluate(identity(), flipping(), data, Criterion(TOP1, 0.02)).passed
    found = evaluate(identity(), flipping(), samples_of(540, marked=99), Criterion(TOP1))
    assert not found.passed
    assert found.why.endswith(" pp, is above 1 pp")  # not blamed on the samples


def test_too_few_samples_are_reported_with_the_number_needed() -> None:
    found = evaluate(identity(), identity(), samples_of(64), Criterion(TOP1))
    assert not found.passed
    assert "the measured value is within: about 278 samples like these would show it" in found.why
    assert not evaluate(identity(), identity(), samples_of(275), Criterion(TOP1)).passed
    assert evaluate(identity(), identity(), samples_of(276), Criterion(TOP1)).passed
    one_lost = evaluate(identity(), flipping(), samples_of(276, marked=1), Criterion(TOP1))
    assert "the measured value is within" in one_lost.why
    few, enough = samples_of(380, labelled=False), samples_of(381, labelled=False)
    found = evaluate(identity(), noisy(40), few, Criterion(max_drop=0.01))
    assert "about 383 samples" in found.why
    assert evaluate(identity(), noisy(40), enough, Criterion(max_drop=0.01)).passed


def test_the_number_of_samples_needed_follows_from_the_spread_of_scores() -> None:
    metric = Metric("level", "", lambda outputs, _: outputs["y"][:, 0].astype(np.float64))
    shift = np.where(np.arange(20) % 2, 0.5, -0.5).astype(np.float32)[:, None]
    shaking = function(lambda x: {"y": x + shift})
    found = evaluate(identity(), shaking, samples_of(20), Criterion(metric, 0.1))
    half = found.drop.drop.high
    assert half > 2.093024 * 0.5 * math.sqrt(20 / 19) / math.sqrt(20)  # t of 19
    needed = math.ceil(22 * (half / 0.1) ** 2)
    assert found.why == (
        f"the upper end of the drop, {half:.4g}, is above 0.1; "
        f"the measured value is within: about {needed} samples like these would show it"
    )


@pytest.mark.parametrize("metric", [TOP1, None])
def test_nan_is_blamed_on_the_model_or_on_the_data_by_name(metric: Metric | None) -> None:
    found = evaluate(nan(), nan(), samples_of(300), Criterion(metric))
    assert not found.passed
    assert found.drop is None
    assert "output 'y' at batch 32: no value is finite" in found.why
    users = Metric("mine", "", pytest.fail)  # a user's may raise on NaN: it never gets them
    assert not evaluate(nan(), nan(), samples_of(8), Criterion(users)).passed
    with pytest.raises(GateFailed, match="NaN or infinity for 32 samples"):
        top1(np.full((32, 10), np.nan), np.zeros(32, np.int64), "data.npz")
    data = samples_of(300)
    data.inputs["x"][211, 3] = np.nan  # its batch has 31 good ones
    with pytest.raises(BadInput, match="input 'x' of sample 211 holds NaN or infinity"):
        evaluate(identity(), identity(), data, Criterion(metric))


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("labelled", [True, False])
def test_nan_where_the_reference_has_none_fails_anyway(odd: float, labelled: bool) -> None:
    def compute(x: np.ndarray) -> dict[str, np.ndarray]:
        y = x.copy()
        y[len(y) // 2, 0] = odd
        return {"y": y}

    broken = function(compute)
    found = evaluate(identity(), broken, samples_of(540, labelled=labelled), Criterion(TOP1))
    assert (found.passed, found.drop, found.sqnr_db) == (False, None, -math.inf)
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.describe() == "NaN or infinity"
    assert found.why.startswith("output 'y' at batch 32: NaN or infinity in one")
    assert not evaluate(identity(), broken, None).passed


def test_outputs_that_are_all_zero_are_a_warning() -> None:
    nothing = function(lambda x: {"y": np.zeros_like(x)})
    found = evaluate(nothing, nothing, samples_of(40))
    assert (found.passed, found.agreement) == (True, None)
    assert "'y' is 0 everywhere" in found.why
    assert found.describe() == "outputs that are 0 everywhere"


def test_a_fixed_batch_runs_at_its_size_and_leaves_the_rest_out() -> None:
    sizes: list[int] = []
    a, b = identity(sizes), function(lambda x: {"y": x.copy()}, axis0=4)
    found = evaluate(a, b, samples_of(14), Criterion(TOP1))
    assert sizes == [4, 4, 4]
    assert found.samples == 12
    found = evaluate(a, identity(sizes), samples_of(70), Criterion(TOP1), batch_size=32)
    assert sizes[3:] == [32, 32, 32, 32, 6, 6]  # each of the two, once per batch
    assert (found.samples, found.drop.reference.value) == (70, 1.0)
    with pytest.raises(BadInput, match="3 samples do not fill the model's fixed batch of 4"):
        evaluate(a, b, samples_of(3), Criterion(TOP1))


@pytest.mark.parametrize(("db", "passed"), [(15.5, True), (14.5, False)])
def test_without_labels_fifteen_decibels_are_the_bound(db: float, passed: bool) -> None:
    found = evaluate(identity(), noisy(db), samples_of(64, labelled=False), Criterion(TOP1))
    assert found.passed is passed
    assert found.sqnr_db == pytest.approx(db, abs=0.01)
    assert f"SQNR {db} dB is {'15 dB or more' if passed else 'below 15 dB'}" in found.why
    assert not evaluate(identity(), noisy(9.5), None).passed
    unused = evaluate(identity(), noisy(20), samples_of(64))  # labels without a metric
    assert (unused.drop, unused.passed) == (None, True)
    specs = (f"y:float32[N,{CLASSES}]", f"z:float32[N,{CLASSES}]")
    a, b = (function(lambda x, f=f: {"y": x, "z": x * np.float32(f)}, *specs) for f in (1, 0.5))
    worst = evaluate(a, b, samples_of(8, labelled=False))
    assert (worst.passed, worst.why[:34]) == (False, "output 'z' at batch 8: SQNR 6.0 dB")


def test_agreement_is_reported_with_its_interval_and_bounded_where_a_bound_is_given() -> None:
    data = samples_of(256, marked=4, labelled=False)
    found = evaluate(identity(), flipping(), data)
    assert found.agreement.value == 252 / 256
    assert found.describe().startswith("agreement 98.4 %, 96.1 to 99.4, n = 256; SQNR ")
    assert (found.passed, found.max_drop) == (True, None)
    found = evaluate(identity(), flipping(), data, Criterion(max_drop=0.03))
    assert not found.passed
    assert found.why.startswith("up to 3.948 % of the samples are answered differently, above 3")
    assert evaluate(identity(), flipping(), data, Criterion(max_drop=0.04)).passed


@pytest.mark.parametrize("data", [samples_of(540, labelled=False), None], ids=["data", "random"])
def test_integer_outputs_alone_are_gated_on_agreement(data: Samples | None) -> None:
    assert evaluate(integer(0), integer(0), data).passed
    found = evaluate(integer(0), integer(1), data)
    assert (found.passed, found.sqnr_db) == (False, None)
    assert ("answered differently" if data else "9 of 9 integers or booleans differ") in found.why


def test_without_samples_random_inputs_of_several_batches_are_used() -> None:
    sizes: list[int] = []
    a, b = identity(sizes), noisy(30)
    found = evaluate(a, b, None)
    assert sizes[-4:] == [1, 2, 7, 32]  # it showed first that these sizes run
    assert (found.passed, found.samples, found.agreement) == (True, None, None)
    assert found.describe() == "SQNR 30.0 dB on random inputs"
    equal = evaluate(identity(), identity(), None)
    assert equal.describe() == "equal outputs on random inputs"
    b.max_batch = 4
    evaluate(a, b, None)
    assert sizes[-3:] == [1, 2, 4]


def test_a_bound_that_bounds_nothing_is_refused_not_ignored() -> None:
    for bound in (0.0, -0.1, math.nan, math.inf):
        with pytest.raises(BadInput, match="`max_drop` must be"):
            evaluate(identity(), identity(), samples_of(8), Criterion(max_drop=bound))
    with pytest.raises(BadInput, match="`max_drop` needs samples"):
        evaluate(identity(), identity(), None, Criterion(max_drop=0.01))
    column = function(lambda x: {"y": x[:, :1]}, "y:float32[N,1]")
    data = samples_of(8, labelled=False)
    assert evaluate(column, column, data).passed
    with pytest.raises(BadInput, match="no output holds an answer"):
        evaluate(column, column, data, Criterion(max_drop=0.01))


@pytest.mark.parametrize(
    ("values", "of_candidate", "shares", "passes", "said"),
    [
        ((1e-6, 1.0), (2e-6, 1.0), ("y",), True, True),  # a detector that finds nothing
        ((1e-6,), (2e-6,), ("y",), False, True),  # nothing else shows that it is right
        ((1e-6,), (1e-6,), ("y",), True, False),
        ((1e-6, 1.0), (2e-6, 0.0), ("y",), False, True),
        ((1e-6, 1.0), (2e-6, 1.0), (), False, False),  # a quantity may be small
        ((1e-6, 1.0), (2e-3, 1.0), ("y",), False, False),  # one that finds something
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

    found = evaluate(engine(values), engine(of_candidate), samples, Criterion(shares=shares))
    assert found.passed is passes
    assert ("below 0.001 everywhere" in found.why) is said


VALUES = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], np.float32)
ONES = np.array([1, 1, 1])
LABELS = {  # what an engine answers, right, wrong and right -> labels that are all class 1
    "float32": (VALUES, ONES.astype(np.float32)),
    "bool": (VALUES, ONES == 1),
    "a column": (VALUES, ONES[:, None]),
    "one-hot": (VALUES, np.eye(2)[ONES]),
    "a column of integers": (np.array([[1], [0], [1]]), ONES * 1.0),
    "integers and one-hot": (np.array([1, 0, 1]), np.eye(2)[ONES]),
    "names": (np.array(["b", "a", "b"], object), np.array(["b", "b", "b"])),
    "numbers as names": (np.array(["1", "0", "1"], object), ONES),
}


@pytest.mark.parametrize(("values", "labels"), LABELS.values(), ids=LABELS)
def test_a_row_is_right_if_its_label_is_largest(values: np.ndarray, labels: np.ndarray) -> None:
    np.testing.assert_array_equal(top1(values, labels, "d"), [1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("values", "labels", "message"),
    [
        (VALUES, np.array([1.5, 0.0, 1.0]), r"labels are float64\[3\]"),
        (VALUES, np.array([[0.3, 0.7], [1, 0], [0, 1]]), "labels are float64"),
        (VALUES, np.array([[0, 0, 1]] * 3), r"labels are int64\[3, 3\]"),
        (VALUES, np.array([[1, 1], [1, 0], [0, 1]]), r"labels are int64\[3, 2\]"),
        (VALUES, np.array(["cat", "dog", "cat"]), r"labels are <U3\[3\]"),
        (VALUES, np.array([1, 0, 2]), "2 classes"),
        (VALUES[:2], np.array([1, 0, 1]), "samples, classes"),
        (VALUES[:, :1], np.array([0, 0, 0]), "samples, classes"),
        (VALUES, np.array([1, 0, -1]), "2 classes"),
    ],
)
def test_what_has_no_score_is_refused(values: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        top1(values, labels, "data.npz")


PERPLEXITY = find_metric("perplexity")


def scored(metric: Metric, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return metric.rate({"y": values}, labels, "data.npz")


def test_perplexity_weighs_tokens_equally_but_the_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    logits = random.standard_normal((9, 6, 5)) * 2
    worse = logits + random.standard_normal(logits.shape) * 0.5
    labels = random.integers(0, 5, (9, 6))
    labels[random.random(labels.shape) < 0.4] = -100
    labels[3] = -100  # weighs nothing

    def perplexity(values: np.ndarray) -> float:
        lse = np.log(np.exp(values).sum(-1))
        chosen = np.take_along_axis(values, np.maximum(labels, 0)[..., None], -1)[..., 0]
        return float(np.exp((lse - chosen)[labels != -100].mean()))

    for block in (10**6, 12):  # 12: two rows at once
        monkeypatch.setattr("deploykit.evaluation.accuracy._LOGITS", block)
        scores = (scored(PERPLEXITY, each, labels) for each in (logits, worse))
        drop = PERPLEXITY.drop(*scores, labels)
        assert drop.reference.value == pytest.approx(perplexity(logits))
        assert drop.candidate.value == pytest.approx(perplexity(worse))
        assert drop.drop.value == pytest.approx(perplexity(worse) / perplexity(logits) - 1)
        assert drop.drop.low < drop.drop.value < drop.drop.high
        assert (drop.unit, drop.n) == ("%", 8)
    for count, label, why in ((9, -100, "no sample has a label"), (1, 0, "needs 2 values")):
        alike = np.full((count, 6), label)
        scores = scored(PERPLEXITY, logits[:count], alike)
        with pytest.raises(BadInput, match=why):
            PERPLEXITY.drop(scores, scores, alike)


def test_log_likelihood_of_one_label_per_sample_does_not_overflow_in_half_precision() -> None:
    one = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    found = log_likelihood({"y": one}, np.array([0, 2]))
    np.testing.assert_allclose(found, np.log([0.5, 0.8]), rtol=1e-6)
    half = np.array([[60000.0, 59990.0, -60000.0]], np.float16)
    gap = float(half[0, 0]) - float(half[0, 1])
    found = log_likelihood({"y": half}, np.array([1]))
    assert found[0] == pytest.approx(-gap - math.log1p(math.exp(-gap)))


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.zeros((2, 3, 4)), np.zeros((2, 2), int), r"labels of shape \(2, 2\)"),
        (np.zeros((2,)), np.zeros((), int), "need a first output of"),
        (np.zeros((2, 4)), np.zeros(2), "integer labels, got float64 and float64"),
        (np.zeros((2, 4), int), np.zeros(2, int), "needs logits"),
        (np.zeros((2, 4)), np.array([0, 4]), "labels run from 0 to 4, the vocabulary has 4 tokens"),
        (np.zeros((2, 4)), np.array([0, -1]), "labels run from -1 to 0"),
    ],
)
def test_no_perplexity_is_refused(logits: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(BadInput, match=f"^data.npz: perplexity: .*{message}"):
        scored(PERPLEXITY, logits, labels)


USERS = """
import sys
import numpy as np
import deploykit as dk

def closeness(outputs, labels):
    return 1 - np.abs(outputs["y"][:, 0] - labels)

def right(outputs, labels): return outputs["y"].argmax(1) == labels
def nan(outputs, labels): return closeness(outputs, labels) * np.nan
def text(outputs, labels): return ["good"] * len(labels)
def key(outputs, labels): return outputs["logits"]
def leaves(outputs, labels): sys.exit(3)
def writes(outputs, labels): labels[:] = 0
def calls(outputs, labels): dk.load("missing.onnx")
NUMBER = 3
"""


@pytest.fixture
def users(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USERS, encoding="utf-8")
    return str(tmp_path / "mine.py")


def test_a_users_metric_scores_in_its_own_unit_and_booleans_are_right_and_wrong(users: str) -> None:
    metric = find_metric(f"{users}:closeness")
    a = scored(metric, np.array([[0.1], [0.2], [0.3]]), np.zeros(3))
    b = scored(metric, np.array([[0.2], [0.2], [0.5]]), np.zeros(3))
    np.testing.assert_allclose(a, [0.9, 0.8, 0.7])
    assert metric.drop(a, b, np.zeros(3)).describe() == "drop 0.1, -0.825 to 0.945, n = 3"
    metric, labels = find_metric(f"{users}:right"), np.array([0, 1, 2, 0])
    scores = scored(metric, np.eye(4), labels)
    np.testing.assert_array_equal(scores, [1, 1, 1, 0])
    assert "proportions" in metric.drop(scores, scores, labels).method


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "NaN or infinity"),
        ("text", r"returned <U4\[2\]"),
        ("key", "failed: KeyError: 'logits'"),
        ("leaves", r"failed: it called exit\(3\)"),
        ("writes", "failed: ValueError: assignment destination is read-only"),
        ("calls", r"failed: missing\.onnx: no such file"),
    ],
)
def test_an_error_in_a_users_metric_names_the_metric(users: str, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=rf"data\.npz: metric .*mine\.py:{name}: .*{message}"):
        scored(find_metric(f"{users}:{name}"), np.ones((2, 1)), np.zeros(2))


def test_an_unknown_metric_is_refused_with_the_known_ones(users: str) -> None:
    with pytest.raises(BadInput, match="'f1' is not a metric") as caught:
        find_metric("f1")
    assert "top1, perplexity" in caught.value.hint
    with pytest.raises(BadInput, match="NUMBER: is a int, not a function"):
        find_metric(f"{users}:NUMBER")
    with pytest.raises(NotFound, match="has no 'missing'"):
        find_metric(f"{users}:missing")


@pytest.mark.parametrize(
    ("name", "output", "inputs", "axis"),
    [
        ("logits", (2, 10), [(2, 3, 8, 8)], 1),
        ("score", (2, 1), [(2, 3, 8, 8)], None),
        ("y", (2,), [(2, 4)], None),
        ("logits", (2, 7, 30), [(2, 7), (2, 7)], 2),  # tokens
        ("boxes", (2, 3234, 4), [(2, 3, 320, 320)], None),
        ("output0", (2, 84, 8400), [(2, 3, 640, 640)], None),
        ("output0", (2, 3, 4), [(2, 3, 640, 640)], None),  # three boxes, not three channels
        ("mask", (2, 5, 8, 8), [(2, 3, 8, 8)], 1),
        ("mask", (2, 1, 8, 8), [(2, 3, 8, 8)], None),
        ("mask", (2, 8, 8, 5), [(2, 8, 8, 3)], 3),
        ("mask", (2, 5, 4, 4), [(2, 3, 8, 8)], None),  # features, or classes of another size
        ("text_embeds", (2, 512), [(2, 7)], None),
        ("last_hidden_state", (2, 7, 128), [(2, 7)], None),
        ("keypoints", (2, 34), [(2, 3, 8, 8)], None),
        ("y", (2, 2, 2, 2, 2), [(2, 2, 2, 2, 2)], None),
    ],
)
def test_the_classes_stand_where_an_input_has_the_same_places(
    name: str, output: tuple[int, ...], inputs: list[tuple[int, ...]], axis: int | None
) -> None:
    feeds = {f"x{n}": np.zeros(shape, np.float32) for n, shape in enumerate(inputs)}
    assert class_axis(name, np.zeros(output, np.float32), feeds) == axis
    assert class_axis(name, np.zeros(output, np.int64), feeds) is None


def test_rows_of_length_one_are_embeddings_unless_none_is_negative() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert class_axis("output", rows, {}) == 1
    assert class_axis("output", units, {}) is None
    assert class_axis("output", np.eye(5, dtype=np.float32), {}) == 1  # certain probabilities


def test_a_segmentation_answers_in_pixels_and_has_the_mean_iou_of_the_classes_shown() -> None:
    left = np.zeros((1, 3, 4, 4), np.float32)
    left[0, 0] = 1.0
    left[0, 1, :, 0] = 2.0  # 4 pixels of class 1, 12 of class 0; none of class 2
    right = left.copy()
    right[0, 1, 0, 1] = 2.0
    feeds = {"image": np.zeros((1, 3, 4, 4), np.float32)}
    specs = "image:float32[N,3,4,4]", "y:float32[N,3,4,4]"
    engines = [Function(lambda _, y=y: {"y": y}, *specs) for y in (left, right)]
    row = compare_engines(*engines, [feeds, feeds]).worst
    assert (row.answers, row.agreement) == ("pixels", 15 / 16)
    assert row.mean_iou == pytest.approx((4 / 5 + 11 / 12) / 2)
    assert same_answers({"y": left}, {"y": right}, feeds, 1).tolist() == [[15, 16]]


@pytest.mark.parametrize(("pixels", "passed"), [(0, True), (2, True), (3, False), (20000, False)])
def test_one_pixel_of_a_mask_in_ten_thousand_may_differ(pixels: int, passed: bool) -> None:
    left = np.tile(np.arange(4, dtype=np.int32), 5000).reshape(1, 100, 200)
    right = left.copy()
    right.reshape(-1)[:pixels] = 7
    specs = "image:uint8[N,100,200,3]", "mask:int32[N,100,200]"
    engines = [Function(lambda _, mask=mask: {"mask": mask}, *specs) for mask in (left, right)]
    feeds = {"image": np.zeros((1, 100, 200, 3), np.uint8)}
    parity = compare_engines(*engines, [feeds], max_error=1e-4)
    assert parity.passed is passed
    assert parity.worst.error == pixels / 20000


Outputs = Mapping[str, np.ndarray]
IMAGE = {"x": np.zeros((1, 3, 8, 8), np.float32)}


def found(count: int, seed: int = 0, stem: str = "") -> dict[str, np.ndarray]:
    """As torchvision's detectors answer: boxes far from each other, best first."""
    rng = np.random.default_rng(seed)
    corner = 100 * np.arange(count, dtype=np.float32)[:, None] + rng.random((count, 2), np.float32)
    sides = 20 + 40 * rng.random((count, 2), np.float32)
    return {
        f"{stem}boxes": np.concatenate((corner, corner + sides), 1),
        f"{stem}labels": rng.integers(1, 9, count),
        f"{stem}scores": np.sort(rng.random(count, np.float32))[::-1].copy(),
    }


def rows(outputs: Outputs, which: object) -> dict[str, np.ndarray]:
    return {name: array[which] for name, array in outputs.items()}  # type: ignore[index]


def head(outputs: Outputs) -> np.ndarray:
    parts = (outputs["boxes"], outputs["scores"][:, None], outputs["labels"][:, None])
    return np.concatenate(parts, 1)[None].astype(np.float32)


def engine(outputs: Outputs) -> Function:
    specs = {2: "[M,4]", 1: "[M]", 3: "[N,M,6]"}
    texts = [f"{name}:{a.dtype}{specs[a.ndim]}" for name, a in outputs.items()]
    return Function(lambda _: dict(outputs), "x:float32[1,3,8,8]", *texts)


def compared(left: Outputs, right: Outputs) -> Parity:
    return compare_engines(engine(left), engine(right), [IMAGE])


def test_boxes_are_compared_with_their_counterparts() -> None:
    left = found(5, stem="output_0_")
    right = rows(left, [2, 0, 1, 4, 3])
    parity = compared(left, right)
    assert parity.passed
    (row,) = [row for row in parity.rows if row.answers]
    assert (row.output, row.answers) == ("output_0_boxes", "boxes")
    assert (row.agreement, row.mean_iou) == (1.0, 1.0)
    right["output_0_boxes"] = right["output_0_boxes"] + np.float32(0.5)
    (row,) = [row for row in compared(left, right).rows if row.answers]
    assert row.max_abs == pytest.approx(0.5, abs=1e-3)
    assert row.mean_iou == pytest.approx(0.96, abs=0.02)
    assert row.agreement == 1.0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_a_box_that_one_does_not_find_is_an_error_of_its_share(turned: bool, single: bool) -> None:
    pair = [found(10), rows(found(10), slice(9))][:: -1 if turned else 1]
    outputs = [{"output0": head(each)} for each in pair] if single else pair
    row = compared(*outputs).worst
    assert row.error == pytest.approx(0.1)
    assert (row.agreement, row.answers, row.problem) == (pytest.approx(0.9), "boxes", "")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_boxes_that_are_broken_on_one_side_are_not_found(value: float) -> None:
    left, right = found(4), found(4)
    right["boxes"][:] = value
    row = compared(left, right).worst
    assert (row.output, row.error, row.agreement, row.problem) == ("boxes", 1.0, 0.0, "")
    assert not compared(right, left).passed


def test_another_label_or_too_little_in_common_is_no_counterpart() -> None:
    left = found(4)
    right = {name: array.copy() for name, array in left.items()}
    right["labels"][0] += 1
    right["boxes"][1] += right["boxes"][1, 2:].max() / 2
    assert same_answers(left, right, IMAGE, 1).tolist() == [[2, 6]]


def test_masks_and_keypoints_go_with_their_boxes_and_padding_is_no_box() -> None:
    left = {**found(3), "masks": np.arange(12, dtype=np.float32).reshape(3, 1, 2, 2)}
    mine, theirs, _ = pair(left, rows(left, [2, 1, 0]))
    np.testing.assert_array_equal(mine["masks"], theirs["masks"])
    filled = {
        name: np.concatenate((a, np.zeros((5, *a.shape[1:]), a.dtype)))[None]
        for name, a in found(3).items()
    }
    (matches,) = pair(filled, filled)[2].values()
    assert matches.images.tolist() == [[3, 3]]


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_boxes_without_an_area_and_no_boxes_are_compared(count: int) -> None:
    left = found(count)
    left["boxes"][:, 2:] = left["boxes"][:, :2]
    assert compared(left, left).passed
    assert compared(left, found(0)).passed is (count == 0)
    assert compared(found(0), left).passed is (count == 0)


@pytest.mark.parametrize(
    "outputs",
    [
        {"boxes": np.zeros((2, 9, 4), np.float32), "scores": np.zeros((2, 9, 3), np.float32)},
        {**found(3), "boxes": -found(3)["boxes"]},  # no corners
        {**found(3), "boxes": np.full((3, 4), np.nan, np.float32)},
        {"output0": np.ones((1, 5, 6), np.float32)},  # no area
        {"output0": np.random.default_rng(0).standard_normal((1, 5, 6)).astype(np.float32)},
        found(5000),
    ],
    ids=["raw head", "negative", "NaN", "ones", "noise", "too many"],
)
def test_what_is_not_certainly_a_detector_is_compared_as_it_is(outputs: Outputs) -> None:
    assert pair(outputs, outputs)[2] == {}


def test_without_labels_a_detector_must_find_nine_of_ten_boxes() -> None:
    left = found(20)
    samples = Samples({"x": np.zeros((3, 3, 8, 8), np.float32)}, None, "here")
    verdicts = [
        evaluate(engine(left), engine(rows(left, slice(kept))), samples) for kept in (20, 18, 17)
    ]
    assert [each.passed for each in verdicts] == [True, True, False]
    assert "both found 85 % of the boxes, below 90%" in verdicts[2].why
    assert verdicts[1].agreement.value == pytest.approx(0.9)
    assert verdicts[1].sqnr_db == np.inf


X, Z_AND_Y = "x:float32[N,4]", ("y:float32[N,4]", "z:float32[N,4]")
NAN, INF = math.nan, math.inf


def constant(values: object, dtype: str = "float32", shape: str = "[N,M]") -> Function:
    array = np.asarray(values, dtype=dtype)
    return Function(lambda _: {"y": array}, X, f"y:{dtype}{shape}")


def in_turn(*answers: list[list[float]]) -> Function:
    left = iter(answers)
    return Function(lambda _: {"y": np.array(next(left), "float32")}, X, "y:float32[N,2]")


def feeds_of(*batches: int) -> list[dict[str, np.ndarray]]:
    return [random_feeds(FakeEngine().inputs, {"N": batch}, seed=batch) for batch in batches]


def compare(a: FakeEngine, b: FakeEngine, *batches: int) -> Parity:
    return compare_engines(a, b, feeds_of(*(batches or (2,))))


def test_figures_of_a_known_difference() -> None:
    row = compare(constant([[3.0, -4.0]]), constant([[3.5, -4.0]])).worst
    assert (row.max_abs, row.values) == (0.5, 2)
    assert row.max_rel == pytest.approx(0.5 / 3)
    assert row.rms == pytest.approx(math.sqrt(0.25 / 2))
    assert row.sqnr_db == pytest.approx(20.0)  # 25 / 0.25 in power
    assert row.error == pytest.approx(0.5 / 4)
    left, right = constant([[1, 2, 0], [5, 1, 1]]), constant([[1, 2, 0], [1, 5, 1]])
    assert compare(left, right).worst.agreement == 0.5
    a, b = constant([[6e4, 6e4]], "float16"), constant([[6e4, 5.9e4]], "float16")
    wanted_db = 20 * math.log10(60000 * math.sqrt(2) / 992)  # its sums do not overflow
    assert compare(a, b).worst.sqnr_db == pytest.approx(wanted_db, abs=0.1)


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        ([0.2e-30, 1e-30], [0.3e-30, 1e-30], 0.1),
        ([1e-5, -1e-5], [-1e-5, 1e-5], 2.0),
        ([0.0, 0.0], [0.0, 1e-20], 1.0),
    ],
)
def test_errors_are_relative_to_the_output(a: list[float], b: list[float], error: float) -> None:
    parity = compare(constant([a], "float64"), constant([b], "float64"))
    assert parity.worst.error == pytest.approx(error)
    assert (parity.passed, parity.warnings) == (False, ())


ONE_SIDE = "output 'y' at batch 2: NaN or infinity in one"
BOTH = "1 of 2 values are NaN or infinity on both sides"
INTEGERS = "1 of 2 integers or booleans differ"


@pytest.mark.parametrize(
    ("a", "b", "dtype", "problem"),
    [
        ([1.0, NAN], [1.0, NAN], "float32", BOTH),
        ([1.0, INF], [1.0, INF], "float32", BOTH),
        ([1.0, 2.0], [1.0, NAN], "float32", ONE_SIDE),
        ([1.0, 2.0], [1.0, INF], "float32", ONE_SIDE),
        ([1.0, INF], [1.0, -INF], "float32", ONE_SIDE),
        ([NAN], [NAN], "float32", "nothing could be compared"),
        ([2**60, 1], [2**60 + 1, 1], "int64", INTEGERS),
        ([True, False], [True, True], "bool", INTEGERS),
        ([0, 255], [0, 254], "uint8", INTEGERS),
    ],
)
def test_what_no_bound_lets_pass_fails_by_name_and_is_null_in_json(
    a: list[object], b: list[object], dtype: str, problem: str
) -> None:
    for first, second in ((a, b), (b, a)):
        parity = compare(constant([first], dtype), constant([second], dtype))
        with pytest.raises(GateFailed, match=problem):
            replace(parity, max_error=1e9).raise_if_over()
        row = parity.worst
        assert row.floating is dtype.startswith("float")
        assert row.places_match is not (problem == ONE_SIDE)
        document = json.loads(json.dumps(parity.to_dict(), allow_nan=False))
        assert document["passed"] is False
        if problem == ONE_SIDE:
            assert document["rows"][0]["error"] is None
            assert "NaN or infinity" in document["rows"][0]["problem"]
    parity = compare(constant([[1e308]], "float64"), constant([[-1e308]], "float64"))
    assert not parity.passed
    json.dumps(parity.to_dict(), allow_nan=False)
    assert compare(FakeEngine(), FakeEngine()).to_dict()["passed"] is True


def test_an_output_of_zeros_or_without_a_value_is_a_warning() -> None:
    parity = compare(constant([[0.0, 0.0]]), constant([[0.0, 0.0]]))
    assert (parity.passed, parity.worst.agreement) == (True, None)
    (warning,) = parity.warnings
    assert warning in parity.why
    assert "'y' is 0 everywhere" in warning
    assert compare(constant([[0.0, 1.0]]), constant([[0.0, 1.0]])).warnings == ()
    nothing = constant(np.zeros((1, 0)).tolist())
    assert "'y' holds no value on these inputs" in compare(nothing, nothing).warnings[0]


def test_the_bound_follows_what_float32_itself_gives_and_is_never_tightened() -> None:
    a, b, noisy = (constant([[1.0, value]]) for value in (2.0, 2.004, 2.001))
    assert not compare(a, b).passed
    parity = add_float32_errors(compare(a, b), a, noisy, feeds_of(2))
    (row,) = parity.rows
    assert row.float32_error == pytest.approx(0.0005, rel=1e-3)
    assert parity.bound(row) == pytest.approx(0.004, rel=1e-3)
    assert parity.passed
    feeds = iter(feeds_of(2, 3))
    parity = add_float32_errors(compare(a, a), a, a, feeds)
    assert (parity.worst.float32_error, parity.bound(parity.worst)) == (0.0, parity.max_error)
    assert len([*feeds]) == 1  # not run: it passes after the first
    b = constant([[-1.0, 0.5]])
    parity = add_float32_errors(compare(a, b), a, b, feeds_of(2))  # rounding noise alone
    assert (parity.bound(parity.worst), parity.passed) == (0.1, False)
    assert "float32 itself gives" in parity.why


def test_feeds_of_one_batch_size_share_their_row() -> None:
    drifting = in_turn([[1.0, 0.0]], [[1.0, 0.25]], [[1.0, 0.0]])
    (row,) = compare(constant([[1.0, 0.0]], shape="[N,2]"), drifting, 2, 2, 2).rows
    assert (row.max_abs, row.values) == (0.25, 6)
    assert row.rms == pytest.approx(math.sqrt(0.0625 / 6))
    broken = in_turn([[NAN, 1.0]], [[1.0, 1.0]])  # not forgotten by the next
    assert not compare(constant([[1.0, 1.0]], shape="[N,2]"), broken, 2, 2).passed


def test_large_outputs_are_compared_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for shape, axes in (((6, 5), "[A,B]"), ((2, 3, 5), "[A,B,C]"), ((30,), "[A]")):
        a, b = (constant(random.standard_normal(shape), shape=axes) for _ in "ab")
        whole = compare(a, b).worst
        with monkeypatch.context() as patch:
            patch.setattr("deploykit.evaluation.parity.BLOCK", 11)
            parts = compare(a, b).worst
        for name in ("max_abs", "max_rel", "rms", "sqnr_db", "agreement", "error", "values"):
            assert getattr(parts, name) == pytest.approx(getattr(whole, name)), name
    monkeypatch.setattr("deploykit.evaluation.parity.BLOCK", 4000)
    engine = constant(np.zeros((200, 1000)))
    tracemalloc.start()
    try:
        compare(engine, engine)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200 * 1000 * 8 / 4  # a quarter of one copy in float64


def test_batch_is_axis_0_of_the_input_that_has_a_dynamic_one() -> None:
    engine = constant([[1.0]])
    engine.inputs = (parse_spec("scale:float32[3]"), parse_spec(X))
    feeds = {"scale": np.ones(3, np.float32), "x": np.ones((5, 4), np.float32)}
    assert compare_engines(engine, engine, [feeds]).worst.batch == 5


def test_a_size_of_random_inputs_without_an_answer_is_left_out() -> None:
    """As of x.std(1) at one step; where nothing else has one, or the two differ, it counts."""

    def passed(a: tuple[float, ...], b: tuple[float, ...], *, random: bool = True) -> list[int]:
        engines = [in_turn(*([[value] * 2] for value in values)) for values in (a, b)]
        parity = compare_engines(*engines, feeds_of(1, 2), random=random)
        return [row.batch for row in parity.rows] if parity.passed else []

    assert passed((NAN, 1.0), (NAN, 1.0)) == [2]
    assert passed((NAN, 1.0), (NAN, 1.0), random=False) == []
    assert passed((NAN, 1.0), (0.0, 1.0)) == []
    assert passed((NAN, NAN), (NAN, NAN)) == []
    assert passed((INF, 1.0), (INF, 1.0)) == [2]
    masked = constant([[1.0, -INF]])
    parity = compare(masked, masked)  # the same mask of infinities passes, but is shown
    assert (parity.passed, parity.worst.finite) == (True, False)


def test_the_gate_names_output_batch_and_figure() -> None:
    def shifted(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": feeds["x"], "z": feeds["x"] + np.float32(len(feeds["x"]) * 0.125)}

    a = Function(lambda f: {"y": f["x"], "z": f["x"]}, X, *Z_AND_Y)
    b = Function(shifted, X, *Z_AND_Y)
    ones = [{"x": np.ones((batch, 4), np.float32)} for batch in (1, 4, 2)]
    parity = compare_engines(a, b, ones, names=("a.onnx", "b.onnx"), max_error=1e-3)
    assert (parity.worst.output, parity.worst.batch) == ("z", 4)
    with pytest.raises(GateFailed) as caught:
        parity.raise_if_over()
    text = "b.onnx against a.onnx: output 'z' at batch 4: error 0.5 is above 0.001"
    assert caught.value.message == text


def test_an_error_equal_to_the_bound_passes_and_a_bound_that_bounds_nothing_is_refused() -> None:
    parity = compare(constant([[1.0]]), constant([[1.25]]))
    replace(parity, max_error=0.25).raise_if_over()
    replace(compare(FakeEngine(), FakeEngine(), 1, 2, 7), max_error=0.0).raise_if_over()
    with pytest.raises(GateFailed):
        replace(parity, max_error=0.2499).raise_if_over()
    for bound in (-1e-3, math.nan, math.inf):
        with pytest.raises(BadInput, match="`max_error` must be 0 or more"):
            compare_engines(FakeEngine(), FakeEngine(), feeds_of(1), max_error=bound)


def test_a_fixed_axis_may_meet_a_dynamic_one_and_outputs_any_order() -> None:
    a = Function(lambda f: {"y": f["x"], "z": -f["x"]}, X, *Z_AND_Y)
    fixed = ("x:float32[2,4]", "z:float32[2,4]", "y:float32[2,4]")
    assert compare(a, Function(lambda f: {"y": f["x"], "z": -f["x"]}, *fixed)).passed


@pytest.mark.parametrize(
    ("specs", "what"),
    [
        (("image:float32[N,4]", "y:float32[N,4]"), "new has an input 'image', old has none"),
        ((X, "logits:float32[N,4]"), "new has an output 'logits', old has none"),
        (("x:float16[N,4]",), r"input 'x' is x:float32\[N,4\] in old, x:float16"),
        (("x:float32[N,4,1]",), r"input 'x' is .* x:float32\[N,4,1\] in new"),
        ((X, *Z_AND_Y), "new has an output 'z', old has none"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_why(specs: tuple[str, ...], what: str) -> None:
    def compared(*engines: FakeEngine, names: tuple[str, str]) -> None:
        with pytest.raises(BadInput, match=what):
            compare_engines(*engines, feeds_of(1), names=names)

    other = Function(lambda _: {}, *specs)
    compared(FakeEngine(), other, names=("old", "new"))
    if "output" in what:
        compared(other, FakeEngine(), names=("new", "old"))


def test_no_inputs_and_shapes_that_differ_only_when_run_are_refused() -> None:
    with pytest.raises(BadInput, match="no inputs to compare on"):
        compare_engines(FakeEngine(), FakeEngine(), [])
    with pytest.raises(BadInput, match=r"output 'y' at batch 2 is float32\[1, 2\] from a"):
        compare(constant([[1.0, 2.0]]), constant([[1.0]]))


ROWS = "(float[N,4] x) => (float[N,4] y)"
FIVE_ONES = {"x": np.ones((5, 2), np.float32)}


def diverge(
    a: onnx.ModelProto, b: onnx.ModelProto, max_error: float = 1e-3, chunk: int = 64
) -> Divergence | None:
    return first_divergence(
        Graph(a), Graph(b), random_feeds(specs(a)[0], {"N": 3}), max_error, chunk
    )


def scaled(model: onnx.ModelProto, weight: str, factor: float) -> onnx.ModelProto:
    return with_weight(model, weight, stored(model)[weight] * factor)


@pytest.mark.parametrize("chunk", [1, 2, 64])
@pytest.mark.parametrize(
    ("weight", "node", "operator"),
    [("w1", "conv1", "Conv"), ("w2", "conv2", "Conv"), ("b3", "head", "Gemm")],
)
def test_the_changed_node_is_named(chunk: int, weight: str, node: str, operator: str) -> None:
    found = diverge(mnist_like(), scaled(mnist_like(), weight, 1.5), chunk=chunk)
    assert (found.node, found.operator, found.before) == (node, operator, 0.0)
    assert found.error > 0.01
    assert f"'{node}' ({operator}): error {found.error:.3g} is above 0.001" in found.text
    assert diverge(mnist_like(), mnist_like(), max_error=0.0, chunk=chunk) is None


# some 4 units in the last place of each half type
@pytest.mark.parametrize(
    ("to", "bound"), [("fp16", 5e-3), ("bf16", 4e-2), ("tensorrt", 0.1), ("onnxruntime", 0.1)]
)
def test_a_wrong_weight_is_found_in_each_precision(tmp_path: Path, to: str, bound: float) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    calibration = calibrate(path, samples(mnist_like(), 64))

    def converted(factor: float) -> onnx.ModelProto:
        model = scaled(mnist_like(), "w2", factor)
        if to in ("fp16", "bf16"):
            return simulate(to_half(model, to)[0])
        return to_pairs(model, calibration, runtime=to)

    assert diverge(mnist_like(), converted(1.0), bound) is None
    found = diverge(mnist_like(), converted(1.5), bound)
    assert (found.node, found.tensor) == ("conv2", "c2")
    assert 0 < found.before < bound


def test_the_node_that_overflows_is_named() -> None:
    half = simulate(to_half(overflow())[0])
    feeds = {"x": np.full((2, 4), 10, np.float32)}
    found = first_divergence(Graph(overflow()), Graph(half), feeds, 1e-2)
    assert (found.node, found.error, found.batch) == ("scale_up", math.inf, 2)
    assert "'scale_up' (Mul): NaN or infinity in one of the two" in found.text


def test_the_batch_of_the_first_difference_is_reported() -> None:
    """A dimension baked in as 1: right for a batch of one, wrong for more."""
    baked = parse(ROWS, "first = Slice(x, zero, one) y = Add(x, first)", zero=[0], one=[1])
    found = diverge(parse(ROWS, "first = Identity(x) y = Add(x, first)"), baked)
    assert (found.node, found.batch) == ("y", 3)  # 'first' itself has another shape


def chain(*factors: float) -> onnx.ModelProto:
    """Multiplications in a row: p, q, r, s, of a one, have these products."""
    names = "pqrs"[: len(factors)]
    steps = [factors[0], *(b / a for a, b in itertools.pairwise(factors))]
    body = " ".join(f"{n} = Mul({a}, w{n})" for a, n in zip("x" + names, names, strict=False))
    weights = {f"w{name}": [float(step)] for name, step in zip(names, steps, strict=True)}
    return parse(f"(float[N,2] x) => (float[N,2] {names[-1]})", body, **weights)


def test_an_error_that_builds_up_is_named_where_it_passes_the_bound() -> None:
    a, b = Graph(chain(1, 1, 1, 1)), Graph(chain(1.01, 1.07, 1.09, 1.11))
    found = first_divergence(a, b, FIVE_ONES, 0.1)
    assert (found.node, found.batch) == ("s", 5)
    assert found.before == pytest.approx(0.09, abs=1e-6)
    assert found.text == (
        "the first node that differs is 's' (Mul): error 0.11 is above 0.1 in 's'; "
        "0.09 just before it"
    )
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (document["node"], document["tensor"]) == ("s", "s")


def test_a_node_without_a_name_is_named_by_its_tensor_and_other_names_do_not_diverge() -> None:
    models = chain(1), chain(2)
    for model in models:
        model.graph.node[0].name = ""
    found = first_divergence(*map(Graph, models), FIVE_ONES, 0.1)
    assert "differs is the Mul of 'p': error 1" in found.text
    other = chain(2)
    other.graph.node[0].output[0] = other.graph.output[0].name = "other"
    assert first_divergence(Graph(chain(1)), Graph(other), FIVE_ONES, 0.1) is None


def test_boxes_are_counted_over_all_images() -> None:
    rows = np.array([[[0, 0, 4, 4, 0.9, 1]], [[1, 1, 5, 5, 0.8, 2]]], np.float32)
    others = rows.copy()
    others[1, 0, 5] = 3  # another class: neither side has this box of the other
    (found,) = pair({"y": rows}, {"y": others})[2].values()
    assert found.images.tolist() == [[1, 1], [0, 2]]


LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        ([0.5, 0.1], [0.5, 0.2], 0.2),  # relative to the scale of the tensor
        ([0, 0], [0, 1e-9], 1),
        ([INF, NAN, 1], [INF, NAN, 1], 0),
        ([NAN], [1], INF),
        ([LOWEST, 1], [-INF, 1], 0),  # a mask that half precision cannot hold is still a mask
        ([LOWEST, 1], [-65504, 1.5], 0.5),
        ([-70000], [-INF], INF),  # an overflow
        ([LOWEST], [0], 1),
        ([], [], 0),
    ],
)
def test_the_error_of_a_tensor(a: list[float], b: list[float], error: float) -> None:
    found, _ = tensor_error(np.array(a, np.float32), np.array(b, np.float32))
    assert found == pytest.approx(error)


def test_integers_are_compared_exactly() -> None:
    assert tensor_error(np.array([1, 2]), np.array([1, 2])) == (0.0, "")
    differ = "1 of 2 integers or booleans differ"
    assert tensor_error(np.array([1, 2]), np.array([1, 3])) == (math.inf, differ)
