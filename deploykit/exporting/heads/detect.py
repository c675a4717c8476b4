"""Boxes of a detector, as the families of detectors give them, become boxes in pixels after NMS."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from deploykit.core.errors import first_line
from deploykit.core.extras import require
from deploykit.core.task import DETECT
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.exporting.heads.head import INSIDE, AnswerRule, HeadRequest, TaskHead, float_outputs
from deploykit.exporting.operators import suppress

torch = require("torch")


_MOST_APART = 0.1  # equal scores have no order
_TORCHVISION = {"boxes", "scores", "labels", "masks", "keypoints", "keypoints_scores"}
_FIRST_IMAGE = "output_0_"  # prefix of names in the list that torchvision's detectors return
_BOX_ROWS = (
    "detect takes [N,4+classes,boxes] or [N,boxes,5+classes] as YOLO gives them, [N,boxes,6] of a "
    "model without NMS, 'boxes' [N,boxes,4] of corners in pixels with 'scores' [N,boxes,classes], "
    "or 'boxes', 'scores' and 'labels' of a detector of torchvision"
)


def add_boxes(request: HeadRequest) -> TaskHead:
    """Add the choice of boxes that the model's family needs. Raises BadInput."""
    loaded = request.loaded
    _keep_anchors(loaded.module)
    outputs = {
        spec.name.removeprefix(_FIRST_IMAGE): (at, spec) for at, spec in enumerate(loaded.outputs)
    }
    places = [outputs[name][0] for name in ("boxes", "scores", "labels") if name in outputs]
    ranks = [len(loaded.outputs[at].shape) for at in places]
    if ranks == [2, 1, 1] and outputs.keys() <= _TORCHVISION:
        return _of_one_image(request, places)
    others = outputs.keys() - {"boxes", "scores"}
    if ranks == [3, 3] and all(re.fullmatch(INSIDE, name) for name in others):
        boxes, scores = (outputs[name][1].shape for name in ("boxes", "scores"))
        count = scores[2]
        if boxes[2] == 4 and boxes[1] == scores[1] and isinstance(count, int):
            return _suppressed(request, places, boxes[:2], count, lambda b, s: (b, s))
    return _of_one_output(request)


def _of_one_output(request: HeadRequest) -> TaskHead:
    """Add the head for rows of a box, scores of classes and what else a YOLO puts there."""
    loaded, classes = request.loaded, request.preset.classes
    at: int | None = 0
    boxes_first = request.preset.task == DETECT or _are_raw_maps(
        loaded.outputs[0], loaded.outputs[1:]
    )
    if float_outputs(loaded, (3,))[:1] != [0] or not boxes_first:
        at = AnswerRule().find(loaded, (3,))
    if at is None:
        raise request.misfit(_BOX_ROWS)
    batch, rows, columns = loaded.outputs[at].shape
    if not isinstance(rows, int) or not isinstance(columns, int) or min(rows, columns) < 5:
        raise request.misfit(_BOX_ROWS)
    ends = any(getattr(part, "end2end", False) for part in loaded.module.modules())
    final = columns == 6 and classes != 2  # else a box and the scores of two classes
    if rows <= 1000 and (final or (ends and columns >= 6)):  # masks or keypoints come behind
        return _final(request, at, (batch, rows))
    by_library = request.preset.task == DETECT and rows == 4 + (classes or 0)
    if rows == columns and not by_library:
        raise request.misfit(f"{_BOX_ROWS}; as many boxes as columns could be either")
    anchors_last = by_library or columns > rows
    width, anchors = (rows, columns) if anchors_last else (columns, rows)
    objectness = not anchors_last and (width - (classes or 0) == 5 or not classes)
    first = 5 if objectness else 4
    count = classes or width - first
    if count < 1 or width < first + count:
        raise request.misfit(_BOX_ROWS)

    def decode(values: Any) -> Any:
        if anchors_last:
            values = values.transpose(1, 2)
        centre, half = values[..., :2], values[..., 2:4] / 2
        scores = values[..., first : first + count]
        if objectness:
            scores = scores * values[..., 4:5]
        return torch.cat((centre - half, centre + half), -1), scores

    made = _suppressed(request, [at], (batch, anchors), count, decode)
    if request.preset.task == DETECT and request.preset.classes:
        made = replace(made, notes=made.notes + _check_with_library(request, at, made, count))
    return made


def _check_with_library(
    request: HeadRequest, at: int, made: TaskHead, count: int
) -> tuple[str, ...]:
    """Raise BadInput unless Ultralytics' own NMS chooses the same boxes in a random image.

    Return a note where that NMS does not run.
    """
    try:
        library = require("ultralytics.utils.nms").non_max_suppression
        (spec,) = request.loaded.inputs
        image = torch.randint(0, 256, concrete(spec, {}), dtype=torch.uint8)
        with torch.no_grad():
            raw = request.loaded.module(image)[at]
            boxes, scores, classes = made.loaded.module(image)
            (own,) = library(raw, 1e-4, request.iou, max_det=request.boxes, nc=count)
    except Exception as exc:  # noqa: BLE001 - an older version, or torchvision lacks operators
        return (f"boxes not compared with Ultralytics' own NMS, which failed: {first_line(exc)}",)
    here = torch.cat((boxes[0], classes[0].unsqueeze(1)), 1)[scores[0] > 1e-4]
    width, height = request.size[1], request.size[0]
    own = torch.cat((own[:, :4].clamp(min=0), own[:, 5:6]), 1)
    own = own.minimum(torch.tensor([width, height, width, height, count]))
    apart = torch.cdist(own, here, p=torch.inf)
    if len(own) and (not len(here) or (apart.min(1).values > 1).float().mean() > _MOST_APART):
        raise request.misfit("its boxes are not those that Ultralytics' own NMS chooses")
    return ()


