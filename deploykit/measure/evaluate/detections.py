"""Pair the boxes that two engines found in the same images.

A detector gives as many boxes as it finds, sorted by score: a difference of 1e-6 swaps two rows or
drops one. So rows are compared with their counterparts: of the same label, with at least half of
their union in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deploykit.runtimes.engine import Arrays

LEAST_IOU = 0.5
_LABELS = ("labels", "classes")
_MORE = ("masks", "keypoints", "keypoints_scores")  # also one row for each box
_MOST = 4096  # boxes of an image; of all pairs the IoU is in memory at once
_CLOSE = 1e-3  # of the largest coordinate: boxes without an area are equal, too


@dataclass(frozen=True)
class Matches:
    """`total`: boxes of either side, pairs counted once. `iou`: summed up over the pairs."""

    matched: int
    total: int
    iou: float


@dataclass(frozen=True)
class _Head:
    """Names of the outputs of one head; all three are the same for rows [x1, y1, x2, y2, s, c]."""

    boxes: str
    scores: str
    labels: str
    more: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.boxes, self.scores, self.labels, *self.more)))

    def rows(self, outputs: Arrays) -> Sequence[np.ndarray]:
        """Corners [..., M, 4], scores [..., M] and labels [..., M]."""
        boxes = outputs[self.boxes]
        if self.scores == self.boxes:
            return boxes[..., :4], boxes[..., 4], boxes[..., 5]
        return boxes, outputs[self.scores], outputs[self.labels]


def pair(left: Arrays, right: Arrays) -> tuple[Arrays, Arrays, Mapping[str, Matches]]:
    """Both with the boxes of `left` that `right` has too, in the order of `left`.

    Recognised are, in `left`: outputs [M,4] or [N,M,4] named "...boxes" with "...scores" and
    "...labels" or "...classes" [M] or [N,M] (and torchvision's masks and keypoints); and [N,M,6]
    that can only be corners, a score and a class. Others stay as they are. `Matches` by the name of
    the output that holds the boxes.
    """
    found: dict[str, Matches] = {}
    left, right = dict(left), dict(right)
    for head in list(_heads(left)):
        if any(left[name].shape[2:] != right[name].shape[2:] for name in head.names):
            continue
        mine, theirs = head.rows(left), head.rows(right)
        if mine[0].ndim != theirs[0].ndim or mine[0].shape[:-2] != theirs[0].shape[:-2]:
            continue
        single = mine[0].ndim == 2
        images = [(mine, theirs)]
        if not single:
            every = range(len(mine[0]))
            images = [([a[n] for a in mine], [a[n] for a in theirs]) for n in every]
        pairs = [_pairs(*image) for image in images]
        for name in head.names:
            for outputs, places in (
                (left, [each.left for each in pairs]),
                (right, [each.right for each in pairs]),
            ):
                parts = [outputs[name]] if single else outputs[name]
                taken = [part[at] for part, at in zip(parts, places, strict=True)]
                outputs[name] = np.concatenate(taken)
        matched = sum(len(each.left) for each in pairs)
        total = sum(each.boxes for each in pairs) - matched
        found[head.boxes] = Matches(matched, total, sum(each.iou for each in pairs))
    return left, right, found


def same_boxes(left: Arrays, right: Arrays) -> np.ndarray | None:
    """A boolean for each box of either side: whether the other has it; None without a detector."""
    found = pair(left, right)[2].values()
    if not found:
        return None
    matched, total = sum(each.matched for each in found), sum(each.total for each in found)
    return np.arange(total) < matched


def _heads(outputs: Arrays) -> Iterator[_Head]:
    for name, array in outputs.items():
        if array.dtype.kind != "f" or array.ndim not in (2, 3) or array.shape[-2] > _MOST:
            continue
        if name.endswith("boxes") and array.shape[-1] == 4:
            stem = name.removesuffix("boxes")
            label = next((stem + each for each in _LABELS if stem + each in outputs), "")
            rows = [outputs[each] for each in (stem + "scores", label) if each in outputs]
            if len(rows) == 2 and all(each.shape == array.shape[:-1] for each in rows):
                more = (stem + each for each in _MORE)
                more = (n for n in more if n in outputs and outputs[n].shape[:1] == array.shape[:1])
                if _corners(array):
                    kept = tuple(more) if array.ndim == 2 else ()
                    yield _Head(name, stem + "scores", label, kept)
        elif array.ndim == 3 and array.shape[-1] == 6 and _only_boxes(array):
            yield _Head(name, name, name)


def _corners(boxes: np.ndarray) -> bool:
    finite = bool(np.isfinite(boxes).all())
    return finite and bool((boxes[..., 2:] >= boxes[..., :2]).all())


def _only_boxes(rows: np.ndarray) -> bool:
    """Whether all rows are corners, a score and the number of a class, and some have an area."""
    scores, classes = rows[..., 4], rows[..., 5]
    shares = bool(((scores >= 0) & (scores <= 1)).all() and scores.any())
    numbers = bool(((classes >= 0) & (np.trunc(classes) == classes)).all())
    return shares and numbers and _corners(rows[..., :4]) and bool(_areas(rows[..., :4]).any())


class _Pairs(NamedTuple):
    """Of one image: places of the pairs on both sides, boxes of both sides, and summed IoU."""

    left: list[int]
    right: list[int]
    boxes: int
    iou: float


def _pairs(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> _Pairs:
    (boxes, scores, labels), (others, their_scores, their_labels) = left, right
    mine, theirs = _real(boxes, scores), _real(others, their_scores)
    iou = _iou(boxes[mine], others[theirs])
    iou[labels[mine][:, None] != their_labels[theirs]] = 0
    found: tuple[list[int], list[int]] = ([], [])
    total = 0.0
    for row, place in enumerate(mine):
        if not len(theirs) or iou[row].max() < LEAST_IOU:
            continue
        best = np.flatnonzero(iou[row] >= iou[row].max() - _CLOSE)
        gaps = np.abs(their_scores[theirs[best]].astype(np.float64) - float(scores[place]))
        column = best[gaps.argmin()]
        total += float(iou[row, column])
        iou[:, column] = 0
        found[0].append(int(place))
        found[1].append(int(theirs[column]))
    return _Pairs(*found, len(mine) + len(theirs), total)


def _real(boxes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Places of the boxes, best first, without the zeros that fill a tensor of fixed size up."""
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    return np.asarray(order[((scores != 0) | boxes.any(-1))[order]])


def _areas(boxes: np.ndarray) -> np.ndarray:
    sides = np.maximum(boxes[..., 2:] - boxes[..., :2], 0)
    return np.asarray(sides[..., 0] * sides[..., 1])


def _iou(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Intersection over union [L,R] of boxes [L,4] and [R,4]; 1 where they are all but equal."""
    right = np.where(np.isfinite(right), right, 0)  # no box of `left` then has much of it
    a, b = left.astype(np.float64)[:, None], right.astype(np.float64)[None]
    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
    shared = _areas(np.concatenate((low, high), -1))
    union = _areas(a) + _areas(b) - shared
    share = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    close = np.abs(a - b).max(-1) <= _CLOSE * np.abs(left).max(initial=0)
    return np.where(close, 1.0, share)
