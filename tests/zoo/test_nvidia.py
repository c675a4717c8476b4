"""NVIDIA's ONNX parser and builder, where they are installed, take every file of the small zoo."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytest.importorskip("tensorrt", reason="tensorrt is not installed", exc_type=ImportError)

from deploykit.core.errors import GateFailed
from tests.support.campaign import CAMPAIGN
from tests.support.zoo.keeper import SMALL, Keeper
from tests.support.zoo.nvidia import verdict

pytestmark = [pytest.mark.torch, pytest.mark.nvidia]


LARGE_LAYERS = ("bert-tiny", "resnet18")  # of 65,536 weights: smaller ones are not worth storing
SLOW = ("fp16", "bf16", "fp8")  # of the same two, which take longest to build
PAIRS = [(name, to) for name in SMALL for to in ("fp32", "fp16", "bf16", "int8", "fp8")]
PAIRS += [(name, "int8-weight-only") for name in LARGE_LAYERS if name in SMALL]
TYPES = ("mnist-cnn", "encoder")  # whose types all run in each test, others' in a campaign
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
