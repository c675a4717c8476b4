from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.graph import cost as kinds
from deploykit.graph.cost import (
    COMPUTE,
    LAUNCH,
    MEMORY,
    Ceilings,
    Curve,
    NodeCost,
    node_time,
    peak_bytes,
    predicted_s,
    savings_s,
    unknown,
)
from deploykit.graph.graph import Graph
from deploykit.graph.shapes import fixed_shapes
from tests.support.graphs.data import samples
from tests.support.graphs.protos import calibrate, mix, node_costs, summarise, to_pairs
from tests.support.onnx_zoo import (
    Shape,
    conv_relu,
    int64_ids,
    linear,
    make,
    mnist_like,
    save,
    two_inputs,
)

PEAKS = {"fp32": 1e12, "fp16": 4e12, "int8": 8e12}


def costs(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Sequence[str],
    weights: Mapping[str, np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, NodeCost]:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    ends = [helper.make_empty_tensor_value_info(name) for name in outputs]
    stored = [onnx.numpy_helper.from_array(array, n) for n, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "g", values, ends, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return {cost.name: cost for cost in node_costs(model, sizes or {})}


class Convolutions:
    """Writes convolutions one after the other; weights are inputs, as only their shapes count."""

    def __init__(self, channels: int, size: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, Shape] = {"x": ("N", channels, size, size)}
        self.channels, self.last = channels, "x"

    def conv(self, channels: int, kernel: int, stride: int = 1, source: str = "") -> str:
        number = len(self.nodes)
        source = source or self.last
        before = self.channels
        self.inputs[f"w{number}"] = (channels, before, kernel, kernel)
        options = {"strides": [stride] * 2, "pads": [kernel // 2] * 4}
        self.last, self.channels = f"t{number}", channels
        self.add("Conv", [source, f"w{number}"], options)
        return self.last

    def add(self, kind: str, inputs: Sequence[str], options: Mapping[str, object]) -> None:
        self.last = f"t{len(self.nodes)}"
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [self.last], name=name, **options))


def test_resnet18_has_the_operations_that_torchvision_states() -> None:
    net = Convolutions(3, 224)
    net.conv(64, 7, 2)
    net.add("MaxPool", [net.last], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4})
    for channels in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and channels > 64 else 1
            entry, before = net.last, net.channels
            net.conv(channels, 3, stride)
            end = net.conv(channels, 3)
            if stride == 2:
                net.channels = before
                net.conv(channels, 1, 2, source=entry)
            net.last = end
    net.add("GlobalAveragePool", [net.last], {})
    net.add("Flatten", [net.last], {})
    net.inputs["w"] = (1000, 512)
    net.add("Gemm", [net.last, "w"], {"transB": 1})
    found = costs(net.nodes, net.inputs, [net.last]).values()
    products = sum(c.flops or 0 for c in found if c.operator in ("Conv", "Gemm"))
    assert products / 2e9 == pytest.approx(1.814, abs=5e-4)  # torchvision: GFLOPS 1.81


def one(kind: str, inputs: Mapping[str, Shape], outputs: int = 1, **attributes: object) -> NodeCost:
    names = [f"y{number}" for number in range(outputs)]
    node = helper.make_node(kind, list(inputs), names, name="n", **attributes)
    return costs([node], inputs, names)["n"]


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "flops"),
    [
        ("MatMul", {"a": (5, 7, 3), "b": (3, 4)}, {}, 2 * 5 * 7 * 4 * 3),
        ("MatMul", {"a": (2, 8, 7, 3), "b": (2, 8, 3, 7)}, {}, 2 * 2 * 8 * 7 * 7 * 3),
        ("Gemm", {"a": (6, 5), "b": (5, 4)}, {}, 2 * 6 * 5 * 4),
        ("Gemm", {"a": (6, 5), "b": (6, 4)}, {"transA": 1}, 2 * 6 * 5 * 4),
        ("Conv", {"x": (1, 8, 9, 9), "w": (16, 2, 3, 3)}, {"group": 4}, 2 * 16 * 49 * 2 * 9),
        ("ConvTranspose", {"x": (1, 8, 5, 5), "w": (8, 4, 2, 2)}, {"strides": [2, 2]}, 6400),
        ("MaxPool", {"x": (1, 2, 8, 8)}, {"kernel_shape": [2, 2], "strides": [2, 2]}, 2 * 16 * 4),
        ("GlobalAveragePool", {"x": (1, 2, 8, 8)}, {}, 128),
        ("Softmax", {"x": (2, 10)}, {}, 100),
        ("Einsum", {"a": (3, 4, 5), "b": (3, 5, 6)}, {"equation": "bij,bjk->bik"}, 2 * 3 * 120),
        ("Relu", {"x": (2, 10)}, {}, 20),
        ("Add", {"a": (2, 10), "b": (10,)}, {}, 20),
        ("Transpose", {"x": (2, 10)}, {}, 0),
    ],
)
def test_operations_by_hand(
    kind: str, inputs: Mapping[str, Shape], attributes: Mapping[str, object], flops: int
) -> None:
    assert one(kind, inputs, **attributes).flops == flops


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_a_recurrent_layer_runs_its_gates_at_each_step_in_both_directions(
    kind: str, gates: int
) -> None:
    steps, batch, width, hidden = 12, 2, 5, 7
    shapes = {
        "x": (steps, batch, width),
        "w": (2, gates * hidden, width),
        "r": (2, gates * hidden, hidden),
    }
    cost = one(kind, shapes, hidden_size=hidden, direction="bidirectional")
    assert cost.flops == 2 * steps * batch * 2 * gates * hidden * (width + hidden)


