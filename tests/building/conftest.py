"""The fixtures of the tests that build with a TensorRT made of Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.fake_tensorrt import Behaviour, FakeTensorRt, Use, replaced


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(linear(), tmp_path / "m.onnx")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "m.trt"


@pytest.fixture
def use() -> Iterator[Use]:
    with ExitStack() as stack:

        def install(name: str = "tensorrt", **behaviour: Any) -> Behaviour:
            does = Behaviour(**behaviour)
            stack.enter_context(replaced(name, FakeTensorRt(does=does)))
            return does

        yield install
