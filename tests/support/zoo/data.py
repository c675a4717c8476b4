"""Inputs for the zoo, made from what is on the machine: nothing is downloaded.

Arrays whose axis 0 is the samples. Photographs are crops of the two that scikit-learn brings.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], np.float32)
DIGITS_TRAIN, DIGITS_CALIBRATION = 597, 100  # the other 1,100 of 1,797 test


@dataclass(frozen=True)
class Labelled:
    """One split: `x` shape (samples, ...), `labels` int64 (samples,)."""

    x: np.ndarray
    labels: np.ndarray


def photos(count: int, seed: int, side: int = 224) -> np.ndarray:
    """float32 (count, 3, side, side), normalised as torchvision's models want it."""
    random = np.random.default_rng(seed)
    images = np.empty((count, side, side, 3), np.float32)
    sources = _photographs()
    for at in range(count):
        crop = _crop(sources[at % len(sources)], random, side)
        gain, lift = random.uniform(0.5, 1.3, 3), random.uniform(-0.15, 0.15, 3)
        images[at] = np.clip(crop * gain + lift, 0, 1)
    return np.ascontiguousarray(((images - IMAGENET_MEAN) / IMAGENET_STD).transpose(0, 3, 1, 2))


@functools.cache
def _photographs() -> tuple[np.ndarray, ...]:
    """scikit-learn's two photographs, float32 (427, 640, 3) in 0..1."""
    from sklearn.datasets import load_sample_images

    return tuple(image.astype(np.float32) / 255 for image in load_sample_images().images)


def _crop(source: np.ndarray, random: np.random.Generator, side: int) -> np.ndarray:
    """A square of 15 to 100 % of the height, mirrored or not, by the nearest pixels."""
    height, width = source.shape[:2]
    size = int(random.uniform(0.15, 1.0) * min(height, width))
    top, left = random.integers(0, height - size + 1), random.integers(0, width - size + 1)
    at = np.arange(side) * size // side
    crop = source[top + at][:, left + at]
    return np.asarray(crop[:, ::-1] if random.random() < 0.5 else crop)


def word_ids(count: int, seed: int, steps: int, words: int) -> np.ndarray:
    """int64 (count, steps) in 0..words-1, the frequent ones small, as in text (Zipf's law)."""
    drawn = np.random.default_rng(seed).zipf(1.3, (count, steps))
    return np.minimum(drawn - 1, words - 1).astype(np.int64)


def signals(count: int, seed: int, steps: int, width: int) -> np.ndarray:
    """float32 (count, steps, width): each step is 0.8 of the last and 0.6 of new noise."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, steps, width)).astype(np.float32)
    values += random.standard_normal((count, 1, width)).astype(np.float32)  # what the sample is of
    for step in range(1, steps):
        values[:, step] = 0.8 * values[:, step - 1] + 0.6 * values[:, step]
    return values


def lengths_mask(count: int, seed: int, steps: int) -> np.ndarray:
    """Bool (count, steps): true up to a length of its own, at least 1."""
    lengths = np.random.default_rng(seed).integers(1, steps + 1, count)
    return np.arange(steps) < lengths[:, None]


@functools.cache
def digits() -> tuple[Labelled, Labelled, Labelled]:
    """scikit-learn's 8x8 digits in 0..1, (samples, 1, 8, 8): to train, to calibrate, to test."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = np.random.RandomState(0).permutation(len(loaded.images))
    images = (loaded.images[order] / 16).astype(np.float32)[:, None]
    labels = loaded.target[order].astype(np.int64)
    ends = (DIGITS_TRAIN, DIGITS_TRAIN + DIGITS_CALIBRATION)
    parts = [np.split(array, ends) for array in (images, labels)]
    train, calibration, test = (Labelled(x, y) for x, y in zip(*parts, strict=True))
    return train, calibration, test
