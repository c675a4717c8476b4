from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.graph.cost import Ceilings, NodeCost, predicted_s, unknown
from tests.support.graphs.cost_graphs import PEAKS, costs
from tests.support.graphs.protos import node_costs
from tests.support.onnx_zoo import Shape, linear, make, two_inputs


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

    def pool(self, kernel: int, stride: int, pad: int = 0) -> None:
        options = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        self.add("MaxPool", [self.last], options)

    def head(self, widths: Sequence[int]) -> None:
        self.add("Flatten", [self.last], {})
        for before, width in pairwise(widths):
            self.inputs[f"w{len(self.nodes)}"] = (width, before)
            self.add("Gemm", [self.last, f"w{len(self.nodes)}"], {"transB": 1})

    def add(self, kind: str, inputs: Sequence[str], options: Mapping[str, object]) -> None:
        self.last = f"t{len(self.nodes)}"
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [self.last], name=name, **options))

    def products(self) -> float:
        """Operations of the convolutions and matrix products, at batch 1."""
        found = costs(self.nodes, self.inputs, [self.last]).values()
        return sum(c.flops or 0 for c in found if c.operator in ("Conv", "Gemm"))


def test_resnet18_has_the_operations_that_torchvision_states() -> None:
    net = Convolutions(3, 224)
    net.conv(64, 7, 2)
    net.pool(3, 2, 1)
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
    net.head([512, 1000])
    assert net.products() / 2e9 == pytest.approx(1.814, abs=5e-4)  # torchvision: GFLOPS 1.81


def test_vgg16_has_the_operations_that_torchvision_states() -> None:
    net = Convolutions(3, 224)
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.conv(channels, 3)
        net.pool(2, 2)
    net.head([512 * 7 * 7, 4096, 4096, 1000])
    assert net.products() / 2e9 == pytest.approx(15.47, abs=5e-3)  # torchvision: GFLOPS 15.47


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
    def flops(sizes: Mapping[str, int]) -> int | None:
        node = helper.make_node("MatMul", ["x", "w"], ["y"], name="n")
        return costs([node], {"x": ("N", "T", 4), "w": (4, 3)}, ["y"], sizes=sizes)["n"].flops

    assert flops({}) == 24
    assert flops({"N": 5, "T": 7}) == 24 * 35


def test_an_axis_without_a_name_is_named_as_specs_names_it() -> None:
    model = linear()
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    assert node_costs(model, {"N": 3})[0].flops == 2 * 3 * 4 * 3


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


def test_a_damaged_graph_gives_unknown_costs_and_no_error() -> None:
    nodes = [
        helper.make_node("Gather", ["four", "nine"], ["g"], name="outside"),
        helper.make_node("Reshape", ["x", "g"], ["r"], name="reshape"),
        helper.make_node("Relu", ["r"], ["y"], name="n"),
    ]
    weights = {"four": np.array([4]), "nine": np.array([9])}
    assert costs(nodes, {"x": ("N", 4)}, ["y"], weights)["n"].flops is None


def test_a_body_that_runs_an_unknown_number_of_times_is_not_known() -> None:
    body = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["n"], name="neg")],
        "body",
        [],
        [helper.make_tensor_value_info("n", TensorProto.FLOAT, None)],
    )
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body)
    found = costs([node], {"x": ("N", 4)}, ["y"], {"c": np.array(True)})
    assert unknown(found.values()) == ("if",)


def test_nodes_without_a_name_get_the_names_that_reports_use() -> None:
    model = two_inputs()
    for node in model.graph.node:
        node.name = ""
    assert [c.name for c in node_costs(model, {})] == ["Add_0", "Mul_1"]
    assert not model.graph.node[0].name  # the model itself is left alone


def test_a_size_below_one_is_bad_input() -> None:
    with pytest.raises(BadInput, match="axis N cannot be of size 0"):
        node_costs(linear(), {"N": 0})


def test_functions_are_looked_into() -> None:
    function = helper.make_function(
        "local",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"], name="add")],
        [helper.make_opsetid("", 18)],
    )
    model = make([helper.make_node("Neg", ["x"], ["y"])], {"x": ("N", 4)}, {"y": ("N", 4)}, {})
    model.graph.node[0].CopyFrom(helper.make_node("Twice", ["x"], ["y"], domain="local"))
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.append(function)
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
