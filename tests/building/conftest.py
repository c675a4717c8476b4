"""The fixtures of the tests that build with a TensorRT made of Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.runtimes.fake_tensorrt import Rig
from tests.support.runtimes.gpu_machine import in_this_process


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    in_this_process(monkeypatch)
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)
