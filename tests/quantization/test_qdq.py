"""INT8 pairs: their scales, what is left as it was, and how they move to another runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.errors import BadInput
from deploykit.core.precision import CALIBRATED
from deploykit.core.runtime import TARGET_RUNTIMES
from deploykit.engines.engine import load
from deploykit.engines.onnxruntime.engine import session_options
from deploykit.graph.graph import Graph
from deploykit.quantization import half_precision, qdq
from deploykit.quantization.moving import move_pairs
from deploykit.quantization.qdq import MOVES, Calibration, Range, box_nodes, without_kernel
from tests.support.builders.nvidia_cases import ask, checked, needs
from tests.support.graphs.data import (
    ZOO,
    Make,
    calibration,
    feeds,
    optimised,
    pairs,
    quality_db,
    quantized,
    run,
    samples,
    sqnr_db,
    stored,
    with_weight,
    writer_of,
)
from tests.support.graphs.protos import (
    calibrate,
    element_types,
    quantizable,
    specs,
    summarise,
    to_half,
    to_pairs,
    to_proto,
)
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import conv_relu, linear, mnist_like, save, two_inputs

# A normal signal with its peak at 4 sigma in steps of peak/127: 10 log10(12 * 127**2 / 16) = 41 dB.
# Input and weight each: 38 dB for a layer; three layers, their noise added: 33 dB.
LEAST_SQNR_DB = 32.0
ROWS = "(float[N,4] x) => (float[N,4] y)"
EYE = np.eye(4)


@pytest.mark.parametrize("runtime", TARGET_RUNTIMES)
@pytest.mark.parametrize("graph", ZOO)
def test_int8_outputs_are_close_on_other_data(graph: Make, runtime: str, tmp_path: Path) -> None:
    source = graph()
    model, _ = quantized(source, tmp_path, runtime)
    onnx.checker.check_model(model, full_check=True)
    assert source == graph()
    assert specs(model) == specs(source)
    names = [node.name for node in model.graph.node]
    assert len({node.name for node in source.graph.node} | set(names)) == len(names)
    assert quantized(source, tmp_path, runtime)[0].SerializeToString() == model.SerializeToString()
    assert quality_db(source, model, feeds(graph(), 32, seed=1), tmp_path) > LEAST_SQNR_DB
    if runtime == "tensorrt":
        values = stored(model)
        zeros = [values[node.input[2]] for node in model.graph.node if "eLinear" in node.op_type]
        assert all(zero.dtype == np.int8 and not zero.any() for zero in zeros)


def up(group: int = 1, *, norm: bool = False) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    last = "n = BatchNormalization(c, v, v, b, v) y = Relu(n)" if norm else "y = Relu(c)"
    return parse(
        "(float[N,8,8,8] x) => (float[N,8,16,16] y)",
        f"c = ConvTranspose<strides = [2, 2], group = {group}>(x, W, b) {last}",
        W=random.standard_normal((8, 8 // group, 2, 2)),
        b=random.standard_normal(8),
        v=random.uniform(0.5, 2, 8),
    )


def product(*, transposed: bool) -> onnx.ModelProto:
    weight = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    body = f"y = Gemm<transB = {int(transposed)}>(x, W)"
    head = "(float[N,4] x) => (float[N,3] y)"
    return parse(head, body, W=weight.T.copy() if transposed else weight)


@pytest.mark.parametrize(
    ("model", "kind", "axis"),
    [
        (conv_relu(), "Conv", 0),
        (product(transposed=False), "Gemm", 1),
        (product(transposed=True), "Gemm", 0),
        (up(), "ConvTranspose", 1),
    ],
)
def test_weights_have_a_scale_per_output_channel_and_a_bias_stays(
    model: onnx.ModelProto, kind: str, axis: int, tmp_path: Path
) -> None:
    int8, _ = quantized(model, tmp_path)
    values, before, (node,) = stored(int8), stored(model), pairs(int8, kind)
    dequantize = writer_of(int8, node.input[1])
    assert [(each.name, each.i) for each in dequantize.attribute] == [("axis", axis)]
    others = tuple(each for each in range(before["W"].ndim) if each != axis)
    steps = np.abs(before["W"]).max(axis=others, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(values[dequantize.input[1]], steps.reshape(-1))
    levels = np.rint(before["W"] / steps).astype(np.int8)
    np.testing.assert_array_equal(values[dequantize.input[0]], levels)
    if len(node.input) > 2:
        np.testing.assert_array_equal(values[node.input[2]], before["b"])
    assert len(pairs(int8, "QuantizeLinear")) == summarise(int8).precision["int8"] == 1


def test_activation_scales_are_the_calibrated_peak(tmp_path: Path) -> None:
    model, found = quantized(mnist_like(), tmp_path)
    values = stored(model)
    seen = {n.input[0]: float(values[n.input[1]]) for n in pairs(model, "QuantizeLinear")}
    assert list(seen) == ["image", "p1", "flat"]
    for name, scale in seen.items():
        assert scale == pytest.approx(found.ranges[name].peak / 127, rel=1e-6)
    kept = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    assert kept & {"w1", "w2", "w3", "b1", "b2", "b3"} == {"b1", "b2", "b3"}
    clipped = Calibration({"x": Range(-50.0, 50.0)}, {"x": Range(-2.0, 1.27)}, 16, "percentile")
    int8 = to_pairs(linear(), clipped)
    scale = stored(int8)[pairs(int8, "QuantizeLinear")[0].input[1]]
    assert float(scale) == pytest.approx(2.0 / 127, rel=1e-6)


def test_what_is_no_layer_stays_float_and_an_input_is_quantized_once(tmp_path: Path) -> None:
    int8, _ = quantized(
        parse(ROWS, "a = MatMul(x, W) b = MatMul(x, W) y = Sum(a, b, x)", W=EYE), tmp_path
    )
    kinds = {"DequantizeLinear": 2, "MatMul": 2, "QuantizeLinear": 1, "Sum": 1}
    assert summarise(int8).operators == kinds
    assert int8.graph.node[-1].input[2] == "x"  # exact for other readers
    head = "(float[N,4,4] a, float[N,4,4] b) => (float[N,4,4] y)"
    model = parse(head, "p = MatMul(a, W) y = MatMul(p, b)", W=EYE)
    assert summarise(quantized(model, tmp_path)[0]).precision == {"float32": 1, "int8": 1}


@pytest.mark.parametrize("runtime", TARGET_RUNTIMES)
def test_a_channel_of_zeros_and_a_constant_are_quantized(runtime: str, tmp_path: Path) -> None:
    head, weight = "(float[N,2] x) => (float[N,2] y)", [[1.0, 0.0], [2.0, 0.0]]
    model = parse(head, "dead = Mul(x, zero) y = MatMul(dead, W)", W=weight, zero=[0.0])
    int8, _ = quantized(model, tmp_path, runtime)
    assert not run(int8, {"x": np.ones((3, 2), np.float32)}, tmp_path / "q.onnx").any()


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no Conv, ConvTranspose, Gemm or MatMul") as caught:
        quantized(two_inputs(), tmp_path)
    assert "fp16" in str(caught.value.hint)
    int8, found = quantized(linear(), tmp_path)
    with pytest.raises(BadInput, match="quantized already"):
        to_pairs(int8, found)
    with pytest.raises(BadInput, match="other than those kept in float32"):
        to_pairs(linear(), found, keep_float32=("gemm",))
    old = linear()
    old.opset_import[0].version = 12  # its operators mean the same in 13
    assert quantized(old, tmp_path)[0].opset_import[0].version == 13
    for value in (np.nan, -np.inf):
        broken = with_weight(linear(), "W", np.full((4, 3), value))
        for to in CALIBRATED:
            with pytest.raises(BadInput, match="weight 'W' holds NaN or infinity"):
                to_pairs(broken, found, to)


def test_a_node_whose_input_was_infinite_stays_float(tmp_path: Path) -> None:
    found = calibrate(save(mnist_like(), tmp_path / "m.onnx"), samples(mnist_like()))
    int8 = to_pairs(mnist_like(), calibration({**found.ranges, "p1": Range(-np.inf, 1.0)}))
    assert summarise(int8).precision == {"float32": 5, "int8": 2}


@pytest.mark.parametrize("runtime", TARGET_RUNTIMES)
def test_skipped_nodes_read_what_they_read_before(runtime: str, tmp_path: Path) -> None:
    found = calibrate(save(mnist_like(), tmp_path / "m.onnx"), samples(mnist_like()))
    assert set(quantizable(mnist_like())) == {"conv1", "conv2", "head"}
    int8 = to_pairs(mnist_like(), found, runtime=runtime, keep_float32=("conv2", "relu2"))
    read = {node.name: node.input[:2] for node in int8.graph.node}
    assert list(writer_of(int8, "c2").input) == ["p1", "w2", "b2"]
    for name in ("conv1", "head"):
        assert {writer_of(int8, each).op_type for each in read[name]} == {"DequantizeLinear"}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_transposed_convolutions_are_close_in_int8(group: int, norm: bool, tmp_path: Path) -> None:
    source = up(group, norm=norm)
    model, _ = quantized(source, tmp_path)
    assert "BatchNormalization" not in summarise(model).operators
    assert quality_db(source, model, feeds(source, 32, seed=1), tmp_path) > LEAST_SQNR_DB
    if group > 1:  # its groups share one scale
        dequantize = writer_of(model, pairs(model, "ConvTranspose")[0].input[1])
        assert not dequantize.attribute
        assert stored(model)[dequantize.input[1]].shape == ()


def test_what_has_no_kernel_for_a_transposed_convolution_says_so() -> None:
    found = calibration(dict.fromkeys(("x", "c", "y"), Range(-1.0, 1.0)))
    with pytest.raises(BadInput, match="no Conv, Gemm or MatMul") as caught:
        to_pairs(up(), found, runtime="onnxruntime")
    assert caught.value.hint == "onnxruntime has no int8 kernel for its ConvTranspose; TensorRT has"
    with pytest.raises(BadInput) as caught:
        to_pairs(up(), found, "fp8")
    assert "TensorRT computes it in int8 only" in str(caught.value.hint)


def unet() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    shapes = {"w0": (8, 3, 3, 3), "w1": (16, 8, 3, 3), "w2": (16, 8, 2, 2), "w3": (4, 16, 3, 3)}
    return parse(
        "(float[N,3,8,8] x) => (float[N,4,8,8] y)",
        """c0 = Conv<pads = [1, 1, 1, 1]>(x, w0) skip = Relu(c0)
           p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(skip)
           c1 = Conv<pads = [1, 1, 1, 1]>(p, w1) r1 = Relu(c1)
           u = ConvTranspose<strides = [2, 2]>(r1, w2) joined = Concat<axis = 1>(skip, u)
           y = Conv<pads = [1, 1, 1, 1]>(joined, w3)""",
        **{name: random.standard_normal(shape) / 8 for name, shape in shapes.items()},
    )


def sums(*, projected: bool = False, order: str = "c2, {}") -> onnx.ModelProto:
    random = np.random.default_rng(0)
    same = "<pads = [1, 1, 1, 1]>"
    short = f"s = Conv{same}(r0, w3)" if projected else ""
    return parse(
        "(float[N,16,8,8] x) => (float[N,16,H,W] y)",
        f"""c0 = Conv{same}(x, w0) r0 = Relu(c0) c1 = Conv{same}(r0, w1) r1 = Relu(c1)
            c2 = Conv{same}(r1, w2) {short}
            add = Add({order.format("s" if projected else "r0")}) y = Relu(add)""",
        **{f"w{i}": random.standard_normal((16, 16, 3, 3)) / 16 for i in range(4)},
    )


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("order", ["c2, {}", "{}, c2"])
def test_what_a_convolution_adds_is_int8(projected: bool, order: str, tmp_path: Path) -> None:
    model, found = quantized(sums(projected=projected, order=order), tmp_path)
    inputs = list(writer_of(model, "add").input)
    inputs.remove("c2")  # the longer path: it fuses with the sum
    quantize = writer_of(model, writer_of(model, inputs[0]).input[0])
    assert quantize.input[0] == ("s" if projected else "r0")
    assert len(pairs(model, "QuantizeLinear")) == (4 if projected else 3)  # r0 once for both
    fp8 = to_pairs(sums(), found, "fp8")
    assert writer_of(fp8, writer_of(fp8, "add").input[1]).op_type == "DequantizeLinear"


def test_a_sum_stays_exact_where_its_convolution_is_read_twice(tmp_path: Path) -> None:
    _, found = quantized(sums(), tmp_path)
    models = [to_pairs(sums(), found, keep_float32=(kept,)) for kept in ("add", "c2")]
    twice = sums()
    twice.graph.output.append(helper.make_tensor_value_info("c2", 1, ["N", 16, 8, 8]))
    for model in (*models, quantized(twice, tmp_path)[0]):
        assert list(writer_of(model, "add").input) == ["c2", "r0"]


def test_onnxruntime_joins_what_a_transposed_convolution_wrote_in_integers(tmp_path: Path) -> None:
    model, _ = quantized(unet(), tmp_path, "onnxruntime")
    done = optimised(model, tmp_path)
    assert (done.count("QLinearConcat"), done.count("Concat")) == (1, 0)
    assert (done.count("QLinearConv"), done.count("ConvTranspose")) == (2, 1)
    source = unet()
    source.graph.output.append(helper.make_tensor_value_info("u", 1, ["N", 8, 8, 8]))
    model, _ = quantized(source, tmp_path, "onnxruntime")
    assert "u" in writer_of(model, "joined").input  # others read it too: it stays exact


@ask
@needs
@pytest.mark.parametrize(
    "source", [up(), up(2), up(8), up(norm=True), unet(), sums(), sums(projected=True)]
)
def test_nvidias_builder_takes_them(source: onnx.ModelProto, tmp_path: Path) -> None:
    model, _ = quantized(source, tmp_path)
    found = checked(model, tmp_path)
    assert found.accepted, found.problems


# Nodes that decode and choose boxes keep float32, whatever the products compute in

DECODE = {"flat", "a", "sum", "pixels", "corners"}


def detector(*, nms: bool, corners: str = "corners") -> onnx.ModelProto:
    """Two convolutions; a box has the sum of two outputs, 16 times, as its corners."""
    result = "float[M,3] places" if nms else f"float[1,16,4] {corners}"
    chosen = """scores = Sigmoid(a) chosen = NonMaxSuppression(corners, scores, most, iou, least)
                places = Cast<to = 1>(chosen)"""
    return parse(
        f"(float[1,3,4,4] x) => ({result})",
        f"""raw = Conv(x, v) act = Relu(raw) out = Conv(act, w) flat = Reshape(out, rows)
            a, b = Split<axis = 1, num_outputs = 2>(flat) sum = Add(a, b) pixels = Mul(sum, stride)
            {corners} = Transpose<perm = [0, 2, 1]>(pixels) {chosen if nms else ""}""",
        v=np.ones((8, 3, 1, 1)),
        w=np.ones((8, 8, 1, 1)),
        rows=[0, 8, -1],
        stride=16.0,
        most=[3],
        iou=[0.5],
        least=[0.0],
    )


@pytest.mark.parametrize("nms", [True, False], ids=["nms", "without nms"])
def test_float16_ends_at_the_last_convolution_of_a_detector(nms: bool) -> None:
    corners = "corners" if nms else "found_boxes"
    model = detector(nms=nms, corners=corners)
    more = {"scores", "chosen", "places"} if nms else set()
    wanted = DECODE - {"corners"} | {corners} | more
    assert box_nodes(model.graph) == wanted
    half = to_half(model)[0]
    types = element_types(half)
    typed = {n.name for n in half.graph.node if types[n.output[0]] == TensorProto.FLOAT16}
    assert {name for name in typed if not name.startswith("Cast")} >= {"raw", "act", "out"}
    assert not typed & wanted
    assert box_nodes(detector(nms=False, corners="logits").graph) == set()


def test_no_coordinate_is_quantized_where_sums_are() -> None:
    names = ("x", "raw", "act", "out", "flat", "a", "b", "sum", "pixels", "corners", "scores")
    ranges = calibration({name: Range(0.0, 24.0) for name in names})
    paired = to_pairs(detector(nms=True), ranges, runtime="onnxruntime")
    read = {n.input[0] for n in paired.graph.node if n.op_type == "QuantizeLinear"}
    assert {"x", "act"} <= read
    assert not read & {"flat", "a", "b", "sum", "pixels", "corners", "scores"}


# 3 bits of mantissa: an error of at most 2^-4 of a value, uniform: 10 log10(3 * 2**8 / 2) = 26 dB
# on average for input and for weight; three layers, their noise added: 20 dB.
LEAST_FP8_SQNR_DB = 20.0
SEEN = calibration(dict.fromkeys(("image", "flat"), Range(-4.0, 4.0)))


def convolution(shape: tuple[int, ...] = (32, 16, 3, 3), group: int = 1) -> onnx.ModelProto:
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
        ((32, 32, 5, 5), 1, 2),
        ((64, 3, 7, 7), 1, 1),  # ResNet's first: "could not find any implementation"
        ((32, 8, 3, 3), 1, 1),
        ((8, 32, 3, 3), 1, 1),
        ((32, 1, 3, 3), 32, 1),
        ((32, 16, 3, 3), 2, 1),
    ],
)
def test_convolutions_without_fp8_stay(shape: tuple[int, ...], group: int, quantized: int) -> None:
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


def test_onnxruntime_scales_are_after_relu_and_cover_the_range(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("axes", "kinds"),
    [
        # as in a transformer: one kernel, where a scale on the result takes three
        ("N,4,8", ["QuantizeLinear", "MatMulIntegerToFloat", "Add", "Tanh"]),
        # ONNX Runtime makes a Gemm in float of MatMul and Add unless a pair is in between
        ("N,8", ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear", "Add", "Tanh"]),
    ],
)
def test_a_matmul_is_integer_whatever_reads_it(axes: str, kinds: list[str], tmp_path: Path) -> None:
    model = parse(
        f"(float[{axes}] x) => (float[{axes}] y)",
        "m = MatMul(x, w) a = Add(m, b) y = Tanh(a)",
        w=np.random.default_rng(0).standard_normal((8, 8)),
        b=np.ones(8),
    )
    model = onnx.shape_inference.infer_shapes(model)
    assert optimised(quantized(model, tmp_path, "onnxruntime")[0], tmp_path) == kinds


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


@pytest.mark.parametrize("kind", sorted(MOVES | qdq._COMPUTES))
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


MOST_LOST_DB = 3.0  # of signal to noise by the move: half a bit
OPERATORS = ["Conv", "Gemm", "MatMul"]


def written(make: Make, tmp_path: Path, **options: object) -> dict[str, Graph]:
    model = make()
    path = save(model, tmp_path / "float.onnx")
    found = calibrate(path, samples(model, 64))
    source = Graph.open(path)
    return {name: qdq.to_pairs(source, found, runtime=name, **options) for name in TARGET_RUNTIMES}


@pytest.mark.parametrize("make", ZOO)
def test_moved_pairs_give_what_was_written_for_that_runtime(make: Make, tmp_path: Path) -> None:
    graphs = written(make, tmp_path)
    moved, _ = move_pairs(graphs["tensorrt"], "onnxruntime")
    inputs = feeds(make(), 16)
    got = run(to_proto(moved), inputs, tmp_path / "moved.onnx")
    wanted = run(to_proto(graphs["onnxruntime"]), inputs, tmp_path / "wanted.onnx")
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert moved.summary.operators == graphs["onnxruntime"].summary.operators


def test_a_graph_without_ranges_or_with_half_nodes_is_not_moved(tmp_path: Path) -> None:
    graphs = written(mnist_like, tmp_path, keep_float32=("conv2",))
    graph = graphs["tensorrt"]
    assert move_pairs(graph, "onnxruntime")[0].precision == graphs["onnxruntime"].precision
    assert move_pairs(half_precision.to_half(graph)[0], "onnxruntime") is None
    del graph.model.metadata_props[:]
    assert move_pairs(graph, "onnxruntime") is None


def written_by_onnxruntime(
    model: onnx.ModelProto, tmp_path: Path, activation_type: str = "QInt8", **options: object
) -> Graph:
    """By quantize_static, with the options that TensorRT's parser accepts."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    inputs = feeds(model, 32)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        left = iter([inputs])

        def get_next(self) -> Mapping[str, np.ndarray] | None:
            return next(self.left, None)

    quantization.quantize_static(
        save(model, tmp_path / "float.onnx"),
        tmp_path / "foreign.onnx",
        Reader(),
        per_channel=True,
        activation_type=quantization.QuantType[activation_type],
        weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=OPERATORS,
        extra_options={
            "ActivationSymmetric": True,
            "QuantizeBias": False,
            "OpTypesToExcludeOutputQuantization": OPERATORS,
            **options,
        },
    )
    return Graph.open(tmp_path / "foreign.onnx")


