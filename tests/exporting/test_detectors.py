"""Detectors: code of torchvision that selects boxes by the data, which a tracer takes whole."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.engines.engine import load  # noqa: E402
from deploykit.exporting.export import export  # noqa: E402

pytestmark = pytest.mark.torch

# written as torchvision/ops/boxes.py is: a branch on a size that follows the data, scripted
SELECTS = """
import torch

def select(boxes, least):
    return _among(boxes[torch.where(boxes[:, 0] > least)[0]])

@torch.jit._script_if_tracing
def _among(boxes):
    if boxes.numel() == 0:
        return torch.zeros((0, 4))
    return boxes - boxes.max()
"""


@pytest.fixture
def select(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function of a file in a folder of that name; torchvision itself may not fit this torch."""
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "selects_boxes.py").write_text(SELECTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("selects_boxes").select


def detector(select: Any, *, branch: bool) -> torch.nn.Module:
    class Detector(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            boxes = images.flatten(1).reshape(-1, 4)
            if branch and boxes.sum() > 0:
                boxes = boxes * 2
            found: torch.Tensor = select(boxes, 0.5)
            return found

    return Detector()


def test_a_detector_goes_through_the_older_exporter_with_an_output_of_any_size(
    tmp_path: Path, select: Any
) -> None:
    module = detector(select, branch=False)
    made = export(module, inputs=["images:float32[1,3,8,8]"], out=tmp_path / "m.onnx")
    assert made.manifest.evidence.export.exporter == "torchscript"
    assert "selects_boxes.py:9" in made.manifest.evidence.export.fallback
    assert [str(each) for each in made.manifest.outputs] == ["output:float32[output_0,4]"]
    with load(tmp_path / "m.onnx", "cpu") as engine:
        for least in (0.0, 0.4, 2.0):  # many boxes, some, none
            images = np.random.default_rng(0).random((1, 3, 8, 8), np.float32) - np.float32(least)
            want = module(torch.from_numpy(images)).numpy()
            np.testing.assert_allclose(engine({"images": images})["output"], want, atol=1e-6)


def test_a_branch_of_the_user_s_own_is_still_refused(tmp_path: Path, select: Any) -> None:
    with pytest.raises(BadInput, match=r"test_detectors\.py:\d+, in forward: `if branch and"):
        export(
            detector(select, branch=True),
            inputs=["images:float32[1,3,8,8]"],
            out=tmp_path / "m.onnx",
        )


GROWS = """
import torch

@torch.jit._script_if_tracing
def doubled(rows):
    found = torch.zeros(0, 4)
    for at in range(rows.size(0)):
        found = torch.cat((found, 2 * rows[at].unsqueeze(0)))
    return found.unsqueeze(1)
"""


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_loop_over_the_boxes_keeps_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchvision pastes the masks of Mask R-CNN; the optimizer kept the first alone."""
    (tmp_path / "grows_by_rows.py").write_text(GROWS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    doubled = importlib.import_module("grows_by_rows").doubled

    class Loop(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = doubled(rows)
            return found

    traced = torch.jit.trace(Loop(), torch.ones(2, 4))
    export(traced, inputs=["rows:float32[N,4]"], out=tmp_path / "m.onnx")
    with load(tmp_path / "m.onnx", "cpu") as engine:
        for count in (1, 3, 0):
            rows = np.arange(4 * count, dtype=np.float32).reshape(count, 4)
            np.testing.assert_array_equal(engine({"rows": rows})["output"], 2 * rows[:, None])
