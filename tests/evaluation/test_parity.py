"""Parity of two engines: the figures of a difference, the verdict, and what cannot be compared."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Parity
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import load
from deploykit.evaluation.divergence import Divergence, first_divergence, tensor_error
from deploykit.evaluation.parity import add_float32_errors, compare_engines
from deploykit.graph.graph import Graph
from tests.support.fake_engine import FakeEngine, Function
from tests.support.graphs.data import samples
from tests.support.graphs.protos import calibrate, simulate, specs, to_half, to_pairs
from tests.support.graphs.qdq_graphs import stored, with_weight
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like, overflow, save

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
def test_agreement_is_equal_argmax(values: object, other: object, expected: float | None) -> None:
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
ONES = [{"x": np.ones((5, 2), np.float32)}]


def inputs_of(model: onnx.ModelProto, *batches: int) -> list[dict[str, np.ndarray]]:
    return [random_feeds(specs(model)[0], {"N": n}, n) for n in batches]


def diverge(
    a: onnx.ModelProto, b: onnx.ModelProto, max_error: float = 1e-3, chunk: int = 64
) -> Divergence | None:
    return first_divergence(Graph(a), Graph(b), inputs_of(a, 1, 3), max_error, chunk)


def scaled(model: onnx.ModelProto, weight: str, factor: float) -> onnx.ModelProto:
    """The same model with one weight changed."""
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


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_a_wrong_weight_is_found_through_half_precision(to: str) -> None:
    half, wrong = (
        simulate(to_half(model, to)[0]) for model in (mnist_like(), scaled(mnist_like(), "w2", 1.5))
    )
    bound = {"fp16": 5e-3, "bf16": 4e-2}[to]  # some 4 units in the last place
    assert diverge(mnist_like(), half, bound) is None
    found = diverge(mnist_like(), wrong, bound)
    assert (found.node, found.tensor, found.steepest.node) == ("conv2", "c2", "conv2")
    assert 0 < found.before < bound


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
def test_a_wrong_weight_is_found_through_int8(tmp_path: Path, runtime: str) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    calibration = calibrate(path, samples(mnist_like(), 64))
    right, wrong = (
        to_pairs(scaled(mnist_like(), "w2", factor), calibration, runtime=runtime)
        for factor in (1.0, 2.0)
    )
    assert diverge(mnist_like(), right, 0.1) is None
    found = diverge(mnist_like(), wrong, 0.1)
    assert found.node == "conv2"


def test_the_node_that_overflows_is_named() -> None:
    half = simulate(to_half(overflow())[0])
    feeds = [{"x": np.full((2, 4), 10, np.float32)}]
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


def test_an_error_that_builds_up_names_where_it_rose_most() -> None:
    a, b = Graph(chain(1, 1, 1, 1)), Graph(chain(1.01, 1.07, 1.09, 1.11))
    found = first_divergence(a, b, ONES, 0.1)
    assert (found.node, found.batch, found.compared) == ("s", 5, 4)
    assert found.before == pytest.approx(0.09, abs=1e-6)
    assert found.steepest.node == "q"
    assert found.text == (
        "the first node that differs is 's' (Mul): error 0.11 is above 0.1 in 's'; "
        "0.09 just before it; the largest rise was at 'q' (Mul), 0.01 to 0.07"
    )
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (document["node"], document["steepest"]["node"]) == ("s", "q")


def test_a_node_without_a_name_is_named_by_its_tensor_and_other_names_do_not_diverge() -> None:
    models = chain(1), chain(2)
    for model in models:
        model.graph.node[0].name = ""
    found = first_divergence(*map(Graph, models), ONES, 0.1)
    assert "differs is the Mul of 'p': error 1" in found.text
    other = chain(2)
    other.graph.node[0].output[0] = other.graph.output[0].name = "other"
    assert first_divergence(Graph(chain(1)), Graph(other), ONES, 0.1) is None


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


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_the_error_is_the_one_of_parity(tmp_path: Path, factor: float) -> None:
    a = save(mnist_like(), tmp_path / "a.onnx")
    b = save(scaled(mnist_like(), "w3", factor), tmp_path / "b.onnx")
    feeds = inputs_of(mnist_like(), 4)
    with load(a, "cpu") as first, load(b, "cpu") as second:
        row = compare_engines(first, second, feeds).rows[0]
        got = tensor_error(first(feeds[0])["logits"], second(feeds[0])["logits"])
    assert got == (row.error, row.problem)
