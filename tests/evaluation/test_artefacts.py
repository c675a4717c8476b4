"""Files that belong together, and engines that are proven when opened: a fake GPU machine's."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.core import files
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Evidence
from deploykit.core.files import manifest_path
from deploykit.engines.tensorrt.compatibility import record_build
from deploykit.evaluation import verify
from deploykit.evaluation.artefacts import (
    Made,
    claim_run,
    claim_splits,
    keep,
    onnx_manifest,
    reject,
    stage,
)
from deploykit.evaluation.verify import open_proven
from deploykit.graph.graph import Graph
from tests.support.bundles import proven_model
from tests.support.calibrations import keep_round_calibration
from tests.support.graphs.data import feeds
from tests.support.graphs.protos import save_graph
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like
from tests.support.runtimes.gpu_machine import LAYERS, Cuda, gpu_machine, plan


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


def test_a_checkpoint_and_splits_replace_no_other_file(tmp_path: Path) -> None:
    out = tmp_path / "m.pt"
    state = tmp_path / "d.ckpt"
    with pytest.raises(BadInput, match="would be overwritten"):
        claim_run((out, state), checkpoint=state)  # neither is there yet
    claim_run((out,), checkpoint=state)
    with pytest.raises(BadInput, match=r"the name says \.pt") as refused:
        claim_run((), checkpoint=out)
    assert refused.value.hint == f"`checkpoint` {out.with_suffix('.ckpt')}"
    (tmp_path / "test.npz").write_bytes(b"mine")
    with pytest.raises(BadInput, match="is not what deploykit wrote there") as refused:
        claim_splits(tmp_path, ())
    assert "another `save_splits`" in str(refused.value.hint)


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
    assert caught.value.hint == "give float.onnx"


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


Machine = Callable[..., Any]
X = np.arange(8, dtype=np.float32).reshape(2, 4)
DIFFERS = r"affine\.trt: against affine\.onnx: output 'y'"


@pytest.fixture(name="machine")
def machine_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    folder = tmp_path / "machine"
    folder.mkdir()
    with ExitStack() as stack:
        yield lambda **more: stack.enter_context(gpu_machine(folder, monkeypatch, **more))


@pytest.fixture(name="unproven")
def unproven_fixture(machine: Machine, affine_onnx: Path) -> Path:
    """An engine built with its precision read back, but where CUDA's bindings were missing."""
    machine(content=plan(layers=LAYERS), has_cuda=False)
    made = dk.build(affine_onnx, "l4")
    assert made.manifest.evidence.verified is False
    machine()
    return made.path


def evidence(path: Path) -> Evidence:
    manifest = Artefact(path).manifest
    return manifest.evidence


def change(path: Path, part: str, **values: object) -> None:
    """Change a part of its manifest, such as "evidence" or "evidence.precision"."""
    document = json.loads(manifest_path(path).read_text())
    inner = document
    for name in filter(None, part.split(".")):
        inner = inner[name]
    inner |= values
    manifest_path(path).write_text(json.dumps(document))


def opened(path: Path, **options: Any) -> list[str]:
    notes: list[str] = []
    for engine in open_proven(path, on_note=notes.append, **options):
        np.testing.assert_array_equal(engine({"x": X})["y"], 2 * X + 1)
        engine.close()
    return notes


def wrong(path: Path, off: float = 1.0) -> None:
    """Another plan in its place, which answers `off` more, and its manifest rewritten to fit."""
    content = plan(layers=LAYERS, off=off)
    path.write_bytes(content)
    change(path, "", sha256=hashlib.sha256(content).hexdigest())


def without_golden(path: Path) -> None:
    path.with_name(path.name + ".golden.npz").unlink()
    change(path, "evidence", golden=None)


def alone(path: Path) -> None:
    """A folder with the engine and a manifest that names no other file."""
    (path.parent / "affine.onnx").unlink()
    without_golden(path)


def runs(path: Path, cuda: Any) -> int:
    before = cuda.count["enqueue"]
    for engine in open_proven(path):
        engine.close()
    return int(cuda.count["enqueue"] - before)


