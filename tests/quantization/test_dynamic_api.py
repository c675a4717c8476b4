"""`--to int8-dynamic` through the verbs: no data, one runtime, read back from the built file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import deploykit as dk
from deploykit.core.errors import BadInput
from tests.support.exact_sums import needs_exact_sums
from tests.support.graphs.data import feeds
from tests.support.onnx_zoo import conv_relu, make, mnist_like, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    shapes = {"w0": (32, 64), "b0": (64,), "w1": (64, 8)}
    weights = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["m0"], "first"),
        helper.make_node("Add", ["m0", "b0"], ["a0"], "bias"),
        helper.make_node("Tanh", ["a0"], ["g"], "tanh"),
        helper.make_node("MatMul", ["g", "w1"], ["y"], "second"),
    ]
    graph = make(nodes, {"x": ("N", 4, 32)}, {"y": ("N", 4, 8)}, weights)
    return save(graph, tmp_path / "model.onnx")


@needs_exact_sums
def test_quantize_needs_no_data_and_keeps_the_evidence(model: Path, tmp_path: Path) -> None:
    made = dk.quantize(model, "int8-dynamic", tmp_path / "q.onnx")
    assert made.manifest.precision["int8"] == 2
    evidence = made.manifest.evidence
    assert evidence.accuracy is not None
    assert evidence.accuracy.passed
    assert evidence.accuracy.sqnr_db > 30
    assert evidence.quantize is not None
    assert (evidence.quantize.to, evidence.quantize.runtime) == (
        "int8-dynamic",
        "onnxruntime",
    )


@needs_exact_sums
def test_build_reads_the_kernels_back(model: Path, tmp_path: Path) -> None:
    made = dk.build(model, "cpu", precision="int8-dynamic", out=tmp_path / "built.onnx")
    assert made.manifest.precision["int8"] == 2
    kinds = [node.op_type for node in onnx.load(tmp_path / "built.onnx").graph.node]
    assert kinds.count("DynamicQuantizeMatMul") == 2
    again = dk.build(
        dk.quantize(model, "int8-dynamic", tmp_path / "q.onnx").path, "cpu", out=tmp_path / "b.onnx"
    )
    assert again.manifest.precision["int8"] == 2


@needs_exact_sums
def test_a_gate_that_it_fails_keeps_it_as_rejected(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((9, 4, 32), np.float32))
    with pytest.raises(dk.GateFailed):
        dk.quantize(
            model, "int8-dynamic", tmp_path / "q.onnx", data=tmp_path / "x.npz", max_drop=1e-9
        )
    assert (tmp_path / "q.rejected.onnx").is_file()


def test_other_runtimes_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="int8-dynamic runs only on onnxruntime, not on tensorrt"):
        dk.quantize(model, "int8-dynamic", tmp_path / "q.onnx", runtime="tensorrt")
    with pytest.raises(BadInput, match="not on tensorrt"):
        dk.quantize(model, "int8-dynamic", tmp_path / "q.onnx", profile="l4")


def test_a_model_of_convolutions_is_pointed_to_int8(tmp_path: Path) -> None:
    source = save(conv_relu(), tmp_path / "c.onnx")
    with pytest.raises(BadInput, match="no Gemm, MatMul or LSTM"):
        dk.quantize(source, "int8-dynamic", tmp_path / "q.onnx")


def test_auto_tries_it_on_a_cpu(tmp_path: Path) -> None:
    source = save(mnist_like(), tmp_path / "c.onnx")
    np.savez(tmp_path / "calib.npz", **feeds(mnist_like(), 16))
    options = {"calib": tmp_path / "calib.npz", "runtime": "onnxruntime", "max_drop": 1e-9}
    with pytest.raises(dk.GateFailed) as caught:
        dk.quantize(source, "auto", tmp_path / "q.onnx", **options)
    search = caught.value.result.search
    assert search is not None
    assert {"int8", "int8-dynamic"} <= {step.precision for step in search.steps}
