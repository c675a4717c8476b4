"""What a task adds behind a model: probabilities, boxes after NMS, a class per pixel, length 1.

Each is a torch module, so that the comparison of the graph with PyTorch covers it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.task import CLASSIFY, DETECT, EMBED, SEGMENT, TEXT_CLASSIFY, TaskOutputs
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.exporters.known_outputs import (
    DETECTOR,
    find_answer,
    may_leave_out,
    misfit,
)
from deploykit.exporters.nms import suppress
from deploykit.exporters.probabilities import are_probabilities
from deploykit.runtimes.torch.loaded import Loaded, by_position
from deploykit.runtimes.torch.outputs import adapt

torch = require("torch")

_FIRST_IMAGE = "output_0_"  # of the list that detectors of torchvision answer with


@dataclass(frozen=True)
class Boxes:
    """How boxes are chosen: `iou` from which they are one, and how `many` an image has at most."""

    iou: float
    many: int


@dataclass(frozen=True)
class TaskHead:
    """A model with a task's outputs. `classes`: how many it tells apart, None for none."""

    loaded: Loaded
    outputs: TaskOutputs
    classes: int | None
    notes: tuple[str, ...] = ()


def with_head(
    loaded: Loaded,
    kind: str,
    size: tuple[int, int],
    boxes: Boxes,
    classes: int | None = None,
    *,
    independent: bool = False,
) -> TaskHead:
    """`loaded` with the outputs of the task `kind`. Raises BadInput where its own do not fit.

    `size`: height and width of the image, 0 where they are dynamic; `classes`: of a detector whose
    outputs do not show it.
    `independent`: a sample may have several labels, each with a probability of its own.
    """
    add = {
        CLASSIFY: _classify,
        TEXT_CLASSIFY: _classify,
        SEGMENT: _segment,
        EMBED: _embed,
        DETECT: _detect,
    }
    return add[kind](_Job(loaded, kind, size, boxes, classes, independent))


@dataclass(frozen=True)
class _Job:
    loaded: Loaded
    kind: str
    size: tuple[int, int]
    boxes: Boxes
    classes: int | None
    independent: bool

    def misfit(self, needs: str) -> BadInput:
        return misfit(self.loaded, f"`task` {self.kind}", needs)

    def one(self, ranks: Sequence[int], needs: str) -> tuple[int, tuple[str, ...]]:
        """The place of the output that counts, a float of one of these ranks, and a note."""
        at = find_answer(self.loaded, self.kind, ranks)
        if at is None:
            raise self.misfit(needs)
        return at, self.left_out([at])

    def left_out(self, places: Sequence[int]) -> tuple[str, ...]:
        others = [each.name for at, each in enumerate(self.loaded.outputs) if at not in places]
        return (f"left out: the outputs {', '.join(others)}",) if others else ()

    def head(
        self,
        function: Callable[..., Any],
        places: Sequence[int],
        specs: Sequence[TensorSpec],
        outputs: TaskOutputs,
        classes: int | None,
        notes: tuple[str, ...] = (),
    ) -> TaskHead:
        behind = _Behind(self.loaded.module, function, places).eval()
        made = adapt(behind, by_position, len(self.loaded.inputs))
        return TaskHead(
            replace(self.loaded, module=made, outputs=tuple(specs)), outputs, classes, notes
        )

    def in_parts(
        self,
        made: TaskHead,
        before: Callable[..., Any],
        places: Sequence[int],
        raw: Sequence[TensorSpec],
        after: Callable[..., Any],
    ) -> TaskHead:
        """`made` that also says how it is put together: `after` chooses by `raw` of `before`."""
        first = self.head(before, places, raw, TaskOutputs(), None).loaded
        choice = adapt(_Behind(None, after, range(len(raw))).eval(), by_position, len(raw))
        second = replace(made.loaded, module=choice, inputs=tuple(raw))
        return replace(made, loaded=replace(made.loaded, parts=(first, second)))


class _Behind(torch.nn.Module):  # type: ignore[misc, name-defined] # torch comes through require
    """`function` of some of the outputs of `module`, after which its inputs are numbered too."""

    def __init__(self, module: Any, function: Callable[..., Any], places: Sequence[int]) -> None:
        super().__init__()
        self.module = module
        self.function = function
        self.places = tuple(places)

    def forward(self, *inputs: Any) -> Any:
        values = (*(self.module(*inputs) if self.module else ()), *inputs)
        return self.function(*(values[at] for at in self.places))


# classes


def _classify(job: _Job) -> TaskHead:
    at, notes = job.one((2, 4), "classify needs scores of the classes, float [N,classes]")
    spec = job.loaded.outputs[at]
    batch, count, *rest = spec.shape
    if not isinstance(count, int) or count < 2 or any(size != 1 for size in rest):
        raise job.misfit("classify needs scores of two classes or more, float [N,classes]")
    done = are_probabilities(job.loaded, at)
    if done:
        notes = (*notes, f"output '{spec.name}' is probabilities already: no softmax was added")

    def scores(values: Any) -> Any:
        flat = values.flatten(1).to(torch.float32)
        if done:
            return (flat,)
        return (flat.sigmoid() if job.independent else flat.softmax(1),)

    out = TensorSpec("scores", "float32", (batch, count))
    return job.head(scores, [at], [out], TaskOutputs(scores="scores"), count, notes)


