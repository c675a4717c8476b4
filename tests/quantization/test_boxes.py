"""Nodes that decode and choose boxes keep float32, whatever the products compute in."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.quantization.calibrate import Range
from deploykit.quantization.qdq_placement import box_nodes
from tests.support.graphs.data import calibration
from tests.support.graphs.protos import element_types, to_half, to_pairs
from tests.support.onnx_zoo import make

DECODE = {"flatten", "split", "add", "decode", "turn"}


def detector(*, nms: bool) -> onnx.ModelProto:
    """Two convolutions; a box has the sum of two outputs, 16 times, as its corners."""
    corners = "corners" if nms else "found_boxes"
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["raw"], name="conv"),
        helper.make_node("Relu", ["raw"], ["act"], name="relu"),
        helper.make_node("Conv", ["act", "w"], ["out"], name="head"),
        helper.make_node("Reshape", ["out", "rows"], ["flat"], name="flatten"),
        helper.make_node("Split", ["flat"], ["a", "b"], name="split", axis=1, num_outputs=2),
        helper.make_node("Add", ["a", "b"], ["sum"], name="add"),
        helper.make_node("Mul", ["sum", "stride"], ["pixels"], name="decode"),
        helper.make_node("Transpose", ["pixels"], [corners], name="turn", perm=[0, 2, 1]),
    ]
    weights = {
        "v": np.ones((8, 3, 1, 1), np.float32),
        "w": np.ones((8, 8, 1, 1), np.float32),
        "rows": np.array([0, 8, -1]),
        "stride": np.float32(16),
    }
    outputs: dict[str, tuple[int | str, ...]] = {corners: (1, 16, 4)}
    if nms:
        limits = {"most": np.array([3]), "iou": np.float32([0.5]), "least": np.float32([0])}
        weights |= limits
        nodes += [
            helper.make_node("Sigmoid", ["a"], ["scores"], name="scores"),
            helper.make_node(
                "NonMaxSuppression", [corners, "scores", *limits], ["chosen"], name="nms"
            ),
            helper.make_node("Cast", ["chosen"], ["places"], name="places", to=TensorProto.FLOAT),
        ]
        outputs = {"places": ("M", 3)}
    return make(nodes, {"x": (1, 3, 4, 4)}, outputs, weights)


@pytest.mark.parametrize("nms", [True, False], ids=["nms", "without nms"])
def test_the_nodes_behind_the_last_products_are_those_of_the_boxes(nms: bool) -> None:
    more = {"scores", "nms", "places"} if nms else set()
    assert box_nodes(detector(nms=nms).graph) == DECODE | more


def test_a_model_without_boxes_has_none() -> None:
    model = detector(nms=False)
    model.graph.output[0].name = model.graph.node[-1].output[0] = "logits"
    assert box_nodes(model.graph) == set()


@pytest.mark.parametrize("nms", [True, False], ids=["nms", "without nms"])
def test_float16_ends_at_the_last_convolution(nms: bool) -> None:
    half = to_half(detector(nms=nms))[0]
    types = element_types(half)
    typed = {n.name for n in half.graph.node if types[n.output[0]] == TensorProto.FLOAT16}
    assert {name for name in typed if not name.startswith("Cast")} >= {"conv", "relu", "head"}
    assert not typed & (DECODE | {"scores", "nms"})


def test_no_coordinate_is_quantized_where_sums_are() -> None:
    names = ("x", "raw", "act", "out", "flat", "a", "b", "sum", "pixels", "corners", "scores")
    ranges = calibration({name: Range(0.0, 24.0) for name in names})
    paired = to_pairs(detector(nms=True), ranges, runtime="onnxruntime")
    quantized = {n.input[0] for n in paired.graph.node if n.op_type == "QuantizeLinear"}
    assert {"x", "act"} <= quantized
    assert not quantized & {"flat", "a", "b", "sum", "pixels", "corners", "scores"}
