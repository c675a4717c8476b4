from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.engines.engine import load
from tests.support.graphs.data import feeds, in_true_halves, sqnr_db
from tests.support.graphs.protos import summarise, to_half, to_weight_only
from tests.support.onnx_zoo import conv_relu, make, mnist_like, save

# A normal weight with its peak at 3 sigma in steps of peak/127: 10 log10(12 * 127**2 / 9) = 43 dB,
# of peak/7: 18 dB; an INT4 block of 128 has its peak there, too.
LEAST_SQNR_DB = {8: 40.0, 4: 16.0}
INT8, INT4 = "int8-weight-only", "int4-weight-only"


def layer(inputs: int = 256, outputs: int = 24, *, kind: str = "MatMul") -> onnx.ModelProto:
    """One linear layer; kind "GemmT" stores its weight as [outputs, inputs]."""
    weight = np.random.default_rng(0).standard_normal((inputs, outputs)).astype(np.float32)
    operator = kind.removesuffix("T")
    attributes = {"transB": 1} if kind == "GemmT" else {}
    node = helper.make_node(operator, ["x", "W"], ["y"], name="layer", **attributes)
    stored = weight.T.copy() if kind == "GemmT" else weight
    return make([node], {"x": ("N", inputs)}, {"y": ("N", outputs)}, {"W": stored})


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray], path: Path) -> np.ndarray:
    with load(save(model, path), "cpu") as engine:
        return engine(inputs)["y"]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "GemmT"])
def test_outputs_are_close_for_each_way_to_store_a_weight(
    kind: str, bits: int, tmp_path: Path
) -> None:
    model = layer(kind=kind)
    small = to_weight_only(model, f"int{bits}-weight-only", least_elements=1)
    onnx.checker.check_model(small, full_check=True)
    inputs = feeds(model, 32)
    wanted = run(model, inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, run(small, inputs, tmp_path / "b.onnx")) > LEAST_SQNR_DB[bits]


def dequantize(model: onnx.ModelProto) -> tuple[onnx.NodeProto, dict[str, onnx.TensorProto]]:
    (node,) = (n for n in model.graph.node if n.op_type == "DequantizeLinear")
    return node, {t.name: t for t in model.graph.initializer}


@pytest.mark.parametrize(("kind", "axis"), [("MatMul", 1), ("Gemm", 1), ("GemmT", 0)])
def test_int8_has_a_scale_per_output(kind: str, axis: int) -> None:
    node, tensors = dequantize(to_weight_only(layer(kind=kind), INT8, least_elements=1))
    assert helper.get_node_attr_value(node, "axis") == axis
    assert list(tensors[node.input[1]].dims) == [24]
    assert tensors[node.input[0]].data_type == TensorProto.INT8


@pytest.mark.parametrize(("kind", "axis"), [("MatMul", 0), ("Gemm", 0), ("GemmT", 1)])
@pytest.mark.parametrize(("inputs", "block"), [(256, 128), (192, 64), (96, 32)])
def test_int4_blocks_lie_along_the_inputs_and_divide_them(
    inputs: int, block: int, kind: str, axis: int
) -> None:
    model = layer(inputs, kind=kind)
    node, tensors = dequantize(to_weight_only(model, INT4, least_elements=1))
    assert helper.get_node_attr_value(node, "axis") == axis
    assert helper.get_node_attr_value(node, "block_size") == block
    shape = [24, 24]
    shape[axis] = inputs // block
    assert list(tensors[node.input[1]].dims) == shape
    assert tensors[node.input[0]].data_type == TensorProto.INT4
    assert len(tensors[node.input[0]].raw_data) == inputs * 24 // 2


def test_int4_numbers_are_read_back_in_their_places() -> None:
    weight = np.zeros((32, 2), np.float32)
    weight[:, 0] = np.arange(32) % 15 - 7
    weight[:, 1] = -weight[:, 0]
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="layer")
    model = make([node], {"x": ("N", 32)}, {"y": ("N", 2)}, {"W": weight})
    _, tensors = dequantize(to_weight_only(model, INT4, least_elements=1))
    np.testing.assert_array_equal(
        numpy_helper.to_array(tensors["W_int4"]).astype(np.float32), weight
    )


def test_int4_raises_the_opset_and_int8_does_not() -> None:
    assert summarise(to_weight_only(layer(), INT4, least_elements=1)).opset == {"ai.onnx": 21}
    assert summarise(to_weight_only(layer(), INT8, least_elements=1)).opset == {"ai.onnx": 18}


def test_a_layer_that_no_block_divides_stays_while_others_shrink() -> None:
    weights = {"a": np.ones((256, 100), np.float32), "b": np.ones((100, 8), np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("MatMul", ["h", "b"], ["y"], name="second"),
    ]
    model = make(nodes, {"x": ("N", 256)}, {"y": ("N", 8)}, weights)
    small = to_weight_only(model, INT4, least_elements=1)
    second = next(node for node in small.graph.node if node.name == "second")
    assert list(second.input) == ["h", "b"]
    assert summarise(small).operators["DequantizeLinear"] == 1


def test_small_layers_and_convolutions_stay() -> None:
    assert "DequantizeLinear" not in summarise(conv_relu()).operators
    small = to_weight_only(mnist_like(), INT8, least_elements=7840)
    assert summarise(small).operators["DequantizeLinear"] == 1
    with pytest.raises(BadInput, match="7841 elements"):
        to_weight_only(mnist_like(), INT8, least_elements=7841)
    with pytest.raises(BadInput, match="no Gemm or MatMul"):
        to_weight_only(conv_relu(), INT8, least_elements=1)


def test_a_weight_read_twice_is_stored_once() -> None:
    nodes = [helper.make_node("MatMul", ["x", "W"], [f"y{i}"], name=f"m{i}") for i in range(2)]
    outputs = {f"y{i}": ("N", 32) for i in range(2)}
    model = make(nodes, {"x": ("N", 32)}, outputs, {"W": np.eye(32, dtype=np.float32)})
    small = to_weight_only(model, INT8, least_elements=1)
    assert summarise(small).operators == {"DequantizeLinear": 1, "MatMul": 2}


@pytest.mark.parametrize("bits", [8, 4])
def test_float16_goes_on_top(bits: int, tmp_path: Path) -> None:
    model = layer()
    half, kept = to_half(to_weight_only(model, f"int{bits}-weight-only", least_elements=1), "fp16")
    assert kept == ()
    assert [n.op_type for n in half.graph.node] == ["DequantizeLinear", "Cast", "MatMul", "Cast"]
    inputs = feeds(model, 8)
    wanted = run(model, inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, in_true_halves(half, inputs)[0]) > LEAST_SQNR_DB[bits] - 1


def test_weights_that_are_not_finite_are_named() -> None:
    model = layer()
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "W"))
    for bits in (8, 4):
        with pytest.raises(BadInput, match="weight 'W'"):
            to_weight_only(model, f"int{bits}-weight-only", least_elements=1)


def test_a_quantized_model_is_refused() -> None:
    with pytest.raises(BadInput, match="quantized already"):
        to_weight_only(to_weight_only(layer(), INT8, least_elements=1), INT8)


def test_an_operator_that_the_newer_opset_changed_is_named() -> None:
    model = layer()
    model.opset_import[0].version = 17
    axes = helper.make_node("ReduceMean", ["y"], ["z"], name="mean", axes=[1])
    model.graph.node.append(axes)
    with pytest.raises(BadInput, match=r"'mean': ReduceMean of opset 17"):
        to_weight_only(model, INT4, least_elements=1)
