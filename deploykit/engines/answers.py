"""Find the answers in a model's outputs: the axis whose largest value is a class.

The evaluation and the server's shadow use the same rule. A shape shows the axis only if an input
has the same positions: tokens, pixels, or the samples themselves. Boxes, anchors, features,
embeddings and coordinates have no answer that could be counted.
"""

from __future__ import annotations

import re

import numpy as np

from deploykit.engines.engine import Arrays

# An output with such a word in its name holds vectors or coordinates.
_NO_CLASSES = re.compile(
    r"box|embed|feature|hidden|latent|pool|coord|point|landmark|offset|delta|regress|vector|descriptor"
)
_UNIT = 1e-3  # the largest deviation from length 1 after normalising


def class_axis(name: str, values: np.ndarray, feeds: Arrays) -> int | None:
    """Return the class axis of output `name`, given the inputs of the same call; None if none.

    [N,C]: 1. [N,T,C] next to an input [N,T] or [N,T,F]: 2. [N,C,H,W] next to an image of that
    height and width: 1, or 3 for [N,H,W,C].
    """
    shape, given = values.shape, [array.shape for array in feeds.values()]
    axis = None
    if values.dtype.kind in "biuO" or _NO_CLASSES.search(name.lower()):
        return None
    if len(shape) == 2:
        # rows of length 1 with a negative value are normalised embeddings
        axis = 1
        if (values < 0).any():
            lengths = np.linalg.norm(values.astype(np.float64), axis=1)
            axis = None if (np.abs(lengths - 1) < _UNIT).all() else 1
    elif len(shape) == 3 and any(len(s) in (2, 3) and s[:2] == shape[:2] for s in given):
        axis = 2
    elif len(shape) == 4:
        images = [s for s in given if len(s) == 4 and s[0] == shape[0]]
        if any(s[2:] == shape[2:] for s in images):
            axis = 1
        elif any(s[1:3] == shape[1:3] for s in images):
            axis = 3
    return axis if axis is not None and shape[axis] >= 2 else None
