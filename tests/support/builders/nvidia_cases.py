"""What the tests that ask the builder that is here share: TensorRT, or TensorRT for RTX."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from deploykit.building.builder import Options
from deploykit.building.tensorrt import BuildCheck, check
from deploykit.core.profile import load_profile
from tests.support.onnx_zoo import save
from tests.support.runtimes import fake_tensorrt

ask = pytest.mark.nvidia
needs = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is None, reason="tensorrt is not installed"
)


def options(workspace_bytes: int = 1 << 30, **more: Any) -> Options:
    l4 = replace(load_profile("l4"), workspace_bytes=workspace_bytes)
    return fake_tensorrt.options(l4, **more)


def checked(model: onnx.ModelProto, tmp_path: Path, **more: Any) -> BuildCheck:
    return check(save(model, tmp_path / "m.onnx"), options(**more))
