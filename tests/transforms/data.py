"""Data that fit a zoo graph, for the tests of this folder."""

from __future__ import annotations

import numpy as np
import onnx

from deploykit.runtimes.data import Samples, random_feeds
from deploykit.transforms.graph import specs


def feeds(model: onnx.ModelProto, count: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    return random_feeds(specs(model)[0], {"N": count}, seed)


def samples(model: onnx.ModelProto, count: int = 16, seed: int = 0) -> Samples:
    return Samples(feeds(model, count, seed), None, "data.npz")


def sqnr_db(wanted: np.ndarray, got: np.ndarray) -> float:
    """Signal to quantization noise, in decibels: 10 more is a third of the error."""
    return float(10 * np.log10(np.sum(wanted**2) / np.sum((wanted - got) ** 2)))
