"""Find the answers in a model's outputs: the axis whose largest value is a class.

A shape shows it only where an input has the same places: tokens, pixels, or the samples themselves.
Boxes, anchors and feature maps have no answer whose share could be counted.
"""

from __future__ import annotations

import numpy as np

from deploykit.runtimes.engine import Arrays


def class_axis(name: str, values: np.ndarray, feeds: Arrays) -> int | None:
    """The axis of the classes in output `name`, given the inputs of the same call; None for none.

    [N,C]: 1. [N,T,C] next to an input [N,T] or [N,T,F]: 2. [N,C,H,W] next to an image of that
    height and width: 1, or 3 for [N,H,W,C].
    """
    shape, given = values.shape, [array.shape for array in feeds.values()]
    axis = None
    if values.dtype.kind in "biu" or "box" in name.lower():
        return None
    if len(shape) == 2:
        axis = 1
    elif len(shape) == 3 and any(len(s) in (2, 3) and s[:2] == shape[:2] for s in given):
        axis = 2
    elif len(shape) == 4:
        images = [s for s in given if len(s) == 4 and s[0] == shape[0]]
        if any(s[2:] == shape[2:] for s in images):
            axis = 1
        elif any(s[1:3] == shape[1:3] for s in images):
            axis = 3
    return axis if axis is not None and shape[axis] >= 2 else None


def same_answers(left: Arrays, right: Arrays, feeds: Arrays, rows: int) -> np.ndarray | None:
    """Where both give the same answer, boolean, for the first output that holds answers."""
    for name, values in left.items():
        others = right[name]
        if values.ndim == 0 or len(values) != rows or not (values.any() or others.any()):
            continue
        if values.dtype.kind in "biu":
            return np.asarray(values == others)
        axis = class_axis(name, values, feeds)
        if axis is not None:
            return np.asarray(values.argmax(axis) == others.argmax(axis))
    return None