@pytest.fixture(params=["gpu", "tensorrt"])
def elsewhere(
    request: pytest.FixtureRequest,
    machine: Machine,
    affine_onnx: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, Any]:
    """A plan proven on an L4 with TensorRT 10.13, on another GPU or another TensorRT; the CUDA."""
    seen = machine().seen
    shapes = Shapes(version_compatible=True, hardware_compatible="ampere-plus")
    made = dk.build(affine_onnx, "l4", shapes=shapes)
    assert made.manifest.evidence.verified is True
    if request.param == "tensorrt":
        seen["nv"].__version__ = "10.14.1.48"
    else:
        a30 = seen["cuda"].describe() | {"gpu": "NVIDIA A30"}
        monkeypatch.setattr(Cuda, "describe", lambda _: a30)
    return made.path, seen["cuda"]


def test_a_plan_is_proven_on_each_gpu_and_tensorrt_once(elsewhere: tuple[Path, Any]) -> None:
    path, cuda = elsewhere
    assert [runs(path, cuda) > 0, runs(path, cuda)] == [True, 0]
    first, second = evidence(path).proven_on
    assert first == "NVIDIA L4 (8.9), TensorRT 10.13.3.9"
    assert second in (
        "NVIDIA A30 (8.9), TensorRT 10.13.3.9",
        "NVIDIA L4 (8.9), TensorRT 10.14.1.48",
    )


def test_a_plan_that_is_wrong_elsewhere_is_refused_there(elsewhere: tuple[Path, Any]) -> None:
    path, _ = elsewhere
    wrong(path)
    assert record_build(Artefact(path).manifest)
    with pytest.raises(dk.GateFailed, match=DIFFERS):
        open_proven(path)
    assert evidence(path).verified is True
    alone(path)
    with pytest.raises(dk.BadInput, match=r"proven on NVIDIA L4 .* only, and cannot be proven"):
        open_proven(path)


