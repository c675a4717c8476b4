"""Where ONNX Runtime wants its pairs, zero points and biases, and what it makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from deploykit.quantization.calibrate import Range
from deploykit.quantization.qdq_placement import _ACTIVATIONS, _COMPUTES, MOVES
from tests.support.graphs.data import calibration
from tests.support.graphs.protos import to_pairs
from tests.support.graphs.qdq_graphs import dequantize_of, optimised, pairs, quantized, stored
from tests.support.onnx_zoo import linear, make, mnist_like

ORT = "onnxruntime"


def test_onnxruntime_scales_cover_the_range_with_a_zero_point(tmp_path: Path) -> None:
    model, found = quantized(mnist_like(), tmp_path, "onnxruntime")
    node = next(n for n in pairs(model, "QuantizeLinear") if n.input[0] == "r1")
    scale, zero = stored(model)[node.input[1]], stored(model)[node.input[2]]
    assert found.ranges["r1"].low == 0
    assert zero.dtype == np.uint8
    assert zero == 0  # after Relu, all 255 steps lie above zero
    assert float(scale) == pytest.approx(found.ranges["r1"].high / 255, rel=1e-6)


def test_onnxruntime_pairs_stand_after_the_relu_and_the_pool(tmp_path: Path) -> None:
    model, _ = quantized(mnist_like(), tmp_path, "onnxruntime")
    after = {node.input[0] for node in pairs(model, "QuantizeLinear")}
    assert after == {"image", "r1", "p1", "r2", "p2", "flat"}


def test_onnxruntime_gets_an_int32_bias_of_the_product_scale(tmp_path: Path) -> None:
    model, _ = quantized(linear(), tmp_path, "onnxruntime")
    values, gemm = stored(model), pairs(model, "Gemm")[0]
    x, weight, bias = (dequantize_of(model, name) for name in gemm.input)
    product = values[x.input[1]] * values[weight.input[1]]
    np.testing.assert_allclose(values[bias.input[1]], product, rtol=1e-6)
    assert values[bias.input[0]].dtype == np.int32
    restored = values[bias.input[0]] * values[bias.input[1]]
    np.testing.assert_allclose(restored, stored(linear())["b"], atol=product.max() / 2)


def test_onnxruntime_pools_keep_the_scale_of_what_they_read() -> None:
    names = ("image", "r1", "r2", "flat")
    seen = {**dict.fromkeys(names, Range(0.0, 4.0)), "p1": Range(0.0, 2.0), "p2": Range(0.0, 3.0)}
    int8 = to_pairs(mnist_like(), calibration(seen), runtime="onnxruntime")
    at = {n.input[0]: float(stored(int8)[n.input[1]]) for n in pairs(int8, "QuantizeLinear")}
    assert at["p1"] == at["r1"]  # else it would be dequantized, pooled and quantized anew
    assert at["flat"] == at["p2"] == at["r2"]


def test_onnxruntime_computes_a_residual_block_in_integers_throughout(tmp_path: Path) -> None:
    model = residual_block()
    int8, _ = quantized(model, tmp_path, "onnxruntime")
    done = optimised(int8, tmp_path)
    assert done.count("QLinearConv") == 3
    assert done.count("QLinearAdd") == 1
    assert not {"Conv", "Add", "Relu"} & set(done)
    assert done.count("DequantizeLinear") == done.count("QuantizeLinear") == 1  # both ends


def residual_block() -> onnx.ModelProto:
    """Conv, Relu, MaxPool, then what ResNet repeats; the pooled tensor is read twice."""
    random = np.random.default_rng(0)
    weights = {f"w{i}": random.standard_normal((16, 16, 3, 3)).astype(np.float32) for i in range(3)}
    same = {"pads": [1, 1, 1, 1]}
    half = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], name="stem", **same),
        helper.make_node("Relu", ["c0"], ["r0"], name="relu0"),
        helper.make_node("MaxPool", ["r0"], ["p"], name="pool", **half),
        helper.make_node("Conv", ["p", "w1"], ["c1"], name="first", **same),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="second", **same),
        helper.make_node("Add", ["c2", "p"], ["sum"], name="add"),
        helper.make_node("Relu", ["sum"], ["r2"], name="relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["y"], name="mean"),
    ]
    return make(nodes, {"x": ("N", 16, 8, 8)}, {"y": ("N", 16, 1, 1)}, weights)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        # as in a transformer: one kernel, where a scale on the result takes three
        (("N", 4, 8), ["QuantizeLinear", "MatMulIntegerToFloat", "Add", "Tanh"]),
        # ONNX Runtime makes a Gemm in float of MatMul and Add unless a pair is in between
        (("N", 8), ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear", "Add", "Tanh"]),
    ],
)
def test_a_matmul_runs_in_integers_whatever_reads_its_result(
    shape: tuple[str | int, ...], wanted: list[str], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((8, 8)).astype(np.float32), "b": np.ones(8, np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "matmul"),
        helper.make_node("Add", ["m", "b"], ["a"], "bias"),
        helper.make_node("Tanh", ["a"], ["y"], "tanh"),
    ]
    model = onnx.shape_inference.infer_shapes(make(nodes, {"x": shape}, {"y": shape}, weights))
    int8, _ = quantized(model, tmp_path, ORT)
    assert optimised(int8, tmp_path) == wanted


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# operator -> attributes and further inputs, of an x [N,8,8,8]
BETWEEN: dict[str, tuple[dict[str, object], list[np.ndarray | None]]] = {
    "MaxPool": ({"kernel_shape": [2, 2]}, []),
    "AveragePool": ({"kernel_shape": [2, 2]}, []),
    "GlobalAveragePool": ({}, []),
    "Reshape": ({}, [_ints(-1, 8, 4, 16)]),
    "Flatten": ({}, []),
    "Transpose": ({"perm": [0, 1, 3, 2]}, []),
    "Unsqueeze": ({}, [_ints(0)]),
    "Squeeze": ({}, [_ints(0)]),
    "Slice": ({}, [_ints(0), _ints(8), _ints(1)]),
    "Split": ({"axis": 0, "num_outputs": 1}, []),
    "Resize": ({"mode": "nearest"}, [None, np.array([1, 1, 2, 2], np.float32)]),
    "Gather": ({"axis": 1}, [_ints(*range(8))]),
    "DepthToSpace": ({"blocksize": 2}, []),
    "Expand": ({}, [_ints(1, 8, 8, 8)]),
    "Tile": ({}, [_ints(1, 1, 1, 1)]),
    "Sigmoid": ({}, []),
    "LeakyRelu": ({"alpha": 0.1}, []),
    "Add": ({}, []),
    "Mul": ({}, []),
    "Concat": ({"axis": 1}, []),
}
# for these one more node gives back a tensor that the next convolution takes
BACK = {
    "Flatten": ("Reshape", _ints(-1, 8, 8, 8)),
    "Unsqueeze": ("Squeeze", _ints(0)),
    "Squeeze": ("Reshape", _ints(-1, 8, 8, 8)),
}


@pytest.mark.parametrize("kind", sorted(MOVES | _COMPUTES))
def test_onnxruntime_runs_in_integers_all_that_is_given_scales(kind: str, tmp_path: Path) -> None:
    attributes, more = BETWEEN[kind]
    weights = {
        f"i{place}": array if array is not None else np.array([], np.float32)
        for place, array in enumerate(more)
    }
    nodes = [helper.make_node("Conv", ["x", "w0"], ["c0"], "conv0", pads=[1, 1, 1, 1])]
    last = "c0"
    if kind == "Squeeze":
        nodes.append(helper.make_node("Unsqueeze", ["c0", "i0"], ["u"], "unsqueeze"))
        last = "u"
    twice = [last] if kind in ("Add", "Mul", "Concat") else []
    nodes.append(helper.make_node(kind, [last, *twice, *weights], ["m"], "middle", **attributes))
    last = "m"
    if kind in BACK:
        operator, shape = BACK[kind]
        weights["back"] = shape
        nodes.append(helper.make_node(operator, ["m", "back"], ["b"], "back"))
        last = "b"
    channels = {"Concat": 16, "DepthToSpace": 2}.get(kind, 8)
    random = np.random.default_rng(0)
    weights["w0"] = random.standard_normal((8, 8, 3, 3)).astype(np.float32)
    weights["w1"] = random.standard_normal((8, channels, 1, 1)).astype(np.float32)
    nodes.append(helper.make_node("Conv", [last, "w1"], ["y"], "conv1"))
    if kind == "Resize":
        weights["i0"] = np.array([], np.float32)
    model = make(nodes, {"x": ("N", 8, 8, 8)}, {"y": ("N", 8, "H", "W")}, weights)
    int8, _ = quantized(model, tmp_path, "onnxruntime")
    done = optimised(int8, tmp_path)
    assert done.count("QuantizeLinear") == 1, done  # of the input: nothing is float from there on
    assert done.count("QLinearConv") >= 1, done


def test_what_onnxruntimes_own_quantizer_has_kernels_for_is_here_or_left_out_on_purpose() -> None:
    registry = pytest.importorskip("onnxruntime.quantization.registry")
    left_out = {
        "ArgMax": "an end: nothing after it computes",
        "Softmax": "256 steps are too coarse for attention's weights",
        "Where": "a mask's -inf has no scale",
        "Pad": "onnxruntime 1.31 pads in float between the pairs",
        "EmbedLayerNormalization": "a fused operator of its own optimiser",
    }
    here = MOVES | _COMPUTES | _ACTIVATIONS | {"Conv", "Gemm", "MatMul"}
    assert set(registry.QLinearOpsRegistry) - here == set(left_out)
