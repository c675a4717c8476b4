"""Build in this process, or in one of its own whose memory is free again when it has ended.

TensorRT keeps what its builder allocated. On a board where CPU and GPU share memory, the engine
that is loaded next would lack it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deploykit.builders.builder import BuildResult
from deploykit.builders.tensorrt import build as plans
from deploykit.builders.tensorrt.options import Options
from deploykit.builders.tensorrt.progress import OnProgress
from deploykit.core.apart import run_apart
from deploykit.core.errors import DeploykitError


def build_here(
    model: Path, out: Path, options: Options, on_progress: OnProgress | None = None
) -> BuildResult:
    """`plans.build` on the GPU of `options`, within its free memory."""
    try:
        from deploykit.runtimes.cuda.driver import CudaDevice

        driver = CudaDevice(options.device)
        driver.use()  # TensorRT builds for this thread's GPU
        options = replace(options, free_bytes=driver.memory()[0])
    except DeploykitError:  # no CUDA: TensorRT itself reports what is missing
        pass
    return plans.build(model, out, options, on_progress)


def build_apart(
    model: Path, out: Path, options: Options, on_progress: OnProgress | None = None
) -> BuildResult:
    """`build_here` in a process of its own; raises what it raises, and OutOfMemory if killed."""
    built: BuildResult = run_apart(
        str(model), build_here, model, out, options, on_progress=on_progress
    )
    return built
