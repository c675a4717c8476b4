"""Data for models whose batch is not axis 0 of each input: states, scalars, a shared bias."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import deploykit as dk

RNG = np.random.default_rng(0)
COUNT = 16
DATA = {
    "x": RNG.standard_normal((COUNT, 5, 4)).astype(np.float32),
    "h": RNG.standard_normal((2, COUNT, 4)).astype(np.float32),
    "rate": np.array(2, np.float32),
    "bias": RNG.standard_normal(4).astype(np.float32),
}
# the batch's names in x and h
NAMES = {
    "N": ("N", "N"),
    "batch": ("batch", "batch"),
    "two names": ("A", "B"),
    "no names": ("?", "?"),
    "fixed": ("1", "1"),
}


@pytest.fixture(params=NAMES.values(), ids=NAMES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A state [2,N,4] goes in and comes out, a scalar and a bias are the same for all samples."""
    first, second = request.param
    unnamed = first == "?"
    first, second = ("A", "B") if unnamed else (first, second)
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2,{second},4] h, float[{first},5,4] x, float rate, float[4] bias)
        => (float[{first},5,4] y, float[2,{second},4] after) {{
            q = MatMul(x, W) r = Add(q, bias) s = Mul(r, rate) y = Relu(s) after = Mul(h, rate)
        }}""")
    if unnamed:
        for value in (*proto.graph.input, *proto.graph.output):
            for axis in value.type.tensor_type.shape.dim:
                if axis.dim_param:
                    axis.dim_param = "?"
        proto.graph.output[1].type.tensor_type.shape.dim[0].dim_param = "?"  # and not 2
    weights = RNG.standard_normal((4, 4)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "W"))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **DATA)
    return tmp_path / "m.onnx"


def answers(model: Path) -> dict[str, np.ndarray]:
    """What ONNX Runtime gives for each sample alone."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    parts = [
        session.run(None, {**DATA, "x": DATA["x"][n : n + 1], "h": DATA["h"][:, n : n + 1]})
        for n in range(COUNT)
    ]
    y, after = zip(*parts, strict=True)
    return {"y": np.concatenate(y), "after": np.concatenate(after, 1)}


def test_samples_are_read_along_the_batch_and_answers_joined_along_it(
    model: Path, tmp_path: Path
) -> None:
    data, want = tmp_path / "d.npz", answers(model)
    assert dk.predict(model, data, tmp_path / "p.npz", batch=7).samples == COUNT
    got = np.load(tmp_path / "p.npz")
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5)


def test_a_folder_of_such_files_is_joined(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for n in range(0, COUNT, 4):
        parts = {"x": DATA["x"][n : n + 4], "h": DATA["h"][:, n : n + 4]}
        np.savez(folder / f"{n:02}.npz", **{**DATA, **parts})
    dk.predict(model, folder, tmp_path / "p.npz")
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["after"], answers(model)["after"])


def test_they_calibrate_evaluate_compare_and_replay(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.npz"
    made = dk.quantize(model, "int8", calib=data)
    assert made.evidence.calibration.samples == COUNT
    assert made.evaluation.samples == COUNT
    assert dk.compare(model, made.path, data=data, max_error=0.1).parity.passed
    assert dk.compare(made.path).parity.passed
    for given in ({}, {"data": data}, {"precision": "int8", "calib": data}):
        assert dk.build(model, "cpu", out=tmp_path / "b.onnx", **given).parity.passed


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"h": DATA["h"][:, :15]}, r"its arrays have \[15, 16\] samples"),
        ({"rate": np.ones(COUNT, np.float32)}, r"input 'rate' is float32\[\], got float32\[16\]"),
        ({"bias": np.ones(3, np.float32)}, r"input 'bias' is float32\[4\], got float32\[3\]"),
    ],
)
@pytest.mark.parametrize("model", [("N", "N")], indirect=True)
def test_arrays_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, wrong: dict[str, np.ndarray], reason: str
) -> None:
    np.savez(tmp_path / "d.npz", **{**DATA, **wrong})
    with pytest.raises(dk.BadInput, match=reason):
        dk.predict(model, tmp_path / "d.npz", tmp_path / "p.npz")


@pytest.mark.parametrize("name", ["?", "-1", "None", "unknown", ""])
def test_axes_of_no_known_size_have_a_size_each(name: str, tmp_path: Path) -> None:
    """PaddlePaddle calls each of them "?"; height and width are not one axis for that."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,3,H,W] x) => (float[N,4] y) {
            c = Conv(x, K) p = GlobalAveragePool(c) y = Flatten(p) }""")
    kernel = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(kernel, "K"))
    for place in (0, 2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[place].dim_param = name
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=RNG.standard_normal((COUNT, 3, 12, 40)).astype(np.float32))
    assert dk.inspect(tmp_path / "m.onnx").inputs[0].shape == ("N", 3, "x_2", "x_3")
    assert dk.quantize(tmp_path / "m.onnx", "int8", calib=tmp_path / "d.npz").evaluation.passed
    with dk.load(tmp_path / "m.onnx", "cpu") as engine:
        assert engine({"x": np.zeros((1, 3, 12, 40), np.float32)})["y"].shape == (1, 4)