def test_dynamic_axes_take_the_sizes_that_are_given_and_are_one_otherwise() -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="n")
    for sizes, flops in (({}, 24), ({"N": 5, "T": 7}, 24 * 35)):
        found = costs([node], {"x": ("N", "T", 4), "w": (4, 3)}, ["y"], sizes=sizes)
        assert found["n"].flops == flops
    model = linear()
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    assert node_costs(model, {"N": 3})[0].flops == 2 * 3 * 4 * 3  # as specs names it
    with pytest.raises(BadInput, match="axis N cannot be of size 0"):
        node_costs(linear(), {"N": 0})


def test_shapes_are_followed_through_arithmetic_on_shapes() -> None:
    """As torch writes it: inference alone does not see through the Reshape of a shape."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="s", start=0, end=2),
        helper.make_node("ReduceProd", ["s"], ["p"], name="p", keepdims=0),
        helper.make_node("Gather", ["s", "zero"], ["first"], name="first"),
        helper.make_node("Gather", ["s", "one"], ["second"], name="second"),
        helper.make_node("Mul", ["first", "second"], ["m"], name="m"),
        helper.make_node("Reshape", ["m", "flat"], ["rows"], name="rows"),
        helper.make_node("Concat", ["rows", "four"], ["shape"], name="shape", axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"], name="reshape"),
        helper.make_node("MatMul", ["y", "w"], ["z"], name="n"),
    ]
    weights = {
        "zero": np.array(0),
        "one": np.array(1),
        "flat": np.array([-1]),
        "four": np.array([4]),
        "w": np.ones((4, 3), np.float32),
    }
    found = costs(nodes, {"x": ("N", "T", 4)}, ["z"], weights, {"N": 2, "T": 5})
    assert found["n"].flops == 2 * 10 * 4 * 3


def test_shapes_that_are_generated_are_followed_too() -> None:
    """A mask as torch's older exporter writes it, its constants in nodes."""
    nodes = [
        helper.make_node("Constant", [], ["two"], value_ints=[2]),
        helper.make_node("ConstantOfShape", ["two"], ["zeros"], name="zeros"),
        helper.make_node("Cast", ["zeros"], ["whole"], name="whole", to=TensorProto.INT64),
        helper.make_node("Add", ["whole", "three"], ["threes"], name="threes"),
        helper.make_node("Expand", ["one", "threes"], ["square"], name="square"),
        helper.make_node("Shape", ["square"], ["shape"], name="shape"),
        helper.make_node("Reshape", ["x", "shape"], ["r"], name="r"),
        helper.make_node("MatMul", ["r", "r"], ["y"], name="n"),
    ]
    weights = {"three": np.array([3, 3]), "one": np.ones((1,), np.float32)}
    assert costs(nodes, {"x": ("N",)}, ["y"], weights, {"N": 9})["n"].flops == 2 * 27


