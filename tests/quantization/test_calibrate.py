from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import Samples
from deploykit.graph.edit import Editor
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import METHODS, Range, importance
from tests.support.graphs.data import feeds, samples
from tests.support.graphs.protos import calibrate
from tests.support.onnx_zoo import (
    conv_relu,
    int64_ids,
    linear,
    make,
    mnist_like,
    save,
)


@pytest.mark.parametrize("batch_size", [1, 5, 32])
def test_ranges_are_those_of_all_samples_whatever_the_batch(
    tmp_path: Path, batch_size: int
) -> None:
    path = save(linear(), tmp_path / "m.onnx")
    data = samples(linear(), 17)
    x = data.inputs["x"]
    weights = {t.name: numpy_helper.to_array(t) for t in linear().graph.initializer}
    y = x @ weights["W"] + weights["b"]
    found = calibrate(path, data, batch_size=batch_size)
    assert found.samples == 17
    assert (found.ranges["x"].low, found.ranges["x"].high) == (x.min(), x.max())
    assert found.ranges["y"].low == pytest.approx(y.min(), rel=1e-6)
    assert found.ranges["y"].high == pytest.approx(y.max(), rel=1e-6)


def test_a_tensor_between_two_fused_nodes_has_its_own_range(tmp_path: Path) -> None:
    path = save(conv_relu(), tmp_path / "m.onnx")
    data = samples(conv_relu())
    x = np.pad(data.inputs["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    weight, bias = (numpy_helper.to_array(t) for t in conv_relu().graph.initializer)
    windows = np.lib.stride_tricks.sliding_window_view(x[:, 0], (3, 3), axis=(1, 2))
    c = np.einsum("nhwij,cij->nchw", windows, weight[:, 0]) + bias[:, None, None]
    found = calibrate(path, data).ranges
    assert found["c"].low == pytest.approx(c.min(), rel=1e-5)
    assert found["c"].high == pytest.approx(c.max(), rel=1e-5)
    assert found["y"] == Range(0.0, found["c"].high)


def test_every_float_tensor_has_a_range_and_no_other(tmp_path: Path) -> None:
    path = save(int64_ids(), tmp_path / "m.onnx")
    assert list(calibrate(path, samples(int64_ids())).ranges) == ["embedded", "y"]


def test_the_percentile_leaves_an_outlier_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    image = feeds(mnist_like(), 512)["image"]
    image[3, 0, 5, 5] = 50.0
    data = Samples({"image": image}, None, "data.npz")
    found = calibrate(path, data, method="percentile")
    assert found.ranges["image"].high == 50.0
    clipped = found.clipped["image"]
    assert 4.0 < clipped.high < 5.5  # of 400 000 normal values two are left out: 4.4 and above
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_of_minus_infinity_keeps_its_range(tmp_path: Path, method: str) -> None:
    weights = {"mask": np.array([0, 0, 0, -np.inf], np.float32)}
    model = make(
        [helper.make_node("Add", ["x", "mask"], ["y"], name="mask_out")],
        {"x": ("N", 4)},
        {"y": ("N", 4)},
        weights,
    )
    data = samples(model)
    found = calibrate(save(model, tmp_path / "m.onnx"), data, method=method).ranges["y"]
    assert found == Range(-math.inf, float(data.inputs["x"][:, :3].max()))


@pytest.mark.parametrize("method", METHODS)
def test_ranges_hold_every_value_whatever_the_method(tmp_path: Path, method: str) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    data = samples(mnist_like(), 64)
    every = calibrate(path, data, method="minmax").ranges
    found = calibrate(path, data, method=method)
    assert found.ranges == every
    assert found.clipped.keys() == every.keys()
    for name, seen in found.clipped.items():
        assert every[name].low <= seen.low <= seen.high <= every[name].high


def test_only_tensors_that_get_a_scale_are_clipped(tmp_path: Path) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    found = calibrate(path, samples(mnist_like(), 64), method="mse")
    cut = {name for name, seen in found.clipped.items() if seen != found.ranges[name]}
    assert {"image", "p1"} <= cut  # p1 has a scale of its own for TensorRT only
    assert cut <= {"image", "r1", "p1", "r2", "flat"}  # not what lies before a Relu, nor logits


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_seen_whatever_their_size(tmp_path: Path, method: str) -> None:
    weights = {"W": np.eye(64, dtype=np.float32) * 3}  # 16 KiB: fed to the session, not built in
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="matmul")
    model = make([node], {"x": ("N", 64)}, {"y": ("N", 64)}, weights)
    data = samples(model)
    found = calibrate(save(model, tmp_path / "m.onnx"), data, method=method).ranges
    assert found["y"].high == pytest.approx(3 * float(data.inputs["x"].max()), rel=1e-6)


def test_batches_are_smaller_where_activations_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1 x 28 x 28 in, 8 and 16 channels of 28 x 28 and 14 x 14 after it: 91 KB a sample
    path = save(mnist_like(), tmp_path / "m.onnx")
    seen = []
    data = samples(mnist_like(), 16)

    class Watched(Samples):
        def batches(self, size: int, **options: bool) -> Iterator[dict[str, np.ndarray]]:
            seen.append(size)
            return super().batches(size, **options)

        def first(self, _: int) -> Samples:
            return self

    monkeypatch.setattr("deploykit.quantization.calibrate.MOST_BYTES", 300_000)
    calibrate(path, Watched(data.inputs, None, "data.npz"))
    assert seen == [3]


def test_a_fixed_batch_is_kept_and_the_remaining_samples_are_dropped(tmp_path: Path) -> None:
    model = make(linear().graph.node, {"x": (4, 4)}, {"y": (4, 3)}, _weights())
    data = samples(linear(), 10)
    found = calibrate(save(model, tmp_path / "m.onnx"), data)
    assert found.samples == 8
    assert found.ranges["x"].high == data.inputs["x"][:8].max()


def _weights() -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in linear().graph.initializer}


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_gives_nan_is_named_with_its_tensor(tmp_path: Path, method: str) -> None:
    model = make(
        [
            helper.make_node("Sqrt", ["x"], ["root"], name="sqrt"),
            helper.make_node("Relu", ["root"], ["y"], name="relu"),
        ],
        {"x": ("N", 4)},
        {"y": ("N", 4)},
        {},
    )
    with pytest.raises(BadInput, match=r"m.onnx: tensor 'root' is NaN .*data.npz"):
        calibrate(save(model, tmp_path / "m.onnx"), samples(model), method=method)


