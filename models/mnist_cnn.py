"""Small CNN on handwritten digits: conv 32, 64, 64, then dense 64 and 10, on 1x28x28 pixels.

The network of "Deep Learning GPU Essentials": three 3x3 convolutions without padding, max-pooling
by 2 after the first two, ReLU throughout, plus the flatten that its listing lacks; the softmax is
in the loss. 93,322 parameters. It trains on images moved by up to 2 pixels (`--no-augment`: as they
are), which more than halved the errors in a cross-validation on the data that do not test.

Data: without `--data`, the 1,797 real handwritten digits that come with scikit-learn (UCI "Optical
Recognition of Handwritten Digits", 8x8 pixels, resized here to 28x28), always split into
1,077 to train, 180 to calibrate and 540 to test. With `--data DIR`, MNIST's four IDX files
(`train-images-idx3-ubyte` and so on, also `.gz`): 59,000 to train, 1,000 to calibrate, 10,000 to
test.
"""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from deploykit.core.errors import BadInput, NotFound, first_line
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.tensors import TensorSpec
from deploykit.training.data import cut_splits, enlarged_digits, top1_per_sample

SIDE = 28
DIGITS_TRAIN, DIGITS_CALIBRATION = 1077, 180  # the other 540 test
MNIST_CALIBRATION = 1000
DIGITS = tuple("0123456789")


class MnistCnn(nn.Module):
    """image_NCHW: float32 (N, 1, 28, 28) in 0..1 -> logits_ND: float32 (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.dense1 = nn.Linear(64 * 3 * 3, 64)
        self.dense2 = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(image)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x)).flatten(1)
        logits: torch.Tensor = self.dense2(F.relu(self.dense1(x)))
        return logits


def data(path: Path | None) -> Splits:
    """The splits above; images float32 (samples, 1, 28, 28) in 0..1, labels int64 (samples,)."""
    return _digits() if path is None else _mnist(path)


def _digits() -> Splits:
    """scikit-learn's digits: the same permutation, so the same splits, on every machine."""
    pixels, labels = enlarged_digits(SIDE)
    return replace(
        cut_splits(pixels[:, None], labels, DIGITS_TRAIN, DIGITS_CALIBRATION),
        source="scikit-learn digits, 8x8 resized to 28x28",
        classes=DIGITS,
    )


def _mnist(folder: Path) -> Splits:
    if not folder.is_dir():
        reason = "is a file, not a folder" if folder.exists() else "no such folder"
        raise NotFound(f"{folder}: {reason}", hint="name the folder with MNIST's four IDX files")
    images = _pixels(_idx(folder, "train-images-idx3-ubyte", 3))
    labels = _idx(folder, "train-labels-idx1-ubyte", 1).astype(np.int64)
    test_images = _pixels(_idx(folder, "t10k-images-idx3-ubyte", 3))
    test_labels = _idx(folder, "t10k-labels-idx1-ubyte", 1).astype(np.int64)
    if len(images) != len(labels) or len(test_images) != len(test_labels):
        raise BadInput(f"{folder}: has different numbers of images and labels")
    if len(images) <= MNIST_CALIBRATION:
        raise BadInput(
            f"{folder}: {len(images)} training images; more than {MNIST_CALIBRATION} needed"
        )
    kept = len(images) - MNIST_CALIBRATION
    return Splits(
        train=_split(images[:kept], labels[:kept]),
        calibration=_split(images[kept:], labels[kept:]),
        test=_split(test_images, test_labels),
        source=f"IDX files in {folder}",
        classes=DIGITS,
    )


def _idx(folder: Path, name: str, dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes: magic 0 0 8 dimensions, sizes as big-endian uint32, data."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if not plain.is_file() and not packed.is_file():
        raise NotFound(f"{plain}: no such file, nor {packed.name}")
    try:
        content = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    except (OSError, EOFError) as exc:
        raise BadInput(f"{folder / name}: cannot be read: {first_line(exc)}") from exc
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header:
        raise BadInput(f"{folder / name}: is not an IDX file of {dimensions} dimensions")
    shape = [int(size) for size in np.frombuffer(content[4:header], ">u4")]
    values = np.frombuffer(content, np.uint8, offset=header)
    count = 1
    for size in shape:
        count *= size
    if len(values) != count:
        raise BadInput(f"{folder / name}: its header declares {count} bytes, it has {len(values)}")
    return values.reshape(shape)


def _pixels(raw: np.ndarray) -> np.ndarray:
    if raw.shape[1:] != (SIDE, SIDE):
        raise BadInput(f"images must be {SIDE}x{SIDE}, got {raw.shape[1:]}")
    return (raw.astype(np.float32) / 255.0)[:, None]


def _split(images: np.ndarray, labels: np.ndarray) -> Split:
    if len(labels) and (labels.min() < 0 or labels.max() > 9):
        raise BadInput(f"labels must be 0 to 9, got {labels.min()} to {labels.max()}")
    return Split({"image": images}, labels)


RECIPE = Recipe(
    build=MnistCnn,
    data=data,
    inputs=(TensorSpec("image", "float32", ("N", 1, SIDE, SIDE)),),
    outputs=(TensorSpec("logits", "float32", ("N", 10)),),
    loss=F.cross_entropy,
    metric=top1_per_sample,
    metric_name="top-1 accuracy",
    epochs=25,
    batch_size=32,
    learning_rate=3e-3,
    augment={"crop": 2},
    augmented=True,
)
