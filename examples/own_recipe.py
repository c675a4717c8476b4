"""Your own recipe: a two-layer network on scikit-learn's digits, 8x8 pixels as 64 numbers.

    deploykit train examples/own_recipe.py -o digits.pt --save-splits digits
    deploykit export digits.pt --arch examples/own_recipe.py

A checkpoint of your own recipe never runs code by itself: `--arch` names the recipe again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

from deploykit import Recipe, Split, Splits, parse_spec


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def data(_path: Path | None) -> Splits:
    digits = load_digits()
    pixels = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    parts = [slice(0, 1100), slice(1100, 1300), slice(1300, None)]
    train, calibration, test = (Split({"pixels": pixels[p]}, labels[p]) for p in parts)
    return Splits(train, calibration, test, source="scikit-learn digits, in their own order")


def top1(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    return (outputs["logits"].argmax(1) == labels).astype(np.float64)


RECIPE = Recipe(
    build=build,
    data=data,
    inputs=(parse_spec("pixels:float32[N,64]"),),
    outputs=(parse_spec("logits:float32[N,10]"),),
    loss=nn.functional.cross_entropy,
    metric=top1,
    metric_name="top-1 accuracy",
    epochs=20,
    batch_size=32,
    learning_rate=3e-3,
)
