r"""The metric of a detector: COCO's mean average precision, for `quantize --metric`.

    deploykit quantize shapes.onnx --to fp16 --calib shapes/calibration.npz --data shapes/test.npz \
        --metric examples/average_precision.py:map_of_each --max-drop 0.01

Labels are float32 (samples, M, 5): the class and x1 y1 x2 y2 in pixels of the model's input, the
class -1 in rows that are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
MOST = 100  # boxes of a class in an image, as pycocotools counts


class MeanPrecision(NamedTuple):
    """`coco`: the mean over IoU 0.50, 0.55, …, 0.95; `at_50`: at an IoU of 0.5. NaN without any."""

    coco: float
    at_50: float


class FoundBoxes(NamedTuple):
    """Of one image: corners [K,4], scores [K] and classes [K]; a score of 0 is no box."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


def mean_average_precision(found: Sequence[FoundBoxes], labels: np.ndarray) -> MeanPrecision:
    """Over all images and the classes that `labels` (images, M, 5) hold."""
    classes = np.unique(labels[..., 0][labels[..., 0] >= 0])
    by_class = [of_class(found, labels, each) for each in classes]
    if not by_class:
        return MeanPrecision(float("nan"), float("nan"))
    return MeanPrecision(float(np.mean(by_class)), float(np.mean([each[0] for each in by_class])))


def map_of_each(outputs: Mapping[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """The mean average precision of each image alone, 1 for one without a box; shape (samples,).

    `outputs`: boxes [N,K,4], scores [N,K] and classes [N,K], as `export --task detect` names them.
    """
    rows = zip(*(outputs[name] for name in FoundBoxes._fields), labels, strict=True)
    each = [mean_average_precision([FoundBoxes(b, s, c)], own[None]) for b, s, c, own in rows]
    return np.nan_to_num(np.array([one.coco for one in each], np.float64), nan=1.0)


def of_class(found: Sequence[FoundBoxes], labels: np.ndarray, number: float) -> np.ndarray:
    """Average precision at each of the thresholds."""
    scores, taken, total = [], [], 0
    for image, own in zip(found, labels, strict=True):
        truth = own[own[:, 0] == number][:, 1:]
        mine = best(image, number)
        total += len(truth)
        scores.append(image.scores[mine].astype(np.float64))
        taken.append(hits(iou(image.boxes[mine], truth)))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return np.array([area(row[order], total) for row in np.concatenate(taken, axis=1)])


def best(image: FoundBoxes, number: float) -> np.ndarray:
    """Places of an image's best boxes that are of class `number`, the best first."""
    order = np.argsort(-image.scores, kind="stable")
    used = order[(image.scores[order] > 0) & (image.classes[order] == number)]
    return np.asarray(used[:MOST])


def iou(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Intersection over union [L,R] of boxes [L,4] and [R,4]."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    low = np.maximum(left[:, None, :2], right[None, :, :2])
    high = np.minimum(left[:, None, 2:], right[None, :, 2:])
    shared = (high - low).clip(min=0).prod(-1)
    areas = [(each[:, 2:] - each[:, :2]).prod(-1) for each in (left, right)]
    return shared / np.maximum(areas[0][:, None] + areas[1] - shared, 1e-9)


def hits(shared: np.ndarray) -> np.ndarray:
    """For each threshold and each box, best first: whether it takes a true box that is left.

    Of two that it overlaps alike it takes the last, as pycocotools does.
    """
    taken = np.zeros((len(THRESHOLDS), len(shared)), bool)
    for level, least in enumerate(THRESHOLDS if shared.size else ()):
        left = shared.copy()
        for row in range(len(left)):
            column = left.shape[1] - 1 - left[row, ::-1].argmax()
            if left[row, column] >= least:
                taken[level, row] = True
                left[:, column] = -1
    return taken


def area(hits: np.ndarray, total: int) -> float:
    """Precision, made falling from the right, at 101 recalls."""
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    falling = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return float(falling[np.searchsorted(right / total, RECALLS)].mean())
