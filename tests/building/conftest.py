"""The fixtures of the tests that build with a TensorRT made of Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploykit.building.builder import BuildResult
from deploykit.building.tensorrt.build import build
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.fake_tensorrt import Behaviour, FakeTensorRt, options, replaced


class Rig:
    """A model, the place of its plan, and the TensorRT that stands in for the installed one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.model, self.out = save(linear(), folder / "m.onnx"), folder / "m.trt"
        self._stack = stack

    def use(self, name: str = "tensorrt", **behaviour: Any) -> Behaviour:
        does = Behaviour(**behaviour)
        self._stack.enter_context(replaced(name, FakeTensorRt(does=does)))
        return does

    def build(
        self, model: Path | None = None, on_progress: Any = None, **given: Any
    ) -> BuildResult:
        return build(model or self.model, self.out, options(**given), on_progress)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)