# pixels


def _segment(job: _Job) -> TaskHead:
    needs = "segment needs scores of the classes of each pixel, float [N,classes,height,width]"
    at, notes = job.one((4,), needs)
    batch, count, *sides = job.loaded.outputs[at].shape
    if not isinstance(count, int) or count < 2:
        raise job.misfit(needs)
    size = job.loaded.inputs[0].shape[1:3]
    places = [at] if tuple(sides) == size else [at, len(job.loaded.outputs)]
    if len(places) > 1:
        notes = (*notes, f"its scores of {sides[0]}x{sides[1]} are resized to the image's")

    def grown(values: Any, *image_NHWC: Any) -> Any:
        values = values.to(torch.float32)
        for image in image_NHWC:
            shape = job.size if all(job.size) else tuple(image.shape[1:3])
            resize = torch.nn.functional.interpolate
            values = resize(values, size=shape, mode="bilinear", align_corners=False)
        return (values,)

    def mask(values: Any) -> Any:
        return (values.argmax(1).to(torch.int32),)

    out = TensorSpec("mask", "int32", (batch, *size))
    names = TaskOutputs(mask="mask")
    made = job.head(lambda *x: mask(*grown(*x)), places, [out], names, count, notes)
    raw = TensorSpec("pixel_scores", "float32", (batch, count, *size))
    return job.in_parts(made, grown, places, [raw], mask)


def size_multiple(loaded: Loaded) -> int:
    """What height and width must be multiples of, as for the skip connections of a U-Net.

    `loaded`: its one input is uint8 [N, H, W, C]. Raises BadInput where no power of 2 will do.
    """
    (spec,) = loaded.inputs
    for multiple in (1, 2, 4, 8, 16, 32, 64):
        shape = concrete(spec, sides_of(spec, multiple))
        with contextlib.suppress(Exception), torch.inference_mode():  # whatever a module raises
            loaded.module(torch.zeros(shape, dtype=torch.uint8))
            return multiple
    raise BadInput(
        f"the model takes no image of {shape[1]}x{shape[2]} pixels",
        hint="give height and width as numbers in `inputs`",
    )


def sides_of(image: TensorSpec, multiple: int) -> dict[str, int]:
    """Sizes for H and W of `image` [N, H, W, C], which no larger power of 2 divides.

    One is above a power, one below: halving rounds down in some models, up in others.
    """
    height, width = map(str, image.shape[1:3])
    return {height: 128 + multiple, width: 256 - multiple}


# embeddings


def _embed(job: _Job) -> TaskHead:
    at, notes = job.one((2, 4), "embed needs one vector for each sample, float [N,size]")
    batch, size, *rest = job.loaded.outputs[at].shape
    if not isinstance(size, int) or any(each != 1 for each in rest):
        raise job.misfit("embed needs one vector for each sample, float [N,size]")

    def unit(values: Any) -> Any:
        return (torch.nn.functional.normalize(values.flatten(1).to(torch.float32), dim=1),)

    out = TensorSpec("embedding", "float32", (batch, size))
    return job.head(unit, [at], [out], TaskOutputs(embedding="embedding"), None, notes)


# boxes

_DETECTS = (
    "detect takes [N,4+classes,boxes] or [N,boxes,5+classes] as YOLO gives them, [N,boxes,6] of a "
    "model without NMS, 'boxes' [N,boxes,4] of corners in pixels with 'scores' [N,boxes,classes], "
    "or 'boxes', 'scores' and 'labels' of a detector of torchvision"
)


def _detect(job: _Job) -> TaskHead:
    _keep_anchors(job.loaded.module)
    outputs = {
        spec.name.removeprefix(_FIRST_IMAGE): (at, spec)
        for at, spec in enumerate(job.loaded.outputs)
    }
    places = [outputs[name][0] for name in ("boxes", "scores", "labels") if name in outputs]
    ranks = [len(job.loaded.outputs[at].shape) for at in places]
    if ranks == [2, 1, 1] and outputs.keys() <= DETECTOR:
        return _of_one_image(job, places)
    others = outputs.keys() - {"boxes", "scores"}
    if ranks == [3, 3] and all(may_leave_out(DETECT, name) for name in others):
        boxes, scores = (outputs[name][1].shape for name in ("boxes", "scores"))
        count = scores[2]
        if boxes[2] == 4 and boxes[1] == scores[1] and isinstance(count, int):
            notes = job.left_out(places)
            return _suppressed(job, places, boxes[:2], count, lambda b, s: (b, s), notes)
    at, notes = job.one((3,), _DETECTS)
    batch, rows, columns = job.loaded.outputs[at].shape
    if not isinstance(rows, int) or not isinstance(columns, int) or min(rows, columns) < 5:
        raise job.misfit(_DETECTS)
    ends = any(getattr(part, "end2end", False) for part in job.loaded.module.modules())
    final = columns == 6 and job.classes != 2  # else a box and the scores of two classes
    if rows <= 1000 and (final or (ends and columns >= 6)):  # masks or keypoints come behind
        return _final(job, at, (batch, rows), notes)
    anchors_last = columns > rows
    width, anchors = (rows, columns) if anchors_last else (columns, rows)
    extra = width - (job.classes or 0)
    objectness = not anchors_last and (extra == 5 or not job.classes)
    first = 5 if objectness else 4
    count = job.classes or width - first
    if count < 1 or width < first + count:
        raise job.misfit(_DETECTS)

    def decode(values: Any) -> Any:
        if anchors_last:
            values = values.transpose(1, 2)
        centre, half = values[..., :2], values[..., 2:4] / 2
        scores = values[..., first : first + count]
        if objectness:
            scores = scores * values[..., 4:5]
        return torch.cat((centre - half, centre + half), -1), scores

    return _suppressed(job, [at], (batch, anchors), count, decode, notes)


