"""Small CNN on two classes of images, such as cats and dogs: 2,011,458 parameters.

The set-up of M. Liefstingh's article of 2022: a little over 2 million parameters, 2,000 images,
batches of 150, 20 epochs; it gives neither the layers nor the size of the images. Here four 3x3
convolutions without padding (32, 64, 128, 128), ReLU and max-pooling by 2 after each, dense 384
and 2, on 128x128 pixels. The softmax is in the loss.

Data: `--data DIR` with one sub-folder of images for each of the two classes; 70, 10 and 20 per cent
train, calibrate and test, or folders train, val and test hold those. Without it, a procedurally
drawn set: round against cornered shapes on noisy backgrounds, 2,000 to train, 200 to calibrate and
400 to test. These are drawings, neither cats nor dogs: their accuracy says nothing about
photographs. `--augment` changes the images that it trains on; the article mentions no augmentation,
so it is off.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from deploykit.core.recipe import Recipe, Splits
from deploykit.core.task import SHORTEST_EDGE, ImageInput, Preprocess
from deploykit.core.tensors import TensorSpec
from deploykit.training.data import cut_splits, top1_per_sample

SIDE = 128
IMAGE = ImageInput("image", SIDE, SIDE, SHORTEST_EDGE, SIDE)  # the middle square
DRAWN = (2000, 200, 400)  # to train, to calibrate, to test
HALF = (0.5, 0.5, 0.5)


class CatsDogs(nn.Module):
    """image_NCHW: float32 (N, 3, 128, 128) in -1..1 -> logits_ND: float32 (N, 2)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 128)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3) for a, b in pairwise(widths))
        self.dense1 = nn.Linear(128 * 6 * 6, 384)
        self.dense2 = nn.Linear(384, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image
        for convolution in self.convolutions:
            x = F.relu(F.max_pool2d(convolution(x), 2))  # ReLU last: on a quarter of the values
        logits: torch.Tensor = self.dense2(F.relu(self.dense1(x.flatten(1))))
        return logits


def data(path: Path | None) -> Splits:
    """Images uint8 (samples, 128, 128, 3), labels int64 (samples,)."""
    if path is not None:
        from deploykit.engines.data.folders import class_splits

        return class_splits(path, IMAGE, classes=2)
    return drawn_splits(*DRAWN)


def drawn_splits(*counts: int) -> Splits:
    """Drawn images, as many as `counts` to train, to calibrate and to test."""
    random = np.random.RandomState(0)  # its stream never changes
    return replace(
        cut_splits(*draw(sum(counts), random), *counts[:2]),
        source="procedurally drawn shapes, round against cornered (no photographs)",
        classes=("round", "cornered"),
    )


def draw(count: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Ellipses (label 0) and rectangles (1), turned, lighter than what is behind, under noise."""
    labels = random.randint(0, 2, count).astype(np.int64)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    noise = random.randint(0, 16, (16, SIDE, SIDE, 3)).astype(np.int16) - 8
    for number, label in enumerate(labels):
        angle = random.uniform(0, np.pi)
        row, column = random.uniform(0.35, 0.65, 2) * SIDE
        long, short = random.uniform(0.15, 0.32, 2) * SIDE
        across = (columns - column) * np.cos(angle) + (rows - row) * np.sin(angle)
        down = (rows - row) * np.cos(angle) - (columns - column) * np.sin(angle)
        a, b = np.abs(across / long), np.abs(down / short)
        inside = np.maximum(a, b) < 0.89 if label else a * a + b * b < 1  # of about equal area
        back, front = random.randint(40, 108, 3), random.randint(148, 216, 3)
        picked = np.where(inside[..., None], front, back) + noise[random.randint(16)]
        images[number] = np.clip(picked, 0, 255)
    return images, labels


RECIPE = Recipe(
    build=CatsDogs,
    data=data,
    inputs=(TensorSpec("image", "uint8", ("N", SIDE, SIDE, 3)),),
    outputs=(TensorSpec("logits", "float32", ("N", 2)),),
    loss=F.cross_entropy,
    metric=top1_per_sample,
    metric_name="top-1 accuracy",
    epochs=20,
    batch_size=150,
    learning_rate=1e-3,
    preprocess=Preprocess("cats-dogs", HALF, HALF),
    augment={"crop": 8, "flip": 0.5, "rotation_degrees": 10, "brightness": 0.2, "contrast": 0.2},
)
