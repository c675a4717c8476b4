"""A recipe that trains in milliseconds: points of the plane on either side of a line."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.tensors import TensorSpec
from deploykit.training.options import Trained


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


def cut(splits: Splits, count: int) -> Splits:
    """The first samples of each split."""
    parts = {}
    for name in ("train", "calibration", "test"):
        part = getattr(splits, name)
        inputs = {key: array[:count] for key, array in part.inputs.items()}
        parts[name] = Split(inputs, part.labels[:count])
    return replace(splits, **parts)


def losses(trained: Trained) -> list[float]:
    return [each["loss"] for each in trained.history]


def write_photos(where: Path, count: int = 9) -> Path:
    """Cuts of scikit-learn's two photographs: `count` in `where`/china, and in `where`/flower."""
    image = pytest.importorskip("PIL.Image")
    datasets = pytest.importorskip("sklearn.datasets")
    random = np.random.default_rng(0)
    for name, photo in zip(("china", "flower"), datasets.load_sample_images().images, strict=True):
        (where / name).mkdir(parents=True)
        for number in range(count):
            row, column = random.integers(0, 200, 2)
            piece = image.fromarray(photo[row : row + 150, column : column + 200])
            piece.save(where / name / f"{number}.{'jpg' if number % 2 else 'PNG'}")
    return where


def torchvision_weights(name: str, where: Path) -> Path:
    """A file with random weights of torchvision's network `name`, such as "resnet18"."""
    torch.manual_seed(0)
    try:
        module = getattr(import_module("torchvision.models"), name)(weights=None)
    except ImportError:
        pytest.skip("torchvision is not installed")
    path = where / f"{name}.pt"
    torch.save(module.state_dict(), path)
    return path
