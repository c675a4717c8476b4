"""INT8 pairs: where they stand for TensorRT, their scales, and what is left as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.core.precision import CALIBRATED
from deploykit.core.runtime import TARGET_RUNTIMES
from deploykit.engines.onnxruntime.engine import session_options
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import Calibration, Range
from deploykit.quantization.qdq import without_kernel
from deploykit.quantization.qdq_placement import _COMPUTES, MOVES, box_nodes
from tests.support.builders.nvidia_cases import ask, checked, needs
from tests.support.graphs.data import calibration, feeds, samples, sqnr_db
from tests.support.graphs.protos import (
    calibrate,
    element_types,
    quantizable,
    specs,
    summarise,
    to_half,
    to_pairs,
)
from tests.support.graphs.qdq_graphs import (
    ZOO,
    Make,
    optimised,
    pairs,
    quality_db,
    quantized,
    run,
    stored,
    with_weight,
    writer_of,
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


def test_conv_weights_have_a_scale_per_channel_and_its_bias_stays(tmp_path: Path) -> None:
    model, _ = quantized(conv_relu(), tmp_path)
    order = [node.op_type for node in model.graph.node]
    assert order == ["QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "Conv", "Relu"]
    conv, relu = model.graph.node[-2:]
    assert relu.input[0] == conv.output[0]
    values, before = stored(model), stored(conv_relu())
    np.testing.assert_array_equal(values[conv.input[2]], before["b"])
    dequantize = writer_of(model, conv.input[1])
    assert [(each.name, each.i) for each in dequantize.attribute] == [("axis", 0)]
    steps = np.abs(before["W"]).max(axis=(1, 2, 3)) / np.float32(127)
    np.testing.assert_array_equal(values[dequantize.input[1]], steps)
    levels = np.rint(before["W"] / steps.reshape(-1, 1, 1, 1)).astype(np.int8)
    np.testing.assert_array_equal(values[dequantize.input[0]], levels)


@pytest.mark.parametrize(("transposed", "axis"), [(0, 1), (1, 0)])
def test_gemm_weights_have_a_scale_per_output(transposed: int, axis: int, tmp_path: Path) -> None:
    weight = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    head = "(float[N,4] x) => (float[N,3] y)"
    body = f"y = Gemm<transB = {transposed}>(x, W)"
    model = parse(head, body, W=weight.T.copy() if transposed else weight)
    int8, _ = quantized(model, tmp_path)
    dequantize = writer_of(int8, pairs(int8, "Gemm")[0].input[1])
    assert dequantize.attribute[0].i == axis
    np.testing.assert_array_equal(
        stored(int8)[dequantize.input[1]], np.array([10, 11, 12], np.float32) / np.float32(127)
    )


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


def test_other_readers_of_a_quantized_input_stay_exact_for_tensorrt(tmp_path: Path) -> None:
    int8, _ = quantized(parse(ROWS, "m = MatMul(x, W) y = Add(m, x)", W=EYE), tmp_path)
    assert list(int8.graph.node[-1].input) == ["m", "x"]


def test_an_input_read_twice_is_quantized_once(tmp_path: Path) -> None:
    int8, _ = quantized(
        parse(ROWS, "a = MatMul(x, W) b = MatMul(x, W) y = Sum(a, b)", W=EYE), tmp_path
    )
    kinds = {"DequantizeLinear": 2, "MatMul": 2, "QuantizeLinear": 1, "Sum": 1}
    assert summarise(int8).operators == kinds


def test_a_product_of_two_activations_stays_float(tmp_path: Path) -> None:
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
    def int8_names(model: onnx.ModelProto) -> set[str]:
        """Nodes whose first two inputs are both dequantized."""
        made = {name for node in pairs(model, "DequantizeLinear") for name in node.output}
        nodes = [node for node in model.graph.node if len(node.input) > 1]
        return {node.name for node in nodes if made.issuperset(node.input[:2])}

    found = calibrate(save(mnist_like(), tmp_path / "m.onnx"), samples(mnist_like()))
    whole = to_pairs(mnist_like(), found, runtime=runtime)
    assert int8_names(whole) == set(quantizable(mnist_like())) == {"conv1", "conv2", "head"}
    int8 = to_pairs(mnist_like(), found, runtime=runtime, keep_float32=("conv2", "relu2"))
    conv = next(node for node in int8.graph.node if node.name == "conv2")
    assert list(conv.input) == ["p1", "w2", "b2"]
    assert int8_names(int8) == {"conv1", "head"}


# Transposed convolutions and residual sums, where TensorRT has INT8 kernels for them


def up(group: int = 1, *, norm: bool = False) -> onnx.ModelProto:
    """ConvTranspose from 8 to 8 channels, twice the size; with batch normalization where asked."""
    random = np.random.default_rng(0)
    last = "n = BatchNormalization(c, v, v, b, v) y = Relu(n)" if norm else "y = Relu(c)"
    return parse(
        "(float[N,8,8,8] x) => (float[N,8,16,16] y)",
        f"c = ConvTranspose<strides = [2, 2], group = {group}>(x, W, b) {last}",
        W=random.standard_normal((8, 8 // group, 2, 2)),
        b=random.standard_normal(8),
        v=random.uniform(0.5, 2, 8),
    )


def test_a_transposed_convolution_has_a_scale_per_output_channel(tmp_path: Path) -> None:
    model, _ = quantized(up(), tmp_path)
    dequantize = writer_of(model, pairs(model, "ConvTranspose")[0].input[1])
    assert [(each.name, each.i) for each in dequantize.attribute] == [("axis", 1)]
    peak = np.abs(stored(up())["W"]).max(axis=(0, 2, 3))
    np.testing.assert_array_equal(stored(model)[dequantize.input[1]], peak / np.float32(127))
    assert summarise(model).precision["int8"] == 1
    assert quantizable(up()) == ("c",)


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
    """Down and up once, and the skipped tensor joined to the result."""
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


def sums(
    *, projected: bool = False, order: str = "c2, {}", end: str = "y = Relu(add)"
) -> onnx.ModelProto:
    """Two blocks as in ResNet: the skipped tensor as it is, or through a convolution."""
    random = np.random.default_rng(0)
    same = "<pads = [1, 1, 1, 1]>"
    short = f"s = Conv{same}(r0, w3)" if projected else ""
    return parse(
        "(float[N,16,8,8] x) => (float[N,16,H,W] y)",
        f"""c0 = Conv{same}(x, w0) r0 = Relu(c0) c1 = Conv{same}(r0, w1) r1 = Relu(c1)
            c2 = Conv{same}(r1, w2) {short}
            add = Add({order.format("s" if projected else "r0")}) {end}""",
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


CASES = {
    "up": up(),
    "grouped": up(2),
    "depthwise": up(8),
    "norm": up(norm=True),
    "unet": unet(),
    "sum": sums(),
    "projected": sums(projected=True),
}


@ask
@needs
@pytest.mark.parametrize("source", CASES.values(), ids=CASES)
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


def test_onnxruntime_computes_a_residual_block_in_integers_throughout(tmp_path: Path) -> None:
    source = sums(end="r = Relu(add) y = GlobalAveragePool(r)")
    done = optimised(quantized(source, tmp_path, "onnxruntime")[0], tmp_path)
    assert (done.count("QLinearConv"), done.count("QLinearAdd")) == (3, 1)
    assert not {"Conv", "Add", "Relu"} & set(done)
    assert done.count("QuantizeLinear") == 1  # of the input


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        # as in a transformer: one kernel, where a scale on the result takes three
        ("N,4,8", ["QuantizeLinear", "MatMulIntegerToFloat", "Add", "Tanh"]),
        # ONNX Runtime makes a Gemm in float of MatMul and Add unless a pair is in between
        ("N,8", ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear", "Add", "Tanh"]),
    ],
)
def test_a_matmul_is_of_integers_whatever_reads_it(
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
