"""`export` from the outside: the preprocessing contract, golden samples, axes that were baked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.core.artefact import Artefact  # noqa: E402
from deploykit.core.files import (  # noqa: E402
    manifest_path,
    sha256,
)
from deploykit.evaluation import golden  # noqa: E402

pytestmark = pytest.mark.torch

ARCH = """
import math
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, image):
        x = torch.relu(self.conv(image))
        return self.head(x.mean(dim=(2, 3)))

class Fixed(Net):
    def forward(self, image):
        x = torch.relu(self.conv(image))
        return self.head(x.mean(dim=(2, 3)).reshape(int(math.sqrt(image.shape[0] ** 2)), 4))
"""


@pytest.fixture
def arch(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(ARCH)
    return str(path)


@pytest.fixture
def weights(tmp_path: Path, arch: str) -> Path:
    from deploykit.core.files import import_object

    torch.manual_seed(0)
    build = import_object(f"{arch}:Net")
    assert callable(build)
    path = tmp_path / "net.pt"
    torch.save(build().state_dict(), path)
    return path


SPEC = "image:float32[N,3,8,8]"


def test_the_graph_takes_uint8_images_and_normalises_them_for_imagenet(
    weights: Path, arch: str, tmp_path: Path
) -> None:
    plain = dk.export(weights, out=tmp_path / "plain.onnx", arch=f"{arch}:Net", inputs=[SPEC])
    made = dk.export(
        weights,
        out=tmp_path / "bytes.onnx",
        arch=f"{arch}:Net",
        inputs=[SPEC],
        preprocess="imagenet",
    )
    assert [str(spec) for spec in made.manifest.inputs] == ["image:uint8[N,8,8,3]"]
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    floats = ((pixels / 255 - mean) / std).transpose(0, 3, 1, 2).astype(np.float32)
    with dk.load(plain.path, "cpu") as a, dk.load(made.path, "cpu") as b:
        name = a.outputs[0].name
        np.testing.assert_allclose(
            b({"image": pixels})[name], a({"image": floats})[name], atol=2e-6
        )
    assert made.manifest.evidence.export.preprocess.name == "imagenet"
    assert made.parity is not None
    assert {row.batch for row in made.parity.rows} == {1, 2, 7, 32}


def test_an_export_records_samples_and_compare_replays_them(
    weights: Path, arch: str, tmp_path: Path
) -> None:
    made = dk.export(weights, out=tmp_path / "m.onnx", arch=f"{arch}:Net", inputs=[SPEC])
    samples = golden.samples_path(made.path)
    assert samples.is_file()
    replayed = dk.compare(made.path)
    assert replayed.parity.passed
    assert replayed.parity.a.startswith("torch ")
    with np.load(samples) as arrays:
        assert arrays["inputs/image"].shape == (golden.SAMPLES, 3, 8, 8)
        changed = {name: arrays[name] for name in arrays.files}
    changed["outputs/output"] = changed["outputs/output"] + 1
    np.savez(samples, **changed)
    with pytest.raises(dk.BadInput, match="SHA-256 differs"):
        dk.compare(made.path)
    document = json.loads(manifest_path(made.path).read_text())
    document["evidence"]["golden"]["sha256"] = sha256(samples)
    manifest_path(made.path).write_text(json.dumps(document))
    with pytest.raises(dk.GateFailed, match=r"m\.onnx"):
        dk.compare(made.path).raise_if_over()


def test_golden_samples_outside_the_folder_are_refused(
    weights: Path, arch: str, tmp_path: Path
) -> None:
    made = dk.export(weights, out=tmp_path / "m.onnx", arch=f"{arch}:Net", inputs=[SPEC])
    document = json.loads(manifest_path(made.path).read_text())
    for name in ("../m.golden.npz", "/etc/passwd", "a/../b", ""):
        document["evidence"]["golden"]["file"] = name
        manifest_path(made.path).write_text(json.dumps(document))
        with pytest.raises(dk.BadInput):
            dk.compare(made.path)


def test_artefacts_made_from_an_export_keep_its_golden_samples(
    weights: Path, arch: str, tmp_path: Path
) -> None:
    made = dk.export(weights, out=tmp_path / "m.onnx", arch=f"{arch}:Net", inputs=[SPEC])
    half = dk.quantize(made.path, "fp16", tmp_path / "h.onnx")
    built = dk.build(half.path, "cpu", out=tmp_path / "b.onnx")
    bounds = [dk.inspect(item.path).manifest.evidence.golden.max_error for item in (made, half)]
    assert 1e-3 <= bounds[1] < 1e-1
    for item in (half, built):
        assert dk.compare(item.path).parity.passed
        assert dk.compare(item.path).parity.a.startswith("torch ")


def test_comparing_a_file_without_golden_samples_is_refused_with_a_reason(tmp_path: Path) -> None:
    from tests.support.onnx_zoo import linear, save

    path = save(linear(), tmp_path / "x.onnx")
    with pytest.raises(dk.DeploykitError, match="no golden samples"):
        dk.compare(path)


def test_real_samples_are_compared_and_recorded(weights: Path, arch: str, tmp_path: Path) -> None:
    data = tmp_path / "d.npz"
    images = np.random.default_rng(0).random((40, 3, 8, 8), dtype=np.float32)
    np.savez(data, image=images)
    made = dk.export(
        weights, out=tmp_path / "m.onnx", arch=f"{arch}:Net", inputs=[SPEC], samples=data
    )
    with np.load(golden.samples_path(made.path)) as arrays:
        np.testing.assert_array_equal(arrays["inputs/image"], images[: golden.SAMPLES])


def test_the_manifest_says_what_was_loaded_and_how_it_was_exported(
    weights: Path, arch: str, tmp_path: Path
) -> None:
    made = dk.export(
        weights, out=tmp_path / "m.onnx", arch=f"{arch}:Net", inputs=[SPEC], profile="h200"
    )
    manifest = Artefact(made.path).manifest
    assert manifest is not None
    source = manifest.evidence.source
    assert source.kind == "state_dict"
    assert source.ran_pickle is False
    assert source.sha256 == sha256(weights)
    assert source.arch_sha256 == sha256(Path(arch))
    export = manifest.evidence.export
    assert (export.exporter, export.fallback, export.profile) == ("dynamo", None, "h200")
    assert manifest.evidence.preflight.problems == ()


def test_an_export_for_a_jetson_has_an_older_opset(
    weights: Path, arch: str, tmp_path: Path
) -> None:
    made = dk.export(
        weights,
        out=tmp_path / "m.onnx",
        arch=f"{arch}:Net",
        inputs=[SPEC],
        profile="jetson-orin-nano-8gb",
    )
    assert made.manifest.evidence.export.opset == 18


def test_an_axis_that_the_model_fixes_is_named(weights: Path, arch: str, tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput, match=r"axis.*N|N.*axis"):
        dk.export(weights, out=tmp_path / "m.onnx", arch=f"{arch}:Fixed", inputs=[SPEC])
    assert not (tmp_path / "m.onnx").exists()


def test_an_export_with_a_fixed_batch_has_that_batch(
    weights: Path, arch: str, tmp_path: Path
) -> None:
    made = dk.export(
        weights, out=tmp_path / "m.onnx", arch=f"{arch}:Fixed", inputs=[SPEC], batch="4"
    )
    assert made.manifest.inputs[0].shape[0] == 4


def test_the_output_must_not_be_the_input_file(weights: Path, arch: str) -> None:
    before = weights.read_bytes()
    with pytest.raises(dk.BadInput, match=r"the name says \.pt"):
        dk.export(weights, out=weights, arch=f"{arch}:Net", inputs=[SPEC])
    assert weights.read_bytes() == before


def test_a_program_is_compared_within_its_exported_size_range(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=4, max=16)
    program = torch.export.export(
        torch.nn.Linear(3, 2), (torch.zeros(5, 3),), dynamic_shapes=({0: rows},)
    )
    path = tmp_path / "p.pt2"
    torch.export.save(program, path)
    made = dk.export(path, allow_pickle=True)
    assert made.parity is not None
    assert [row.batch for row in made.parity.rows] == [4, 7, 16]
    assert made.manifest.evidence.source.ran_pickle is True
    assert any("ran code of its own" in note for note in made.notes)
