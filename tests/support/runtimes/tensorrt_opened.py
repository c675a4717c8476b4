"""An engine opened on a TensorRT and a CUDA made of Python, for the tests of the runtime.

The fixture is imported by its function's name and asked for as `opened`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.manifest import Manifest
from deploykit.engines.tensorrt.compatibility import PlanFile
from deploykit.engines.tensorrt.engine import TensorRtEngine
from tests.support.runtimes.fake_tensorrt import FakeTensorRt, plan_bytes, tensor
from tests.support.runtimes.own_cuda import FakeCuda

X = tensor("x", "INPUT", [-1, 4])
Y = tensor("y", "OUTPUT", [-1, 4])
PROFILE = {"x": [[1, 4], [8, 4], [32, 4]]}


class Opened:
    """An engine and the stand-ins below it. `memory`: bytes of `weights` and of a `context`."""

    def __init__(
        self,
        tensors: tuple[Any, ...] = (X, Y),
        profiles: tuple[Any, ...] = (PROFILE,),
        manifest: Manifest | None = None,
        *,
        cuda: FakeCuda | None = None,
        fail: dict[str, str] | None = None,
        noise: dict[str, str] | None = None,
        scratch: int = 0,
        memory: Mapping[str, int] | None = None,
        notes: tuple[str, ...] = (),
        dla: int | None = None,
        **options: Any,
    ) -> None:
        self.cuda = cuda or FakeCuda()
        self.nv = FakeTensorRt(self.cuda)
        self.nv.fail, self.nv.noise = fail or {}, noise or {}
        content = plan_bytes(tensors, profiles, scratch=scratch, **memory or {})
        plan = PlanFile(content, notes, host_code=False, dla=dla)
        self.engine = TensorRtEngine(self.nv, self.cuda, Path("m.trt"), plan, manifest, **options)


@pytest.fixture(name="opened")
def opened_fixture() -> Iterator[Opened]:
    """The model y = 2x + 1 on float32[N,4], batches 1 to 32."""
    found = Opened()
    yield found
    found.engine.close()
    assert found.cuda.held() == {}
