"""Our TensorRT engine on a TensorRT and a CUDA made of Python, which compute what a `Case` does.

In: a case. Out: the real `TensorRtEngine` with stand-ins below it, so that the conformance suite
proves its names, dtypes, shapes, batches and buffers on machines without a GPU. What the real
libraries do is proven where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.manifest import Manifest
from deploykit.engines.engine import Engine
from deploykit.engines.tensorrt.compatibility import PlanFile
from deploykit.engines.tensorrt.engine import TensorRtEngine
from tests.support.runtimes import fake_tensorrt as fake
from tests.support.runtimes.cases import LARGEST_BATCH, LARGEST_STEPS, Case
from tests.support.runtimes.own_cuda import FakeCuda

_NAMES = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64", "bool": "BOOL"}
_SIZES = {"N": (1, 8, LARGEST_BATCH), "T": (1, 3, LARGEST_STEPS)}


def open_stand_in(folder: Path, case: Case) -> Engine:
    """`case` as a plan for batches of 1 to `LARGEST_BATCH`, with a manifest that names its axes."""
    tensors = [
        fake.tensor(spec.name, mode, [-1 if isinstance(n, str) else n for n in spec.shape], dtype)
        for mode, specs in (("INPUT", case.input_specs), ("OUTPUT", case.output_specs))
        for spec in specs
        for dtype in [_NAMES[spec.dtype]]
    ]
    profile = {
        spec.name: [
            [_SIZES[n][at] if isinstance(n, str) else n for n in spec.shape] for at in range(3)
        ]
        for spec in case.input_specs
    }
    manifest = Manifest("tensorrt", case.input_specs, case.output_specs, {}, "", (), {})
    cuda = FakeCuda(new_machine=False)
    plan = PlanFile(fake.plan_bytes(tensors, [profile]), (), host_code=False)
    return TensorRtEngine(_Module(cuda, case), cuda, folder / f"{case.name}.trt", plan, manifest)


class _Module(fake.FakeTensorRt):
    def __init__(self, cuda: FakeCuda, case: Case) -> None:
        super().__init__(cuda)
        self.case = case

    def Runtime(self, logger: Any) -> _Runtime:  # noqa: N802 - as TensorRT has it
        super().Runtime(logger)
        return _Runtime(self)


class _Context(fake.Context):
    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Of the sizes that the inputs were given, by the names of the case's axes."""
        case: Case = self.nv.case
        sizes: dict[Any, int] = {}
        for spec in case.input_specs:
            sizes.update(zip(spec.shape, self.shapes[spec.name], strict=True))
        spec = next(s for s in (*case.input_specs, *case.output_specs) if s.name == name)
        return tuple(sizes[n] if isinstance(n, str) else n for n in spec.shape)

    def execute_async_v3(self, stream: int) -> bool:
        case: Case = self.nv.case
        inputs = {s.name: self._array(s.name, self.shapes[s.name]) for s in case.input_specs}
        outputs = self._outputs([spec.name for spec in case.output_specs])

        def run() -> None:
            for name, values in case.compute(inputs).items():
                outputs[name][:] = values

        self.nv.cuda.push(stream, "enqueue", run)
        return True

    def _outputs(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self._array(name, self.get_tensor_shape(name)) for name in names}


class _Engine(fake.Engine):
    kind = _Context


class _Runtime(fake.Runtime):
    kind = _Engine
