"""A recipe for a GPU's first run: images and a small network that need no package but torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.tensors import parse_spec


def build() -> nn.Module:
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(256, 2))


def images(count: int, seed: int) -> Split:
    """Noise that is brighter in one half: the upper one in class 0, the lower one in class 1."""
    draw = np.random.default_rng(seed)
    pixels = draw.random((count, 3, 16, 16), np.float32) / 2
    labels = draw.integers(0, 2, count)
    for row, label in enumerate(labels):
        pixels[row, :, 8 * label : 8 * label + 8] += 0.5
    return Split({"image": pixels}, labels)


def data(_path: Path | None) -> Splits:
    return Splits(images(512, 1), images(64, 2), images(128, 3), source="bright halves")


def top1(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    return (outputs["logits"].argmax(1) == labels).astype(np.float64)


RECIPE = Recipe(
    build=build,
    data=data,
    inputs=(parse_spec("image:float32[N,3,16,16]"),),
    outputs=(parse_spec("logits:float32[N,2]"),),
    loss=nn.functional.cross_entropy,
    metric=top1,
    metric_name="top-1 accuracy",
    epochs=3,
    batch_size=64,
    learning_rate=1e-2,
    augment={"crop": 1, "flip": 0.5, "brightness": 0.1},
)
