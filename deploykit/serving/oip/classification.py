"""The classification extension: an output's highest values as texts `value:index[:label]`.

In: an output as the engine gave it. Out: an array of `str` of shape [classes], or [batch, classes]
for a model that is batched. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def classified(
    array: np.ndarray, classes: int, *, batched: bool, labels: Sequence[str] = ()
) -> np.ndarray:
    """The `classes` highest values of each row, highest first, fewer where there are fewer.

    All axes but the batch count as one row. Of equal values the lower index comes first, and NaN
    comes last. A float is written with six decimals, as other servers of the protocol do it.
    """
    values = (
        array.reshape(array.shape[0], math.prod(array.shape[1:]))
        if batched
        else array.reshape(1, array.size)
    )
    count = min(classes, values.shape[1])
    texts = np.empty((len(values), count), object)
    for row, numbers in enumerate(values):
        for place, index in enumerate(_highest(numbers, count)):
            value = numbers[index]
            text = f"{value:.6f}:{index}" if value.dtype.kind == "f" else f"{int(value)}:{index}"
            texts[row, place] = f"{text}:{labels[index]}" if index < len(labels) else text
    return texts if batched else texts[0]


def _highest(numbers: np.ndarray, count: int) -> list[int]:
    """Where the `count` highest of them are; sorting them backwards keeps equal ones in order."""
    order = np.argsort(numbers[::-1], kind="stable")[::-1]
    order = len(numbers) - 1 - order
    if numbers.dtype.kind == "f":  # numpy sorts NaN above every number
        order = np.concatenate([order[~np.isnan(numbers[order])], order[np.isnan(numbers[order])]])
    places: list[int] = order[:count].tolist()
    return places
