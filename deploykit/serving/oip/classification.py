"""The classification extension: an output's highest values as strings `value:index[:label]`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def classify(
    array: np.ndarray, classes: int, *, batched: bool, labels: Sequence[str] = ()
) -> np.ndarray:
    """The `classes` highest values of each row, highest first, or all if a row has fewer.

    All axes but the batch axis are flattened. Of equal values the lower index comes first; NaN
    comes last. Floats have six decimals, as in other servers of the protocol.
    """
    values = (
        array.reshape(array.shape[0], math.prod(array.shape[1:]))
        if batched
        else array.reshape(1, array.size)
    )
    count = min(classes, values.shape[1])
    strings = np.empty((len(values), count), object)
    for row, numbers in enumerate(values):
        for place, index in enumerate(_highest(numbers, count)):
            value = numbers[index]
            string = f"{value:.6f}:{index}" if value.dtype.kind == "f" else f"{int(value)}:{index}"
            labelled = index < len(labels)
            strings[row, place] = f"{string}:{labels[index]}" if labelled else string
    return strings if batched else strings[0]


def _highest(numbers: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` highest values; sorting in reverse keeps equal values in order."""
    order = np.argsort(numbers[::-1], kind="stable")[::-1]
    order = len(numbers) - 1 - order
    if numbers.dtype.kind == "f":  # numpy sorts NaN above every number
        order = np.concatenate([order[~np.isnan(numbers[order])], order[np.isnan(numbers[order])]])
    places: list[int] = order[:count].tolist()
    return places
