"""The fixtures of the tests that build with a TensorRT made of Python.

Each is imported by its function's name and asked for by its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploykit.building.tensorrt.options import AxisRange, Options
from deploykit.core.profile import load_profile
from tests.support.builders.fake_tensorrt import Behaviour, make
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.modules import replaced

BATCH = AxisRange(1, 4, 8)
NO_FORMATS = (
    "IBuilder::buildSerializedNetwork: Error Code 9: Internal Error (conv: could not find any "
    "supported formats consistent with input/output data types)"
)


@pytest.fixture(name="cache", autouse=True)
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path) -> Path:
    return save(linear(), tmp_path / "m.onnx")


@pytest.fixture(name="out")
def out_fixture(tmp_path: Path) -> Path:
    return tmp_path / "m.trt"


Use = Callable[..., Behaviour]


@pytest.fixture(name="use")
def use_fixture() -> Iterator[Use]:
    """Put a TensorRT that behaves as told in place of the installed one."""
    with ExitStack() as stack:

        def install(name: str = "tensorrt", **behaviour: Any) -> Behaviour:
            does = Behaviour(**behaviour)
            stack.enter_context(replaced(name, make(does)))
            return does

        yield install


def options(profile: str = "l4", **more: Any) -> Options:
    return Options(load_profile(profile), BATCH, **more)
