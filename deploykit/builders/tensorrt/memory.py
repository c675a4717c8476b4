"""How much GPU memory a build needs at least, told before it starts.

In: sizes read off the file and the parsed network. Out: bytes, or an error with both figures. A
build that runs out takes minutes to say so, and on a board whose CPU and GPU share their memory the
system may kill it instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploykit.core.errors import Unsupported
from deploykit.runtimes.onnxruntime.file import external_files

LEAST_WORKSPACE = 64 << 20  # with less, kernels of a common size are left out or none is found
_ELEMENT_BYTES = 4  # no tensor between layers is wider than float32 but indices, which are small


@dataclass(frozen=True)
class Need:
    """Bytes on the device: weights once, the workspace in full, tensors between layers."""

    weights: int
    workspace: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.activations


def weight_bytes(model: Path) -> int:
    """Size of the file and of the data files beside it: what its weights take, near enough."""
    files = [model, *(model.parent / name for name in external_files(model))]
    return sum(file.stat().st_size for file in files)


def activation_bytes(shapes: Iterable[Sequence[int]], batch: int, others: int) -> int:
    """Two of the largest tensor: a layer's input and output are alive together.

    `shapes`: of all tensors, -1 where dynamic; axis 0 is then taken as `batch`, any other as
    `others`. An estimate from below: branches keep more alive, and a size that is computed from
    several axes can be larger.
    """
    largest = 0
    for shape in shapes:
        sizes = [
            size if size >= 0 else (batch if place == 0 else others)
            for place, size in enumerate(shape)
        ]
        largest = max(largest, math.prod(sizes))
    return 2 * largest * _ELEMENT_BYTES


def workspace_that_fits(need: Need, free_bytes: int | None, where: str) -> int:
    """The workspace of `need`, or what the device's `free_bytes` leave of it; None is not known.

    TensorRT takes a limit, not an amount: with less it chooses among fewer kernels. Raises
    Unsupported where weights and activations leave less than LEAST_WORKSPACE.
    """
    if free_bytes is None or need.total <= free_bytes:
        return need.workspace
    left = free_bytes - need.weights - need.activations
    if left >= min(need.workspace, LEAST_WORKSPACE):
        return left
    raise Unsupported(
        f"{where}: building needs {mib(need.weights)} of GPU memory for weights, "
        f"{mib(need.activations)} for activations and {mib(LEAST_WORKSPACE)} to work in, "
        f"{mib(free_bytes)} are free",
        hint="close what else uses the GPU, or ask for a smaller batch",
    )


def mib(size: int) -> str:
    """A size for people."""
    return f"{size / (1 << 20):,.0f} MiB"
