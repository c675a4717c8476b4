from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.core.precision import CALIBRATED
from deploykit.core.runtime import TARGET_RUNTIMES
from deploykit.engines.data.samples import Samples
from deploykit.quantization.calibrate import Calibration, Range
from tests.support.graphs.data import calibration, feeds, samples, sqnr_db
from tests.support.graphs.protos import calibrate, quantizable, specs, summarise, to_pairs
from tests.support.graphs.qdq_graphs import (
    ZOO,
    Make,
    dequantize_of,
    pairs,
    quantized,
    run,
    stored,
)
from tests.support.onnx_zoo import conv_relu, linear, make, mnist_like, save, two_inputs

# A normal signal with its peak at 4 sigma in steps of peak/127: 10 log10(12 * 127**2 / 16) = 41 dB.
# Input and weight each: 38 dB for a layer; three layers, their noise added: 33 dB.
LEAST_SQNR_DB = 32.0


@pytest.mark.parametrize("runtime", TARGET_RUNTIMES)
@pytest.mark.parametrize("graph", ZOO)
def test_int8_outputs_are_close_on_data_not_calibrated_on(
    graph: Make, runtime: str, tmp_path: Path
) -> None:
    source = graph()
    model, _ = quantized(source, tmp_path, runtime)
    onnx.checker.check_model(model, full_check=True)
    assert source == graph()
    assert specs(model) == specs(source)
    names = [node.name for node in model.graph.node]
    assert len({node.name for node in source.graph.node} | set(names)) == len(names)
    again, _ = quantized(source, tmp_path, runtime)
    assert again.SerializeToString() == model.SerializeToString()
    inputs = feeds(graph(), 32, seed=1)
    wanted = run(graph(), inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, run(model, inputs, tmp_path / "b.onnx")) > LEAST_SQNR_DB


@pytest.mark.parametrize("graph", ZOO)
def test_zero_points_are_all_zero_and_int8(graph: Make, tmp_path: Path) -> None:
    model, _ = quantized(graph(), tmp_path)
    values = stored(model)
    for node in pairs(model, "QuantizeLinear") + pairs(model, "DequantizeLinear"):
        zero = values[node.input[2]]
        assert zero.dtype == np.int8
        assert not zero.any()


def test_no_pair_is_placed_between_conv_and_relu(tmp_path: Path) -> None:
    model, _ = quantized(conv_relu(), tmp_path)
    order = [node.op_type for node in model.graph.node]
    assert order == ["QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "Conv", "Relu"]
    conv, relu = model.graph.node[-2:]
    assert relu.input[0] == conv.output[0]


def test_the_bias_stays_float(tmp_path: Path) -> None:
    model, _ = quantized(conv_relu(), tmp_path)
    conv = model.graph.node[-2]
    np.testing.assert_array_equal(stored(model)[conv.input[2]], stored(conv_relu())["b"])


def test_conv_weights_have_a_scale_per_output_channel(tmp_path: Path) -> None:
    model, _ = quantized(conv_relu(), tmp_path)
    dequantize = dequantize_of(model, pairs(model, "Conv")[0].input[1])
    assert dequantize.attribute[0].name == "axis"
    assert dequantize.attribute[0].i == 0
    weight = stored(conv_relu())["W"]
    peak = np.abs(weight).max(axis=(1, 2, 3))
    np.testing.assert_array_equal(stored(model)[dequantize.input[1]], peak / np.float32(127))
    whole = np.rint(weight / (peak / np.float32(127)).reshape(-1, 1, 1, 1))
    np.testing.assert_array_equal(stored(model)[dequantize.input[0]], whole.astype(np.int8))


@pytest.mark.parametrize(("transposed", "axis"), [(0, 1), (1, 0)])
def test_gemm_weights_have_a_scale_per_output(transposed: int, axis: int, tmp_path: Path) -> None:
    weight = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    model = make(
        [helper.make_node("Gemm", ["x", "W"], ["y"], name="gemm", transB=transposed)],
        {"x": ("N", 4)},
        {"y": ("N", 3)},
        {"W": weight.T.copy() if transposed else weight},
    )
    int8, _ = quantized(model, tmp_path)
    dequantize = dequantize_of(int8, pairs(int8, "Gemm")[0].input[1])
    assert dequantize.attribute[0].i == axis
    np.testing.assert_array_equal(
        stored(int8)[dequantize.input[1]], np.array([10, 11, 12], np.float32) / np.float32(127)
    )


def test_activation_scales_are_the_calibrated_peak(tmp_path: Path) -> None:
    model, found = quantized(mnist_like(), tmp_path)
    seen = {}
    for node in pairs(model, "QuantizeLinear"):
        seen[node.input[0]] = float(stored(model)[node.input[1]])
    assert list(seen) == ["image", "p1", "flat"]
    for name, scale in seen.items():
        assert scale == pytest.approx(found.ranges[name].peak / 127, rel=1e-6)


def test_float_weights_are_not_kept_next_to_the_quantized_ones(tmp_path: Path) -> None:
    model, _ = quantized(mnist_like(), tmp_path)
    kept = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    assert not kept.intersection(("w1", "w2", "w3"))
    assert kept.issuperset(("b1", "b2", "b3"))


def test_other_readers_of_a_quantized_input_stay_exact_for_tensorrt(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["m"], name="matmul"),
        helper.make_node("Add", ["m", "x"], ["y"], name="residual"),
    ]
    weights = {"W": np.eye(4, dtype=np.float32)}
    model = make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, weights)
    int8, _ = quantized(model, tmp_path)
    assert list(int8.graph.node[-1].input) == ["m", "x"]


