"""Files that belong together: external weights move, are hashed and rejected with their model.

And what was made for ONNX Runtime is refused for a target with TensorRT, with what to give instead.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Evidence
from deploykit.evaluation.artefacts import Made, keep, onnx_manifest, reject, stage
from deploykit.graph.graph import Graph
from tests.support.bundles import proven_model
from tests.support.calibrations import keep_round_calibration
from tests.support.graphs.data import feeds
from tests.support.graphs.protos import save_graph
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like


def write(out: Path, value: float, *, good: bool = True, limit: int = 1024) -> Made:
    weights = np.full((256, 8), value)
    model = parse("(float[N,256] x) => (float[N,8] y)", "y = MatMul(x, W)", W=weights)
    with stage(out) as tmp:
        save_graph(model, tmp, limit_bytes=limit)
        made = Made(out, onnx_manifest(Graph.open(tmp), (), tools=("onnx",), evidence=Evidence()))
        return keep(tmp, made) if good else reject(tmp, made)


def answer(path: Path) -> float:
    with dk.load(path, "cpu") as engine:
        return float(engine({"x": np.ones((1, 256), np.float32)})["y"][0, 0])


def test_external_weights_move_with_their_model_and_are_rejected_with_it(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    write(out, 1.0)
    names = ["m.onnx", "m.onnx.data", "m.onnx.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    rejected = write(out, 2.0, good=False).path
    assert rejected.name == "m.rejected.onnx"
    assert (answer(out), answer(rejected)) == (256.0, 512.0)
    for path in (out, rejected):
        assert Artefact(path).manifest is not None
    write(out, 1.0, limit=1 << 20)  # in one file: the previous model's weights go
    assert not (tmp_path / "m.onnx.data").exists()


def test_changed_external_weights_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", 1.0)
    data = tmp_path / "m.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")
    with pytest.raises(dk.BadInput, match=r"m\.onnx\.data: is not the file"):
        dk.inspect(tmp_path / "m.onnx")


def test_an_error_names_no_file_of_the_folder_that_is_gone(tmp_path: Path) -> None:
    def fail() -> None:
        with stage(tmp_path / "m.onnx") as staged:
            part = staged.parent / ".auto.x" / "3.onnx"
            raise BadInput(f"{part}: is bad, {staged} too", hint=f"see {part} of {tmp_path}")

    with pytest.raises(BadInput, match=r"^m\.onnx: is bad, m\.onnx too$") as caught:
        fail()
    assert caught.value.message == str(caught.value)
    assert caught.value.hint == f"see m.onnx of {tmp_path}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`float.onnx`; `built.onnx` and `built8.onnx` for the CPU; `ort.onnx`, `trt.onnx`: pairs."""
    folder = tmp_path_factory.mktemp("made")
    model = proven_model(folder / "float.onnx", mnist_like())
    np.savez(folder / "calib.npz", **feeds(mnist_like(), 32, seed=1))
    calib = folder / "calib.npz"
    dk.build(model, "cpu", out=folder / "built.onnx")
    dk.build(model, "cpu", precision="int8", calib=calib, out=folder / "built8.onnx")
    for runtime, name in (("onnxruntime", "ort"), ("tensorrt", "trt")):
        dk.quantize(model, to="int8", runtime=runtime, calib=calib, out=folder / f"{name}.onnx")
    return folder


@pytest.mark.parametrize("name", ["built", "built8", "ort"])
def test_no_bundle_nor_plan_takes_onnxruntimes_own(folder: Path, tmp_path: Path, name: str) -> None:
    path = folder / f"{name}.onnx"
    for kind in ("docker", "triton", "kserve", "ray"):
        with pytest.raises(dk.BadInput, match="profile 'l4' runs TensorRT"):
            dk.bundle(path, "l4", to=kind, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(dk.BadInput, match="profile 'l4' runs TensorRT"):
        dk.plan(path, profiles=["l4"])


@pytest.mark.parametrize(("name", "to"), [("float", "l4"), ("trt", "l4"), ("built8", "cpu")])
def test_what_a_target_needs_is_bundled(folder: Path, tmp_path: Path, name: str, to: str) -> None:
    assert dk.bundle(folder / f"{name}.onnx", to, out=tmp_path / "out").path.is_dir()


def test_the_cure_names_the_file_that_was_built(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput, match="built for ONNX Runtime on a CPU") as caught:
        dk.bundle(folder / "built8.onnx", "l4", out=tmp_path / "out")
    assert "give float.onnx" in caught.value.hint
    assert "quantize float.onnx --to int8 --calib DATA --profile l4" in caught.value.hint
    with pytest.raises(dk.BadInput) as caught:
        dk.bundle(folder / "built.onnx", "l4", out=tmp_path / "out")
    assert caught.value.hint == "give float.onnx, which `build` read"


def test_a_file_without_manifest_is_refused_by_its_operators(folder: Path, tmp_path: Path) -> None:
    stranger = shutil.copyfile(folder / "built.onnx", tmp_path / "stranger.onnx")
    with pytest.raises(dk.BadInput, match="only ONNX Runtime has this operator"):
        dk.bundle(stranger, "l4", out=tmp_path / "out")
    with pytest.raises(dk.BadInput, match="only ONNX Runtime has this operator"):
        dk.plan(stranger, profiles=["l4"])


def test_a_plan_for_all_targets_and_inspect_show_the_placement(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_round_calibration(tmp_path, monkeypatch)
    rows = {each.profile: each for each in dk.plan(folder / "ort.onnx").targets}
    assert rows["cpu"].predictions
    assert "placed for ONNX Runtime" in rows["l4"].why
    assert not rows["l4"].predictions
    ort, trt = (dk.inspect(folder / f"{name}.onnx") for name in ("ort", "trt"))
    assert ort.details["pairs"] == "placed for ONNX Runtime"
    assert trt.details["pairs"] == "placed for TensorRT"
    assert "l4" not in ort.fits
    assert {"l4", "cpu"} <= {*trt.fits}
