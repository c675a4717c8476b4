"""Data for models whose batch is not axis 0 of each input: states, scalars, a shared bias."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import deploykit as dk
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import save

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


def rename(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    """ONNX's text syntax takes no "?" for an axis."""
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in names:
                axis.dim_param = names[axis.dim_param]
    return model


@pytest.fixture(params=NAMES.values(), ids=NAMES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A state [2,N,4] goes in and comes out, a scalar and a bias are the same for all samples."""
    first, second = request.param
    unnamed = first == "?"
    first, second = ("A", "B") if unnamed else (first, second)
    proto = parse(
        f"(float[2,{second},4] h, float[{first},5,4] x, float rate, float[4] bias)"
        f" => (float[{first},5,4] y, float[{'L' if unnamed else 2},{second},4] after)",
        "q = MatMul(x, W) r = Add(q, bias) s = Mul(r, rate) y = Relu(s) after = Mul(h, rate)",
        W=RNG.standard_normal((4, 4)),
    )
    np.savez(tmp_path / "d.npz", **DATA)
    names = dict.fromkeys("ABL", "?") if unnamed else {}
    return save(rename(proto, names), tmp_path / "m.onnx")


def test_samples_are_read_along_the_batch_and_answers_joined_along_it(
    model: Path, tmp_path: Path
) -> None:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    alone = [
        session.run(None, {**DATA, "x": DATA["x"][n : n + 1], "h": DATA["h"][:, n : n + 1]})
        for n in range(COUNT)
    ]
    y, after = zip(*alone, strict=True)
    folder = tmp_path / "parts"
    folder.mkdir()
    for n in range(0, COUNT, 4):
        part = {"x": DATA["x"][n : n + 4], "h": DATA["h"][:, n : n + 4]}
        np.savez(folder / f"{n:02}.npz", **{**DATA, **part})
    for data in (tmp_path / "d.npz", folder):
        assert dk.predict(model, data, tmp_path / "p.npz", batch=7, force=True).samples == COUNT
        got = np.load(tmp_path / "p.npz")
        np.testing.assert_allclose(got["y"], np.concatenate(y), rtol=1e-5)
        np.testing.assert_allclose(got["after"], np.concatenate(after, 1), rtol=1e-5)


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
    body = "c = Conv(x, K) p = GlobalAveragePool(c) y = Flatten(p)"
    kernel = RNG.standard_normal((4, 3, 3, 3))
    proto = parse("(float[A,3,H,W] x) => (float[N,4] y)", body, K=kernel)
    path = save(rename(proto, dict.fromkeys("AHW", name)), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=RNG.standard_normal((COUNT, 3, 12, 40)).astype(np.float32))
    assert dk.inspect(path).inputs[0].shape == ("N", 3, "x_2", "x_3")
    assert dk.quantize(path, "int8", calib=tmp_path / "d.npz").evaluation.passed
    with dk.load(path, "cpu") as engine:
        assert engine({"x": np.zeros((1, 3, 12, 40), np.float32)})["y"].shape == (1, 4)
