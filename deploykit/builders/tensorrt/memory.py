"""Predict how much GPU memory a build needs at least, before it starts.

A build that runs out of memory takes minutes to fail, and where CPU and GPU share their memory the
system may kill it instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from deploykit.core.errors import Unsupported
from deploykit.core.memory import BuildMemory
from deploykit.runtimes.onnxruntime.file import onnx_files

LEAST_WORKSPACE = 64 << 20  # with less, TensorRT drops common kernels or finds none
_ELEMENT_BYTES = 4  # float32, the largest type between layers but for small index tensors


def weight_bytes(model: Path) -> int:
    """Size of the file and its external data files, which approximates the weights."""
    return sum(file.stat().st_size for file in onnx_files(model))


def activation_bytes(shapes: Iterable[Sequence[int]], batch: int, others: int) -> int:
    """A lower bound: twice the largest tensor, as a layer's input and output exist together.

    `shapes`: of all tensors, -1 where dynamic; such an axis 0 counts as `batch`, any other axis as
    `others`. Branches keep more tensors alive, and a computed size can be larger.
    """
    largest = 0
    for shape in shapes:
        sizes = [
            size if size >= 0 else (batch if place == 0 else others)
            for place, size in enumerate(shape)
        ]
        largest = max(largest, math.prod(sizes))
    return 2 * largest * _ELEMENT_BYTES


def workspace_that_fits(need: BuildMemory, free_bytes: int | None, where: str) -> int:
    """The workspace of `need`, cut to what `free_bytes` (None if not known) leaves.

    The workspace is a limit: with less, TensorRT chooses among fewer kernels. Raises Unsupported
    where weights and activations leave less than LEAST_WORKSPACE.
    """
    if free_bytes is None or need.total <= free_bytes:
        return need.workspace
    left = free_bytes - need.held - need.activations
    if left >= min(need.workspace, LEAST_WORKSPACE):
        return left
    raise Unsupported(
        f"{where}: building needs {mib(need.held)} of GPU memory for "
        f"{'the builder and three copies of the weights' if need.shared else 'weights'}, "
        f"{mib(need.activations)} for activations and {mib(LEAST_WORKSPACE)} of workspace, "
        f"but only {mib(free_bytes)} are free",
        hint="stop other programs that use the GPU, or choose a smaller batch",
    )


def mib(size: int) -> str:
    """1048576 is "1 MiB"."""
    return f"{size / (1 << 20):,.0f} MiB"
