"""Files of old opsets: converted by onnx, compared with the model, and reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import deploykit as dk

RNG = np.random.default_rng(0)
CONV = "c = Conv(x, K) "
# name -> opset, precision, options, body from x [N,3,8,8] to y, the axes of y, and the new opset
MODELS = {
    "product": (9, "bf16", {}, "f = Flatten(x) y = MatMul(f, W)", "N,8", 13),
    "batch norm": (
        *(9, "int8", {}, CONV + "b = BatchNormalization(c, S, B, B, S) y = Relu(b)", "N,4,6,6", 13),
    ),
    "bounds": (9, "int8", {}, CONV + "y = Clip<min = 0.0, max = 6.0>(c)", "N,4,6,6", 13),
    "axes": (
        *(11, "int8", {}, CONV + "g = GlobalMaxPool(c) y = Squeeze<axes = [2, 3]>(g)", "N,4", 13),
    ),
    "softmax": (11, "int8", {}, CONV + "y = Softmax<axis = 1>(c)", "N,4,6,6", 13),
    "upsample": (9, "int8", {}, CONV + 'y = Upsample<mode = "nearest">(c, U)', "N,4,12,12", 13),
    "maximum": (
        *(15, "fp8", {}, "f = Flatten(x) m = MatMul(f, L) y = ReduceMax<axes = [1]>(m)", "N,1", 19),
    ),
    "pairs": (
        *(15, "int8", {"other_nodes": "fp16"}, CONV + "y = ReduceMean<axes = [2]>(c)"),
        *("N,4,1,6", 19),
    ),
    "parts": (
        *(17, "int4-weight-only", {}, "f = Flatten(x) m = MatMul(f, L) y, z = Split<axis = 1>(m)"),
        *("N,256", 21),
    ),
}
CONSTANTS = {
    "K": RNG.standard_normal((4, 3, 3, 3)).astype(np.float32),
    "W": RNG.standard_normal((192, 8)).astype(np.float32),
    "L": RNG.standard_normal((192, 512)).astype(np.float32),
    "S": np.ones(4, np.float32),
    "B": np.zeros(4, np.float32),
    "U": np.array([1, 1, 2, 2], np.float32),
}


def write(folder: Path, body: str, shape: str, opset: int, ir: int = 7) -> Path:
    model = onnx.parser.parse_model(
        f'<ir_version: {ir}, opset_import: ["" : {opset}]> '
        f"g (float[N,3,8,8] x) => (float[{shape}] y) {{ {body} }}"
    )
    read = {name for node in model.graph.node for name in node.input}
    for name, array in CONSTANTS.items():
        if name in read:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
            if ir < 4:
                kind = onnx.helper.make_tensor_value_info(name, 1, array.shape)
                model.graph.input.append(kind)
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "d.npz", x=RNG.standard_normal((32, 3, 8, 8)).astype(np.float32))
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("opset", "to", "options", "body", "shape", "least"), MODELS.values(), ids=MODELS
)
def test_an_old_opset_is_converted_proven_and_reported(
    opset: int, to: str, options: dict[str, str], body: str, shape: str, least: int, tmp_path: Path
) -> None:
    path = write(tmp_path, body, shape, opset)
    made = dk.quantize(path, to, calib=tmp_path / "d.npz", **options)
    assert made.evaluation.passed
    assert dk.inspect(made.path).details["opset"]["ai.onnx"] >= least
    note = f"opset {opset}, converted to {least}: "
    assert any(note in each for each in made.notes)
    if to != "bf16":  # ONNX Runtime's CPU does not run it
        assert dk.compare(path, made.path, data=tmp_path / "d.npz", max_error=0.3).parity.passed


def test_constants_that_are_listed_as_inputs_are_constants(tmp_path: Path) -> None:
    """Files of before IR version 4 list them so."""
    path = write(tmp_path, *MODELS["batch norm"][3:5], 9, ir=3)
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
    path = write(tmp_path, *MODELS["bounds"][3:5], 9)
    with pytest.raises(dk.BadInput, match=reason) as caught:
        dk.quantize(path, "int8", calib=tmp_path / "d.npz")
    assert caught.value.hint == "export it again with opset 13"


def test_auto_tries_what_needs_a_newer_opset_too(tmp_path: Path) -> None:
    path = write(tmp_path, *MODELS["maximum"][3:5], 11)
    made = dk.quantize(path, "auto", calib=tmp_path / "d.npz", runtime="onnxruntime")
    assert any("opset 11, converted to 13" in note for note in made.notes)
