"""A file made for ONNX Runtime is refused for a target with TensorRT, with what to give instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from tests.support.bundles import proven_model
from tests.support.calibrations import keep_round_calibration
from tests.support.graphs.data import feeds
from tests.support.onnx_zoo import mnist_like


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`float.onnx`; `built.onnx` and `built8.onnx` for the CPU; `ort.onnx`, `trt.onnx`: pairs."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("made")
    model = proven_model(folder / "float.onnx", mnist_like())
    np.savez(folder / "calib.npz", **feeds(mnist_like(), 32, seed=1))
    calib = folder / "calib.npz"
    dk.build(model, "cpu", out=folder / "built.onnx")
    dk.build(model, "cpu", precision="int8", calib=calib, out=folder / "built8.onnx")
    for runtime, name in (("onnxruntime", "ort"), ("tensorrt", "trt")):
        dk.quantize(model, to="int8", runtime=runtime, calib=calib, out=folder / f"{name}.onnx")
    return folder


@pytest.fixture
def stranger(folder: Path, tmp_path: Path) -> Path:
    """`built.onnx` without its manifest."""
    return shutil.copyfile(folder / "built.onnx", tmp_path / "stranger.onnx")


@pytest.mark.parametrize("kind", ["docker", "triton", "kserve", "ray"])
@pytest.mark.parametrize("name", ["built", "built8", "ort"])
def test_no_kind_of_bundle_takes_it(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    with pytest.raises(dk.BadInput, match="profile 'l4' runs TensorRT"):
        dk.bundle(folder / f"{name}.onnx", "l4", to=kind, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["float", "trt"])
def test_a_file_made_for_tensorrt_or_for_any_target_is_bundled(
    folder: Path, tmp_path: Path, name: str
) -> None:
    assert dk.bundle(folder / f"{name}.onnx", "l4", out=tmp_path / "out").path.is_dir()


def test_a_file_built_for_a_cpu_is_bundled_for_a_cpu(folder: Path, tmp_path: Path) -> None:
    assert dk.bundle(folder / "built8.onnx", "cpu", out=tmp_path / "out").path.is_dir()


def test_the_cure_names_the_file_that_was_built(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput, match="built for ONNX Runtime on a CPU") as caught:
        dk.bundle(folder / "built8.onnx", "l4", out=tmp_path / "out")
    assert "give float.onnx" in str(caught.value.hint)
    assert "quantize float.onnx --to int8 --calib DATA --profile l4" in str(caught.value.hint)


def test_the_cure_of_a_float32_build_does_not_speak_of_int8(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput) as caught:
        dk.bundle(folder / "built.onnx", "l4", out=tmp_path / "out")
    assert caught.value.hint == "give float.onnx, which `build` read"


def test_a_strangers_file_is_refused_by_its_operators(stranger: Path, tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput, match="only ONNX Runtime has this operator"):
        dk.bundle(stranger, "l4", out=tmp_path / "out")
    with pytest.raises(dk.BadInput, match="only ONNX Runtime has this operator"):
        dk.plan(stranger, profiles=["l4"])


@pytest.mark.parametrize("name", ["built", "built8", "ort"])
def test_a_plan_for_a_named_target_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(dk.BadInput, match="profile 'l4' runs TensorRT"):
        dk.plan(folder / f"{name}.onnx", profiles=["l4"])


def test_a_plan_for_all_targets_gives_the_reason_in_their_rows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_round_calibration(tmp_path, monkeypatch)
    rows = {each.profile: each for each in dk.plan(folder / "ort.onnx").targets}
    assert rows["cpu"].predictions
    assert "placed for ONNX Runtime" in rows["l4"].why
    assert not rows["l4"].predictions


def test_inspect_shows_the_placement_and_only_targets_that_take_it(folder: Path) -> None:
    ort, trt = (dk.inspect(folder / f"{name}.onnx") for name in ("ort", "trt"))
    assert ort.details["pairs"] == "placed for ONNX Runtime"
    assert trt.details["pairs"] == "placed for TensorRT"
    assert "l4" not in ort.fits
    assert {"l4", "cpu"} <= {*trt.fits}
