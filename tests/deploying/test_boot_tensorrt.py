"""`deploykit boot` of a TensorRT engine, on a machine with an NVIDIA L4 that is made of Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import deploykit as dk
from tests.support.boots import boot, failing
from tests.support.bundles import proven_model
from tests.support.runtimes.cases import AFFINE, onnx_model
from tests.support.runtimes.gpu_machine import gpu_machine


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    model = proven_model(tmp_path / "affine.onnx", onnx_model(AFFINE))
    dk.bundle(model, "l4", out=tmp_path / "bundle", batch="1,4,8")
    return tmp_path / "bundle"


def test_the_engine_is_built_for_this_gpu_and_then_cached(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with gpu_machine(tmp_path, monkeypatch):
        first = boot(bundle, cache, device="auto")
        again = boot(bundle, cache, failing(AssertionError("built again")), device="auto")
    assert (first.source, again.source) == ("build", "cache")
    found = json.loads((cache / first.slot / "slot.json").read_text())
    key = {name: found["key"][name] for name in ("gpu", "sm_count", "compute_capability", "batch")}
    assert key == {
        "gpu": "NVIDIA L4",
        "sm_count": 58,
        "compute_capability": "8.9",
        "batch": "1,4,8",
    }
    assert found["engine"] == "affine.trt"
