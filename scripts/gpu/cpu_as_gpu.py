"""deploykit with this machine's CPU in the GPU's place: to rehearse what needs a GPU.

    python -m scripts.gpu.cpu_as_gpu bench model.onnx --device cuda

Everything runs but the GPU: an engine of ONNX Runtime or PyTorch that is asked for on "cuda" opens
on the CPU and reports "cuda:0"; ONNX Runtime's is called through the buffers of its CUDA calls. The
probe of the GPU's ceilings is a small one. What reads a GPU, such as its meter, finds none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from deploykit.core.extras import installed

NOTE = "a rehearsal: the CPU in the GPU's place, no figure of a GPU counts"


@contextmanager
def cpu_as_gpu(*, torch: bool = False) -> Iterator[None]:
    """`torch`: PyTorch's engines too."""
    from deploykit.planning import probe

    onnxruntime: Any = import_module("deploykit.engines.onnxruntime.engine")

    with ExitStack() as stack:
        small = {"GPU_ROWS": 64, "GPU_WIDTH": 64, "GPU_ELEMENTS": 1 << 12, "BUDGET_S": 0.001}
        stack.enter_context(patch.multiple(probe, **small))
        modules = [onnxruntime]
        if torch:
            modules.append(import_module("deploykit.engines.torch.engine"))
        for module in modules:
            opening = partial(open_here, module.open_engine)
            stack.enter_context(patch.object(module, "open_engine", opening))
        yield


def open_here(
    open_engine: Any, source: Any, device: str = "auto", *args: Any, **options: Any
) -> Any:
    engine = open_engine(source, "cpu", *args, **options)
    return OnGpu(engine) if device.startswith("cuda") else engine


class OnGpu:
    """An engine on the CPU that reports a GPU."""

    device = "cuda:0"

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.notes = (*engine.notes, NOTE)
        self.runtime = f"{engine.runtime} on the CPU"
        if engine.runtime.startswith("onnxruntime"):
            engine._binding = bound(engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, feeds: Any) -> Any:
        return self._engine(feeds)

    def __enter__(self) -> OnGpu:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def bound(engine: Any) -> Any:
    from deploykit.engines.onnxruntime.engine import BatchSizes, Binding, ort

    class Copied(Binding):
        """Its outputs are the caller's, as those from a GPU's memory are."""

        def __call__(self, feeds: Any) -> Any:
            return {name: array.copy() for name, array in super().__call__(feeds).items()}

    binding = Copied(ort, engine.session, engine.inputs, engine.outputs, ("cpu", 0))
    return BatchSizes(binding, lambda: binding)


def main() -> None:
    from deploykit.cli.main import main as run

    sys.stderr.write(f"{NOTE}\n")
    with cpu_as_gpu(torch=installed("torch")):
        run()


if __name__ == "__main__":
    main()
