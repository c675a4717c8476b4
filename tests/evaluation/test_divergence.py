from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import load
from deploykit.evaluation.divergence import Divergence, first_divergence, tensor_error
from deploykit.evaluation.parity import compare_engines
from deploykit.graph.graph import Graph
from tests.support.graphs.data import samples
from tests.support.graphs.protos import (
    calibrate,
    simulate,
    specs,
    to_half,
    to_pairs,
)
from tests.support.onnx_zoo import int64_ids, make, mnist_like, overflow, save, two_inputs

pytest.importorskip("onnxruntime")


def feeds_of(model: onnx.ModelProto, *batches: int) -> list[dict[str, np.ndarray]]:
    return [random_feeds(specs(model)[0], {"N": n}, n) for n in batches]


def diverge(
    a: onnx.ModelProto, b: onnx.ModelProto, max_error: float = 1e-3, chunk: int = 64
) -> Divergence | None:
    return first_divergence(Graph(a), Graph(b), feeds_of(a, 1, 3), max_error, chunk)


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
    found = first_divergence(Graph(overflow()), Graph(half), feeds, 1e-2)
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


def chain(*factors: float) -> onnx.ModelProto:
    """Multiplications in a row: p, q, r, s, of a one, have these products."""
    names = "pqrs"[: len(factors)]
    steps = [factors[0], *(b / a for a, b in itertools.pairwise(factors))]
    nodes = [
        helper.make_node("Mul", [before, f"w_{name}"], [name], name=f"node_{name}")
        for before, name in zip("x" + names, names, strict=False)
    ]
    weights = {f"w_{n}": np.array([step], np.float32) for n, step in zip(names, steps, strict=True)}
    return make(nodes, {"x": ("N", 2)}, {names[-1]: ("N", 2)}, weights)


ONES = [{"x": np.ones((5, 2), np.float32)}]


def test_an_error_that_builds_up_names_where_it_rose_most() -> None:
    a, b = Graph(chain(1, 1, 1, 1)), Graph(chain(1.01, 1.07, 1.09, 1.11))
    found = first_divergence(a, b, ONES, 0.1)
    assert found is not None
    assert (found.node, found.batch, found.compared) == ("node_s", 5, 4)
    assert found.before == pytest.approx(0.09, abs=1e-6)
    assert found.steepest.node == "node_q"
    assert found.text == (
        "the first node that differs is 'node_s' (Mul): error 0.11 is above 0.1 in 's'; "
        "0.09 just before it; the largest rise was at 'node_q' (Mul), 0.01 to 0.07"
    )
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (document["node"], document["steepest"]["node"]) == ("node_s", "node_q")


def test_a_node_without_a_name_is_named_by_its_tensor() -> None:
    models = chain(1), chain(2)
    for model in models:
        model.graph.node[0].name = ""
    found = first_divergence(*map(Graph, models), ONES, 0.1)
    assert found is not None
    assert "differs is the Mul of 'p': error 1" in found.text


def test_graphs_that_share_no_names_have_no_divergence() -> None:
    other = chain(2)
    other.graph.node[0].output[0] = other.graph.output[0].name = "other"
    assert first_divergence(Graph(chain(1)), Graph(other), ONES, 0.1) is None


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
