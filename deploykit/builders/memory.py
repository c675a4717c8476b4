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
from deploykit.runtimes.onnxfile import external_files

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


def check_memory(need: Need, free_bytes: int | None, where: str) -> None:
    """Raise Unsupported if `need` is more than the device's `free_bytes`; None is not known."""
    if free_bytes is None or need.total <= free_bytes:
        return
    raise Unsupported(
        f"{where}: building needs about {_mib(need.total)} of GPU memory (weights "
        f"{_mib(need.weights)}, workspace {_mib(need.workspace)}, activations "
        f"{_mib(need.activations)}), {_mib(free_bytes)} are free",
        hint="close what else uses the GPU, or ask for a smaller workspace or batch",
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
