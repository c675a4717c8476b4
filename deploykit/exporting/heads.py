"""What a task adds behind a model: probabilities, boxes after NMS, a class per pixel, length 1.

Each is a torch module, so that the comparison of the graph with PyTorch covers it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.files import read_json
from deploykit.core.task import (
    CLASSIFY,
    CLS,
    DETECT,
    EMBED,
    MEAN,
    SEGMENT,
    TEXT_CLASSIFY,
    TaskOutputs,
)
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.engines.torch.files import module_errors
from deploykit.engines.torch.loaded import Loaded, by_position
from deploykit.engines.torch.outputs import adapt

torch_nms: ModuleType = require("torch")
onnxscript: ModuleType = require("onnxscript")
_dispatch: Any = require("torch.utils._python_dispatch")
torch = require("torch")


# Non-maximum suppression as one operator, whose output has the shape of the scores.
#
# torch's reference and ONNX's NonMaxSuppression keep the same boxes. ONNX lists them, as many as
# the
# data give; here the scores of all others become 0, so that a batch has one shape.

op: Any = onnxscript.opset18
VALUE: Any = onnxscript.FLOAT
INDICES: Any = onnxscript.INT64
_library: Any = torch_nms.library.Library("deploykit", "FRAGMENT")
_library.define(
    "suppress(Tensor boxes, Tensor scores, Tensor classes, int count, float iou, int most)"
    " -> Tensor"
)


def suppress(
    boxes_NA4: Any, scores_NA: Any, classes_NA: Any, count: int, iou: float, most: int
) -> Any:
    """The scores [N,A], 0 for a box that overlaps a better one of its class by more than `iou`.

    Boxes [N,A,4] are corners, classes [N,A] below `count`. Of each row the best `most` are kept;
    others may be, too.
    """
    return torch_nms.ops.deploykit.suppress(boxes_NA4, scores_NA, classes_NA, count, iou, most)


@torch_nms.library.impl(_library, "suppress", "CompositeExplicitAutograd")  # type: ignore[untyped-decorator]
def _suppress(
    boxes_NA4: Any, scores_NA: Any, classes_NA: Any, _: int, iou: float, most: int
) -> Any:
    kept_NA = torch_nms.zeros_like(scores_NA)
    rows = zip(boxes_NA4, scores_NA, classes_NA, kept_NA, strict=True)
    for boxes, scores, classes, kept in rows:
        order = scores.argsort(descending=True, stable=True)
        order = order[scores[order] > 0]
        for _ in range(most):
            if not len(order):
                break
            best, order = order[0], order[1:]
            kept[best] = scores[best]
            other = classes[order] != classes[best]
            order = order[other | (_iou(boxes[best], boxes[order]) <= iou)]
    return kept_NA


@torch_nms.library.register_fake("deploykit::suppress", lib=_library)  # type: ignore[untyped-decorator]
def _shape(_boxes: Any, scores: Any, *_options: Any) -> Any:
    return torch_nms.empty_like(scores)


def onnx_forms() -> Mapping[Any, Callable[..., Any]]:
    """As torch.onnx.export takes them."""
    return {torch_nms.ops.deploykit.suppress.default: _translate}


def _translate(
    boxes: VALUE, scores: VALUE, classes: INDICES, count: int, iou: float, most: int
) -> Any:
    """Each class has a row of scores of its own, 0 for boxes of the others."""
    one = op.Constant(value_ints=[1])
    each = op.Constant(value_ints=list(range(count)))
    own = op.Equal(op.Unsqueeze(classes, one), op.Reshape(each, op.Constant(value_ints=[1, -1, 1])))
    by_class = op.Where(own, op.Unsqueeze(scores, one), op.Constant(value_float=0.0))
    selected = op.NonMaxSuppression(
        boxes,
        by_class,
        op.Constant(value_ints=[most]),
        op.Constant(value_floats=[iou]),
        op.Constant(value_floats=[0.0]),
    )
    places = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)  # of image and box
    nothing = op.Mul(scores, op.Constant(value_float=0.0))
    return op.ScatterND(nothing, places, op.GatherND(scores, places))


def _iou(box_4: Any, others_M4: Any) -> Any:
    low = torch_nms.maximum(box_4[:2], others_M4[:, :2])
    high = torch_nms.minimum(box_4[2:], others_M4[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    areas = (others_M4[:, 2:] - others_M4[:, :2]).prod(1)
    whole = (box_4[2:] - box_4[:2]).prod() + areas - shared
    return torch_nms.where(shared > 0, shared / whole, torch_nms.zeros_like(shared))


# See whether a model's outputs are probabilities already, so that no softmax comes behind them.

_NOT_ONE = 1e-3  # sums of rows that are probabilities are nearer to 1


def are_probabilities(loaded: Loaded, at: int) -> bool:
    """Whether an output comes from a sigmoid, or its rows add up to 1.

    Seen on random images, and on tokens of id 0.
    """
    inputs = []
    random = torch.Generator().manual_seed(0)
    for spec in loaded.inputs:
        shape = concrete(spec, {axis: low for axis, (low, _) in loaded.limits.items()})
        dtype = getattr(torch, spec.dtype)
        mask = "mask" in spec.name
        inputs.append((torch.rand(shape, generator=random) + mask).to(dtype))
    with module_errors("the model"), torch.inference_mode(), _SigmoidWatch() as watch:
        values = loaded.module(*inputs)[at]
    if values.untyped_storage().data_ptr() in watch.made:
        return True
    values = values.flatten(1)
    return bool((values >= 0).all() and ((values.sum(1) - 1).abs() < _NOT_ONE).all())


class _SigmoidWatch(_dispatch.TorchDispatchMode):  # type: ignore[misc] # torch comes through require
    """While active: where the results of sigmoids are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sigmoid = func._opname.startswith(("sigmoid", "hardsigmoid"))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor) and not func.is_view:
                note = self.made.add if sigmoid else self.made.discard
                note(each.untyped_storage().data_ptr())
        return found


