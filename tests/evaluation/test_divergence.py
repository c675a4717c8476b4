from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays, load
from deploykit.evaluation.divergence import Divergence, Tap, first_divergence, tensor_error
from deploykit.evaluation.parity import compare_engines
from tests.support.graphs.data import samples
from tests.support.graphs.protos import (
    calibrate,
    expose,
    shared,
    simulate,
    specs,
    to_half,
    to_pairs,
)
from tests.support.onnx_zoo import int64_ids, make, mnist_like, overflow, save, two_inputs

ort = pytest.importorskip("onnxruntime")


def tap(model: onnx.ModelProto) -> Tap:
    def opened(names: Sequence[str]) -> Callable[[Arrays], Sequence[np.ndarray]]:
        tapped, shown = expose(model, names)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(
            tapped.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return lambda feeds: session.run(shown, dict(feeds))

    return opened


def feeds_of(model: onnx.ModelProto, *batches: int) -> list[dict[str, np.ndarray]]:
    return [random_feeds(specs(model)[0], {"N": n}, n) for n in batches]


def diverge(
    a: onnx.ModelProto, b: onnx.ModelProto, max_error: float = 1e-3, chunk: int = 64
) -> Divergence | None:
    pairs = shared(a, b)
    return first_divergence(
        tap(a), tap(b), pairs, feeds_of(a, 1, 3), max_error=max_error, chunk=chunk
    )


def scaled(model: onnx.ModelProto, weight: str, factor: float) -> onnx.ModelProto:
    """The same model with one weight changed."""
    for tensor in model.graph.initializer:
        if tensor.name == weight:
            array = numpy_helper.to_array(tensor) * np.float32(factor)
            tensor.CopyFrom(numpy_helper.from_array(array, weight))
    return model


@pytest.mark.parametrize("chunk", [1, 2, 64])
@pytest.mark.parametrize(
    ("weight", "node", "operator"),
    [("w1", "conv1", "Conv"), ("w2", "conv2", "Conv"), ("b3", "head", "Gemm")],
)
def test_the_node_whose_weight_was_changed_is_named(
    chunk: int, weight: str, node: str, operator: str
) -> None:
    found = diverge(mnist_like(), scaled(mnist_like(), weight, 1.5), chunk=chunk)
    assert found is not None
    assert (found.node, found.operator, found.before) == (node, operator, 0.0)
    assert found.error > 0.01
    assert f"'{node}' ({operator}): error {found.error:.3g} is above 0.001" in found.text


def test_equal_graphs_do_not_diverge() -> None:
    assert diverge(mnist_like(), mnist_like(), max_error=0.0) is None


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_a_wrong_weight_is_found_through_half_precision(to: str) -> None:
    half = to_half(mnist_like(), to)[0]
    wrong = to_half(scaled(mnist_like(), "w2", 1.5), to)[0]
    bound = {"fp16": 5e-3, "bf16": 4e-2}[to]  # some 4 units in the last place
    assert diverge(mnist_like(), simulate(half), bound) is None
    found = diverge(mnist_like(), simulate(wrong), bound)
    assert found is not None
    assert (found.node, found.tensor) == ("conv2", "c2")
    assert 0 < found.before < bound
    assert found.steepest.node == "conv2"


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
def test_a_wrong_weight_is_found_through_int8(tmp_path: Path, runtime: str) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    calibration = calibrate(path, samples(mnist_like(), 64))
    right = to_pairs(mnist_like(), calibration, runtime=runtime)
    wrong = to_pairs(scaled(mnist_like(), "w2", 2.0), calibration, runtime=runtime)
    bound = 0.1
    assert diverge(mnist_like(), right, bound) is None
    found = diverge(mnist_like(), wrong, bound)
    assert found is not None
    assert found.node == "conv2"


def test_the_node_that_overflows_is_named() -> None:
    half = simulate(to_half(overflow())[0])
    feeds = [{"x": np.full((2, 4), 10, np.float32)}]
    pairs = shared(overflow(), half)
    found = first_divergence(tap(overflow()), tap(half), pairs, feeds, max_error=1e-2)
    assert found is not None
    assert (found.node, found.error, found.batch) == ("scale_up", math.inf, 2)
    assert "'scale_up' (Mul): NaN or infinity in one of the two" in found.text


def test_the_batch_of_the_first_difference_is_reported() -> None:
    """A dimension baked in as 1: right for a batch of one, wrong for more."""
    nodes = [helper.make_node("Slice", ["x", "zero", "one"], ["first"], name="first")]
    nodes.append(helper.make_node("Add", ["x", "first"], ["y"], name="add"))
    weights = {"zero": np.array([0]), "one": np.array([1])}
    row = {"x": ("N", 4)}, {"y": ("N", 4)}
    baked = make(nodes, *row, weights)
    nodes = [helper.make_node("Identity", ["x"], ["first"], name="first")]
    nodes.append(helper.make_node("Add", ["x", "first"], ["y"], name="add"))
    right = make(nodes, *row, {})
    found = diverge(right, baked)
    assert found is not None
    assert (found.node, found.batch) == ("add", 3)  # 'first' itself has another shape


def test_several_outputs_and_integers_are_compared() -> None:
    other = two_inputs()
    other.graph.node[1].input[1] = "a"
    found = diverge(two_inputs(), other)
    assert found is not None
    assert found.node == "mul"
    assert diverge(int64_ids(), int64_ids()) is None
    found = diverge(int64_ids(), scaled(int64_ids(), "table", 2))
    assert found is not None
    assert found.node == "embed"


@dataclass(frozen=True)
class Twin:
    a_name: str
    b_name: str
    node: str
    operator: str


def pairs_of(*names: str) -> list[Twin]:
    return [Twin(name, name, f"node_{name}", "Relu") for name in names]


def values(**tensors: float) -> Tap:
    """A graph of which each tensor is one number, whatever it is fed."""
    return lambda names: lambda _: [np.array([tensors[name]], np.float32) for name in names]


FEEDS: list[Mapping[str, np.ndarray]] = [{"x": np.zeros((5, 2), np.float32)}]


def test_an_error_that_builds_up_names_where_it_rose_most() -> None:
    a, b = values(p=1, q=1, r=1, s=1), values(p=1.01, q=1.07, r=1.09, s=1.11)
    found = first_divergence(a, b, pairs_of("p", "q", "r", "s"), FEEDS, max_error=0.1)
    assert found is not None
    assert (found.node, found.batch, found.compared) == ("node_s", 5, 4)
    assert found.before == pytest.approx(0.09)
    assert found.steepest.node == "node_q"
    assert found.text == (
        "the first node that differs is 'node_s' (Relu): error 0.11 is above 0.1 in 's'; "
        "0.09 just before it; the largest rise was at 'node_q' (Relu), 0.01 to 0.07"
    )


def test_a_node_without_a_name_is_named_by_its_tensor() -> None:
    pair = Twin("p", "p", "", "Conv")
    found = first_divergence(values(p=0), values(p=1), [pair], FEEDS, max_error=0.1)
    assert found is not None
    assert "differs is the Conv of 'p': error 1" in found.text


def test_only_as_many_tensors_are_asked_for_as_fit_a_chunk() -> None:
    asked: list[list[str]] = []

    def watched(names: Sequence[str]) -> Callable[[Arrays], Sequence[np.ndarray]]:
        asked.append(list(names))
        return lambda _: [np.zeros(1)] * len(names)

    pairs = pairs_of("p", "q", "r", "s", "t")
    b = values(p=0, q=0, r=1, s=0, t=0)
    first_divergence(watched, b, pairs, FEEDS, max_error=0.1, chunk=2)
    assert asked == [["p", "q"], ["r", "s"]]  # the answer was there: 't' is not looked at


def test_graphs_that_share_no_names_are_bad_input() -> None:
    with pytest.raises(BadInput, match="share no names"):
        first_divergence(values(), values(), [], FEEDS, max_error=0.1)


def test_no_feeds_are_bad_input() -> None:
    with pytest.raises(BadInput, match="no inputs"):
        first_divergence(values(p=0), values(p=0), pairs_of("p"), [], max_error=0.1)


def test_a_bound_that_is_none_is_bad_input() -> None:
    with pytest.raises(BadInput, match="`max_error`"):
        first_divergence(values(p=0), values(p=0), pairs_of("p"), FEEDS, max_error=math.nan)


def test_the_result_is_json() -> None:
    a, b = values(p=0), values(p=math.inf)
    found = first_divergence(a, b, pairs_of("p"), FEEDS, max_error=0.1)
    assert found is not None
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (document["node"], document["error"], document["steepest"]["error"]) == (
        "node_p",
        None,
        None,
    )


def error(a: Sequence[float], b: Sequence[float]) -> float:
    return tensor_error(np.array(a, np.float32), np.array(b, np.float32))[0]


def test_the_error_is_relative_to_the_scale_of_the_tensor() -> None:
    assert error([0.5, 0.1], [0.5, 0.2]) == pytest.approx(0.2)
    assert error([100, 0], [100, 1]) == pytest.approx(0.01)
    assert error([0, 0], [0, 1e-9]) == 1
    assert error([0, 0], [0, 0]) == 0


def test_infinity_and_nan_in_the_same_places_are_equal() -> None:
    assert error([np.inf, np.nan, 1], [np.inf, np.nan, 1]) == 0
    assert error([np.inf, 1], [-np.inf, 1]) == math.inf
    assert error([np.nan], [1]) == math.inf


def test_a_mask_that_half_precision_cannot_hold_is_still_a_mask() -> None:
    lowest = float(np.finfo(np.float32).min)
    assert error([lowest, 1], [-np.inf, 1]) == 0
    assert error([lowest, 1], [-65504, 1.5]) == 0.5
    assert error([-70000], [-np.inf]) == math.inf  # an overflow
    assert error([lowest], [0]) == pytest.approx(1)


def test_integers_are_compared_exactly() -> None:
    assert tensor_error(np.array([1, 2]), np.array([1, 2])) == (0.0, "")
    assert tensor_error(np.array([1, 2]), np.array([1, 3])) == (
        math.inf,
        "1 of 2 integers or booleans differ",
    )


def test_an_empty_tensor_is_equal() -> None:
    assert error([], []) == 0


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_the_error_is_the_one_of_parity(tmp_path: Path, factor: float) -> None:
    a = save(mnist_like(), tmp_path / "a.onnx")
    b = save(scaled(mnist_like(), "w3", factor), tmp_path / "b.onnx")
    feeds = feeds_of(mnist_like(), 4)
    with load(a, "cpu") as first, load(b, "cpu") as second:
        row = compare_engines(first, second, feeds).rows[0]
        got = tensor_error(first(feeds[0])["logits"], second(feeds[0])["logits"])
    assert got == (row.error, row.problem)
