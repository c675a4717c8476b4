"""Data that fit a zoo graph, for the tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from deploykit.engines.data.samples import Samples, random_feeds
from deploykit.quantization.calibrate import Calibration, Range
from tests.support.graphs.protos import specs


def feeds(model: onnx.ModelProto, count: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    return random_feeds(specs(model)[0], {"N": count}, seed)


def samples(model: onnx.ModelProto, count: int = 16, seed: int = 0) -> Samples:
    return Samples(feeds(model, count, seed), None, "data.npz")


def calibration(ranges: Mapping[str, Range]) -> Calibration:
    return Calibration(ranges, ranges, 16, "minmax")


def sqnr_db(wanted: np.ndarray, got: np.ndarray) -> float:
    """Signal to quantization noise, in decibels: 10 more is a third of the error."""
    return float(10 * np.log10(np.sum(wanted**2) / np.sum((wanted - got) ** 2)))


def in_true_halves(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs by numpy's float16, which overflows as a GPU does; ONNX Runtime on a CPU hides it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return [np.asarray(value) for value in ReferenceEvaluator(model).run(None, inputs)]