# Find the output that a task reads, by the names and the number of all outputs of a model.
#
# A rank alone proves nothing: the class scores of a DETR, [N,20,92], have the rank of a YOLO's
# boxes.
# If a model has several outputs, one has the name of the task's answer, and the name of every
# other
# one says that it is no part of that answer.

TOKENS = "tokens"  # a vector for each token of a text, to be pooled
DETECTOR = {"boxes", "scores", "labels", "masks", "keypoints", "keypoints_scores"}  # torchvision's

_NAMED = 6  # outputs in an error: a D-FINE has fifteen
_SCORES = ("logits", "scores", "out", "output")
_ANSWERS = {
    CLASSIFY: _SCORES,
    TEXT_CLASSIFY: _SCORES,
    SEGMENT: _SCORES,
    EMBED: ("embedding", "embeddings", "image_embeds", "text_embeds", "pooler_output", "pooled"),
    TOKENS: ("last_hidden_state", "token_embeddings"),
    DETECT: (),
}
_INSIDE = r"(\w+_)?(last_hidden_state|hidden_states?|attentions?|past_key_values)(_\d+)*"
_DURING_TRAINING = r"aux\w*|cls_logits|distillation_logits"  # the latter two: of a DeiT, averaged
_OTHERS = {
    **dict.fromkeys(_ANSWERS, re.compile(_INSIDE)),
    **dict.fromkeys(
        (CLASSIFY, TEXT_CLASSIFY, SEGMENT), re.compile(f"{_INSIDE}|{_DURING_TRAINING}|features")
    ),
    TOKENS: re.compile(f"{_INSIDE}|pooler_output"),
}


def find_answer(loaded: Loaded, kind: str, ranks: Sequence[int]) -> int | None:
    """Return the place of the output with the answer, or None if the outputs fit no known head.

    `kind`: a task, or TOKENS. The answer is a float tensor with one of `ranks`.
    """
    outputs = loaded.outputs
    fits = [
        at for at, spec in enumerate(outputs) if "float" in spec.dtype and len(spec.shape) in ranks
    ]
    stated = loaded.preset.task if loaded.preset else None
    if (kind, stated) == (EMBED, CLASSIFY):
        kind = CLASSIFY  # of a known classifier the vector is its scores, as a note then says
    boxes_first = stated == DETECT or _are_raw_maps(outputs[0], outputs[1:])
    if kind == DETECT and fits[:1] == [0] and boxes_first:
        return 0
    if len(outputs) > 1 or (kind not in (EMBED, TOKENS) and _transformers_class(loaded)):
        fits = [at for at in fits if outputs[at].name in _ANSWERS[kind]]
        others = [spec.name for at, spec in enumerate(outputs) if at not in fits[:1]]
        if not all(may_leave_out(kind, name) for name in others):
            return None
    return fits[0] if fits else None


def may_leave_out(kind: str, name: str) -> bool:
    """Return whether the name of an output says that it is no part of the answer of `kind`."""
    return _OTHERS[kind].fullmatch(name) is not None


