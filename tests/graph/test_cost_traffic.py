"""What nodes move through memory, the mix of precisions, and the seconds that follow from both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from deploykit.core.errors import BadInput
from deploykit.graph.cost import Ceilings, NodeCost, node_time, predicted_s, savings_s
from tests.support.graphs.cost_graphs import PEAKS, costs
from tests.support.graphs.data import samples
from tests.support.graphs.protos import calibrate, mix, node_costs, summarise, to_pairs
from tests.support.onnx_zoo import (
    conv_relu,
    int64_ids,
    linear,
    make,
    mnist_like,
    save,
    two_inputs,
)


def test_an_activation_runs_inside_the_convolution_before_it() -> None:
    conv, relu = node_costs(conv_relu(), {"N": 2})
    image, result = 2 * 64 * 4, 2 * 4 * 64 * 4
    assert (conv.read_bytes, conv.write_bytes) == (image, result)
    assert (relu.read_bytes, relu.write_bytes) == (0, 0)


def test_a_tensor_that_two_nodes_read_goes_through_memory() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="r"),
        helper.make_node("Neg", ["r"], ["n"], name="n"),
        helper.make_node("Add", ["r", "n"], ["y"], name="y"),
    ]
    found = costs(nodes, {"x": (10,)}, ["y"])
    assert (found["r"].write_bytes, found["n"].read_bytes) == (40, 80)  # Add, inside Neg, reads r
    assert (found["n"].write_bytes, found["y"].read_bytes) == (40, 0)


def test_views_move_nothing() -> None:
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"], name="flatten"),
        helper.make_node("MatMul", ["f", "w"], ["y"], name="n"),
    ]
    found = costs(nodes, {"x": (2, 3, 4), "w": (12, 5)}, ["y"])
    assert (found["flatten"].read_bytes, found["flatten"].write_bytes) == (0, 0)
    assert found["n"].read_bytes == 4 * (24 + 60)


def test_a_table_that_is_looked_up_is_read_by_the_row() -> None:
    embed, project = node_costs(int64_ids(), {"N": 1})
    assert (embed.weight_bytes, embed.weights) == (10 * 8 * 4, 80)
    assert embed.traffic_bytes == 5 * 8 + 2 * 5 * 8 * 4  # ids, the rows, and their copy
    assert project.traffic_bytes == 4 * (5 * 8 + 8 * 3 + 5 * 3)


def quantized(tmp_path: Path) -> onnx.ModelProto:
    path = save(mnist_like(), tmp_path / "m.onnx")
    return to_pairs(mnist_like(), calibrate(path, samples(mnist_like())))


def test_int8_weights_and_activations_are_a_byte_each(tmp_path: Path) -> None:
    wide = {cost.name: cost for cost in node_costs(mnist_like(), {})}
    narrow = {cost.name: cost for cost in node_costs(quantized(tmp_path), {})}
    assert wide["head"].weight_bytes == (784 * 10 + 10) * 4
    assert narrow["head"].weight_bytes == 784 * 10 + 10 * 4  # the bias is float
    assert (wide["head"].read_bytes, narrow["head"].read_bytes) == (784 * 4, 784)
    assert (wide["head"].precision, narrow["head"].precision) == ("float32", "int8")
    assert wide["head"].flops == narrow["head"].flops == 2 * 784 * 10


def test_dequantized_weights_are_counted_where_they_are_used() -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["W"], name="dq"),
        helper.make_node("MatMul", ["x", "W"], ["y"], name="matmul"),
    ]
    nodes.append(helper.make_node("Reshape", ["y", "shape"], ["z"], name="reshape"))
    weights = {"q": np.ones((4, 3), np.int8), "scale": np.array(0.1, np.float32)}
    weights["shape"] = np.array([3, 2])
    found = costs(nodes, {"x": (2, 4)}, ["z"], weights)
    assert found["reshape"].weight_bytes == 0  # a shape is no weight
    assert (found["dq"].weight_bytes, found["dq"].traffic_bytes) == (0, 0)
    assert (found["matmul"].weight_bytes, found["matmul"].precision) == (12, "float32")


def test_nodes_of_constants_cost_nothing() -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], name="t"),
        helper.make_node("Neg", ["t"], ["minus"], name="minus"),
        helper.make_node("MatMul", ["x", "minus"], ["y"], name="n"),
    ]
    found = costs(nodes, {"x": (2, 4)}, ["y"], {"w": np.ones((3, 4), np.float32)})
    assert (found["minus"].flops, found["minus"].traffic_bytes) == (0, 0)
    assert (found["n"].flops, found["n"].weight_bytes) == (2 * 2 * 4 * 3, 48)


def test_the_mix_agrees_with_the_summary(tmp_path: Path) -> None:
    for model in (linear(), mnist_like(), two_inputs(), int64_ids(), quantized(tmp_path)):
        found, summary = mix(model, {}), summarise(model)
        assert found.nodes == summary.precision
        assert sum(found.weights.values()) == summary.parameters
        assert sum(found.weight_bytes.values()) == summary.weight_bytes


def test_the_mix_contains_the_share_of_each_precision(tmp_path: Path) -> None:
    document = json.loads(json.dumps(mix(quantized(tmp_path), {}).to_dict()))
    assert document["nodes"] == {"float32": 4, "int8": 3}
    assert document["shares"]["nodes"]["int8"] == pytest.approx(3 / 7)
    assert document["shares"]["flops"]["int8"] > 0.9
    assert document["weights"] == {"float32": 8 + 16 + 10, "int8": 72 + 1152 + 7840}
    assert document["unknown"] == []


def test_a_weight_that_two_nodes_share_is_one_weight() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="a"),
        helper.make_node("MatMul", ["h", "w"], ["y"], name="b"),
    ]
    model = make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, {"w": np.ones((4, 4), np.float32)})
    assert mix(model, {}).weights == {"float32": 16}


def test_a_graph_that_computes_nothing_has_no_shares() -> None:
    model = make([helper.make_node("Identity", ["x"], ["y"])], {"x": ("N",)}, {"y": ("N",)}, {})
    assert mix(model, {}).to_dict()["shares"]["flops"] == {}


TARGET = Ceilings(PEAKS, 1e9)


def cost(precision: str = "float32", flops: int = 0, moved: int = 0) -> NodeCost:
    return NodeCost("n", "Conv", precision, flops, moved, 0, 0)


def test_a_node_takes_the_longer_of_its_arithmetic_and_its_traffic() -> None:
    assert node_time(cost(flops=10**9, moved=10), TARGET).seconds == 1e-3
    assert node_time(cost(flops=10, moved=10**6), TARGET).seconds == 1e-3
    assert node_time(cost("float16", flops=10**9), TARGET).seconds == 2.5e-4
    assert node_time(cost("int8", flops=10**9), TARGET).seconds == 1.25e-4


def test_a_precision_without_a_peak_runs_at_that_of_fp32() -> None:
    assert node_time(cost("float8", flops=10**9), TARGET).seconds == 1e-3


def test_the_prediction_adds_up_the_nodes() -> None:
    two = [cost(flops=10**9), cost(moved=10**6)]
    assert predicted_s(two, TARGET) == pytest.approx(2e-3)


@pytest.mark.parametrize(("peaks", "bytes_per_s"), [({}, 1e9), (PEAKS, 0.0), ({"fp32": 0}, 1e9)])
def test_a_prediction_without_a_target_is_bad_input(
    peaks: Mapping[str, float], bytes_per_s: float
) -> None:
    with pytest.raises(BadInput, match="needs the peaks"):
        Ceilings(peaks, bytes_per_s)


def test_the_saving_of_a_node_is_by_its_name(tmp_path: Path) -> None:
    wide, narrow = node_costs(mnist_like(), {"N": 64}), node_costs(quantized(tmp_path), {"N": 64})
    saved = savings_s(wide, narrow, Ceilings(PEAKS, 1e11))
    assert saved["conv2"] > saved["conv1"] > 0
    assert saved["flatten"] == 0
    assert not any(name.startswith("QuantizeLinear") for name in saved)
