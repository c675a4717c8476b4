"""Exporting through torch's real exporter: names, dynamic axes, parity, and what it refuses."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.engine import load  # noqa: E402
from deploykit.engines.torch.open import save_checkpoint  # noqa: E402
from deploykit.exporting.export import export  # noqa: E402
from deploykit.exporting.onnx import export_module  # noqa: E402

pytestmark = pytest.mark.torch

IMAGE, FOUR = parse_spec("image:float32[N,1,8,8]"), parse_spec("y:float32[N,4]")
ARCH = """
import torch
def Small():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 4)
    )
class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.ones(1))
    def forward(self, image):
        if image.sum() > 0:
            return image.sum((1, 2, 3))[:, None] * self.one
        return image.sum((1, 2, 3))[:, None] - self.one
"""


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 4)
    ).eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "arch.py").write_text(ARCH, encoding="utf-8")
    save_checkpoint(tmp_path / "small.pt", small(), "own", [IMAGE], [FOUR])
    return tmp_path / "small.pt"


def test_names_axes_and_opset_are_as_asked(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    export_module(small(), [IMAGE], [FOUR], out, opset=18)
    model = onnx.load(out)
    assert [item.version for item in model.opset_import if item.domain == ""] == [18]
    with load(out, "cpu") as engine:
        assert (engine.inputs, engine.outputs) == ((IMAGE,), (FOUR,))


def test_the_same_model_gives_the_same_bytes_and_no_paths(tmp_path: Path) -> None:
    first, again = tmp_path / "a.onnx", tmp_path / "b.onnx"
    export_module(small(), [IMAGE], [FOUR], first)
    export_module(small(), [IMAGE], [FOUR], again)
    assert first.read_bytes() == again.read_bytes()
    assert b"site-packages" not in first.read_bytes()
    assert b"aten" not in first.read_bytes()


def test_a_causal_mask_made_of_the_length_is_exported(tmp_path: Path) -> None:
    """Torch's layers look at a mask's values to find out whether it is causal."""

    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            values: torch.Tensor = self.layers(x, x, src_mask=mask, tgt_mask=mask)
            return values

    detect = torch.nn.modules.transformer._detect_is_causal_mask
    module = Causal().eval()
    specs = [parse_spec("x:float32[N,T,8]")], [parse_spec("y:float32[N,T,8]")]
    export_module(module, *specs, tmp_path / "m.onnx")
    assert torch.nn.modules.transformer._detect_is_causal_mask is detect
    with load(tmp_path / "m.onnx", "cpu") as engine:
        for rows, length in ((1, 5), (3, 9)):
            x = torch.randn(rows, length, 8)
            with torch.no_grad():
                want = module(x).numpy()
            np.testing.assert_allclose(engine({"x": x.numpy()})["y"], want, atol=1e-5)


def test_two_inputs_share_their_dynamic_axes(tmp_path: Path) -> None:
    class Attend(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (x * mask[:, :, None]).sum(1)

    inputs = [parse_spec("x:float32[N,T,3]"), parse_spec("mask:float32[N,T]")]
    export_module(Attend(), inputs, [parse_spec("y:float32[N,3]")], tmp_path / "m.onnx")
    with load(tmp_path / "m.onnx", "cpu") as engine:
        for rows, length in ((1, 1), (2, 9), (7, 4)):
            feeds = {
                "x": np.ones((rows, length, 3), np.float32),
                "mask": np.ones((rows, length), np.float32),
            }
            np.testing.assert_allclose(engine(feeds)["y"], np.full((rows, 3), length), rtol=1e-6)


def test_export_proves_parity_at_every_batch(checkpoint: Path) -> None:
    made = export(checkpoint, arch=f"{checkpoint.parent}/arch.py:Small")
    assert made.parity is not None
    assert [row.batch for row in made.parity.rows] == [1, 2, 7, 32]
    assert made.parity.passed
    assert made.path == checkpoint.with_suffix(".onnx")
    assert made.manifest.made_with["torch"] == version("torch")
    assert made.manifest.evidence.parity.passed


def test_a_fixed_batch_is_fixed(checkpoint: Path) -> None:
    made = export(checkpoint, arch=f"{checkpoint.parent}/arch.py:Small", batch="3")
    assert made.manifest.inputs[0].shape == (3, 1, 8, 8)
    assert made.manifest.outputs[0].shape == (3, 4)


@pytest.mark.parametrize("batch", ["0", "-1", "two", ""])
def test_a_batch_that_is_no_size_is_refused(checkpoint: Path, batch: str) -> None:
    with pytest.raises(BadInput, match="`batch`"):
        export(checkpoint, arch=f"{checkpoint.parent}/arch.py:Small", batch=batch)


def test_an_opset_that_is_not_offered_is_refused(checkpoint: Path) -> None:
    with pytest.raises(BadInput, match="opset 3"):
        export(checkpoint, arch=f"{checkpoint.parent}/arch.py:Small", opset=3)


def test_a_model_that_cannot_be_exported_says_why_and_leaves_nothing(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Control flow that depends on the data."""
    path = tmp_path / "branch.pt"
    torch.save({"one": torch.ones(1)}, path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadInput, match=r"arch\.py:12, in forward: `if image\.sum\(\) > 0:`"):
        export(path, arch=f"{tmp_path}/arch.py:Branch", inputs=["image:float32[N,1,8,8]"])
    assert [item for item in sorted(tmp_path.iterdir()) if item.name != "__pycache__"] == before
