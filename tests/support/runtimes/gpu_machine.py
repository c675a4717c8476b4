"""A machine with an NVIDIA L4, made of Python: its driver's tool, its CUDA, its TensorRT.

In: what its TensorRT builds. Out: everything above it is real: `deploykit build`, the checks of a
plan, our runtime, the proof. The model that it knows is y = 2x + 1 on float32[N,4].
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.runtimes import fake_tensorrt as fake
from tests.support.runtimes.fake_tensorrt import Behaviour, replaced
from tests.support.runtimes.own_cuda import FakeCuda

GPU = "NVIDIA L4"
LAYER = {
    "Name": "node_of_m + node_of_y",
    "LayerType": "kgen",
    "Inputs": [{"Name": "x", "Format/Datatype": "Float"}],
    "Outputs": [{"Name": "y", "Format/Datatype": "Float"}],
}
LAYERS = json.dumps({"Layers": [LAYER]})
TENSORS = (fake.tensor("x", "INPUT", [-1, 4]), fake.tensor("y", "OUTPUT", [-1, 4]))


def plan(batch: tuple[int, int, int] = (1, 8, 32), **more: Any) -> bytes:
    return fake.plan_bytes(TENSORS, [{"x": [[n, 4] for n in batch]}], **more)


class Cuda(FakeCuda):
    sm_count = 58

    def describe(self) -> dict[str, Any]:
        facts = {"gpu": GPU, "compute_capability": "8.9", "sm_count": self.sm_count}
        return {**facts, "driver": "580.65.06", "cuda": "13.0"}


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

    driver = SimpleNamespace(CudaDevice=device)
    bindings = (
        replaced("deploykit.engines.cuda.driver", driver) if has_cuda else replaced("cuda", None)
    )
    with replaced("tensorrt", module), bindings:
        yield does