def test_a_proof_made_elsewhere_first_does_not_count_where_it_was_built(
    machine: Machine, affine_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(content=plan(layers=LAYERS), has_cuda=False)
    path = dk.build(affine_onnx, "l4", shapes=Shapes(hardware_compatible="ampere-plus")).path
    a30 = {"gpu": "NVIDIA A30", "compute_capability": "8.0"}
    change(path, "built_on", **a30)
    cuda = machine().seen["cuda"]
    assert [runs(path, cuda) > 0, runs(path, cuda)] == [True, 0]
    described = cuda.describe() | a30
    monkeypatch.setattr(Cuda, "describe", lambda _: described)
    assert runs(path, cuda) > 0


def test_an_unverified_engine_is_verified_against_its_graph_and_recorded(unproven: Path) -> None:
    assert opened(unproven) == []
    assert evidence(unproven).verified is True
    parity = evidence(unproven).parity
    assert (parity.a, parity.b, parity.passed) == ("affine.onnx", "affine.trt", True)
    assert len(parity.rows) == 4


@pytest.mark.parametrize("batch", [(1, 1, 1), (1, 2, 2), (8, 8, 16)], ids=str)
def test_golden_samples_are_replayed_within_the_engines_sizes(
    machine: Machine, affine_onnx: Path, batch: tuple[int, int, int]
) -> None:
    machine(content=plan(batch, layers=LAYERS), has_cuda=False)
    path = dk.build(affine_onnx, "l4", shapes=Shapes(batch=",".join(map(str, batch)))).path
    affine_onnx.unlink()
    runs(path, machine().seen["cuda"])
    assert evidence(path).verified is True
    assert "recorded" in evidence(path).parity.a


def test_a_renamed_graph_is_found_by_its_hash(unproven: Path) -> None:
    (unproven.parent / "affine.onnx").rename(unproven.parent / "renamed.onnx")
    without_golden(unproven)
    opened(unproven)
    assert evidence(unproven).verified is True


def test_an_engine_that_cannot_be_verified_is_refused_or_opened_on_trust(unproven: Path) -> None:
    alone(unproven)
    with pytest.raises(dk.BadInput, match=r"cannot be proven here.*no golden samples") as caught:
        open_proven(unproven)
    assert caught.value.exit_code == 2
    assert "put affine.onnx next to it" in caught.value.hint
    assert "`trust`" in caught.value.hint
    (note,) = opened(unproven, trust=True)
    assert "unproven" in note
    assert evidence(unproven).verified is False


@pytest.mark.parametrize("trust", [False, True])
def test_an_engine_whose_outputs_differ_from_its_graph_is_refused_and_closed(
    unproven: Path, machine: Machine, trust: bool
) -> None:
    cuda = machine().seen["cuda"]
    wrong(unproven)
    with pytest.raises(dk.GateFailed, match=DIFFERS) as caught:
        open_proven(unproven, trust=trust)
    assert caught.value.exit_code == 1
    assert evidence(unproven).verified is False
    assert evidence(unproven).parity.passed is False
    assert cuda.count["enqueue"] > 0
    assert cuda.held() == {}


def golden_differ(path: Path) -> None:
    (path.parent / "affine.onnx").unlink()
    wrong(path)


def wider(path: Path) -> None:
    why = ["'add' was asked in float16 and runs in float32"]
    change(path, "evidence.precision", wider=why, layers=[], wider_share=0.5, seen=1.0)


@pytest.mark.parametrize(
    ("spoil", "error", "why"),
    [
        (golden_differ, dk.GateFailed, "recorded: output 'y'"),
        (wider, dk.GateFailed, "'add' was asked in float16"),
        (
            lambda path: change(path, "built_on", sm_count="20"),
            *(dk.Unsupported, "58 multiprocessors in use here, 20 there"),
        ),
        (lambda path: manifest_path(path).unlink(), dk.BadInput, "has no manifest"),
    ],
    ids=["golden samples", "wider layers", "another GPU", "no manifest"],
)
def test_an_engine_that_is_not_what_it_was_is_refused(
    unproven: Path, spoil: Callable[[Path], object], error: type[Exception], why: str
) -> None:
    spoil(unproven)
    with pytest.raises(error, match=why):
        open_proven(unproven)
    if "manifest" in why:
        (note,) = opened(unproven, trust=True)
        assert "without a manifest: neither its origin" in note


@pytest.mark.parametrize("layers", [LAYERS, None], ids=["readable", "unreadable"])
def test_layers_not_read_back_by_the_build_are_read_on_open_or_noted(
    machine: Machine, affine_onnx: Path, layers: str | None
) -> None:
    content = plan(layers=layers) if layers else plan()
    machine(content=content, has_cuda=False)
    path = dk.build(affine_onnx, "l4").path
    change(path, "evidence.precision", layers=None)
    machine(content=content)
    notes = opened(path)
    assert evidence(path).verified is bool(layers)
    if layers:
        assert (notes, evidence(path).precision.shares) == ([], {"float32": 1.0})
    else:
        assert "is not known" in notes[0]


def test_a_manifest_not_written_is_noted(unproven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = manifest_path(unproven).read_bytes()

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)  # root may write anywhere
    (note,) = opened(unproven)
    assert "could not be saved" in note
    assert manifest_path(unproven).read_bytes() == before


def test_an_engine_rebuilt_during_open_keeps_its_own_manifest(unproven: Path) -> None:
    manifest = Artefact(unproven).manifest
    change(unproven, "built_on", driver="590.1")
    verify._write(unproven, manifest, {"verified": True}, print)
    assert evidence(unproven).verified is False


def test_instances_are_verified_once_onnx_files_never(unproven: Path, affine_onnx: Path) -> None:
    assert len(open_proven(unproven, instances=3)) == 3
    with pytest.raises(dk.BadInput, match="`instances` 0: 1 or more"):
        open_proven(unproven, instances=0)
    with pytest.raises(dk.BadInput, match="`cuda_graphs` are batch sizes"):
        open_proven(affine_onnx, open_engine=partial(dk.load, cuda_graphs=[0]))
    assert opened(affine_onnx, device="cpu", threads=1) == []
    both = open_proven(affine_onnx, "cpu", threads=1, instances=2)
    assert len({id(each) for each in both}) == 2


def test_without_cuda_bindings_what_is_missing_is_named(unproven: Path, machine: Machine) -> None:
    machine(has_cuda=False)
    with pytest.raises(dk.Unsupported, match="cuda is"):
        open_proven(unproven)


def test_predict_verifies_the_engine_before_it_writes(unproven: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "x.npz", tmp_path / "y.npz"
    np.savez(data, x=X)
    wrong(unproven)
    with pytest.raises(dk.GateFailed, match="error"):
        dk.predict(unproven, data, out)
    assert not out.exists()
    wrong(unproven, off=0.0)
    assert dk.predict(unproven, data, out).samples == len(X)
    assert evidence(unproven).verified is True
