"""What a model's outputs mean: labels with scores, boxes, a mask, an embedding, as JSON values.

    classify, text-classify   {"label", "score", "top": [{"label", "index", "score"}, ...]}
    detect    {"boxes": [{"label", "index", "score", "box": [x1, y1, x2, y2]}], "width", "height"}
    segment   {"segments": [{"label", "index", "pixels", "rle"}, ...], "width", "height"}, or "png"
    embed     {"embedding": [...]}

Boxes and masks are in pixels of the image as it was sent, turned upright.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.task import DETECT, EMBED, SEGMENT, Task

if TYPE_CHECKING:
    from deploykit.runtimes.tasks.images import PlacedImage  # Pillow, which a text does not need

Answer = dict[str, Any]

RLE, PNG = "rle", "png"
_NO_ANSWER = 255  # in a PNG mask: pixels that the model was not shown


def answer(
    task: Task,
    outputs: Mapping[str, np.ndarray],
    placed: Sequence[PlacedImage | None],
    *,
    mask: str = RLE,
) -> list[Answer]:
    """One answer for each row of `outputs`; `placed` has the image of each, None for a text.

    `mask`: "rle", COCO's run lengths for each label, or "png", one image of label indices.
    Raises BadInput for scores that are not finite.
    """
    names = task.outputs
    if task.kind == EMBED:
        return [{"embedding": row} for row in _finite(outputs, names.embedding).tolist()]
    if task.kind == DETECT:
        return [_boxes(task, outputs, row, image) for row, image in enumerate(placed) if image]
    if task.kind == SEGMENT:
        return [
            _segments(task, classes, image, mask)
            for classes, image in zip(outputs[names.mask], placed, strict=True)
            if image
        ]
    return [_labels(task, row) for row in _finite(outputs, names.scores)]


def _finite(outputs: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    array = outputs[name]
    if not np.isfinite(array).all():
        raise BadInput(f"the model's output '{name}' holds NaN or infinity")
    return array


def _labels(task: Task, scores: np.ndarray) -> Answer:
    scores = scores.reshape(-1)
    best = np.argsort(-scores, kind="stable")[: task.top_k].tolist()
    top = [{"label": task.label(i), "index": i, "score": float(scores[i])} for i in best]
    return {"label": top[0]["label"], "score": top[0]["score"], "top": top}


def _boxes(task: Task, outputs: Mapping[str, np.ndarray], row: int, image: PlacedImage) -> Answer:
    names = task.outputs
    scores, boxes = (_finite(outputs, name)[row] for name in (names.scores, names.boxes))
    classes = outputs[names.classes][row]
    kept = np.flatnonzero((scores >= task.threshold) & (scores > 0))
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    places = image.to_original(boxes[kept]).round(2).tolist()
    found = [
        {"label": task.label(int(classes[i])), "index": int(classes[i]), "score": float(scores[i])}
        for i in kept
    ]
    each = [{**one, "box": place} for one, place in zip(found, places, strict=True)]
    return {"boxes": each, "width": image.width, "height": image.height}


def _segments(task: Task, classes: np.ndarray, image: PlacedImage, form: str) -> Answer:
    mask = _original_mask(classes, image)
    size = {"width": image.width, "height": image.height}
    if form == PNG:
        return {"png": _png(mask), **size}
    return {"segments": _run_lengths(task, mask), **size}


def _original_mask(classes: np.ndarray, image: PlacedImage) -> np.ndarray:
    """Label indices for each pixel of the original, the nearest one's; -1 where it was cut off."""
    height, width = classes.shape
    down, along = height / image.pixels.shape[0], width / image.pixels.shape[1]
    x = (np.arange(image.width) + 0.5) * image.scale_x + image.left
    y = (np.arange(image.height) + 0.5) * image.scale_y + image.top
    x, y = (np.floor(found).astype(int) for found in (x * along, y * down))
    found: np.ndarray = classes.astype(np.int32)[
        y.clip(0, height - 1)[:, None], x.clip(0, width - 1)
    ]
    found[(y < 0) | (y >= height), :] = -1
    found[:, (x < 0) | (x >= width)] = -1
    return found


def _run_lengths(task: Task, mask: np.ndarray) -> list[Answer]:
    """COCO's uncompressed form: counts of 0 and 1 in turn, columns first, beginning with 0."""
    flat = mask.T.reshape(-1)
    starts = np.concatenate(([0], np.flatnonzero(flat[1:] != flat[:-1]) + 1))
    ends, values = np.append(starts[1:], flat.size), flat[starts]
    found = []
    for index in sorted({int(value) for value in np.unique(values)} - {-1}):
        runs = values == index
        edges = np.stack([starts[runs], ends[runs]], axis=1).reshape(-1)
        counts = np.diff(np.concatenate(([0], edges, [flat.size])))
        pixels = int(counts[1::2].sum())
        if not counts[-1]:
            counts = counts[:-1]
        rle = {"size": list(mask.shape), "counts": counts.tolist()}
        found.append({"label": task.label(index), "index": index, "pixels": pixels, "rle": rle})
    return found


def _png(mask: np.ndarray) -> str:
    if mask.size and int(mask.max()) >= _NO_ANSWER:
        raise BadInput(f"a PNG mask has {_NO_ANSWER} labels at most", hint="ask for mask=rle")
    from deploykit.runtimes.data.images import Image

    data = io.BytesIO()
    Image.fromarray(np.where(mask < 0, _NO_ANSWER, mask).astype(np.uint8)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()