def _suppressed(
    job: _Job,
    places: Sequence[int],
    shape: Sequence[int | str],
    count: int,
    decode: Callable[..., Any],
    notes: tuple[str, ...] = (),
) -> TaskHead:
    """NMS within each class behind `decode`, which gives corners [N,A,4] and scores [N,A,C]."""
    anchors = shape[1]
    many = min(job.boxes.many, anchors) if isinstance(anchors, int) else job.boxes.many
    height, width = job.size

    def before(*values: Any) -> Any:
        return decode(*(value.to(torch.float32) for value in values))

    def after(corners: Any, by_class: Any) -> Any:
        scores, classes = by_class.max(-1)
        scores = suppress(corners, scores, classes, count, job.boxes.iou, many)
        scores, places = scores.topk(many, dim=1)
        corners = corners.gather(1, places.unsqueeze(-1).expand(-1, -1, 4))
        return _in_image(corners, scores, classes.gather(1, places), height, width)

    def detect(*values: Any) -> Any:
        return after(*before(*values))

    made = _boxes(job, places, (shape[0], many), detect, count, notes)
    raw = (
        TensorSpec("corners", "float32", (*shape, 4)),
        TensorSpec("by_class", "float32", (*shape, count)),
    )
    return job.in_parts(made, before, places, raw, after)


def _final(job: _Job, at: int, shape: Sequence[int | str], notes: tuple[str, ...]) -> TaskHead:
    """Rows that begin with corners, score and class, the best ones first or not."""
    many = min(job.boxes.many, int(shape[1]))

    def detect(rows: Any) -> Any:
        scores, places = rows[..., 4].topk(many, dim=1)
        rows = rows.gather(1, places.unsqueeze(-1).expand(-1, -1, 6))
        classes = rows[..., 5].to(torch.int64)
        return _in_image(rows[..., :4], scores, classes, *job.size)

    return _boxes(job, [at], (shape[0], many), detect, job.classes, notes)


def _of_one_image(job: _Job, places: Sequence[int]) -> TaskHead:
    """A detector of torchvision, which has its own NMS: as many rows as boxes, the best first."""
    many = job.boxes.many

    def detect(corners: Any, scores: Any, classes: Any) -> Any:
        filled = [
            torch.cat((each, each.new_zeros((many, *each.shape[1:]))))[:many]
            for each in (corners, scores, classes)
        ]
        return tuple(each.reshape(1, many, *each.shape[1:]) for each in filled)

    return _boxes(job, places, (1, many), detect, job.classes, job.left_out(places))


def _in_image(corners: Any, scores: Any, classes: Any, height: int, width: int) -> Any:
    """Cut off at the edges; rows without a score are 0."""
    used = (scores > 0).to(corners.dtype)
    x = corners[..., 0::2].clamp(0, width)
    y = corners[..., 1::2].clamp(0, height)
    corners = torch.stack((x[..., 0], y[..., 0], x[..., 1], y[..., 1]), -1)
    return corners * used.unsqueeze(-1), scores * used, classes * used.to(classes.dtype)


def _boxes(
    job: _Job,
    places: Sequence[int],
    shape: Sequence[int | str],
    function: Callable[..., Any],
    count: int | None,
    notes: tuple[str, ...] = (),
) -> TaskHead:
    specs = (
        TensorSpec("boxes", "float32", (*shape, 4)),
        TensorSpec("scores", "float32", tuple(shape)),
        TensorSpec("classes", "int64", tuple(shape)),
    )
    found = TaskOutputs(boxes="boxes", scores="scores", classes="classes")
    return job.head(function, places, specs, found, count, notes)


class _AnyShape:
    """Equal to every shape: a head of Ultralytics keeps the grid of anchors that it has."""

    __hash__ = None  # type: ignore[assignment] # it is compared alone

    def __eq__(self, _other: object) -> bool:
        return True


def _keep_anchors(module: Any) -> None:
    """Let a head of Ultralytics keep the anchors of its last run, those of the image's size.

    It would make them anew, and no graph can keep that, wherever the batch has another size.
    """
    for part in module.modules():
        if type(part).__module__.startswith("ultralytics.") and hasattr(part, "anchors"):
            part.shape, part.dynamic = _AnyShape(), False
