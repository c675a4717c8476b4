"""What the recipes that classify images share: scikit-learn's digits as data, and their metric."""

from __future__ import annotations

import numpy as np

from deploykit.core.extras import require
from deploykit.core.recipe import Split, Splits

_GREATEST = 16.0  # of scikit-learn's pixels


def top1_per_sample(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """1.0 for each sample whose largest logit is the label, else 0.0."""
    right: np.ndarray = (outputs["logits"].argmax(1) == labels).astype(np.float64)
    return right


def enlarged_digits(side: int, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` of the 1,797 digits in an order that is the same on every machine.

    Pixels float32 (count, side, side) in 0..1, enlarged linearly from 8x8; labels int64 (count,).
    """
    digits = require("sklearn.datasets").load_digits()
    order = np.random.RandomState(0).permutation(len(digits.images))[:count]  # a stable stream
    small = (digits.images[order] / _GREATEST).astype(np.float32)
    resize = _linear(small.shape[1], side)
    large = np.clip(resize @ small @ resize.T, 0.0, 1.0)
    return large, digits.target[order].astype(np.int64)


def _linear(before: int, after: int) -> np.ndarray:
    """The matrix (after, before) that resizes an axis, pixel centres aligned."""
    at = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)
    distances = np.abs(at[:, None] - np.arange(before))
    return np.maximum(0.0, 1.0 - distances).astype(np.float32)


def digit_splits(side: int, train: int, calibration: int, test: int) -> Splits:
    """The digits as grey images uint8 (samples, side, side, 3), for a model of any classes."""
    pixels, labels = enlarged_digits(side, train + calibration + test)
    grey = np.round(pixels * 255).astype(np.uint8)[..., None]
    colour = np.repeat(grey, 3, axis=3)
    first, second = train, train + calibration
    return Splits(
        train=Split({"image": colour[:first]}, labels[:first]),
        calibration=Split({"image": colour[first:second]}, labels[first:second]),
        test=Split({"image": colour[second:]}, labels[second:]),
        source=f"scikit-learn digits, 8x8 enlarged to {side}x{side}",
        classes=tuple(map(str, range(10))),
        build_with={"classes": 10},
    )
