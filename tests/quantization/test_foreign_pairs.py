"""A build for a CPU of INT8 graphs that another tool wrote for TensorRT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.errors import BadInput
from tests.support.graphs.data import feeds
from tests.support.graphs.foreign_pairs import written_by_onnxruntime
from tests.support.onnx_zoo import make, mnist_like, save


def layers(*kinds: str) -> onnx.ModelProto:
    """Image x float32[N,4,8,8] -> the nodes named, each a 1x1 Conv, a product or an activation."""
    random, last = np.random.default_rng(0), "x"
    weights, nodes = dict[str, np.ndarray](), []
    for number, kind in enumerate(kinds):
        inputs, out = [last], f"t{number}"
        if kind in ("Conv", "MatMul"):
            shape = (4, 4, 1, 1) if kind == "Conv" else (8, 8)
            weights[f"w{number}"] = random.standard_normal(shape).astype(np.float32) / 2
            inputs.append(f"w{number}")
        nodes.append(helper.make_node(kind, inputs, [out], out))
        last = out
    nodes[-1].output[0] = "y"
    return make(nodes, {"x": ("N", 4, 8, 8)}, {"y": ("N", 4, 8, 8)}, weights)


def foreign(tmp_path: Path, *kinds: str, activation_type: str = "QInt8") -> tuple[Path, Path]:
    """The file and calibration data."""
    model = layers(*kinds)
    there = written_by_onnxruntime(model, tmp_path, activation_type=activation_type)
    path = there.save(tmp_path / "q.onnx").path
    np.savez(tmp_path / "calib.npz", **feeds(model, 32, seed=1))
    return path, tmp_path / "calib.npz"


def kernels(path: Path) -> int:
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    return sum(kind.startswith("QLinearConv") or "MatMul" in kind for kind in kinds)


def test_one_that_runs_in_part_is_placed_for_the_cpu_too(tmp_path: Path) -> None:
    """Its MatMuls have kernels where they are, and more than half run; its Conv has none."""
    path, _ = foreign(tmp_path, "Conv", "Relu", "MatMul", "Tanh", "MatMul", "Tanh", "MatMul")
    made = dk.build(path, "cpu", out=tmp_path / "b.onnx")
    kinds = [node.op_type for node in onnx.load(made.path).graph.node]
    assert "QLinearConv" in kinds, kinds
    assert any("were placed for the CPU" in note for note in made.notes)
    assert not any("data give it" in note for note in made.notes)


def test_one_that_gains_nothing_stays_as_it_is(tmp_path: Path) -> None:
    """Its MatMuls run, and its Conv writes a result: that runs in float wherever the pairs are."""
    path, _ = foreign(tmp_path, "MatMul", "Tanh", "MatMul", "Tanh", "Conv")
    made = dk.build(path, "cpu", out=tmp_path / "b.onnx")
    assert not any("placed" in note or "not checked" in note for note in made.notes), made.notes
    assert made.manifest.evidence.parity is not None


def test_a_range_that_does_not_follow_is_asked_for_and_found_in_data(tmp_path: Path) -> None:
    path, calib = foreign(tmp_path, "Conv", "Relu", "Conv", "Tanh", "Conv", "Sigmoid")
    made = dk.build(path, "cpu", out=tmp_path / "b.onnx")
    (note,) = (note for note in made.notes if "data give it" in note)
    assert f"deploykit build {path} --profile cpu --calib FILE.npz" in note
    assert "2 tensors that INT8 needs" in note
    measured = dk.build(path, "cpu", calib=calib, out=tmp_path / "c.onnx")
    assert kernels(measured.path) > kernels(made.path)
    evidence = measured.manifest.evidence
    assert evidence.calibration is not None
    assert (evidence.calibration.samples, evidence.calibration.method) == (32, "mixed")
    assert any("those of the calibration data" in note for note in evidence.notes)
    assert not any("data give it" in note for note in measured.notes)
    with pytest.raises(BadInput, match="no INT8 pairs to place") as caught:
        dk.build(measured.path, "cpu", calib=calib, out=tmp_path / "d.onnx")
    assert caught.value.hint == "leave it out"


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_a_graph_of_16_bits_is_refused_with_the_command_that_helps(
    tmp_path: Path, domain: str
) -> None:
    path, _ = foreign(tmp_path, "Conv", "Relu", "Conv", activation_type="QUInt16")
    model = onnx.load(path)
    for node in model.graph.node:  # the domain depends on the version of ONNX Runtime's quantizer
        if node.op_type.endswith("quantizeLinear") or node.op_type == "QuantizeLinear":
            node.domain = domain
    del model.opset_import[:]
    model.opset_import.extend(
        helper.make_opsetid(*each) for each in (("", 21), ("com.microsoft", 1))
    )
    onnx.save(model, path)
    assert dk.inspect(path).precision["int16"] == 2
    with pytest.raises(BadInput, match="INT16 nodes in integers: it has no kernels") as caught:
        dk.build(path, "cpu", out=tmp_path / "b.onnx")
    assert "--precision int8 --calib" in str(caught.value.hint)


def test_calibration_data_without_effect_are_refused(tmp_path: Path) -> None:
    source = save(mnist_like(), tmp_path / "m.onnx")
    np.savez(tmp_path / "calib.npz", **feeds(mnist_like(), 16))
    with pytest.raises(BadInput, match=r"m\.onnx: `calib` has no effect") as caught:
        dk.build(source, "cpu", calib=tmp_path / "calib.npz", out=tmp_path / "b.onnx")
    assert caught.value.hint == "`precision` int8 quantizes it"


def test_data_do_not_help_where_pairs_cannot_be_moved(tmp_path: Path) -> None:
    path, calib = foreign(tmp_path, "Conv", "Relu", "Conv")
    model = onnx.load(path)
    out = next(node for node in model.graph.node if node.op_type == "QuantizeLinear").output[0]
    model.graph.node.append(helper.make_node("Cast", [out], ["n"], to=TensorProto.INT32))
    model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT32, None))
    model.graph.output[-1].type.tensor_type.shape.dim.add().dim_param = "N"
    for _ in range(3):
        model.graph.output[-1].type.tensor_type.shape.dim.add()
    with pytest.raises(BadInput, match="`calib` cannot help") as caught:
        dk.build(save(model, path), "cpu", calib=calib, out=tmp_path / "b.onnx")
    assert "deploykit build FLOAT32.onnx --profile cpu --precision int8" in str(caught.value.hint)
