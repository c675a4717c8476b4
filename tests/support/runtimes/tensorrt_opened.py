"""An engine opened on a TensorRT made of Python and our CUDA driver, for tests of the runtime.

The fixture is imported by its function's name and asked for as `opened`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.manifest import Manifest
from deploykit.engines.tensorrt.compatibility import PlanFile
from deploykit.engines.tensorrt.engine import TensorRtEngine
from tests.support.runtimes.fake_tensorrt import Computes, FakeTensorRt, affine, plan_bytes, tensor
from tests.support.runtimes.own_cuda import FakeCuda, rows

X = tensor("x", "INPUT", [-1, 4])
Y = tensor("y", "OUTPUT", [-1, 4])
PROFILE = {"x": [[1, 4], [8, 4], [32, 4]]}


def right(engine: TensorRtEngine, count: int, start: float = 0.0) -> bool:
    x = rows(count, start=start)
    return np.array_equal(engine({"x": x})["y"], 2 * x + 1)


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
        computes: Computes = affine,
        **options: Any,
    ) -> None:
        self.cuda = cuda or FakeCuda()
        self.nv = FakeTensorRt(self.cuda, computes=computes)
        self.nv.fail, self.nv.noise = fail or {}, noise or {}
        content = plan_bytes(tensors, profiles, scratch=scratch, **memory or {})
        plan = PlanFile(content, notes, host_code=False, dla=dla)
        self.engine = TensorRtEngine(self.nv, self.cuda, Path("m.trt"), plan, manifest, **options)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *raised: object) -> None:
        self.engine.close()
        assert raised[0] or self.cuda.held() == {}


@pytest.fixture(name="opened")
def opened_fixture() -> Iterator[Opened]:
    """The model y = 2x + 1 on float32[N,4], batches 1 to 32."""
    with Opened() as opened:
        yield opened