@pytest.mark.parametrize("kind", ["ConstantOfShape", "Range"])
def test_a_huge_constant_is_not_made(kind: str) -> None:
    """10^12 elements would be 8 TB."""
    inputs = {"ConstantOfShape": ["huge"], "Range": ["zero", "end", "one"]}[kind]
    nodes = [
        helper.make_node(kind, inputs, ["c"], name="c"),
        helper.make_node("NonZero", ["x"], ["z"], name="unknown"),
    ]
    weights = {
        "huge": np.array([10**6, 10**6]),
        "zero": np.array(0),
        "end": np.array(10**12),
        "one": np.array(1),
    }
    found = costs(nodes, {"x": ("N",)}, ["c", "z"], weights)
    assert found["c"].flops == 0


def test_what_is_not_known_is_none_and_is_named() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"], name="places"),
        helper.make_node("Transpose", ["places"], ["rows"], name="rows"),
        helper.make_node("Relu", ["x"], ["y"], name="relu"),
    ]
    found = costs(nodes, {"x": ("N", 4)}, ["rows", "y"])
    assert found["places"].flops is None
    assert found["rows"].write_bytes is None
    assert unknown(found.values()) == ("places", "rows")
    assert predicted_s(found.values(), Ceilings(PEAKS, 1e9)) > 0


def test_a_damaged_graph_and_a_body_that_runs_an_unknown_number_of_times_are_not_known() -> None:
    nodes = [
        helper.make_node("Gather", ["four", "nine"], ["g"], name="outside"),
        helper.make_node("Reshape", ["x", "g"], ["r"], name="reshape"),
        helper.make_node("Relu", ["r"], ["y"], name="n"),
    ]
    weights = {"four": np.array([4]), "nine": np.array([9])}
    assert costs(nodes, {"x": ("N", 4)}, ["y"], weights)["n"].flops is None
    inner = helper.make_tensor_value_info("n", TensorProto.FLOAT, None)
    body = helper.make_graph([helper.make_node("Neg", ["x"], ["n"])], "body", [], [inner])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body)
    found = costs([node], {"x": ("N", 4)}, ["y"], {"c": np.array(True)})
    assert unknown(found.values()) == ("if",)


def test_nodes_without_a_name_get_the_names_that_reports_use() -> None:
    model = two_inputs()
    for node in model.graph.node:
        node.name = ""
    assert [c.name for c in node_costs(model, {})] == ["Add_0", "Mul_1"]
    assert not model.graph.node[0].name  # the model itself is left alone


def test_functions_are_looked_into() -> None:
    inside = [helper.make_node("Add", ["a", "a"], ["b"], name="add")]
    opset = helper.make_opsetid("", 18)
    model = make([helper.make_node("Neg", ["x"], ["y"])], {"x": ("N", 4)}, {"y": ("N", 4)}, {})
    model.graph.node[0].CopyFrom(helper.make_node("Twice", ["x"], ["y"], domain="local"))
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.append(helper.make_function("local", "Twice", ["a"], ["b"], inside, [opset]))
    (found,) = node_costs(model, {"N": 3})
    assert (found.operator, found.flops) == ("Add", 12)


def test_a_large_model_is_not_copied() -> None:
    """Shapes are enough: the data of this weight are missing."""
    model = linear()
    model.graph.initializer[0].CopyFrom(
        TensorProto(name="W", data_type=TensorProto.FLOAT, dims=(10**5, 10**5))
    )
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 10**5
    assert node_costs(model, {})[0].weight_bytes == 4 * 10**10 + 12


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


def test_views_and_nodes_of_constants_cost_nothing() -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], name="t"),
        helper.make_node("Neg", ["t"], ["minus"], name="minus"),
        helper.make_node("Flatten", ["x"], ["f"], name="flatten"),
        helper.make_node("MatMul", ["f", "minus"], ["y"], name="n"),
    ]
    found = costs(nodes, {"x": (2, 2, 2)}, ["y"], {"w": np.ones((3, 4), np.float32)})
    assert (found["minus"].flops, found["minus"].traffic_bytes) == (0, 0)
    assert found["flatten"].traffic_bytes == 0
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
    copy = make([helper.make_node("Identity", ["x"], ["y"])], {"x": ("N",)}, {"y": ("N",)}, {})
    assert mix(copy, {}).to_dict()["shares"]["flops"] == {}  # it computes nothing


def test_a_weight_that_two_nodes_share_is_one_weight() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="a"),
        helper.make_node("MatMul", ["h", "w"], ["y"], name="b"),
    ]
    model = make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, {"w": np.ones((4, 4), np.float32)})
    assert mix(model, {}).weights == {"float32": 16}


