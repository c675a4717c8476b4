"""A recipe that trains in milliseconds: points of the plane on either side of a line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.tensors import TensorSpec


def points(count: int, seed: int) -> Split:
    values = np.random.default_rng(seed).standard_normal((count, 2)).astype(np.float32)
    return Split({"x": values}, (values[:, 0] > values[:, 1]).astype(np.int64))


SPLITS = Splits(points(200, 1), points(20, 2), points(100, 3), "points")
LINE = Recipe(
    build=lambda: torch.nn.Linear(2, 2),
    data=lambda _: SPLITS,
    inputs=(TensorSpec("x", "float32", ("N", 2)),),
    outputs=(TensorSpec("y", "float32", ("N", 2)),),
    loss=torch.nn.functional.cross_entropy,
    metric=lambda outputs, labels: (outputs["y"].argmax(1) == labels).astype(float),
    metric_name="top-1 accuracy",
    epochs=10,
    batch_size=20,
    learning_rate=0.05,
)


def dropping() -> torch.nn.Module:
    """A network that draws random numbers in every step."""
    return torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 2)
    )


def cut(splits: Splits, count: int) -> Splits:
    """The first samples of each split."""
    parts = {}
    for name in ("train", "calibration", "test"):
        part = getattr(splits, name)
        inputs = {key: array[:count] for key, array in part.inputs.items()}
        parts[name] = Split(inputs, part.labels[:count])
    return replace(splits, **parts)