def test_an_input_read_twice_is_quantized_once(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "W"], [f"y{i}"], name=f"m{i}") for i in range(2)]
    outputs = {f"y{i}": ("N", 4) for i in range(2)}
    model = make(nodes, {"x": ("N", 4)}, outputs, {"W": np.eye(4, dtype=np.float32)})
    int8, _ = quantized(model, tmp_path)
    assert summarise(int8).operators == {
        "DequantizeLinear": 2,
        "MatMul": 2,
        "QuantizeLinear": 1,
    }


def test_a_product_of_two_activations_stays_float(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["a", "W"], ["p"], name="weights"),
        helper.make_node("MatMul", ["p", "b"], ["y"], name="activations"),
    ]
    weights = {"W": np.eye(4, dtype=np.float32)}
    model = make(nodes, {"a": ("N", 4, 4), "b": ("N", 4, 4)}, {"y": ("N", 4, 4)}, weights)
    assert summarise(quantized(model, tmp_path)[0]).precision == {"float32": 1, "int8": 1}


def test_a_channel_of_zeros_and_a_constant_input_are_quantized(tmp_path: Path) -> None:
    weight = np.array([[1, 0], [2, 0]], np.float32)
    nodes = [
        helper.make_node("Mul", ["x", "zero"], ["dead"], name="mul"),
        helper.make_node("MatMul", ["dead", "W"], ["y"], name="matmul"),
    ]
    weights = {"W": weight, "zero": np.zeros(1, np.float32)}
    model = make(nodes, {"x": ("N", 2)}, {"y": ("N", 2)}, weights)
    for runtime in TARGET_RUNTIMES:
        int8, _ = quantized(model, tmp_path, runtime)
        got = run(int8, {"x": np.ones((3, 2), np.float32)}, tmp_path / "q.onnx")
        np.testing.assert_array_equal(got, np.zeros((3, 2), np.float32))


def test_a_batch_norm_is_folded_and_its_range_found(tmp_path: Path) -> None:
    model = conv_norm_relu()
    int8, _ = quantized(model, tmp_path)
    assert "BatchNormalization" not in summarise(int8).operators
    inputs = feeds(model, 32, seed=1)
    wanted = run(model, inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, run(int8, inputs, tmp_path / "b.onnx")) > LEAST_SQNR_DB


def conv_norm_relu() -> onnx.ModelProto:
    weights = {
        **stored(conv_relu()),
        "scale": np.array([1, 2, 0.5, 1], np.float32),
        "shift": np.array([0, 1, -1, 0.5], np.float32),
        "mean": np.array([0.1, 0, -0.1, 0.2], np.float32),
        "variance": np.array([1, 0.5, 2, 1], np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "W", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node(
            "BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"], name="norm"
        ),
        helper.make_node("Relu", ["n"], ["y"], name="relu"),
    ]
    return make(nodes, {"x": ("N", 1, 8, 8)}, {"y": ("N", 4, 8, 8)}, weights)


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


def test_a_node_whose_input_was_infinite_stays_float(tmp_path: Path) -> None:
    data = Samples(feeds(mnist_like()), None, "data.npz")
    ranges = dict(calibrate(save(mnist_like(), tmp_path / "m.onnx"), data).ranges)
    ranges["p1"] = Range(-np.inf, 1.0)
    int8 = to_pairs(mnist_like(), calibration(ranges))
    assert summarise(int8).precision == {"float32": 5, "int8": 2}


def int8_names(model: onnx.ModelProto) -> set[str]:
    """Nodes whose first two inputs are both dequantized."""
    made = {name for node in pairs(model, "DequantizeLinear") for name in node.output}
    return {n.name for n in model.graph.node if len(n.input) > 1 and made.issuperset(n.input[:2])}


def test_quantizable_names_what_to_pairs_quantizes(tmp_path: Path) -> None:
    int8, _ = quantized(mnist_like(), tmp_path)
    assert quantizable(mnist_like()) == ("conv1", "conv2", "head")
    assert int8_names(int8) == {"conv1", "conv2", "head"}


@pytest.mark.parametrize("runtime", TARGET_RUNTIMES)
def test_skipped_nodes_read_what_they_read_before(runtime: str, tmp_path: Path) -> None:
    found = calibrate(save(mnist_like(), tmp_path / "m.onnx"), samples(mnist_like()))
    int8 = to_pairs(mnist_like(), found, runtime=runtime, keep_float32=("conv2", "relu2"))
    conv = next(node for node in int8.graph.node if node.name == "conv2")
    assert list(conv.input) == ["p1", "w2", "b2"]
    assert int8_names(int8) == {"conv1", "head"}


def test_scales_come_from_the_clipped_range() -> None:
    found = Calibration({"x": Range(-50.0, 50.0)}, {"x": Range(-2.0, 1.27)}, 16, "percentile")
    int8 = to_pairs(linear(), found)
    scale = stored(int8)[pairs(int8, "QuantizeLinear")[0].input[1]]
    assert float(scale) == pytest.approx(2.0 / 127, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    model = linear()
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[1, 2] = value
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "W"))
    for to in CALIBRATED:
        with pytest.raises(BadInput, match="weight 'W' holds NaN or infinity"):
            to_pairs(model, calibration({"x": Range(-1.0, 1.0)}), to)
