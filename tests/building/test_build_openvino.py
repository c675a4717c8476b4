"""Build a graph for OpenVINO, prove what was built, and use the file as any other engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.artefact import Artefact, load_manifest
from deploykit.core.errors import BadInput, GateFailed, Unsupported
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like, save

ov = pytest.importorskip("openvino", reason="openvino is not installed")

ROUNDS = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "openvino":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from deploykit.cli.main import main
sys.exit(main())
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    images = np.random.default_rng(3).standard_normal((64, 1, 28, 28)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", image=images)
    return tmp_path / "samples.npz"


def test_a_build_is_compared_read_back_and_opened_by_openvino_again(model: Path) -> None:
    made = dk.build(model, "cpu-openvino")
    assert made.path.name == "model.cpu-openvino.onnx"
    manifest = load_manifest(made.path)
    assert manifest is not None
    assert manifest.format == Artefact(made.path).format == "openvino"
    assert set(manifest.precision) == {"float32"}
    assert manifest.built_on["runtime"].startswith("openvino 20")
    assert manifest.evidence.verified
    assert manifest.evidence.parity is not None
    assert manifest.evidence.parity.max_error == 1e-3
    with dk.load(made.path) as engine:
        assert engine.runtime == manifest.built_on["runtime"]
    found = dk.inspect(made.path)
    assert (found.format, found.fits) == ("openvino", ("cpu-openvino",))
    assert dk.compare(model, made.path).parity.passed


@pytest.mark.skipif(not ROUNDS, reason="this CPU has no instructions for bfloat16")
def test_bfloat16_is_asked_for_named_and_gated_on_the_file_that_is_kept(
    model: Path, samples: Path
) -> None:
    made = dk.build(model, "cpu-openvino", precision="bf16", data=samples)
    assert set(made.manifest.precision) == {"bfloat16"}
    assert made.manifest.evidence.accuracy is not None
    assert 30 < made.manifest.evidence.accuracy.sqnr_db < 70
    assert not any("ONNX Runtime's CPU provider" in note for note in made.notes)


def test_int8_pairs_are_placed_for_it_and_its_layers_counted(model: Path, samples: Path) -> None:
    made = dk.build(model, "cpu-openvino", precision="int8", calib=samples)
    counts = made.manifest.precision
    if "int8" in counts:  # this CPU has it
        assert counts["int8"] > counts.get("float32", 0)
    else:
        assert any("no layer of the engine" in note for note in made.notes)


def test_an_engine_that_computes_something_else_is_rejected(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploykit.engines.openvino import OpenVinoEngine

    call = OpenVinoEngine.__call__

    def wrong(self: OpenVinoEngine, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array + 1 for name, array in call(self, feeds).items()}

    monkeypatch.setattr(OpenVinoEngine, "__call__", wrong)
    with pytest.raises(GateFailed):
        dk.build(model, "cpu-openvino")
    assert not model.with_name("model.cpu-openvino.onnx").exists()


def test_what_openvino_cannot_is_refused_and_leaves_no_file(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"runs OpenVINO, which has no such options"):
        dk.build(model, "cpu-openvino", shapes=dk.Shapes(dla=3))
    det = parse("(float[N,3,3] x) => (float[N] y)", "y = Det(x)")
    with pytest.raises(Unsupported, match="OpenVINO has no operator Det"):
        dk.build(save(det, model.with_name("det.onnx")), "cpu-openvino")
    monkeypatch.setattr("deploykit.building.builder._MOST_BYTES", 100)
    with pytest.raises(Unsupported, match="is one ONNX file, which holds at most 100"):
        dk.build(model, "cpu-openvino")
    assert {each.name for each in model.parent.iterdir()} == {"model.onnx", "det.onnx"}


def test_without_openvino_the_extra_is_named_and_nothing_is_written(model: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, "build", model, "--profile", "cpu-openvino"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "openvino is not installed" in done.stderr
    assert "[openvino]" in done.stderr
    assert [each.name for each in model.parent.iterdir()] == ["model.onnx"]


def test_neither_a_plan_nor_a_bundle_claims_what_is_of_onnx_runtime(model: Path) -> None:
    (target,) = dk.plan(model, profiles=["cpu-openvino"], batches=[1]).targets
    assert not target.predictions
    assert "only ONNX Runtime" in target.why
    with pytest.raises(BadInput, match="no bundle has OpenVINO's packages"):
        dk.bundle(model, "cpu-openvino", out=model.with_name("bundle"))
    assert not model.with_name("bundle").exists()
