"""Gates of the Python API: what a failed one leaves behind, and what it carries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import deploykit as dk
from deploykit.building.build import build
from deploykit.core.artefact import Artefact
from deploykit.graph.graph import Graph
from deploykit.quantization.job import share_outputs
from deploykit.quantization.quantize import quantize
from tests.support.onnx_zoo import mnist_like, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


def test_a_build_that_fails_parity_is_kept_under_the_rejected_name(
    model: Path, tmp_path: Path
) -> None:
    """A float16 graph, computed in float32 by ONNX Runtime's CPU, is not equal to the last bit."""
    half = quantize(model, "fp16").path
    out = tmp_path / "built.onnx"
    out.write_bytes(b"the one before")
    with pytest.raises(dk.GateFailed, match=r"built\.onnx .*is above 1e-12; .*rejected") as caught:
        build(half, "cpu", out=out, max_error=1e-12, force=True)
    assert out.read_bytes() == b"the one before"
    rejected = tmp_path / "built.rejected.onnx"
    assert caught.value.result.path == rejected
    manifest = Artefact(rejected).manifest
    assert manifest is not None
    assert not manifest.evidence.parity.passed
    assert not list(tmp_path.glob(".*"))


@pytest.mark.torch
def test_an_export_that_fails_parity_is_kept_under_the_rejected_name(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from deploykit.core.recipe import load_recipe
    from deploykit.engines.torch.open import save_checkpoint

    recipe = load_recipe("mnist-cnn")
    path = tmp_path / "m.pt"
    save_checkpoint(path, recipe.build(), "mnist-cnn", recipe.inputs, recipe.outputs)
    with pytest.raises(dk.GateFailed, match="is above 1e-12"):
        dk.export(path, max_error=1e-12)
    assert not (tmp_path / "m.onnx").exists()
    assert (tmp_path / "m.rejected.onnx").is_file()
    assert dk.export(path).parity.passed


def test_the_gate_compares_the_upper_end_of_the_interval(model: Path, tmp_path: Path) -> None:
    """No sample flips, so the drop is 0, but 20 samples cannot prove a drop under 1 %."""
    images = np.random.default_rng(0).random((300, 1, 28, 28), dtype=np.float32)
    with dk.load(model, "cpu") as engine:
        logits = engine({"image": images})[engine.outputs[0].name]
    first, second = np.sort(logits, 1)[:, ::-1][:, :2].T
    clear = np.argsort(first - second)[-20:]  # rounding cannot flip these
    images, labels = images[clear], logits[clear].argmax(1)
    data = tmp_path / "d.npz"
    np.savez(data, image=images, labels=labels)
    with pytest.raises(dk.GateFailed) as caught:
        quantize(model, "fp16", data=data, max_drop=0.01)
    drop = caught.value.result.drop
    assert (drop.drop.value, drop.lost, drop.gained) == (0.0, 0, 0)
    assert drop.drop.high > 0.01
    assert quantize(model, "fp16", data=data, max_drop=0.5).drop.drop.high < 0.5


def test_a_manifest_that_does_not_fit_its_file_is_refused(model: Path) -> None:
    half = quantize(model, "fp16").path
    half.write_bytes(model.read_bytes())
    with pytest.raises(dk.BadInput, match="SHA-256 differs"):
        dk.inspect(half)


def test_serve_names_models_after_their_files(model: Path) -> None:
    from deploykit.serving.serve import name_models

    named = name_models(["a=x/y.onnx", "dir/model.int8.onnx"])
    assert named == {"a": Path("x/y.onnx"), "model.int8": Path("dir/model.int8.onnx")}


@pytest.fixture
def labelled(model: Path, tmp_path: Path) -> Path:
    """300 random images with the answers that the model itself gives them."""
    images = np.random.default_rng(0).random((300, 1, 28, 28), dtype=np.float32)
    with dk.load(model, "cpu") as engine:
        labels = engine({"image": images})[engine.outputs[0].name].argmax(1)
    np.savez(tmp_path / "labelled.npz", image=images, labels=labels)
    return tmp_path / "labelled.npz"


def test_a_graph_whose_pairs_were_moved_passes_the_gate_only_with_labelled_data(
    model: Path, labelled: Path, tmp_path: Path
) -> None:
    for_tensorrt = quantize(model, "int8", tmp_path / "q.onnx", calib=labelled).path
    unchecked = build(for_tensorrt, "cpu", out=tmp_path / "unchecked.onnx")
    assert unchecked.evaluation is None
    assert any("accuracy of this graph was not checked" in note for note in unchecked.notes)
    written = Artefact(unchecked.path).manifest
    assert written is not None
    assert any("not checked" in note for note in written.evidence.notes)
    checked = build(for_tensorrt, "cpu", out=tmp_path / "c.onnx", data=labelled, max_drop=0.5)
    assert checked.drop is not None
    assert checked.drop.n == 300
    assert not any("not checked" in note for note in checked.notes)
    with pytest.raises(dk.GateFailed, match=r"g\.onnx: drop .*; the file is kept as") as caught:
        build(for_tensorrt, "cpu", out=tmp_path / "g.onnx", data=labelled, max_drop=1e-6)
    assert caught.value.result.path == tmp_path / "g.rejected.onnx"
    assert not (tmp_path / "g.onnx").exists()


def test_a_build_in_int8_is_gated_on_the_file_that_it_writes(
    model: Path, labelled: Path, tmp_path: Path
) -> None:
    options = {"precision": "int8", "calib": labelled, "data": labelled}
    made = build(model, "cpu", out=tmp_path / "b.onnx", max_drop=0.5, **options)
    assert made.evaluation is not None
    assert made.evaluation.parity.b == "b.onnx"
    with dk.load(made.path, "cpu") as engine:
        arrays = np.load(labelled)
        answers = engine({"image": arrays["image"]})[engine.outputs[0].name].argmax(1)
    assert made.drop.candidate.value == pytest.approx((answers == arrays["labels"]).mean())
    with pytest.raises(dk.GateFailed, match="the upper end of the drop"):
        build(model, "cpu", out=tmp_path / "g.onnx", max_drop=1e-6, **options)
    assert (tmp_path / "g.rejected.onnx").is_file()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("y = Sigmoid(x)", {"y"}),
        ("s = Sigmoid(x) y = Flatten(s)", {"y"}),
        ("s = Sigmoid(x) y = Mul(s, x)", set()),
        ("y = Softmax(x)", set()),  # its values add up to 1: their noise always says something
    ],
)
def test_outputs_of_a_sigmoid_are_those_that_may_find_nothing(body: str, found: set[str]) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> '
    text += f"g (float[N,4] x) => (float[N,4] y) {{ {body} }}"
    assert share_outputs(Graph(onnx.parser.parse_model(text))) == found