TARGET = Ceilings(PEAKS, 1e9)


def cost(precision: str = "float32", flops: int = 0, moved: int = 0) -> NodeCost:
    return NodeCost("n", "Conv", precision, flops, moved, 0, 0)


@pytest.mark.parametrize(
    ("node", "seconds"),
    [
        (cost(flops=10**9, moved=10), 1e-3),
        (cost(flops=10, moved=10**6), 1e-3),
        (cost("float16", flops=10**9), 2.5e-4),
        (cost("int8", flops=10**9), 1.25e-4),
        (cost("float8", flops=10**9), 1e-3),  # no peak of its own: that of fp32
    ],
)
def test_a_node_takes_the_longer_of_its_arithmetic_and_its_traffic(
    node: NodeCost, seconds: float
) -> None:
    assert node_time(node, TARGET).seconds == seconds
    assert predicted_s([node, cost(moved=10**6)], TARGET) == pytest.approx(seconds + 1e-3)


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


CURVE = Curve((10.0, 1000.0), (1e-6, 1e-5))
SIMPLE = Ceilings({"fp32": 1e9, "int8": 4e9}, 1e9, launch_s=1e-6)


def conv(
    flops: int = 0, moved: int = 0, weights: int = 0, kind: str = kinds.CONVOLUTION
) -> NodeCost:
    return NodeCost("n", "Conv", "float32", flops, moved, weights, 0, kind=kind)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [(0, 0.0), (1, 1e-7), (10, 1e-6), (100, 10**-5.5), (1000, 1e-5), (5000, 5e-5)],
)
def test_a_curve_is_straight_in_logarithms_and_proportional_outside(
    work: float, seconds: float
) -> None:
    assert CURVE.at(work) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("cost", "limit"),
    [(conv(10**6, 10), COMPUTE), (conv(10, 10**6), MEMORY), (conv(10, 10), LAUNCH)],
)
def test_a_node_is_limited_by_what_takes_most_of_its_time(cost: NodeCost, limit: str) -> None:
    assert node_time(cost, SIMPLE).limit == limit
    assert node_time(cost, SIMPLE).launch_s == 1e-6
    assert node_time(conv(100, 0), SIMPLE).launch_s == 0  # inside another kernel


def test_a_measured_curve_replaces_the_peak_and_counts_only_weights_as_traffic() -> None:
    measured = replace(SIMPLE, curves={"fp32 convolution": Curve((1e6,), (2e-3,))})
    time = node_time(conv(10**6, 10**9), measured)
    assert time.seconds == pytest.approx(2e-3)
    assert node_time(conv(10**6, 1, weights=10**7), measured).memory_s == pytest.approx(1e-2)


def test_a_precision_without_a_curve_of_its_own_takes_that_of_fp32() -> None:
    seconds = {"fp32 convolution": 1.0, "int8 convolution": 0.5}
    curves = {name: Curve((1.0,), (each,)) for name, each in seconds.items()}
    measured = replace(SIMPLE, curves=curves)
    for precision, each in (("int8", 0.5), ("float16", 1.0)):
        cost = replace(conv(1, 1), precision=precision)
        assert node_time(cost, measured).seconds == pytest.approx(each)


def test_a_recurrent_node_takes_each_step_after_the_other() -> None:
    measured = replace(SIMPLE, launch_s=0.0, curves={"fp32 recurrent": CURVE})
    cost = replace(conv(1000, 1, kind=kinds.RECURRENT), steps=100)
    assert node_time(cost, measured).seconds == pytest.approx(100 * 1e-6)


def test_what_moves_data_follows_its_bytes() -> None:
    measured = replace(SIMPLE, curves={"fp32 movement": CURVE})
    time = node_time(conv(0, 1000, kind=kinds.MOVEMENT), measured)
    assert time.seconds == pytest.approx(1e-5)
    assert time.limit == MEMORY


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
        (
            [
                *chain("x", "a"),
                VIEW,
                node("Reshape", "a", "shape", "v"),
                node("Add", "view", "v", "y"),
            ],
            {"y": HALVES},
            3,
        ),
        ([node("MatMul", "x", "w", "y")], {"y": ROW}, 2),
    ],
    ids=[
        "a chain has two at a time and its input",
        "a branch lives until it is read",
        "a view shares memory and keeps its source alive",
        "an output that is a view keeps its source to the end",
        "two views are no memory of their own",
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
