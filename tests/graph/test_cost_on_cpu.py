"""Which INT8 pairs ONNX Runtime's CPU runs in integers, and what the others cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from deploykit.graph.cost import costs_of
from deploykit.graph.graph import Graph
from deploykit.graph.shapes import fixed_shapes
from tests.support.onnx_zoo import make


def pairs(operator: str, bias: str, after: str, zero: np.generic) -> onnx.ModelProto:
    """`operator` on quantized tensors. `after`: what its result goes through, "Relu Q"."""
    matrix = (8, 8, 3, 3) if operator == "Conv" else (8, 8)
    weights: dict[str, np.ndarray] = {
        "w8": np.ones(matrix, np.int8),
        "b": np.ones(8, np.float32),
        "b32": np.ones(8, np.int32),
        "s": np.array(0.1, np.float32),
        "s2": np.array(0.01, np.float32),
        "zero": np.asarray(zero),
        "zero8": np.array(0, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "zero"], ["xd"], name="dq"),
        helper.make_node("DequantizeLinear", ["w8", "s", "zero8"], ["w"], name="dq of weights"),
    ]
    inputs = ["xd", "w", *["b"] * bool(bias)]
    if bias == "int32":
        del weights["b"]
        nodes.append(helper.make_node("DequantizeLinear", ["b32", "s2"], ["b"]))
    nodes.append(helper.make_node(operator, inputs, ["made"], name="node"))
    last = "made"
    for step in after.split():
        if step == "Q":
            nodes.append(helper.make_node("QuantizeLinear", [last, "s", "zero"], ["yq"], name="q"))
            nodes.append(helper.make_node("DequantizeLinear", ["yq", "s", "zero"], ["yd"]))
        else:
            nodes.append(helper.make_node(step, [last], ["cut"]))
        last = nodes[-1].output[0]
    nodes.append(helper.make_node("Neg", [last], ["y"]))
    shape = (2, 8, 6, 6) if operator == "Conv" else (2, 8)
    return make(nodes, {"x": shape}, {"y": ("N",) * len(shape)}, weights)


@pytest.mark.parametrize("zero", [np.uint8(128), np.uint8(0), np.int8(0)], ids=repr)
@pytest.mark.parametrize("after", ["", "Q", "Relu Q"])
@pytest.mark.parametrize(
    ("operator", "bias"),
    [("Conv", ""), ("Conv", "float"), ("Gemm", "float"), ("Gemm", "int32"), ("MatMul", "")],
)
def test_a_cpu_runs_in_integers_what_onnx_runtime_does(
    operator: str, bias: str, after: str, zero: np.generic, tmp_path: Path
) -> None:
    model = pairs(operator, bias, after, zero)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    runs = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    integers = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat"} & runs
    known = fixed_shapes(Graph(model), {})
    found = {cost.name: cost for cost in costs_of(known, on_cpu=True)}
    assert found["node"].precision == ("int8" if integers else "float32")
    assert {each.precision for each in costs_of(known) if each.name == "node"} == {"int8"}


def test_pairs_that_a_cpu_has_no_kernel_for_are_converted_in_every_call() -> None:
    known = fixed_shapes(Graph(pairs("Conv", "", "Relu Q", np.int8(0))), {})
    found = {cost.name: cost for cost in costs_of(known, on_cpu=True)}
    elements = 2 * 8 * 6 * 6
    assert found["dq"].traffic_bytes == elements * (1 + 4)
    assert found["dq of weights"].traffic_bytes == 8 * 8 * 9 * (1 + 4)
    assert found["q"].traffic_bytes == 2 * 8 * 4 * 4 * (4 + 1)  # not in the convolution's kernel
    assert found["node"].read_bytes == elements * 4
    compiled = {cost.name: cost for cost in costs_of(known)}
    assert [compiled[name].traffic_bytes for name in ("dq", "dq of weights", "q")] == [0, 0, 0]