def moved_graph(foreign: Graph) -> onnx.ModelProto:
    return to_proto(move_pairs(foreign, "onnxruntime", derive=True)[0])


def blocks(activation: str = "{1} = Relu({0})", *, join: str = "Add") -> onnx.ModelProto:
    """Conv, activation, then two of ResNet's blocks, or of a YOLO's with SiLU or Concat."""
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {"least": np.array(0.0), "most": np.array(1.0)}
    lines: list[str] = []

    def conv(name: str, source: str, channels: int = 8) -> str:
        kernel = 1 if channels == 16 or name == "y" else 3
        weights[f"w_{name}"] = random.standard_normal((8, channels, kernel, kernel)) / 6
        pads = ", ".join([str(kernel // 2)] * 4)
        lines.append(f"{name} = Conv<pads = [{pads}]>({source}, w_{name})")
        return name

    def act(source: str) -> str:
        lines.append(activation.format(source, f"{source}_act"))
        return f"{source}_act"

    last = act(conv("stem", "x", 3))
    for block in "ab":
        body = conv(f"{block}2", act(conv(f"{block}1", last)))
        if join == "Add":
            lines.append(f"{block}_sum = Add({body}, {last})")
            last = act(f"{block}_sum")
        else:
            parts = act(body)
            lines.append(f"{block}_cat = Concat<axis = 1>({parts}, {last})")
            last = act(conv(f"{block}3", f"{block}_cat", 16))
    conv("y", last)
    return parse("(float[N,3,8,8] x) => (float[N,8,8,8] y)", "\n".join(lines), **weights)


SILU = "{0}_gate = Sigmoid({0}) {1} = Mul({0}, {0}_gate)"
CASES: dict[str, Callable[[], onnx.ModelProto]] = {
    "sequence": mnist_like,
    "residual": blocks,
    "silu": lambda: blocks(SILU),
    "clip": lambda: blocks("{1} = Clip({0}, least, most)"),
    "silu concat": lambda: blocks(SILU, join="Concat"),
}


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_runs_a_foreign_file_in_integers_once_moved(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    foreign = written_by_onnxruntime(model, tmp_path)
    before = optimised(to_proto(foreign), tmp_path)
    assert not [kind for kind in before if kind.startswith("QLinear")], before
    moved = moved_graph(foreign)
    onnx.checker.check_model(moved, full_check=True)
    done = optimised(moved, tmp_path)
    convs = sum(node.op_type == "Conv" for node in model.graph.node)
    # all but the last: what it writes is a result or, in float, what a head of float reads
    assert done.count("QLinearConv") >= convs - 1, done
    assert not {"Add", "Concat", "Mul", "Sigmoid"} & set(done), done
    inputs = feeds(model, 32, seed=1)
    there_db = quality_db(model, to_proto(foreign), inputs, tmp_path)
    assert quality_db(model, moved, inputs, tmp_path) > there_db - MOST_LOST_DB


def test_weights_that_pass_through_a_pair_are_taken_as_int8(tmp_path: Path) -> None:
    foreign = written_by_onnxruntime(blocks(), tmp_path, AddQDQPairToWeight=True)
    assert stored(to_proto(foreign))["w_stem"].dtype == np.float32
    moved = moved_graph(foreign)
    assert optimised(moved, tmp_path).count("QLinearConv") == 5
    assert quality_db(blocks(), moved, feeds(blocks(), 32, seed=1), tmp_path) > 20


def by_hand(
    *, transposed: bool = False, uint8: bool = False, ends: bool = False, contrib: bool = False
) -> onnx.ModelProto:
    """Two MatMuls; their weights transposed, or unsigned and shifted; the result through a pair."""
    random = np.random.default_rng(1)
    kind, shift = (np.uint8, 128) if uint8 else (np.int8, 0)
    weights: dict[str, np.ndarray] = {"s": np.array(0.05), "z": np.array(0, np.int8)}
    body, last = "", "x"
    for layer, out in (("a", "ma"), ("b", "mb" if ends else "y")):
        weights |= {
            f"w{layer}": (random.integers(-100, 100, (4, 4)) + shift).astype(kind),
            f"s{layer}": random.uniform(0.005, 0.02, 4),
            f"z{layer}": np.full(4, shift, kind),
        }
        weight = f"t{layer}" if transposed else f"d{layer}"
        body += f"""q{layer} = QuantizeLinear({last}, s, z)
                    x{layer} = DequantizeLinear(q{layer}, s, z)
                    d{layer} = DequantizeLinear<axis = {int(not transposed)}>
                        (w{layer}, s{layer}, z{layer})
                    {f"{weight} = Transpose<perm = [1, 0]>(d{layer})" if transposed else ""}
                    {out} = MatMul(x{layer}, {weight}) """
        last = out
    body += "qy = QuantizeLinear(mb, s, z) y = DequantizeLinear(qy, s, z)" if ends else ""
    model = parse("(float[N,4] x) => (float[N,4] y)", body, **weights)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for node in model.graph.node:  # as ONNX Runtime's quantizer writes them on request
        node.domain = "com.microsoft" * (contrib and node.op_type.endswith("Linear"))
    return model


@pytest.mark.parametrize(
    "options", [{}, {"transposed": True}, {"uint8": True}, {"ends": True}, {"contrib": True}]
)
def test_weights_are_read_as_the_pairs_mean_them(options: dict[str, bool], tmp_path: Path) -> None:
    source = by_hand(**options)
    moved = moved_graph(Graph(source))
    assert summarise(moved).precision.get("int8") == 2
    least = 12 if options.get("ends") else 20  # the steps of the last pair, which is gone
    assert quality_db(source, moved, feeds(source, 64), tmp_path) > least


def test_a_tensor_that_others_read_is_not_clipped_to_what_one_reader_needs(tmp_path: Path) -> None:
    model = blocks()
    model.graph.output.append(helper.make_tensor_value_info("a_sum", 1, ["N", 8, 8, 8]))
    moved = moved_graph(written_by_onnxruntime(model, tmp_path))
    answers = []
    for graph in (model, moved):
        with load(save(graph, tmp_path / "b.onnx"), "cpu") as engine:
            answers.append(engine(feeds(model, 8))["a_sum"])
    assert sqnr_db(*answers) > 35


@pytest.mark.parametrize("why", ["integers", "computed", "half", "none"])
def test_what_is_not_pairs_in_float32_is_left(why: str) -> None:
    model = by_hand()
    if why == "integers":
        model.graph.node.append(helper.make_node("Cast", ["qa"], ["n"], to=TensorProto.INT32))
        model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT32, ["N", 4]))
    elif why == "computed":
        model.graph.node.insert(0, helper.make_node("Abs", ["s"], ["s_abs"]))
        model.graph.node[1].input[1] = model.graph.node[2].input[1] = "s_abs"
    elif why == "none":
        model = mnist_like()
    graph = half_precision.to_half(Graph(model))[0] if why == "half" else Graph(model)
    assert move_pairs(graph, "onnxruntime", derive=True) is None


def foreign(tmp_path: Path, *kinds: str, activation_type: str = "QInt8") -> tuple[Path, Path]:
    """The file and calibration data of the nodes named, each a 1x1 Conv, a product or otherwise."""
    random, lines, weights = np.random.default_rng(0), [], dict[str, np.ndarray]()
    for n, kind in enumerate(kinds):
        if kind in OPERATORS:
            shape = (4, 4, 1, 1) if kind == "Conv" else (8, 8)
            weights[f"w{n}"] = random.standard_normal(shape) / 2
        read = f"t{n}, w{n}" if kind in OPERATORS else f"t{n}"
        lines.append(f"t{n + 1} = {kind}({read})")
    head = f"(float[N,4,8,8] t0) => (float[N,4,8,8] t{len(kinds)})"
    model = parse(head, " ".join(lines), **weights)
    there = written_by_onnxruntime(model, tmp_path, activation_type=activation_type)
    np.savez(tmp_path / "calib.npz", **feeds(model, 32, seed=1))
    return there.save(tmp_path / "q.onnx").path, tmp_path / "calib.npz"


def kernels(path: Path) -> int:
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    return sum(kind.startswith("QLinearConv") or "MatMul" in kind for kind in kinds)


def test_a_range_that_does_not_follow_is_asked_for_and_found_in_data(tmp_path: Path) -> None:
    path, calib = foreign(tmp_path, "Conv", "Relu", "Conv", "Tanh", "Conv", "Sigmoid")
    made = dk.build(path, "cpu", out=tmp_path / "b.onnx")
    (note,) = (note for note in made.notes if "data give it" in note)
    assert f"deploykit build {path} --profile cpu --calib FILE.npz" in note
    assert "2 tensor(s) that INT8 needs" in note
    measured = dk.build(path, "cpu", calib=calib, out=tmp_path / "c.onnx")
    assert kernels(measured.path) > kernels(made.path)
    evidence = measured.manifest.evidence
    assert (evidence.calibration.samples, evidence.calibration.method) == (32, "mixed")
    assert any("those of the calibration data" in note for note in evidence.notes)
    with pytest.raises(BadInput, match="no INT8 pairs to place") as caught:
        dk.build(measured.path, "cpu", calib=calib, out=tmp_path / "d.onnx")
    assert caught.value.hint == "leave it out"


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_a_graph_of_16_bits_is_refused_with_what_helps(tmp_path: Path, domain: str) -> None:
    path, _ = foreign(tmp_path, "Conv", "Relu", "Conv", activation_type="QUInt16")
    model = onnx.load(path)
    for node in model.graph.node:  # the domain depends on the version of ONNX Runtime's quantizer
        if "eLinear" in node.op_type or "QuantizeLinear" in node.op_type:
            node.domain = domain
    del model.opset_import[:]
    model.opset_import.extend(
        [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    )
    onnx.save(model, path)
    assert dk.inspect(path).precision["int16"] == 2
    with pytest.raises(BadInput, match="INT16 nodes in integers: it has no kernels") as caught:
        dk.build(path, "cpu", out=tmp_path / "b.onnx")
    assert "--precision int8 --calib" in str(caught.value.hint)


def test_calibration_data_that_cannot_help_are_refused(tmp_path: Path) -> None:
    source = save(mnist_like(), tmp_path / "m.onnx")
    np.savez(tmp_path / "calib.npz", **feeds(mnist_like(), 16))
    with pytest.raises(BadInput, match=r"m\.onnx: `calib` has no effect") as caught:
        dk.build(source, "cpu", calib=tmp_path / "calib.npz", out=tmp_path / "b.onnx")
    assert caught.value.hint == "`precision` int8 quantizes it"
    path, calib = foreign(tmp_path, "Conv", "Relu", "Conv")
    model = onnx.load(path)
    out = next(node for node in model.graph.node if node.op_type == "QuantizeLinear").output[0]
    model.graph.node.append(helper.make_node("Cast", [out], ["n"], to=TensorProto.INT32))
    shape = ["N", None, None, None]
    model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT32, shape))
    with pytest.raises(BadInput, match="`calib` cannot help") as caught:
        dk.build(save(model, path), "cpu", calib=calib, out=tmp_path / "b.onnx")
    assert "deploykit build FLOAT32.onnx --profile cpu --precision int8" in str(caught.value.hint)
