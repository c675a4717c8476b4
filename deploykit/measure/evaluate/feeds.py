"""Seeded random inputs at the sizes that two engines are compared at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deploykit.core.tensors import BATCH, TensorSpec
from deploykit.runtimes.data.samples import random_feeds
from deploykit.runtimes.rows import spread_places

BATCHES = (1, 2, 7, 32)
_LENGTHS = (5, 12, 1, 33)  # of sequences, one for each of the batches
_SIDES = (64, 96, 64, 128)  # of images whose height or width is dynamic

AxisLimits = Mapping[str, tuple[int, int | None]]  # least and largest size by axis


def feeds_at_sizes(
    inputs: Sequence[TensorSpec], limits: AxisLimits | None = None
) -> list[dict[str, np.ndarray]]:
    """Inputs at each of the `parity_sizes`, from one seed each.

    Where nothing but the batch differs, the smaller ones are rows from all over the largest, the
    last first: the outputs then also show whether a row depends on its place and on other rows.
    """
    sizes = parity_sizes(inputs, limits)
    largest = random_feeds(tuple(inputs), sizes[-1], len(sizes) - 1)
    by_rows = all(spec.shape[:1] == (BATCH,) and BATCH not in spec.shape[1:] for spec in inputs)

    def feeds(seed: int, each: Mapping[str, int]) -> dict[str, np.ndarray]:
        if not by_rows or {**each, BATCH: 0} != {**sizes[-1], BATCH: 0}:
            return random_feeds(tuple(inputs), each, seed)
        places = spread_places(sizes[-1][BATCH], each[BATCH])
        return {name: array[places] for name, array in largest.items()}

    return [feeds(seed, each) for seed, each in enumerate(sizes[:-1])] + [largest]


def parity_sizes(
    inputs: Sequence[TensorSpec], limits: AxisLimits | None = None
) -> list[dict[str, int]]:
    """Sizes of the dynamic axes to compare at: batches 1, 2, odd and large, several lengths.

    `limits`: least and largest size by axis, where the model has them.
    """
    images = {
        axis for spec in inputs if len(spec.shape) == 4 for axis in spec.shape[1:]
    }  # their sides must survive the pooling of a CNN
    axes = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)}
    if not axes:
        return [{}]

    def within(axis: str, size: int) -> int:
        low, high = (limits or {}).get(axis, (1, None))
        return max(low, size if high is None else min(size, high))

    found = [
        {
            axis: within(axis, batch if axis == BATCH else side if axis in images else length)
            for axis in sorted(axes)
        }
        for batch, length, side in zip(BATCHES, _LENGTHS, _SIDES, strict=True)
    ]
    return [sizes for n, sizes in enumerate(found) if sizes not in found[:n]]
