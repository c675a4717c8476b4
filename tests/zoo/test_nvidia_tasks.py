"""NVIDIA's ONNX parser and builder take the graphs that `export --task` writes, but for NMS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytest.importorskip("tensorrt", reason="tensorrt is not installed", exc_type=ImportError)

import deploykit as dk  # noqa: E402
from tests.support.installed import needs  # noqa: E402
from tests.support.runtimes.tokenizer import write_tokenizer  # noqa: E402
from tests.support.zoo.nvidia import trt, verdict  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.nvidia]

nn = torch.nn
IMAGE, TEXT = ["image:float32[N,3,32,32]"], [f"{name}:int64[N,T]" for name in ("ids", "mask")]


def convolutions(*last: Any) -> Any:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), *last)


class Words(nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """The vectors of tokens, or the classes of their mean."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.head = nn.Linear(16, classes) if classes else None

    def forward(self, ids: Any, mask: Any) -> Any:
        tokens = self.embedding(ids) * mask.unsqueeze(-1)
        return tokens if self.head is None else self.head(tokens.mean(1))


def yolo() -> Any:
    """[N,4+classes,boxes], as Ultralytics answers."""
    return convolutions(nn.Conv2d(8, 6, 1), nn.Sigmoid(), nn.Flatten(2))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "classify": (lambda: convolutions(nn.Flatten(), nn.Linear(2048, 4)), {}),
    "segment": (lambda: convolutions(nn.Conv2d(8, 4, 1)), {}),
    "embed": (lambda: convolutions(nn.Flatten(), nn.Linear(2048, 16)), {}),
    "text-classify": (lambda: Words(3), {}),
    "embed of a text": (lambda: Words(0), {"pooling": "mean"}),
}


def exported(make: Any, task: str, folder: Path, **more: Any) -> Path:
    """As bytes or tokens in, the task's answers out, in any batch."""
    torch.manual_seed(0)
    module = make().eval()
    if isinstance(module, Words):
        needs("tokenizers")
        write_tokenizer(folder / "tokenizer.json")
        more |= {"inputs": TEXT, "tokenizer": folder / "tokenizer.json", "max_length": 64}
    else:
        more |= {"inputs": IMAGE, "preprocess": "imagenet"}
    return dk.export(module, out=folder / "m.onnx", task=task, **more).path


@pytest.mark.parametrize("case", CASES)
def test_nvidias_builder_accepts_the_graph_of_a_task(tmp_path: Path, case: str) -> None:
    make, more = CASES[case]
    found = verdict(exported(make, case.partition(" ")[0], tmp_path, **more))
    assert found.accepted, found.why


@pytest.mark.skipif(not hasattr(trt, "IS_RTX_RIG"), reason="TensorRT itself has NMS")
def test_the_builder_of_tensorrt_for_rtx_has_no_kernel_for_nms(tmp_path: Path) -> None:
    """As docs/tasks.md says; when it has one, the page is wrong."""
    found = verdict(exported(yolo, "detect", tmp_path))
    assert not found.accepted
    assert "NonMaxSuppression" in found.why
