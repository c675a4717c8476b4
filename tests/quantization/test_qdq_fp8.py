"""Graphs with FP8 pairs: how close they come, their scales and what stays as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.engines.onnxruntime.engine import session_options
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import Range
from deploykit.quantization.qdq import without_kernel
from tests.support.graphs.data import calibration, feeds, samples, sqnr_db
from tests.support.graphs.protos import calibrate, summarise, to_pairs
from tests.support.graphs.qdq_graphs import ZOO, Make, pairs, run, stored
from tests.support.onnx_zoo import conv_relu, linear, make, save

# 3 bits of mantissa: an error of at most 2^-4 of a value, uniform: 10 log10(3 * 2**8 / 2) = 26 dB
# on average for input and for weight; three layers, their noise added: 20 dB.
LEAST_FP8_SQNR_DB = 20.0


def convolution(
    shape: tuple[int, ...] = (32, 16, 3, 3), group: int = 1, then: str = "Relu"
) -> onnx.ModelProto:
    """Image x -> Conv of these weights -> Relu -> Gemm head, for `(N, channels, 12, 12)`."""
    random = np.random.default_rng(0)
    weights = {"w1": random.standard_normal(shape).astype(np.float32) / 12}
    weights["w2"] = random.standard_normal((shape[0], 10)).astype(np.float32) / 6
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["c"], "conv", group=group),
        helper.make_node(then, ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "w2"], ["logits"], "head"),
    ]
    image = ("N", shape[1] * group, 12, 12)
    return make(nodes, {"image": image}, {"logits": ("N", 10)}, weights)


SEEN = calibration(dict.fromkeys(("image", "flat"), Range(-4.0, 4.0)))


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
    fp8 = to_pairs(convolution(shape, group), SEEN, "fp8")
    assert summarise(fp8).precision.get("float8") == quantized
    note = without_kernel(Graph(convolution(shape, group)), "tensorrt", "fp8")
    assert note.startswith("1 convolution(s) stay as they are: TensorRT has no FP8 kernel") == (
        quantized == 1
    )
    assert not without_kernel(Graph(convolution(shape, group)), "tensorrt", "int8")


@pytest.mark.parametrize("graph", [*(each for each in ZOO if each is not conv_relu), convolution])
def test_fp8_outputs_are_close_on_data_not_calibrated_on(graph: Make, tmp_path: Path) -> None:
    found = calibrate(save(graph(), tmp_path / "m.onnx"), samples(graph(), 64))
    fp8 = to_pairs(graph(), found, "fp8")
    onnx.checker.check_model(fp8, full_check=True)
    assert summarise(fp8).opset == {"ai.onnx": 19}
    inputs = feeds(graph(), 32, seed=1)
    wanted = run(graph(), inputs, tmp_path / "a.onnx")
    options = session_options(1)  # optimised, ONNX Runtime 1.31 takes FP8 for INT8 and refuses it
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        fp8.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    assert sqnr_db(wanted, session.run(None, inputs)[0]) > LEAST_FP8_SQNR_DB


def test_fp8_stores_what_numpy_rounds_to_e4m3() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fp8 = to_pairs(convolution(), SEEN, "fp8")
    tensors = {t.name: t for t in fp8.graph.initializer}
    for name, weight in stored(convolution()).items():
        kept, scale = tensors[f"{name}_float8"], stored_scale(fp8, f"{name}_scale")
        assert kept.data_type == TensorProto.FLOAT8E4M3FN
        assert scale == np.float32(np.abs(weight).max() / np.float32(448))
        wanted = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
        assert kept.raw_data == wanted.tobytes()


def stored_scale(model: onnx.ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def test_fp8_has_one_scale_per_tensor_and_a_float_bias(tmp_path: Path) -> None:
    fp8 = to_pairs(linear(), calibration({"x": Range(-4.48, 4.0)}), "fp8")
    gemm = pairs(fp8, "Gemm")[0]
    assert gemm.input[2] == "b"
    assert not any(a.name == "axis" for n in pairs(fp8, "DequantizeLinear") for a in n.attribute)
    assert stored_scale(fp8, "x_scale") == pytest.approx(4.48 / 448)
    assert summarise(fp8).precision == {"float8": 1}


def test_fp8_leaves_skipped_nodes_alone() -> None:
    kept = to_pairs(convolution(), SEEN, "fp8", keep_float32=("head",))
    assert summarise(kept).precision["float8"] == 1
