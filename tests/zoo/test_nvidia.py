"""NVIDIA's ONNX parser and builder take the small zoo's files and a task's graphs, but for NMS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("tensorrt", reason="tensorrt is not installed", exc_type=ImportError)

import deploykit as dk  # noqa: E402
from deploykit.core.errors import GateFailed  # noqa: E402
from tests.support.campaign import CAMPAIGN  # noqa: E402
from tests.support.installed import needs  # noqa: E402
from tests.support.runtimes.tokenizer import write_tokenizer  # noqa: E402
from tests.support.zoo.keeper import SMALL, Keeper  # noqa: E402
from tests.support.zoo.nvidia import trt, verdict  # noqa: E402

needs("onnxscript")

pytestmark = [pytest.mark.torch, pytest.mark.nvidia]
nn = torch.nn

LARGE_LAYERS = ("bert-tiny", "resnet18")  # of 65,536 weights: smaller ones are not worth storing
SLOW = ("fp16", "bf16", "fp8")  # of the same two, which take longest to build
PAIRS = [(name, to) for name in SMALL for to in ("fp32", "fp16", "bf16", "int8", "fp8")]
PAIRS += [(name, "int8-weight-only") for name in LARGE_LAYERS if name in SMALL]
TYPES = ("mnist-cnn", "encoder-masked")  # whose types all run in each test, others' in a campaign
if not CAMPAIGN:
    PAIRS = [
        (name, to)
        for name, to in PAIRS
        if (name not in LARGE_LAYERS or to not in SLOW)
        and (name in TYPES or to not in ("bf16", "fp8"))
    ]
# a member's files are made once, by one worker
GROUPED = [pytest.param(*pair, marks=pytest.mark.xdist_group(pair[0])) for pair in PAIRS]


@pytest.mark.parametrize(("name", "to"), GROUPED)
def test_nvidias_builder_accepts_every_file_that_passed(keeper: Keeper, name: str, to: str) -> None:
    try:
        made = keeper.quantized(name, to)
    except GateFailed as exc:
        pytest.skip(f"not an accepted file: {exc.message}")
    found = verdict(made.path)
    assert found.accepted, found.why


def convolutions(*last: Any) -> Any:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), *last)


class Words(nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.head = nn.Linear(16, classes) if classes else None

    def forward(self, ids: Any, mask: Any) -> Any:
        tokens = self.embedding(ids) * mask.unsqueeze(-1)
        return tokens if self.head is None else self.head(tokens.mean(1))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "classify": (lambda: convolutions(nn.Flatten(), nn.Linear(2048, 4)), {}),
    "segment": (lambda: convolutions(nn.Conv2d(8, 4, 1)), {}),
    "embed": (lambda: convolutions(nn.Flatten(), nn.Linear(2048, 16)), {}),
    "text-classify": (lambda: Words(3), {}),
    "embed of a text": (lambda: Words(0), {"pooling": "mean"}),
    # [N,4+classes,boxes], as Ultralytics answers; TensorRT for RTX has no kernel for NMS, as
    # docs/tasks.md says: when it has one, the page is wrong
    "detect": (lambda: convolutions(nn.Conv2d(8, 6, 1), nn.Sigmoid(), nn.Flatten(2)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_nvidias_builder_accepts_the_graph_of_a_task_but_nms(tmp_path: Path, case: str) -> None:
    if case == "detect" and not hasattr(trt, "IS_RTX_RIG"):
        pytest.skip("TensorRT itself has NMS")
    make, more = CASES[case]
    torch.manual_seed(0)
    module = make().eval()
    if isinstance(module, Words):
        needs("tokenizers")
        write_tokenizer(tmp_path / "tokenizer.json")
        more = {**more, "inputs": ["ids:int64[N,T]", "mask:int64[N,T]"], "max_length": 64}
        more["tokenizer"] = tmp_path / "tokenizer.json"
    else:
        more = {**more, "inputs": ["image:float32[N,3,32,32]"], "preprocess": "imagenet"}
    task = case.partition(" ")[0]
    found = verdict(dk.export(module, out=tmp_path / "m.onnx", task=task, **more).path)
    assert found.accepted is (case != "detect"), found.why
    assert case != "detect" or "NonMaxSuppression" in found.why
