"""What FP8 keeps as it was, and where ONNX Runtime wants INT8 pairs and what it makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from deploykit.engines.onnxruntime.engine import session_options
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import Range
from deploykit.quantization.qdq import without_kernel
from deploykit.quantization.qdq_placement import _ACTIVATIONS, _COMPUTES, MOVES
from tests.support.graphs.data import calibration, feeds, samples, sqnr_db
from tests.support.graphs.protos import calibrate, summarise, to_pairs
from tests.support.graphs.qdq_graphs import (
    ZOO,
    Make,
    optimised,
    pairs,
    quantized,
    run,
    stored,
    writer_of,
)
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import conv_relu, linear, mnist_like, save

# 3 bits of mantissa: an error of at most 2^-4 of a value, uniform: 10 log10(3 * 2**8 / 2) = 26 dB
# on average for input and for weight; three layers, their noise added: 20 dB.
LEAST_FP8_SQNR_DB = 20.0
SEEN = calibration(dict.fromkeys(("image", "flat"), Range(-4.0, 4.0)))


def convolution(shape: tuple[int, ...] = (32, 16, 3, 3), group: int = 1) -> onnx.ModelProto:
    """Image -> Conv of these weights -> Relu -> Gemm head."""
    random = np.random.default_rng(0)
    return parse(
        f"(float[N,{shape[1] * group},12,12] image) => (float[N,10] logits)",
        f"""c = Conv<group = {group}>(image, w1) r = Relu(c) p = GlobalAveragePool(r)
            flat = Flatten(p) logits = Gemm(flat, w2)""",
        w1=random.standard_normal(shape) / 12,
        w2=random.standard_normal((shape[0], 10)) / 6,
    )


@pytest.mark.parametrize(
    ("shape", "group", "quantized"),
    [
        ((32, 16, 3, 3), 1, 2),
        ((16, 16, 1, 1), 1, 2),
        ((32, 32, 5, 5), 1, 2),
        ((64, 3, 7, 7), 1, 1),  # ResNet's first: "could not find any implementation"
        ((32, 8, 3, 3), 1, 1),
        ((8, 32, 3, 3), 1, 1),
        ((32, 16, 7, 7), 1, 1),
        ((32, 1, 3, 3), 32, 1),
        ((32, 16, 3, 3), 2, 1),
    ],
)
def test_convolutions_without_an_fp8_kernel_stay_as_they_are(
    shape: tuple[int, ...], group: int, quantized: int
) -> None:
    graph = Graph(convolution(shape, group))
    fp8 = to_pairs(convolution(shape, group), SEEN, "fp8")
    assert summarise(fp8).precision.get("float8") == quantized
    note = without_kernel(graph, "tensorrt", "fp8")
    assert note.startswith("1 convolution(s) stay as they are: TensorRT has no FP8 kernel") == (
        quantized == 1
    )
    assert not without_kernel(graph, "tensorrt", "int8")


@pytest.mark.parametrize("graph", [*(each for each in ZOO if each is not conv_relu), convolution])
def test_fp8_outputs_are_close_on_data_not_calibrated_on(graph: Make, tmp_path: Path) -> None:
    found = calibrate(save(graph(), tmp_path / "m.onnx"), samples(graph(), 64))
    fp8 = to_pairs(graph(), found, "fp8")
    onnx.checker.check_model(fp8, full_check=True)
    assert summarise(fp8).opset == {"ai.onnx": 19}
    inputs = feeds(graph(), 32, seed=1)
    options = session_options(1)  # optimised, ONNX Runtime 1.31 takes FP8 for INT8 and refuses it
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(fp8.SerializeToString(), options)
    wanted = run(graph(), inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, session.run(None, inputs)[0]) > LEAST_FP8_SQNR_DB


def test_fp8_stores_what_numpy_rounds_to_e4m3_with_one_scale_per_tensor() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fp8 = to_pairs(convolution(), SEEN, "fp8")
    tensors = {t.name: t for t in fp8.graph.initializer}
    for name, weight in stored(convolution()).items():
        kept = tensors[f"{name}_float8"]
        scale = onnx.numpy_helper.to_array(tensors[f"{name}_scale"])
        assert kept.data_type == TensorProto.FLOAT8E4M3FN
        assert scale == np.float32(np.abs(weight).max() / np.float32(448))
        assert kept.raw_data == (weight / scale).astype(ml_dtypes.float8_e4m3fn).tobytes()
    kept = to_pairs(convolution(), SEEN, "fp8", keep_float32=("logits",))
    assert summarise(kept).precision["float8"] == 1
    fp8 = to_pairs(linear(), calibration({"x": Range(-4.48, 4.0)}), "fp8")
    assert pairs(fp8, "Gemm")[0].input[2] == "b"
    assert not any(a.name == "axis" for n in pairs(fp8, "DequantizeLinear") for a in n.attribute)
    (scale,) = (t for t in fp8.graph.initializer if t.name == "x_scale")
    assert onnx.numpy_helper.to_array(scale) == pytest.approx(4.48 / 448)


def test_onnxruntime_scales_cover_the_range_with_a_zero_point_after_the_relu_and_the_pool(
    tmp_path: Path,
) -> None:
    model, found = quantized(mnist_like(), tmp_path, "onnxruntime")
    after = {node.input[0]: node for node in pairs(model, "QuantizeLinear")}
    assert after.keys() == {"image", "r1", "p1", "r2", "p2", "flat"}
    scale, zero = (stored(model)[name] for name in after["r1"].input[1:])
    assert found.ranges["r1"].low == 0
    assert (zero.dtype, zero) == (np.uint8, 0)  # after Relu, all 255 steps lie above zero
    assert float(scale) == pytest.approx(found.ranges["r1"].high / 255, rel=1e-6)


def test_onnxruntime_gets_an_int32_bias_of_the_product_scale(tmp_path: Path) -> None:
    model, _ = quantized(linear(), tmp_path, "onnxruntime")
    values, gemm = stored(model), pairs(model, "Gemm")[0]
    x, weight, bias = (writer_of(model, name) for name in gemm.input)
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
    """Conv, Relu, MaxPool, then what ResNet repeats; the pooled tensor is read twice."""
    random = np.random.default_rng(0)
    model = parse(
        "(float[N,16,8,8] x) => (float[N,16,1,1] y)",
        """c0 = Conv<pads = [1, 1, 1, 1]>(x, w0) r0 = Relu(c0)
           p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r0)
           c1 = Conv<pads = [1, 1, 1, 1]>(p, w1) r1 = Relu(c1)
           c2 = Conv<pads = [1, 1, 1, 1]>(r1, w2) sum = Add(c2, p) r2 = Relu(sum)
           y = GlobalAveragePool(r2)""",
        **{f"w{i}": random.standard_normal((16, 16, 3, 3)) for i in range(3)},
    )
    done = optimised(quantized(model, tmp_path, "onnxruntime")[0], tmp_path)
    assert (done.count("QLinearConv"), done.count("QLinearAdd")) == (3, 1)
    assert not {"Conv", "Add", "Relu"} & set(done)
    assert done.count("DequantizeLinear") == done.count("QuantizeLinear") == 1  # both ends


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        # as in a transformer: one kernel, where a scale on the result takes three
        ("N,4,8", ["QuantizeLinear", "MatMulIntegerToFloat", "Add", "Tanh"]),
        # ONNX Runtime makes a Gemm in float of MatMul and Add unless a pair is in between
        ("N,8", ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear", "Add", "Tanh"]),
    ],
)
def test_a_matmul_runs_in_integers_whatever_reads_its_result(
    axes: str, wanted: list[str], tmp_path: Path
) -> None:
    model = parse(
        f"(float[{axes}] x) => (float[{axes}] y)",
        "m = MatMul(x, w) a = Add(m, b) y = Tanh(a)",
        w=np.random.default_rng(0).standard_normal((8, 8)),
        b=np.ones(8),
    )
    model = onnx.shape_inference.infer_shapes(model)
    assert optimised(quantized(model, tmp_path, "onnxruntime")[0], tmp_path) == wanted


AGAIN = {"again": [-1, 8, 8, 8]}
# operator -> from c [N,8,8,8] to m, which the next convolution takes, and the constants
BETWEEN = {
    "MaxPool": ("m = MaxPool<kernel_shape = [2, 2]>(c)", {}),
    "AveragePool": ("m = AveragePool<kernel_shape = [2, 2]>(c)", {}),
    "GlobalAveragePool": ("m = GlobalAveragePool(c)", {}),
    "Reshape": ("m = Reshape(c, i)", {"i": [-1, 8, 4, 16]}),
    "Flatten": ("b = Flatten(c) m = Reshape(b, again)", AGAIN),
    "Transpose": ("m = Transpose<perm = [0, 1, 3, 2]>(c)", {}),
    "Unsqueeze": ("b = Unsqueeze(c, i) m = Squeeze(b, i)", {"i": [0]}),
    "Squeeze": ("u = Unsqueeze(c, i) b = Squeeze(u, i) m = Reshape(b, again)", {"i": [0], **AGAIN}),
    "Slice": ("m = Slice(c, i, j, k)", {"i": [0], "j": [8], "k": [1]}),
    "Split": ("m = Split<axis = 0, num_outputs = 1>(c)", {}),
    "Resize": ('m = Resize<mode = "nearest">(c, , i)', {"i": [1.0, 1.0, 2.0, 2.0]}),
    "Gather": ("m = Gather<axis = 1>(c, i)", {"i": [*range(8)]}),
    "DepthToSpace": ("m = DepthToSpace<blocksize = 2>(c)", {}),
    "Expand": ("m = Expand(c, i)", {"i": [1, 8, 8, 8]}),
    "Tile": ("m = Tile(c, i)", {"i": [1, 1, 1, 1]}),
    "Sigmoid": ("m = Sigmoid(c)", {}),
    "LeakyRelu": ("m = LeakyRelu<alpha = 0.1>(c)", {}),
    "Add": ("m = Add(c, c)", {}),
    "Mul": ("m = Mul(c, c)", {}),
    "Concat": ("m = Concat<axis = 1>(c, c)", {}),
}


@pytest.mark.parametrize("kind", sorted(MOVES | _COMPUTES))
def test_onnxruntime_runs_in_integers_all_that_is_given_scales(kind: str, tmp_path: Path) -> None:
    between, constants = BETWEEN[kind]
    channels = {"Concat": 16, "DepthToSpace": 2}.get(kind, 8)
    random = np.random.default_rng(0)
    model = parse(
        "(float[N,8,8,8] x) => (float[N,8,H,W] y)",
        f"c = Conv<pads = [1, 1, 1, 1]>(x, w0) {between} y = Conv(m, w1)",
        w0=random.standard_normal((8, 8, 3, 3)),
        w1=random.standard_normal((8, channels, 1, 1)),
        **constants,
    )
    done = optimised(quantized(model, tmp_path, "onnxruntime")[0], tmp_path)
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