def test_every_calibrator_comes_from_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = save(mnist_like(), tmp_path / "m.onnx"), samples(mnist_like(), 64)
    alone = {method: calibrate(path, data, method=method) for method in METHODS}
    runs = []
    batches = Samples.batches
    monkeypatch.setattr(
        Samples, "batches", lambda self, size, **_: runs.append(size) or batches(self, size)
    )
    found = calibrate(path, data)
    assert len(runs) == 1
    for method in METHODS:
        using = found.using(method)
        assert (using.clipped, using.method) == (alone[method].clipped, method)
        assert using.ranges == found.ranges


@pytest.mark.parametrize(
    ("kind", "shape"), [("MatMul", (6, 5)), ("MatMul", (3, 6, 5)), ("Gemm", (5, 6))]
)
def test_importance_is_the_energy_of_the_weights_that_a_channel_meets(
    tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    attributes = {"transB": 1} if kind == "Gemm" else {}
    node = helper.make_node(kind, ["x", "W"], ["y"], name="node", **attributes)
    out = ("N", 5) if kind == "Gemm" else (*shape[:-2], "N", 5)
    model = make([node], {"x": ("N", 6)}, {"y": out}, {"W": weight})
    others = (
        (0,)
        if kind == "Gemm"
        else tuple(axis for axis in range(len(shape)) if axis != len(shape) - 2)
    )
    found = importance(Editor(Graph.open(save(model, tmp_path / "m.onnx"))))
    np.testing.assert_allclose(found["x"], (weight**2).sum(axis=others), rtol=1e-5)


def x_of(samples: int, *bad: float) -> np.ndarray:
    x = feeds(linear(), samples)["x"]
    if bad:
        x[5, 2] = x[9, 0] = bad[0]
    return x


@pytest.mark.parametrize(
    ("batch", "x", "says"),
    [
        ("N", x_of(7), r"data.npz: 7 samples"),
        (64, x_of(10), "do not fill the model's fixed batch of 64"),
        ("N", x_of(16, np.nan), "data.npz: input 'x' of sample 5 holds NaN"),
        ("N", x_of(16, -np.inf), "data.npz: input 'x' of sample 5 holds NaN"),
        ("N", np.repeat(x_of(1), 16, axis=0), "the same"),
    ],
    ids=["few", "fixed-batch", "nan", "infinity", "equal"],
)
def test_samples_that_calibrate_nothing_are_refused(
    tmp_path: Path, batch: int | str, x: np.ndarray, says: str
) -> None:
    model = make(linear().graph.node, {"x": (batch, 4)}, {"y": (batch, 3)}, _weights())
    with pytest.raises(BadInput, match=says):
        calibrate(save(model, tmp_path / "m.onnx"), Samples({"x": x}, None, "data.npz"))
