"""Take the user's example inputs to other sizes: a model may refuse values that were made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploykit.core.tensors import (
    TensorSpec,
    batch_axes,
    carrier,
    concrete,
    dynamic_sizes,
    steps_counted,
)
from deploykit.engines.data.samples import random_feeds


@dataclass(frozen=True)
class Example:
    """The user's inputs by name, and the largest size that the user allows by axis; or neither."""

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)

    def sizes(self, specs: Sequence[TensorSpec]) -> dict[str, int]:
        """Return the sizes that the dynamic axes have in the example."""
        shapes = {name: array.shape for name, array in self.arrays.items()}
        return dynamic_sizes(list(filter(self._fits, specs)), shapes)

    def feeds(
        self,
        specs: Sequence[TensorSpec],
        sizes: Mapping[str, int],
        seed: int = 0,
        *,
        floats: bool = False,
    ) -> dict[str, np.ndarray]:
        """Return inputs at `sizes`: integers, booleans and masks of the example, random floats.

        `floats`: all values of the example instead, in its order.
        """
        found = random_feeds(tuple(specs), sizes, seed)
        own, batch = self.sizes(specs), batch_axes(specs)
        for spec in specs:
            if not self._fits(spec) or not (
                floats or "float" not in spec.dtype or "mask" in spec.name.lower()
            ):
                continue
            array, shape = self.arrays[spec.name], concrete(spec, sizes)
            for place, size in enumerate(shape):
                count = array.shape[place]
                rows = spec.shape[place] in batch if batch else place == 0
                if not count or (count == size and not rows):
                    continue
                if rows:
                    order = np.arange(count)
                    order = order if floats else np.random.default_rng(seed).permutation(order)
                    order = np.resize(order, size)  # repeated
                else:  # the ends stay: a mask has the padding that it had, and what rose rises
                    first, last = -(-min(size, count) // 2), min(size, count) // 2
                    middle = np.full(max(0, size - count), first - 1)
                    order = np.r_[:first, middle, count - last : count]
                array = array.take(order, axis=place)
            steps, before = (steps_counted(spec, specs, each) for each in (sizes, own))
            if steps is not None and before:
                array = np.clip(-(-array * steps // before), 1, steps).astype(array.dtype)
            found[spec.name] = array if array.shape == shape else np.zeros(shape, array.dtype)
        return found

    def _fits(self, spec: TensorSpec) -> bool:
        """Return whether the example has this input, its batch and dynamic axes of any size."""
        array = self.arrays.get(spec.name)
        if array is None or array.dtype.name != carrier(spec.dtype):
            return False
        pairs = enumerate(zip(array.shape, spec.shape, strict=False))
        return array.ndim == len(spec.shape) and all(
            place == 0 or isinstance(axis, str) or axis == size for place, (size, axis) in pairs
        )
