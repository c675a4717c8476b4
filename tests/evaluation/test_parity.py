"""Parity of two engines: the figures of a difference, the verdict, and what cannot be compared."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Parity
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.data.samples import random_feeds
from deploykit.evaluation.parity import add_float32_errors, compare_engines, in_other_batches
from tests.support.fake_engine import FakeEngine, Function

X, Z_AND_Y = "x:float32[N,4]", ("y:float32[N,4]", "z:float32[N,4]")
NAN, INF = math.nan, math.inf


def constant(values: object, dtype: str = "float32", shape: str = "[N,M]") -> Function:
    """An engine whose output is always the same."""
    array = np.asarray(values, dtype=dtype)
    return Function(lambda _: {"y": array}, X, f"y:{dtype}{shape}")


def in_turn(*answers: list[list[float]]) -> Function:
    left = iter(answers)
    return Function(lambda _: {"y": np.array(next(left), "float32")}, X, "y:float32[N,2]")


def feeds_of(*batches: int) -> list[dict[str, np.ndarray]]:
    return [random_feeds(FakeEngine().inputs, {"N": batch}, seed=batch) for batch in batches]


def compare(a: FakeEngine, b: FakeEngine, *batches: int) -> Parity:
    return compare_engines(a, b, feeds_of(*(batches or (2,))))


def test_an_engine_equals_itself() -> None:
    parity = compare(FakeEngine(), FakeEngine(), 1, 2, 7)
    assert [(row.output, row.batch) for row in parity.rows] == [("y", 1), ("y", 2), ("y", 7)]
    for row in parity.rows:
        assert (row.max_abs, row.max_rel, row.rms, row.error) == (0, 0, 0, 0)
        assert (row.sqnr_db, row.agreement, row.finite) == (math.inf, 1.0, True)
    replace(parity, max_error=0.0).raise_if_over()


def test_figures_of_a_known_difference() -> None:
    row = compare(constant([[3.0, -4.0]]), constant([[3.5, -4.0]])).worst
    assert (row.max_abs, row.values) == (0.5, 2)
    assert row.max_rel == pytest.approx(0.5 / 3)
    assert row.rms == pytest.approx(math.sqrt(0.25 / 2))
    assert row.sqnr_db == pytest.approx(20.0)  # 25 / 0.25 in power
    assert row.error == pytest.approx(0.5 / 4)
    a, b = constant([[6e4, 6e4]], "float16"), constant([[6e4, 5.9e4]], "float16")
    wanted_db = 20 * math.log10(60000 * math.sqrt(2) / 992)  # its sums do not overflow
    assert compare(a, b).worst.sqnr_db == pytest.approx(wanted_db, abs=0.1)


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        ([0.2e-30, 1e-30], [0.3e-30, 1e-30], 0.1),
        ([0.2e5, 1e5], [0.3e5, 1e5], 0.1),
        ([1e-5, -1e-5], [-1e-5, 1e-5], 2.0),
        ([0.0, 0.0], [0.0, 1e-20], 1.0),
    ],
)
def test_the_error_is_relative_to_the_scale_of_the_output(
    a: list[float], b: list[float], error: float
) -> None:
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
        ([1.0, -INF], [1.0, 2.0], "float32", ONE_SIDE),
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


def test_another_batch_computes_row_by_row() -> None:
    sizes = []

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        sizes.append(len(feeds["x"]))
        return {"y": feeds["x"] * 2}

    feeds = {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}
    np.testing.assert_array_equal(in_other_batches(Function(run), feeds)["y"], feeds["x"] * 2)
    assert sizes == [1, 1, 1]


def test_feeds_of_one_batch_size_share_their_row() -> None:
    drifting = in_turn([[1.0, 0.0]], [[1.0, 0.25]], [[1.0, 0.0]])
    (row,) = compare(constant([[1.0, 0.0]], shape="[N,2]"), drifting, 2, 2, 2).rows
    assert (row.max_abs, row.values) == (0.25, 6)
    assert row.rms == pytest.approx(math.sqrt(0.0625 / 6))
    broken = in_turn([[NAN, 1.0]], [[1.0, 1.0]])  # not forgotten by the next
    assert not compare(constant([[1.0, 1.0]], shape="[N,2]"), broken, 2, 2).passed


def test_large_outputs_are_compared_in_parts_with_the_same_figures_in_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_the_callback_gets_both_outputs_in_the_references_order_until_one_side_is_nan() -> None:
    answers = iter([1.0, 1.0, NAN, 1.0])
    a = Function(lambda f: {"z": -f["x"], "y": f["x"]}, X, *Z_AND_Y)
    b = Function(lambda f: {"y": f["x"] * np.float32(next(answers)), "z": -f["x"]}, X, *Z_AND_Y)
    seen: list[object] = []
    compare_engines(
        *(a, b, feeds_of(1, 3, 2, 2)),
        each=lambda *args: seen.append((args[0], list(args[1]), list(args[2]))),
    )
    assert seen == [(0, ["y", "z"], ["y", "z"]), (1, ["y", "z"], ["y", "z"])]


def test_batch_is_axis_0_of_the_input_that_has_a_dynamic_one() -> None:
    engine = constant([[1.0]])
    engine.inputs = (parse_spec("scale:float32[3]"), parse_spec(X))
    feeds = {"scale": np.ones(3, np.float32), "x": np.ones((5, 4), np.float32)}
    assert compare_engines(engine, engine, [feeds]).worst.batch == 5


@pytest.mark.parametrize(
    ("values", "other", "expected"),
    [
        ([[1, 2, 0], [5, 1, 1]], [[1, 2, 0], [1, 5, 1]], 0.5),
        ([[[1, 2], [2, 1]]], [[[1, 2], [2, 1]]], None),
        ([[1], [2]], [[1], [2]], None),
        ([1, 2], [1, 2], None),
        ([[[[1, 2]]]], [[[[2, 1]]]], None),
    ],
    ids=["half", "three axes", "one column", "one axis", "image"],
)
def test_agreement_is_the_share_of_equal_argmax(
    values: object, other: object, expected: float | None
) -> None:
    shape = "[" + ",".join(f"A{n}" for n in range(np.ndim(values))) + "]"
    a, b = (constant(array, shape=shape) for array in (values, other))
    assert compare(a, b).worst.agreement == expected


def test_the_same_mask_of_infinities_on_both_sides_passes_but_is_shown() -> None:
    parity = compare(constant([[1.0, -math.inf]]), constant([[1.0, -math.inf]]))
    assert parity.passed
    assert not parity.worst.finite


def test_a_size_of_random_inputs_without_an_answer_is_left_out() -> None:
    """As of x.std(1) at one step; where nothing else has one, or the two differ, it counts."""

    def engine(*values: float) -> Function:
        answers = iter(values)
        return Function(
            lambda f: {"y": np.full((len(f["x"]), 1), next(answers), "f")}, X, "y:float32[N,1]"
        )

    def passed(a: tuple[float, ...], b: tuple[float, ...], *, random: bool = True) -> list[int]:
        parity = compare_engines(engine(*a), engine(*b), feeds_of(1, 2), random=random)
        return [row.batch for row in parity.rows] if parity.passed else []

    assert passed((NAN, 1.0), (NAN, 1.0)) == [2]
    assert passed((NAN, 1.0), (NAN, 1.0), random=False) == []
    assert passed((NAN, 1.0), (0.0, 1.0)) == []
    assert passed((NAN, NAN), (NAN, NAN)) == []
    assert passed((INF, 1.0), (INF, 1.0)) == [2]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1, 2), (1, 2, 1, 2)], ids=str)
def test_strings_compare_exactly(shape: tuple[int, ...]) -> None:
    def strings(*values: str) -> Function:
        array = np.array(values, object).reshape(shape)
        engine = Function(lambda _: {"y": array}, X)
        engine.outputs = (TensorSpec("y", "string", ("N", *shape[1:])),)
        return engine

    a, b = strings(*"abcd"), strings(*"abcx")
    with pytest.raises(GateFailed, match="1 of 4 strings differ"):
        replace(compare(a, b), max_error=1e9).raise_if_over()
    same = compare(a, a)
    assert (same.passed, same.worst.error, same.worst.agreement) == (True, 0, None)


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
def test_what_cannot_be_compared_is_refused_with_the_difference(
    specs: tuple[str, ...], what: str
) -> None:
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