def _are_raw_maps(boxes: TensorSpec, others: Sequence[TensorSpec]) -> bool:
    """Return whether `others` are the maps [N,anchors,h,w,columns] that `boxes` was decoded from.

    YOLOv5 returns both from a model in eval mode: as many boxes, with the same columns.
    """
    shapes = [spec.shape[1:] for spec in others]
    if any(len(shape) != 4 or str in map(type, shape) for shape in shapes):
        return False
    rows = sum(prod(map(int, shape[:3])) for shape in shapes)
    return boxes.shape[1:2] == (rows,) and {shape[3] for shape in shapes} == {boxes.shape[-1]}


def _suppressed(
    request: HeadRequest,
    places: Sequence[int],
    shape: Sequence[int | str],
    count: int,
    decode: Callable[..., Any],
) -> TaskHead:
    """Add NMS within each class behind `decode`, which gives corners [N,A,4], scores [N,A,C]."""
    anchors = shape[1]
    many = min(request.boxes, anchors) if isinstance(anchors, int) else request.boxes

    def before(*values: Any) -> Any:
        return decode(*(value.to(torch.float32) for value in values))

    def after(corners: Any, by_class: Any) -> Any:
        scores, classes = by_class.max(-1)
        scores = suppress(corners, scores, classes, count, request.iou, many)
        scores, best = scores.topk(many, dim=1)
        corners = corners.gather(1, best.unsqueeze(-1).expand(-1, -1, 4))
        return _in_image(corners, scores, classes.gather(1, best), *request.size)

    made = _boxes(request, places, (shape[0], many), lambda *x: after(*before(*x)), count)
    raw = (
        TensorSpec("corners", "float32", (*shape, 4)),
        TensorSpec("by_class", "float32", (*shape, count)),
    )
    return request.in_parts(made, before, places, raw, after)


def _final(request: HeadRequest, at: int, shape: tuple[int | str, int]) -> TaskHead:
    """Cut rows that begin with corners, score and class, the best ones first or not."""
    many = min(request.boxes, shape[1])

    def detect(rows: Any) -> Any:
        scores, best = rows[..., 4].topk(many, dim=1)
        rows = rows.gather(1, best.unsqueeze(-1).expand(-1, -1, 6))
        classes = rows[..., 5].to(torch.int64)
        return _in_image(rows[..., :4], scores, classes, *request.size)

    return _boxes(request, [at], (shape[0], many), detect, request.preset.classes)


def _of_one_image(request: HeadRequest, places: Sequence[int]) -> TaskHead:
    """Fill the rows of a detector of torchvision, which has its own NMS, up to a fixed number."""
    many = request.boxes

    def detect(corners: Any, scores: Any, classes: Any) -> Any:
        filled = [
            torch.cat((each, each.new_zeros((many, *each.shape[1:]))))[:many]
            for each in (corners, scores, classes)
        ]
        return tuple(each.reshape(1, many, *each.shape[1:]) for each in filled)

    return _boxes(request, places, (1, many), detect, request.preset.classes)


def _in_image(corners: Any, scores: Any, classes: Any, height: int, width: int) -> Any:
    used = (scores > 0).to(corners.dtype)
    x = corners[..., 0::2].clamp(0, width)
    y = corners[..., 1::2].clamp(0, height)
    corners = torch.stack((x[..., 0], y[..., 0], x[..., 1], y[..., 1]), -1)
    return corners * used.unsqueeze(-1), scores * used, classes * used.to(classes.dtype)


def _boxes(
    request: HeadRequest,
    places: Sequence[int],
    shape: tuple[int | str, int],
    function: Callable[..., Any],
    count: int | None,
) -> TaskHead:
    specs = (
        TensorSpec("boxes", "float32", (*shape, 4)),
        TensorSpec("scores", "float32", shape),
        TensorSpec("classes", "int64", shape),
    )
    return request.head(function, places, specs, count, request.left_out(*places))


class _AnyShape:
    """Equal to every shape: a head of Ultralytics keeps the grid of anchors that it has."""

    __hash__ = None  # type: ignore[assignment] # it is compared alone

    def __eq__(self, _other: object) -> bool:
        return True


def _keep_anchors(module: Any) -> None:
    """Let a head of Ultralytics keep the anchors of its last run, those of the image's size.

    It would compute them again for another batch size, which no graph can hold.
    """
    for part in module.modules():
        if type(part).__module__.startswith("ultralytics.") and hasattr(part, "anchors"):
            part.shape, part.dynamic = _AnyShape(), False
