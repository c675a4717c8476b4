"""Files of old opsets: converted by onnx, compared with the model, and reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import deploykit as dk
from tests.support.graphs.small import write_text

RNG = np.random.default_rng(0)
CONV = "c = Conv(x, K) "
PRODUCT = "f = Flatten(x) m = MatMul(f, L) "
NORM = CONV + "b = BatchNormalization(c, S, B, B, S) y = Relu(b)"
BOUNDS = CONV + "y = Clip<min = 0.0, max = 6.0>(c)"
MAXIMUM = PRODUCT + "y = ReduceMax<axes = [1]>(m)"
# name -> opset, precision, body from x [N,3,8,8] to y, the axes of y, and the new opset
MODELS = {
    "product": (9, "bf16", "f = Flatten(x) y = MatMul(f, L)", "N,512", 13),
    "batch norm": (9, "int8", NORM, "N,4,6,6", 13),
    "bounds": (9, "int8", BOUNDS, "N,4,6,6", 13),
    "axes": (11, "int8", CONV + "g = GlobalMaxPool(c) y = Squeeze<axes = [2, 3]>(g)", "N,4", 13),
    "softmax": (11, "int8", CONV + "y = Softmax<axis = 1>(c)", "N,4,6,6", 13),
    "upsample": (9, "int8", CONV + 'y = Upsample<mode = "nearest">(c, U)', "N,4,12,12", 13),
    "maximum": (15, "fp8", MAXIMUM, "N,1", 19),
    "pairs": (15, "int8 fp16", CONV + "y = ReduceMean<axes = [2]>(c)", "N,4,1,6", 19),
    "parts": (17, "int4-weight-only", PRODUCT + "y, z = Split<axis = 1>(m)", "N,256", 21),
}


def write(folder: Path, body: str, shape: str, opset: int) -> Path:
    np.savez(folder / "d.npz", x=RNG.standard_normal((32, 3, 8, 8)).astype(np.float32))
    constants = {
        "K": RNG.standard_normal((4, 3, 3, 3)),
        "L": RNG.standard_normal((192, 512)),
        "S": np.ones(4),
        "B": np.zeros(4),
        "U": np.array([1.0, 1.0, 2.0, 2.0]),
    }
    head = f"(float[N,3,8,8] x) => (float[{shape}] y)"
    return write_text(folder, head, body, constants, opset)


@pytest.mark.parametrize("case", MODELS)
def test_an_old_opset_is_converted_proven_and_reported(case: str, tmp_path: Path) -> None:
    opset, to, body, shape, least = MODELS[case]
    path, data = write(tmp_path, body, shape, opset), tmp_path / "d.npz"
    to, _, rest = to.partition(" ")
    made = dk.quantize(path, to, calib=data, other_nodes=rest or "fp32")
    assert made.evaluation.passed
    assert dk.inspect(made.path).details["opset"]["ai.onnx"] >= least
    assert any(f"opset {opset}, converted to {least}: " in note for note in made.notes)
    if to != "bf16":  # ONNX Runtime's CPU does not run it
        assert dk.compare(path, made.path, data=data, max_error=0.3).parity.passed


def test_constants_that_are_listed_as_inputs_are_constants(tmp_path: Path) -> None:
    """Files of before IR version 4 list them so."""
    path = write(tmp_path, NORM, "N,4,6,6", 9)
    model = onnx.load(path)
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, 1, tensor.dims))
    onnx.save(model, path)
    made = dk.quantize(path, "int8", calib=tmp_path / "d.npz")
    assert made.manifest.precision["int8"] == 1
    assert [spec.name for spec in made.manifest.inputs] == ["x"]


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (False, r"opset 9, converted to 13, does not compute the same: against m.onnx"),
        (True, r"opset 9 cannot be converted to 13, which this precision needs: no adapter"),
    ],
)
def test_a_conversion_that_fails_or_changes_the_model_is_refused(
    raises: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = onnx.version_converter.convert_version

    def convert(model: onnx.ModelProto, least: int) -> onnx.ModelProto:
        if raises:
            raise RuntimeError("no adapter")
        found = real(model, least)
        found.graph.node[-1].op_type = "Max"  # the bounds are values then
        return found

    monkeypatch.setattr(onnx.version_converter, "convert_version", convert)
    path = write(tmp_path, BOUNDS, "N,4,6,6", 9)
    with pytest.raises(dk.BadInput, match=reason) as caught:
        dk.quantize(path, "int8", calib=tmp_path / "d.npz")
    assert caught.value.hint == "export it again with opset 13"


def test_auto_tries_what_needs_a_newer_opset_too(tmp_path: Path) -> None:
    path = write(tmp_path, MAXIMUM, "N,1", 11)
    made = dk.quantize(path, "auto", calib=tmp_path / "d.npz", runtime="onnxruntime")
    assert any("opset 11, converted to 13" in note for note in made.notes)
