from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.graph.cost import peak_bytes
from deploykit.graph.graph import Graph
from deploykit.graph.shapes import fixed_shapes
from tests.support.onnx_zoo import make

KIB = 1024  # each tensor: 256 float32
ROW, HALVES = ("N", 256), ("N", 128, 2)


def peak(model: onnx.ModelProto, batch: int = 1, scale: float = 1.0) -> int:
    return peak_bytes(fixed_shapes(Graph(model), {"N": batch}), lambda _name: scale)


def node(kind: str, *names: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, list(names[:-1]), [names[-1]], name=names[-1], **attributes)


def chain(*names: str) -> list[onnx.NodeProto]:
    return [node("Relu", *each) for each in pairwise(names)]


VIEW = node("Reshape", "a", "shape", "view")


@pytest.mark.parametrize(
    ("nodes", "outputs", "tensors"),
    [
        (chain("x", "a", "b", "y"), {"y": ROW}, 3),
        ([*chain("x", "a", "b", "c"), node("Add", "c", "a", "y")], {"y": ROW}, 4),
        (
            [*chain("x", "a"), VIEW, *chain("x", "c"), *chain("view", "d")],
            {"c": ROW, "d": HALVES},
            4,
        ),
        ([*chain("x", "a"), VIEW, *chain("x", "b", "c", "y")], {"view": HALVES, "y": ROW}, 4),
        ([node("MatMul", "x", "w", "y")], {"y": ROW}, 2),
    ],
    ids=[
        "a chain has two at a time and its input",
        "a branch lives until it is read",
        "a view shares memory and keeps its source alive",
        "an output that is a view keeps its source to the end",
        "weights are no activations",
    ],
)
def test_the_peak_is_of_the_tensors_that_are_alive(
    nodes: list[onnx.NodeProto], outputs: dict[str, tuple[str | int, ...]], tensors: int
) -> None:
    stored = {"shape": np.array([-1, 128, 2]), "w": np.ones((256, 256), np.float32)}
    used = {name for each in nodes for name in each.input}
    weights = {name: array for name, array in stored.items() if name in used}
    model = make(nodes, {"x": ROW}, outputs, weights)
    assert peak(model) == tensors * KIB
    assert peak(model, 7, scale=0.5) == tensors * 7 * KIB / 2


def test_what_a_body_reads_from_outside_stays_alive() -> None:
    inner = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    body = helper.make_graph([node("Add", "kept", "kept", "inner")], "body", [], [inner])
    nodes = [*chain("x", "kept"), *chain("x", "a", "b")]
    nodes.append(node("If", "c", "d", then_branch=body, else_branch=body))
    nodes.append(node("Add", "b", "d", "y"))
    assert peak(make(nodes, {"x": ROW}, {"y": ROW}, {"c": np.array(True)})) >= 4 * KIB
