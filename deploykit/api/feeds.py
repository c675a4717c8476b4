"""Inputs to compare two engines on, and how many rows of them fit into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.core.tensors import BATCH, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.engine import Engine

    Feeds = Mapping[str, np.ndarray]

MOST_SAMPLES, MOST_BYTES = 32, 64 << 20
MOST_CALL_BYTES = 128 << 20  # of the largest tensor where two engines are compared


def comparison_feeds(
    first: Engine, second: Engine, samples: Samples | None, graph: Path | None
) -> tuple[list[Feeds], tuple[str, ...]]:
    """Samples, or random inputs at several sizes, within the batches that both engines take.

    `graph`: the ONNX file that tells how many rows fit into memory; None where there is none. Also
    returns a note where these are fewer than usual.
    """
    from deploykit.measure.evaluate.feeds import feeds_at_sizes

    limits = {**first.limits, **second.limits}
    least, most = limits.get(BATCH, (1, None))
    usual = min(MOST_SAMPLES, most or MOST_SAMPLES)
    if samples is not None:
        size, used = samples.batching(usual, (*first.inputs, *second.inputs))
        samples = samples.first(used)
        if graph is None or size != usual:
            return list(samples.batches(size)), ()
        rows = max(least, rows_that_fit([next(samples.batches(size))], graph))
        return list(samples.batches(min(size, rows))), rows_note(rows, usual)
    feeds = feeds_at_sizes(first.inputs, limits)
    if graph is None:
        return list(feeds), ()
    rows = max(least, rows_that_fit(feeds, graph))
    return first_rows(feeds, rows), rows_note(rows, usual)


def axis_sizes(samples: Samples | None, inputs: Sequence[TensorSpec], batch: int) -> dict[str, int]:
    """The sizes of the dynamic axes in `samples`, with `batch` at axis 0."""
    if samples is None:
        return {str(spec.shape[0]): batch for spec in inputs if spec.batched}
    return {
        axis: batch if place == 0 else size
        for spec in inputs
        for place, (axis, size) in enumerate(
            zip(spec.shape, samples.inputs[spec.name].shape, strict=True)
        )
        if isinstance(axis, str)
    }


def batch_that_fits(source: Graph, sizes: Mapping[str, int], most_bytes: int = MOST_BYTES) -> int:
    """Samples for one call: 32, fewer where the largest tensor of one sample is large.

    `sizes`: of the dynamic axes at batch 1. Two engines run, each with some such tensors.
    """
    from deploykit.onnx_graph import cost

    largest = max((each.write_bytes or 0 for each in cost.node_costs(source, sizes)), default=0)
    return max(1, min(MOST_SAMPLES, most_bytes // max(largest, 1)))


def rows_that_fit(feeds: Sequence[Feeds], graph: Path) -> int:
    """How many rows of such feeds make no tensor in `graph` above 128 MiB; 32 at most.

    At least 2, so that a frozen batch shows; 32 also where the batch is fixed.
    """
    from deploykit.onnx_graph.graph import Graph

    opened = Graph.open(graph)
    if not all(spec.batched for spec in opened.inputs):
        return MOST_SAMPLES
    largest = max(feeds, key=lambda each: sum(array.nbytes for array in each.values()))
    sizes = {
        axis: size if place else 1
        for spec in opened.inputs
        if spec.name in largest  # else the engines differ, which their comparison reports
        for place, (axis, size) in enumerate(
            zip(spec.shape, largest[spec.name].shape, strict=False)
        )
        if isinstance(axis, str)
    }
    return max(2, batch_that_fits(opened, sizes, MOST_CALL_BYTES))


def first_rows(feeds: Sequence[Feeds], rows: int) -> list[Feeds]:
    """The feeds with at most so many rows each, from first to last; all for `MOST_SAMPLES`."""
    from deploykit.runtimes.rows import spread_places

    if rows >= MOST_SAMPLES:
        return list(feeds)
    return [
        {name: array[spread_places(len(array), rows)[::-1]] for name, array in each.items()}
        for each in feeds
    ]


def rows_note(rows: int, usual: int = MOST_SAMPLES) -> tuple[str, ...]:
    """For the user, where batches were smaller than usual."""
    if rows >= usual:
        return ()
    return (f"compared at batches of up to {rows}: larger ones take too much memory",)
