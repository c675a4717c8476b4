"""Opening what was never run on its device: it is proven first, or refused; the proof is kept.

The machine is made of Python below our runtime; see `tests.support.runtimes.gpu_machine`.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.core import files
from deploykit.core.artefact import Artefact
from deploykit.core.files import manifest_path
from deploykit.engines.tensorrt.compatibility import record_build
from deploykit.evaluation.verify import open_proven
from tests.support.runtimes.gpu_machine import LAYERS, Cuda, gpu_machine, plan

Machine = Callable[..., Any]
X = np.arange(8, dtype=np.float32).reshape(2, 4)


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


def verified(path: Path) -> object:
    manifest = Artefact(path).manifest
    assert manifest is not None
    return manifest.evidence.verified


def opened(path: Path, **options: Any) -> list[str]:
    """Open it, hold it to its answer, and give the notes."""
    notes: list[str] = []
    engines = open_proven(path, on_note=notes.append, **options)
    for engine in engines:
        np.testing.assert_array_equal(engine({"x": X})["y"], 2 * X + 1)
        engine.close()
    return notes


def wrong(path: Path, off: float) -> None:
    """Another plan in its place, which answers `off` more, and its manifest rewritten to fit."""
    content = plan(layers=LAYERS, off=off)
    path.write_bytes(content)
    values = json.loads(manifest_path(path).read_text())
    values["sha256"] = hashlib.sha256(content).hexdigest()
    manifest_path(path).write_text(json.dumps(values))


def test_an_engine_verified_by_its_build_opens_without_notes(
    machine: Machine, affine_onnx: Path
) -> None:
    machine()
    made = dk.build(affine_onnx, "l4")
    assert made.manifest.evidence.verified is True
    assert made.parity is not None
    assert opened(made.path) == []


@pytest.fixture(params=["gpu", "tensorrt"])
def elsewhere(
    request: pytest.FixtureRequest,
    machine: Machine,
    affine_onnx: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, Any]:
    """A plan proven on an L4 with TensorRT 10.13, on another GPU or another TensorRT; the CUDA."""
    from deploykit.building.builder import Shapes

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


def runs(path: Path, cuda: Any) -> int:
    before = cuda.count["enqueue"]
    for engine in open_proven(path):
        engine.close()
    return int(cuda.count["enqueue"] - before)


def test_a_plan_is_proven_on_each_gpu_and_tensorrt_once(
    elsewhere: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cuda = elsewhere
    assert [runs(path, cuda) > 0, runs(path, cuda)] == [True, 0]
    manifest = Artefact(path).manifest
    assert manifest is not None
    first, second = manifest.evidence.proven_on
    assert first == "NVIDIA L4 (8.9), TensorRT 10.13.3.9"
    assert second in (
        "NVIDIA A30 (8.9), TensorRT 10.13.3.9",
        "NVIDIA L4 (8.9), TensorRT 10.14.1.48",
    )


def test_a_plan_that_is_wrong_elsewhere_is_refused_there_and_keeps_its_proof(
    elsewhere: tuple[Path, Any],
) -> None:
    path, _ = elsewhere
    wrong(path, off=1.0)
    manifest = Artefact(path).manifest
    assert manifest is not None
    assert record_build(manifest)
    with pytest.raises(dk.GateFailed, match=r"affine\.trt: against affine\.onnx: output 'y'"):
        open_proven(path)
    assert verified(path) is True
    alone(path)
    with pytest.raises(dk.BadInput, match=r"proven on NVIDIA L4 .* only, and cannot be proven"):
        open_proven(path)


def test_a_proof_made_elsewhere_first_does_not_count_where_it_was_built(
    machine: Machine, affine_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploykit.building.builder import Shapes

    machine(content=plan(layers=LAYERS), has_cuda=False)
    path = dk.build(affine_onnx, "l4", shapes=Shapes(hardware_compatible="ampere-plus")).path
    values = json.loads(manifest_path(path).read_text())
    values["built_on"] |= {"gpu": "NVIDIA A30", "compute_capability": "8.0"}
    manifest_path(path).write_text(json.dumps(values))
    cuda = machine().seen["cuda"]
    assert [runs(path, cuda) > 0, runs(path, cuda)] == [True, 0]
    described = cuda.describe() | {"gpu": "NVIDIA A30", "compute_capability": "8.0"}
    monkeypatch.setattr(Cuda, "describe", lambda _: described)
    assert runs(path, cuda) > 0


def test_an_unverified_engine_is_verified_against_its_graph_and_recorded(unproven: Path) -> None:
    assert opened(unproven) == []
    manifest = Artefact(unproven).manifest
    assert manifest is not None
    assert manifest.evidence.verified is True
    assert (manifest.evidence.parity.a, manifest.evidence.parity.b) == (
        "affine.onnx",
        "affine.trt",
    )
    assert manifest.evidence.parity.passed is True
    assert len(manifest.evidence.parity.rows) == 4


def test_without_its_graph_an_engine_is_verified_by_golden_samples(unproven: Path) -> None:
    (unproven.parent / "affine.onnx").unlink()
    assert opened(unproven) == []
    assert verified(unproven) is True
    manifest = Artefact(unproven).manifest
    assert manifest is not None
    assert "recorded" in manifest.evidence.parity.a


@pytest.mark.parametrize("batch", [(1, 1, 1), (1, 2, 2), (8, 8, 16)], ids=str)
def test_golden_samples_are_replayed_within_the_engines_sizes(
    machine: Machine, affine_onnx: Path, batch: tuple[int, int, int]
) -> None:
    from deploykit.building.builder import Shapes

    machine(content=plan(batch, layers=LAYERS), has_cuda=False)
    text = ",".join(map(str, batch))
    path = dk.build(affine_onnx, "l4", shapes=Shapes(batch=text)).path
    affine_onnx.unlink()
    machine()
    for engine in open_proven(path):
        engine.close()
    assert verified(path) is True


def test_a_renamed_graph_is_found_by_its_hash(unproven: Path) -> None:
    (unproven.parent / "affine.onnx").rename(unproven.parent / "renamed.onnx")
    unproven.with_name(unproven.name + ".golden.npz").unlink()
    values = json.loads(manifest_path(unproven).read_text())
    values["evidence"]["golden"] = None
    manifest_path(unproven).write_text(json.dumps(values))
    opened(unproven)
    assert verified(unproven) is True


def alone(path: Path) -> None:
    """A folder with the engine and a manifest that names no other file."""
    (path.parent / "affine.onnx").unlink()
    path.with_name(path.name + ".golden.npz").unlink()
    values = json.loads(manifest_path(path).read_text())
    values["evidence"]["golden"] = None
    manifest_path(path).write_text(json.dumps(values))


def test_an_engine_that_cannot_be_verified_is_refused_with_what_is_missing(unproven: Path) -> None:
    alone(unproven)
    with pytest.raises(dk.BadInput, match=r"cannot be proven here.*no golden samples") as caught:
        open_proven(unproven)
    assert caught.value.exit_code == 2
    assert "put affine.onnx next to it" in (caught.value.hint or "")
    assert "`trust`" in (caught.value.hint or "")


def test_an_engine_that_cannot_be_verified_opens_on_trust_with_one_warning(unproven: Path) -> None:
    alone(unproven)
    (note,) = opened(unproven, trust=True)
    assert "unproven" in note
    assert verified(unproven) is False


@pytest.mark.parametrize("trust", [False, True])
def test_an_engine_whose_outputs_differ_from_its_graph_is_refused(
    unproven: Path, trust: bool
) -> None:
    wrong(unproven, off=1.0)
    with pytest.raises(dk.GateFailed, match=r"affine\.trt: against affine\.onnx: output 'y'") as e:
        open_proven(unproven, trust=trust)
    assert e.value.exit_code == 1
    assert verified(unproven) is False
    manifest = Artefact(unproven).manifest
    assert manifest is not None
    assert manifest.evidence.parity.passed is False


def test_an_engine_whose_outputs_differ_from_golden_samples_is_refused(unproven: Path) -> None:
    (unproven.parent / "affine.onnx").unlink()
    wrong(unproven, off=1.0)
    with pytest.raises(dk.GateFailed, match="recorded: output 'y'"):
        open_proven(unproven)


def test_an_engine_built_with_layers_in_a_wider_precision_is_refused(unproven: Path) -> None:
    values = json.loads(manifest_path(unproven).read_text())
    values["evidence"]["precision"] |= {
        "wider": ["'add' was asked in float16 and runs in float32"],
        "wider_share": 0.5,
        "seen": 1.0,
    }
    manifest_path(unproven).write_text(json.dumps(values))
    with pytest.raises(dk.GateFailed, match="'add' was asked in float16"):
        open_proven(unproven)


def test_layers_not_read_back_by_the_build_are_read_on_open(
    machine: Machine, affine_onnx: Path
) -> None:
    machine(has_cuda=False)
    path = dk.build(affine_onnx, "l4").path
    values = json.loads(manifest_path(path).read_text())
    values["evidence"]["precision"]["layers"] = None
    manifest_path(path).write_text(json.dumps(values))
    machine()
    assert opened(path) == []
    manifest = Artefact(path).manifest
    assert manifest is not None
    assert manifest.evidence.verified is True
    assert manifest.evidence.precision.shares == {"float32": 1.0}


def test_an_engine_with_unreadable_layers_opens_as_unverified(
    machine: Machine, affine_onnx: Path
) -> None:
    machine(content=plan(), has_cuda=False)
    path = dk.build(affine_onnx, "l4").path
    machine(content=plan())
    (note,) = opened(path)
    assert "is not known" in note
    assert verified(path) is False


def test_a_manifest_that_cannot_be_written_is_a_note(
    unproven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = manifest_path(unproven).read_bytes()

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)  # root may write anywhere
    (note,) = opened(unproven)
    assert "could not be saved" in note
    assert manifest_path(unproven).read_bytes() == before


def test_an_engine_rebuilt_during_open_keeps_its_own_manifest(unproven: Path) -> None:
    from deploykit.evaluation import verify

    manifest = Artefact(unproven).manifest
    assert manifest is not None
    values = json.loads(manifest_path(unproven).read_text())
    values["built_on"]["driver"] = "590.1"
    manifest_path(unproven).write_text(json.dumps(values))
    verify._write(unproven, manifest, {"verified": True}, print)
    assert verified(unproven) is False


def test_an_engine_without_a_manifest_opens_only_on_trust(unproven: Path) -> None:
    manifest_path(unproven).unlink()
    with pytest.raises(dk.BadInput, match="has no manifest"):
        open_proven(unproven)
    (note,) = opened(unproven, trust=True)
    assert "without a manifest: neither its origin" in note


def test_several_instances_are_verified_once(unproven: Path) -> None:
    assert len(open_proven(unproven, instances=3)) == 3
    with pytest.raises(dk.BadInput, match="`instances` 0: 1 or more"):
        open_proven(unproven, instances=0)


def test_a_refused_engine_is_closed(unproven: Path, machine: Machine) -> None:
    cuda = machine().seen["cuda"]
    wrong(unproven, off=1.0)
    with pytest.raises(dk.GateFailed):
        open_proven(unproven)
    assert cuda.count["enqueue"] > 0
    assert cuda.held() == {}


def test_an_engine_of_another_gpu_is_refused_before_it_runs(
    unproven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads(manifest_path(unproven).read_text())
    values["built_on"]["sm_count"] = "20"
    manifest_path(unproven).write_text(json.dumps(values))
    with pytest.raises(dk.Unsupported, match="58 multiprocessors in use here, 20 there"):
        open_proven(unproven)


def test_an_onnx_file_opens_without_verification(affine_onnx: Path) -> None:
    notes: list[str] = []
    (engine,) = open_proven(affine_onnx, "cpu", threads=1, on_note=notes.append)
    with engine:
        np.testing.assert_array_equal(engine({"x": X})["y"], 2 * X + 1)
    assert notes == []
    both = open_proven(affine_onnx, "cpu", threads=1, instances=2)
    assert len({id(each) for each in both}) == 2


def test_without_cuda_bindings_what_is_missing_is_named(unproven: Path, machine: Machine) -> None:
    machine(has_cuda=False)
    with pytest.raises(dk.Unsupported, match="cuda is"):
        open_proven(unproven)


def test_predict_verifies_the_engine_before_it_writes_outputs(
    unproven: Path, tmp_path: Path
) -> None:
    data, out = tmp_path / "x.npz", tmp_path / "y.npz"
    np.savez(data, x=X)
    wrong(unproven, 1.0)
    with pytest.raises(dk.GateFailed, match="error"):
        dk.predict(unproven, data, out)
    assert not out.exists()
    wrong(unproven, 0.0)
    assert dk.predict(unproven, data, out).samples == len(X)
    assert verified(unproven) is True
