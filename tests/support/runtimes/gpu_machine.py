"""A machine with an NVIDIA L4, made of Python: its driver's tool, its CUDA, its TensorRT.

In: what its TensorRT builds. Out: everything above it is real: `deploykit build`, the checks of a
plan, our runtime, the proof. The model that it knows is y = 2x + 1 on float32[N,4].
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.artefact import Manifest
from deploykit.engines.tensorrt.compatibility import PlanFile
from deploykit.engines.tensorrt.engine import TensorRtEngine
from tests.support.runtimes import fake_tensorrt as fake
from tests.support.runtimes.fake_tensorrt import Behaviour, replaced
from tests.support.runtimes.own_cuda import FakeCuda, rows

GPU = "NVIDIA L4"
LAYER = {
    "Name": "node_of_m + node_of_y",
    "LayerType": "kgen",
    "Inputs": [{"Name": "x", "Format/Datatype": "Float"}],
    "Outputs": [{"Name": "y", "Format/Datatype": "Float"}],
}
LAYERS = json.dumps({"Layers": [LAYER]})
X, Y = fake.tensor("x", "INPUT", [-1, 4]), fake.tensor("y", "OUTPUT", [-1, 4])


def plan(batch: tuple[int, int, int] = (1, 8, 32), **more: Any) -> bytes:
    return fake.plan_bytes((X, Y), [{"x": [[n, 4] for n in batch]}], **more)


class Cuda(FakeCuda):
    sm_count = 58

    def describe(self) -> dict[str, Any]:
        facts = {"gpu": GPU, "compute_capability": "8.9", "sm_count": self.sm_count}
        return {**facts, "driver": "580.65.06", "cuda": "13.0"}


def in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let builds run here, as another process would not find a TensorRT made of Python."""

    def run(_what: str, function: Any, *arguments: Any, on_progress: Any = None) -> Any:
        return function(*arguments, on_progress or (lambda *_: None))

    patch.setattr("deploykit.building.tensorrt.run_apart", run)


@contextmanager
def gpu_machine(
    folder: Path, patch: pytest.MonkeyPatch, *, content: bytes | None = None, has_cuda: bool = True
) -> Iterator[Behaviour]:
    """The machine inside the block; `folder` gets its `nvidia-smi`.

    `content`: the plan that its TensorRT gives for whatever it is asked to build. `has_cuda`: its
    CUDA bindings are installed.
    """
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{GPU}, 23034, 580.65.06, 8.9'\n")
    smi.chmod(0o755)
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    patch.setenv("DEPLOYKIT_CACHE", str(folder / "cache"))
    does = Behaviour(plan=content or plan(layers=LAYERS))
    cuda = Cuda()
    does.seen["cuda"] = cuda
    module = does.seen["nv"] = fake.FakeTensorRt(cuda, does)
    opened: list[int] = does.seen.setdefault("devices", [])

    def device(number: int) -> Cuda:
        opened.append(number)
        return cuda

    in_this_process(patch)
    driver = SimpleNamespace(CudaDevice=device)
    bindings = (
        replaced("deploykit.engines.cuda.driver", driver) if has_cuda else replaced("cuda", None)
    )
    with replaced("tensorrt", module), bindings:
        yield does


# an engine opened on its stand-ins alone

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
        scratch: int = 0,
        memory: Mapping[str, int] | None = None,
        notes: tuple[str, ...] = (),
        dla: int | None = None,
        computes: fake.Computes = fake.affine,
        **options: Any,
    ) -> None:
        self.cuda = cuda or FakeCuda()
        self.nv = fake.FakeTensorRt(self.cuda, computes=computes)
        self.nv.fail = fail or {}
        content = fake.plan_bytes(tensors, profiles, scratch=scratch, **memory or {})
        plan = PlanFile(Path("m.trt"), content, manifest, notes, dla=dla)
        self.engine = TensorRtEngine(self.nv, self.cuda, plan, **options)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *raised: object) -> None:
        self.engine.close()
        assert raised[0] or self.cuda.held() == {}
