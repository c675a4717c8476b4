"""Transposed convolutions and residual sums, where TensorRT has INT8 kernels for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from deploykit.core.errors import BadInput
from deploykit.quantization.calibrate import Range
from tests.support.builders.nvidia_cases import ask, checked, needs
from tests.support.graphs.data import calibration, feeds, sqnr_db
from tests.support.graphs.protos import quantizable, summarise, to_pairs
from tests.support.graphs.qdq_graphs import (
    dequantize_of,
    optimised,
    pairs,
    quantized,
    run,
    stored,
)
from tests.support.onnx_zoo import make

LEAST_SQNR_DB = 32.0  # see test_qdq.py


def up(group: int = 1, *, norm: bool = False, relu: bool = True) -> onnx.ModelProto:
    """ConvTranspose from 8 to 8 channels, twice the size; with batch normalization where asked."""
    random = np.random.default_rng(0)
    weights = {
        "W": random.standard_normal((8, 8 // group, 2, 2)).astype(np.float32),
        "b": random.standard_normal(8).astype(np.float32),
    }
    nodes = [
        helper.make_node("ConvTranspose", ["x", "W", "b"], ["c"], "up", strides=[2, 2], group=group)
    ]
    last = "c"
    if norm:
        names = ["scale", "shift", "mean", "variance"]
        weights |= {name: random.uniform(0.5, 2, 8).astype(np.float32) for name in names}
        nodes.append(helper.make_node("BatchNormalization", ["c", *names], ["n"], "norm"))
        last = "n"
    if relu:
        nodes.append(helper.make_node("Relu", [last], ["y"], "relu"))
    else:
        nodes[-1].output[0] = "y"
    return make(nodes, {"x": ("N", 8, 8, 8)}, {"y": ("N", 8, 16, 16)}, weights)


def test_a_transposed_convolution_has_a_scale_per_output_channel(tmp_path: Path) -> None:
    model, _ = quantized(up(), tmp_path)
    dequantize = dequantize_of(model, pairs(model, "ConvTranspose")[0].input[1])
    assert [(each.name, each.i) for each in dequantize.attribute] == [("axis", 1)]
    peak = np.abs(stored(up())["W"]).max(axis=(0, 2, 3))
    np.testing.assert_array_equal(stored(model)[dequantize.input[1]], peak / np.float32(127))
    assert summarise(model).precision["int8"] == 1
    assert quantizable(up()) == ("up",)


@pytest.mark.parametrize("group", [2, 8])
def test_the_groups_of_a_transposed_convolution_share_one_scale(group: int, tmp_path: Path) -> None:
    model, _ = quantized(up(group), tmp_path)
    dequantize = dequantize_of(model, pairs(model, "ConvTranspose")[0].input[1])
    assert not dequantize.attribute
    assert stored(model)[dequantize.input[1]].shape == ()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_a_transposed_convolution_stays_close_in_int8(
    group: int, norm: bool, tmp_path: Path
) -> None:
    source = up(group, norm=norm)
    model, _ = quantized(source, tmp_path)
    assert "BatchNormalization" not in summarise(model).operators
    inputs = feeds(source, 32, seed=1)
    wanted = run(source, inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, run(model, inputs, tmp_path / "b.onnx")) > LEAST_SQNR_DB


def test_what_has_no_kernel_for_a_transposed_convolution_says_so() -> None:
    found = calibration(dict.fromkeys(("x", "c", "y"), Range(-1.0, 1.0)))
    with pytest.raises(BadInput, match="no Conv, Gemm or MatMul") as caught:
        to_pairs(up(), found, runtime="onnxruntime")
    assert caught.value.hint == "onnxruntime has no int8 kernel for its ConvTranspose; TensorRT has"
    with pytest.raises(BadInput) as caught:
        to_pairs(up(), found, "fp8")
    assert "TensorRT computes it in int8 only" in str(caught.value.hint)


def unet() -> onnx.ModelProto:
    """Down and up once, and the skipped tensor joined to the result."""
    random = np.random.default_rng(0)
    shapes = {"w0": (8, 3, 3, 3), "w1": (16, 8, 3, 3), "w2": (16, 8, 2, 2), "w3": (4, 16, 3, 3)}
    weights = {
        name: (random.standard_normal(shape) / 8).astype(np.float32)
        for name, shape in shapes.items()
    }
    same = {"pads": [1, 1, 1, 1]}
    half = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], "stem", **same),
        helper.make_node("Relu", ["c0"], ["skip"], "relu0"),
        helper.make_node("MaxPool", ["skip"], ["p"], "pool", **half),
        helper.make_node("Conv", ["p", "w1"], ["c1"], "deep", **same),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("ConvTranspose", ["r1", "w2"], ["u"], "up", strides=[2, 2]),
        helper.make_node("Concat", ["skip", "u"], ["joined"], "join", axis=1),
        helper.make_node("Conv", ["joined", "w3"], ["y"], "head", **same),
    ]
    return make(nodes, {"x": ("N", 3, 8, 8)}, {"y": ("N", 4, 8, 8)}, weights)


def sums(*, projected: bool = False) -> onnx.ModelProto:
    """Two blocks as in ResNet: the skipped tensor as it is, or through a convolution."""
    random = np.random.default_rng(0)
    weights = {
        f"w{i}": (random.standard_normal((16, 16, 3, 3)) / 16).astype(np.float32) for i in range(4)
    }
    same = {"pads": [1, 1, 1, 1]}
    short = "s" if projected else "r0"
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], "stem", **same),
        helper.make_node("Relu", ["c0"], ["r0"], "relu0"),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], "first", **same),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "second", **same),
        *([helper.make_node("Conv", ["r0", "w3"], ["s"], "short", **same)] if projected else []),
        helper.make_node("Add", ["c2", short], ["sum"], "add"),
        helper.make_node("Relu", ["sum"], ["y"], "relu2"),
    ]
    used = {name for node in nodes for name in node.input}
    kept = {name: each for name, each in weights.items() if name in used}
    return make(nodes, {"x": ("N", 16, 8, 8)}, {"y": ("N", 16, 8, 8)}, kept)


@pytest.mark.parametrize("projected", [False, True])
def test_what_is_added_to_a_convolution_reads_int8_for_tensorrt(
    projected: bool, tmp_path: Path
) -> None:
    model, _ = quantized(sums(projected=projected), tmp_path)
    add = next(node for node in model.graph.node if node.name == "add")
    assert add.input[0] == "c2"  # the longer path: it fuses with the sum
    quantize = dequantize_of(model, dequantize_of(model, add.input[1]).input[0])
    assert quantize.input[0] == ("s" if projected else "r0")
    assert len(pairs(model, "QuantizeLinear")) == (4 if projected else 3)  # r0 once for both


def test_the_order_of_a_sum_does_not_matter(tmp_path: Path) -> None:
    source = sums(projected=True)
    add = next(node for node in source.graph.node if node.name == "add")
    add.input[:] = ["s", "c2"]
    model, _ = quantized(source, tmp_path)
    add = next(node for node in model.graph.node if node.name == "add")
    assert add.input[1] == "c2"
    assert add.input[0] != "s"


def test_a_sum_stays_exact_where_its_convolution_does(tmp_path: Path) -> None:
    _, found = quantized(sums(), tmp_path)
    for kept in ("add", "second"):
        model = to_pairs(sums(), found, keep_float32=(kept,))
        add = next(node for node in model.graph.node if node.name == "add")
        assert list(add.input) == ["c2", "r0"]


def test_a_result_that_is_read_twice_is_no_residual(tmp_path: Path) -> None:
    source = sums()
    source.graph.output.append(helper.make_tensor_value_info("c2", 1, ["N", 8, 8, 8]))
    model, _ = quantized(source, tmp_path)
    add = next(node for node in model.graph.node if node.name == "add")
    assert list(add.input) == ["c2", "r0"]


def test_fp8_quantizes_the_residual_too(tmp_path: Path) -> None:
    _, found = quantized(sums(), tmp_path)
    model = to_pairs(sums(), found, "fp8")
    add = next(node for node in model.graph.node if node.name == "add")
    assert dequantize_of(model, add.input[1]).op_type == "DequantizeLinear"


def test_onnxruntime_joins_what_a_transposed_convolution_wrote_in_integers(tmp_path: Path) -> None:
    model, _ = quantized(unet(), tmp_path, "onnxruntime")
    done = optimised(model, tmp_path)
    assert (done.count("QLinearConcat"), done.count("Concat")) == (1, 0)
    assert (done.count("QLinearConv"), done.count("ConvTranspose")) == (2, 1)


def test_a_part_that_others_read_too_stays_exact_next_to_the_concat(tmp_path: Path) -> None:
    source = unet()
    source.graph.output.append(helper.make_tensor_value_info("u", 1, ["N", 8, 8, 8]))
    model, _ = quantized(source, tmp_path, "onnxruntime")
    assert "u" in next(node for node in model.graph.node if node.name == "join").input


@ask
@needs
@pytest.mark.parametrize("case", ["up", "grouped", "depthwise", "norm", "unet", "sum", "projected"])
def test_nvidias_builder_takes_them(case: str, tmp_path: Path) -> None:
    source = {
        "up": up,
        "grouped": lambda: up(2),
        "depthwise": lambda: up(8),
        "norm": lambda: up(norm=True),
        "unet": unet,
        "sum": sums,
        "projected": lambda: sums(projected=True),
    }[case]()
    model, _ = quantized(source, tmp_path)
    found = checked(model, tmp_path)
    assert found.accepted, found.problems
