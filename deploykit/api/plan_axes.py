"""Give each dynamic axis of a graph the size that `plan` predicts for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, did_you_mean
from deploykit.core.task import Task

if TYPE_CHECKING:
    from deploykit.onnx_graph.graph import Graph

MOST_SIZE = 1 << 31  # of an axis: more elements in one direction than any runtime indexes


def sizes_of_axes(
    graph: Graph, where: Artefact, given: Mapping[str, int]
) -> tuple[dict[str, int], list[str], list[str]]:
    """Sizes of the dynamic axes but the batch, the names of the batch axis, and notes."""
    batch = [
        spec.shape[0] for spec in graph.inputs if spec.shape and isinstance(spec.shape[0], str)
    ]
    names = [axis for spec in graph.inputs for axis in spec.shape if isinstance(axis, str)]
    others = [name for name in dict.fromkeys(names) if name not in batch]
    given = {**_sizes_of(where.task, graph), **given}
    for name, size in given.items():
        if name not in others:
            known = ", ".join(others) or "none but the batch"
            hint = "`batches` sets the batch" if name in batch else did_you_mean(name, others)
            raise BadInput(f"{where}: no dynamic axis '{name}'; it has: {known}", hint=hint)
        if not 1 <= size <= MOST_SIZE:
            raise BadInput(f"`axes` {name}={size}: must be 1 or more, and fit into 31 bits")
    sizes = {name: given.get(name, 1) for name in others}
    notes = [
        f"axis {name} is taken as 1, as no size was given: `axes` {name}=128"
        for name in others
        if name not in given
    ]
    return sizes, list(dict.fromkeys(batch)), notes


def _sizes_of(task: Task | None, graph: Graph) -> dict[str, int]:
    """Of an image of any ratio: the square that a folder of them is cut to."""
    image = task.image if task else None
    if image is None or image.height:
        return {}
    side = math.ceil(image.resize_to / image.multiple) * image.multiple
    return {axis: side for axis in graph.inputs[0].shape[1:3] if isinstance(axis, str)}


def fixed_batch(graph: Graph) -> int:
    """Of a model without a dynamic axis 0."""
    fixed = (spec.shape[0] for spec in graph.inputs if spec.shape)
    return next((size for size in fixed if isinstance(size, int) and size > 0), 1)
