from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.graph.cost import peak_bytes
from deploykit.graph.graph import Graph
from deploykit.graph.shapes import fixed_shapes
from tests.support.onnx_zoo import make

KIB = 1024  # each tensor: 256 float32
ROW = ("N", 256)


def peak(model: onnx.ModelProto, batch: int = 1, scale: float = 1.0) -> int:
    return peak_bytes(fixed_shapes(Graph(model), {"N": batch}), lambda _name: scale)


def node(kind: str, *names: str) -> onnx.NodeProto:
    return helper.make_node(kind, list(names[:-1]), [names[-1]], name=names[-1])


def test_a_chain_has_two_tensors_at_a_time_and_its_input() -> None:
    nodes = [node("Relu", "x", "a"), node("Relu", "a", "b"), node("Relu", "b", "y")]
    assert peak(make(nodes, {"x": ROW}, {"y": ROW}, {})) == 3 * KIB


def test_a_branch_lives_until_it_is_read() -> None:
    nodes = [
        node("Relu", "x", "kept"),
        node("Relu", "kept", "a"),
        node("Relu", "a", "b"),
        node("Add", "b", "kept", "y"),
    ]
    assert peak(make(nodes, {"x": ROW}, {"y": ROW}, {})) == 4 * KIB


def test_a_view_shares_memory_and_keeps_its_source_alive() -> None:
    shape = np.array([-1, 128, 2], np.int64)
    nodes = [
        node("Relu", "x", "a"),
        helper.make_node("Reshape", ["a", "shape"], ["view"], name="view"),
        node("Relu", "x", "c"),
        node("Relu", "view", "d"),
    ]
    outputs = {"c": ROW, "d": ("N", 128, 2)}
    assert peak(make(nodes, {"x": ROW}, outputs, {"shape": shape})) == 4 * KIB


def test_an_output_that_is_a_view_keeps_its_source_to_the_end() -> None:
    shape = np.array([-1, 128, 2], np.int64)
    nodes = [
        node("Relu", "x", "a"),
        helper.make_node("Reshape", ["a", "shape"], ["view"], name="view"),
        node("Relu", "x", "b"),
        node("Relu", "b", "c"),
        node("Relu", "c", "y"),
    ]
    outputs = {"view": ("N", 128, 2), "y": ROW}
    assert peak(make(nodes, {"x": ROW}, outputs, {"shape": shape})) == 4 * KIB


def test_weights_are_not_activations() -> None:
    weights = {"w": np.ones((256, 256), np.float32)}
    model = make([node("MatMul", "x", "w", "y")], {"x": ROW}, {"y": ROW}, weights)
    assert peak(model) == 2 * KIB


@pytest.mark.parametrize("batch", [1, 7])
def test_it_grows_with_the_batch_and_with_the_scale(batch: int) -> None:
    model = make([node("Relu", "x", "y")], {"x": ROW}, {"y": ROW}, {})
    assert peak(model, batch) == 2 * batch * KIB
    assert peak(model, batch, scale=0.5) == batch * KIB


def test_what_a_body_reads_from_outside_stays_alive() -> None:
    body = helper.make_graph(
        [node("Add", "kept", "kept", "inner")],
        "body",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    nodes = [
        node("Relu", "x", "kept"),
        node("Relu", "x", "a"),
        node("Relu", "a", "b"),
        helper.make_node("If", ["c"], ["d"], name="d", then_branch=body, else_branch=body),
        node("Add", "b", "d", "y"),
    ]
    model = make(nodes, {"x": ROW}, {"y": ROW}, {"c": np.array(True)})
    assert peak(model) >= 4 * KIB
