"""The first node at which two graphs differ, and by how much."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import load
from deploykit.evaluation.divergence import Divergence, first_divergence, tensor_error
from deploykit.evaluation.parity import compare_engines
from deploykit.graph.graph import Graph
from tests.support.graphs.data import samples
from tests.support.graphs.protos import calibrate, simulate, specs, to_half, to_pairs
from tests.support.graphs.qdq_graphs import stored, with_weight
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import int64_ids, mnist_like, overflow, save, two_inputs

ROWS = "(float[N,4] x) => (float[N,4] y)"
ONES = [{"x": np.ones((5, 2), np.float32)}]


def feeds_of(model: onnx.ModelProto, *batches: int) -> list[dict[str, np.ndarray]]:
    return [random_feeds(specs(model)[0], {"N": n}, n) for n in batches]


def diverge(
    a: onnx.ModelProto, b: onnx.ModelProto, max_error: float = 1e-3, chunk: int = 64
) -> Divergence | None:
    return first_divergence(Graph(a), Graph(b), feeds_of(a, 1, 3), max_error, chunk)


def scaled(model: onnx.ModelProto, weight: str, factor: float) -> onnx.ModelProto:
    """The same model with one weight changed."""
    return with_weight(model, weight, stored(model)[weight] * factor)


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
    assert diverge(mnist_like(), mnist_like(), max_error=0.0, chunk=chunk) is None


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_a_wrong_weight_is_found_through_half_precision(to: str) -> None:
    half, wrong = (
        simulate(to_half(model, to)[0]) for model in (mnist_like(), scaled(mnist_like(), "w2", 1.5))
    )
    bound = {"fp16": 5e-3, "bf16": 4e-2}[to]  # some 4 units in the last place
    assert diverge(mnist_like(), half, bound) is None
    found = diverge(mnist_like(), wrong, bound)
    assert found is not None
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
    baked = parse(ROWS, "first = Slice(x, zero, one) y = Add(x, first)", zero=[0], one=[1])
    found = diverge(parse(ROWS, "first = Identity(x) y = Add(x, first)"), baked)
    assert found is not None
    assert (found.node, found.batch) == ("y", 3)  # 'first' itself has another shape


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
    body = " ".join(f"{n} = Mul({a}, w{n})" for a, n in zip("x" + names, names, strict=False))
    weights = {f"w{name}": [float(step)] for name, step in zip(names, steps, strict=True)}
    return parse(f"(float[N,2] x) => (float[N,2] {names[-1]})", body, **weights)


def test_an_error_that_builds_up_names_where_it_rose_most() -> None:
    a, b = Graph(chain(1, 1, 1, 1)), Graph(chain(1.01, 1.07, 1.09, 1.11))
    found = first_divergence(a, b, ONES, 0.1)
    assert found is not None
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
    assert found is not None
    assert "differs is the Mul of 'p': error 1" in found.text
    other = chain(2)
    other.graph.node[0].output[0] = other.graph.output[0].name = "other"
    assert first_divergence(Graph(chain(1)), Graph(other), ONES, 0.1) is None


LOWEST = float(np.finfo(np.float32).min)
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        ([0.5, 0.1], [0.5, 0.2], 0.2),  # relative to the scale of the tensor
        ([100, 0], [100, 1], 0.01),
        ([0, 0], [0, 1e-9], 1),
        ([0, 0], [0, 0], 0),
        ([INF, NAN, 1], [INF, NAN, 1], 0),
        ([INF, 1], [-INF, 1], INF),
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
    feeds = feeds_of(mnist_like(), 4)
    with load(a, "cpu") as first, load(b, "cpu") as second:
        row = compare_engines(first, second, feeds).rows[0]
        got = tensor_error(first(feeds[0])["logits"], second(feeds[0])["logits"])
    assert got == (row.error, row.problem)
