"""Graphs with FP8 pairs: how close they come, their scales and what stays as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

from deploykit.engines.onnxruntime.engine import session_options
from deploykit.quantization.calibrate import Range
from tests.support.graphs.data import calibration, feeds, samples, sqnr_db
from tests.support.graphs.protos import calibrate, summarise, to_pairs
from tests.support.graphs.qdq_graphs import ZOO, Make, pairs, run, stored
from tests.support.onnx_zoo import linear, mnist_like, save

# 3 bits of mantissa: an error of at most 2^-4 of a value, uniform: 10 log10(3 * 2**8 / 2) = 26 dB
# on average for input and for weight; three layers, their noise added: 20 dB.
LEAST_FP8_SQNR_DB = 20.0


@pytest.mark.parametrize("graph", ZOO)
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
    seen = calibration(dict.fromkeys(("image", "p1", "flat"), Range(-4.0, 4.0)))
    fp8 = to_pairs(mnist_like(), seen, "fp8")
    tensors = {t.name: t for t in fp8.graph.initializer}
    for name, weight in stored(mnist_like()).items():
        if not name.startswith("w"):
            continue
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
    seen = calibration(dict.fromkeys(("image", "p1", "flat"), Range(-4.0, 4.0)))
    assert (
        summarise(to_pairs(mnist_like(), seen, "fp8", keep_float32=("head",))).precision["float8"]
        == 2
    )