def misfit(loaded: Loaded, option: str, needs: str) -> BadInput:
    """Return the error for a model whose outputs are not what `option` needs."""
    outputs, model = loaded.outputs, _transformers_class(loaded)
    named = ", ".join(map(str, outputs[:_NAMED]))
    more = f" and {len(outputs) - _NAMED} more" if len(outputs) > _NAMED else ""
    cure = "; wrap the model in a module that returns this alone" if len(outputs) > 1 else ""
    who = f"transformers' {model}" if model else "the model"
    return BadInput(
        f"{option} does not fit {who}: its outputs are {named}{more}", hint=needs + cure
    )


def _transformers_class(loaded: Loaded) -> str:
    """Return the class of the model if it is one of transformers, whose outputs have fixed names.

    A model inside a module of the user's own does not count: the module decides what it returns.
    """
    types = (type(part) for part in loaded.module.modules())
    outside = (each for each in types if not each.__module__.startswith("deploykit."))
    outermost = next(outside, object)
    return outermost.__name__ if outermost.__module__.startswith("transformers.") else ""


def _are_raw_maps(boxes: TensorSpec, others: Sequence[TensorSpec]) -> bool:
    """Return whether `others` are the maps [N,anchors,h,w,columns] that `boxes` was decoded from.

    YOLOv5 returns both from a model in eval mode: as many boxes, with the same columns.
    """
    shapes = [spec.shape[1:] for spec in others]
    if any(len(shape) != 4 or str in map(type, shape) for shape in shapes):
        return False
    rows = sum(prod(map(int, shape[:3])) for shape in shapes)
    return boxes.shape[1:2] == (rows,) and {shape[3] for shape in shapes} == {boxes.shape[-1]}


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


# One vector for a text of the vectors of its tokens, as sentence-transformers pools them.

_TAKEN = ("Transformer", "Pooling", "Normalize")  # parts of such a folder
_NAMES = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS}


def with_pooling(loaded: Loaded, pooling: str | None, folder: Path | None) -> Loaded:
    """`loaded` with one vector [N,size]: the mean over the mask's tokens, or the first token's.

    `pooling` None: as `folder` of sentence-transformers says, else `loaded` itself. Raises BadInput
    where no output has a vector of each token, and for what the folder asks and this does not do.
    """
    pooling = pooling or _stated(folder)
    if pooling is None:
        return loaded
    at = find_answer(loaded, TOKENS, (3,))
    if at is None:
        needs = "a vector of each token is needed, float [N,T,size]"
        raise misfit(loaded, f"`pooling` {pooling}", needs)
    masks = [place for place, spec in enumerate(loaded.inputs) if "mask" in spec.name]
    pooled = _Pooled(loaded.module, at, masks[0] if masks else None, mean=pooling == MEAN)
    batch, _, size = loaded.outputs[at].shape
    module = adapt(pooled.eval(), by_position, len(loaded.inputs))
    return replace(loaded, module=module, outputs=(TensorSpec("pooled", "float32", (batch, size)),))


class _Pooled(torch.nn.Module):  # type: ignore[misc, name-defined] # torch comes through require
    def __init__(self, module: Any, at: int, mask: int | None, *, mean: bool) -> None:
        super().__init__()
        self.module = module
        self.at = at
        self.mask = mask
        self.mean = mean

    def forward(self, *inputs: Any) -> Any:
        tokens_NTD = self.module(*inputs)[self.at].to(torch.float32)
        if not self.mean:
            return (tokens_NTD[:, 0],)
        if self.mask is None:
            return (tokens_NTD.mean(1),)
        counts_NT1 = inputs[self.mask].to(torch.float32).unsqueeze(-1)
        return ((tokens_NTD * counts_NT1).sum(1) / counts_NT1.sum(1).clamp(min=1e-9),)


def _stated(folder: Path | None) -> str | None:
    file = folder / "modules.json" if folder else None
    if folder is None or file is None or not file.is_file():
        return None
    listed, found = read_json(file), None
    for part in listed if isinstance(listed, list) else []:
        kind, place = (str(part.get(key, "")) for key in ("type", "path"))
        kind = kind.rpartition(".")[2]
        if kind == "Pooling":
            rule = read_json(folder / place / "config.json")
            found = rule.get("pooling_mode") or _only([n for n in rule if rule[n] is True])
        if kind not in _TAKEN or found not in (None, MEAN, CLS):
            raise BadInput(
                f"{folder}: its part {place or kind} is not offered: {found or kind}",
                hint=f"`pooling`: {MEAN} or {CLS} of the transformer's tokens instead",
            )
    return found


def _only(modes: list[str]) -> str:
    modes = [each for each in modes if each.startswith("pooling_mode")]
    return _NAMES.get("".join(modes), " and ".join(modes) or "none")
