"""Put a task's outputs behind a model: what every head needs, then the head of each task.

A head is a torch module, so that the comparison of the graph with PyTorch covers it. Which output
of the model it reads is decided by names and by their number, as a rank alone proves nothing: the
class scores of a DETR, [N,20,92], have the rank of a YOLO's boxes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.files import read_json
from deploykit.core.task import CLASSIFY, CLS, DETECT, EMBED, MEAN, TaskOutputs
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.engines.torch.files import module_errors
from deploykit.engines.torch.loaded import Loaded, by_position
from deploykit.engines.torch.outputs import adapt
from deploykit.exporting.operators import suppress

torch = require("torch")
_dispatch: Any = require("torch.utils._python_dispatch")

INSIDE = r"(\w+_)?(last_hidden_state|hidden_states?|attentions?|past_key_values)(_\d+)*"
_SHOWN = 6  # outputs in an error: a D-FINE has fifteen


@dataclass(frozen=True)
class AnswerRule:
    """The rule that finds the output that a task reads.

    Of several outputs, one has one of `names`, and the name of every other one matches `others`: it
    is no part of the answer. `by_name`: the only output of a transformers model must have such a
    name, too.
    """

    names: tuple[str, ...] = ()
    others: str = INSIDE
    by_name: bool = True

    def find(self, loaded: Loaded, ranks: Sequence[int]) -> int | None:
        """Return the place of the output with the answer, a float tensor with one of `ranks`."""
        outputs = loaded.outputs
        fits = float_outputs(loaded, ranks)
        if len(outputs) > 1 or (self.by_name and _transformers_class(loaded)):
            fits = [at for at in fits if outputs[at].name in self.names]
            others = [spec.name for at, spec in enumerate(outputs) if at not in fits[:1]]
            if not all(re.fullmatch(self.others, name) for name in others):
                return None
        return fits[0] if fits else None


def float_outputs(loaded: Loaded, ranks: Sequence[int]) -> list[int]:
    return [
        at
        for at, spec in enumerate(loaded.outputs)
        if "float" in spec.dtype and len(spec.shape) in ranks
    ]


@dataclass(frozen=True)
class TaskHead:
    """A model with a task's outputs. `classes`: their number, None without classes."""

    loaded: Loaded
    outputs: TaskOutputs
    classes: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadRequest:
    """A model that is to get the outputs of the task `kind`, and what the task's head may need.

    `size`: height and width of the image, 0 where they are dynamic. `iou`: the overlap from which
    two boxes are one; `boxes`: the most of an image. `labelled`: the user named the classes.
    `problem`: the `problem_type` of transformers' configuration.
    """

    loaded: Loaded
    kind: str
    size: tuple[int, int] = (0, 0)
    iou: float = 0.7
    boxes: int = 300
    labelled: bool = False
    problem: str = ""

    @property
    def stated(self) -> str | None:
        """The task that the model's library names."""
        return self.loaded.preset.task if self.loaded.preset else None

    @property
    def classes(self) -> int | None:
        """Return the number of classes that the model's library names."""
        return self.loaded.preset.classes if self.loaded.preset else None

    def misfit(self, needs: str, option: str = "") -> BadInput:
        """Return the error for outputs that are not what the task, or `option`, needs."""
        outputs, model = self.loaded.outputs, _transformers_class(self.loaded)
        named = ", ".join(map(str, outputs[:_SHOWN]))
        more = f" and {len(outputs) - _SHOWN} more" if len(outputs) > _SHOWN else ""
        cure = "; wrap the model in a module that returns this alone" if len(outputs) > 1 else ""
        who = f"transformers' {model}" if model else "the model"
        return BadInput(
            f"{option or f'`task` {self.kind}'} does not fit {who}: its outputs are {named}{more}",
            hint=needs + cure,
        )

    def find(self, rule: AnswerRule, ranks: Sequence[int], needs: str, named: str = "") -> int:
        """Return the place of the output that `rule` finds. Raises BadInput, which says `needs`.

        `named`: part of the name of the classes in transformers with this head: those of others
        have outputs of the same name and rank, such as whether two sentences follow each other.
        """
        at = rule.find(self.loaded, ranks)
        if at is None or named not in (_transformers_class(self.loaded) or named):
            raise self.misfit(needs)
        return at

    def left_out(self, *places: int) -> tuple[str, ...]:
        """Return a note on the outputs that the head does not read."""
        others = [each.name for at, each in enumerate(self.loaded.outputs) if at not in places]
        return (f"left out: the outputs {', '.join(others)}",) if others else ()

    def head(
        self,
        function: Callable[..., Any],
        places: Sequence[int],
        outputs: Sequence[TensorSpec],
        classes: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> TaskHead:
        """Put `function` behind the model: it takes the values at `places`, returns `outputs`.

        `places`: of the model's outputs; its inputs are numbered behind them. `outputs`: named as
        the fields of `TaskOutputs`, where they are the answer.
        """
        behind = _Behind(self.loaded.module, function, places).eval()
        made = adapt(behind, by_position, len(self.loaded.inputs))
        names = {spec.name: spec.name for spec in outputs if spec.name in _FIELDS}
        loaded = replace(self.loaded, module=made, outputs=tuple(outputs))
        return TaskHead(loaded, TaskOutputs(**names), classes, notes)

    def in_parts(
        self,
        made: TaskHead,
        before: Callable[..., Any],
        places: Sequence[int],
        raw: Sequence[TensorSpec],
        after: Callable[..., Any],
    ) -> TaskHead:
        """Return `made` with its two parts: `after` chooses by the values `raw` of `before`."""
        first = self.head(before, places, raw).loaded
        choice = adapt(_Behind(None, after, range(len(raw))).eval(), by_position, len(raw))
        second = replace(made.loaded, module=choice, inputs=tuple(raw))
        return replace(made, loaded=replace(made.loaded, parts=(first, second)))


_FIELDS = set(TaskOutputs.__dataclass_fields__)


class _Behind(torch.nn.Module):  # type: ignore[misc, name-defined] # torch comes through require
    """Applies `function` to some outputs of `module`; its inputs are numbered behind these."""

    def __init__(self, module: Any, function: Callable[..., Any], places: Sequence[int]) -> None:
        super().__init__()
        self.module = module
        self.function = function
        self.places = tuple(places)

    def forward(self, *inputs: Any) -> Any:
        values = (*(self.module(*inputs) if self.module else ()), *inputs)
        return self.function(*(values[at] for at in self.places))


def own_module(loaded: Loaded) -> Any:
    """Return the user's module, without what deploykit put around it."""
    parts = loaded.module.modules()
    return next((x for x in parts if not type(x).__module__.startswith("deploykit.")), None)


def _transformers_class(loaded: Loaded) -> str:
    """Return the class of a model of transformers, unless a module of the user's is around it."""
    kind = type(own_module(loaded))
    return kind.__name__ if kind.__module__.startswith("transformers.") else ""


# Scores of classes become probabilities, of an image or of a text.

# the last two groups: outputs of a training, and those of a DeiT, whose mean is `logits`
SCORES = AnswerRule(
    ("logits", "scores", "out", "output"),
    rf"{INSIDE}|aux\w*|cls_logits|distillation_logits|features",
)
_NOT_ONE = 1e-3  # sums of rows that are probabilities are nearer to 1


def add_scores(request: HeadRequest) -> TaskHead:
    """Add a softmax, or a sigmoid where a sample may have several labels. Raises BadInput."""
    if request.problem == "regression":
        raise BadInput(
            f"`task` {request.kind}: the outputs are numbers, not classes (regression)",
            hint="without `task` they stay as they are",
        )
    if request.stated == EMBED and request.loaded.preset and not request.labelled:
        raise BadInput(
            f"`task` {request.kind}: by {request.loaded.preset.source} the outputs are features",
            hint="`task` embed; where they are classes, `labels` says so",
        )
    needs = "classify needs scores of two classes or more, float [N,classes]"
    at = request.find(SCORES, (2, 4), needs, "Classification")
    notes = request.left_out(at)
    spec = request.loaded.outputs[at]
    batch, count, *rest = spec.shape
    if not isinstance(count, int) or count < 2 or any(size != 1 for size in rest):
        raise request.misfit(needs)
    done = are_probabilities(request.loaded, at)
    if done:
        notes += (f"output '{spec.name}' is probabilities already: no softmax was added",)
    independent = request.problem == "multi_label_classification"

    def scores(values: Any) -> Any:
        flat = values.flatten(1).to(torch.float32)
        if done:
            return (flat,)
        return (flat.sigmoid() if independent else flat.softmax(1),)

    return request.head(
        scores, [at], [TensorSpec("scores", "float32", (batch, count))], count, notes
    )


def are_probabilities(loaded: Loaded, at: int) -> bool:
    """Return whether an output comes from a sigmoid, or its rows add up to 1.

    It is tried on random images, and on tokens of id 0.
    """
    inputs = []
    random = torch.Generator().manual_seed(0)
    for spec in loaded.inputs:
        shape = concrete(spec, {axis: low for axis, (low, _) in loaded.limits.items()})
        mask = "mask" in spec.name
        inputs.append((torch.rand(shape, generator=random) + mask).to(getattr(torch, spec.dtype)))
    with module_errors("the model"), torch.inference_mode(), _SigmoidWatch() as watch:
        values = loaded.module(*inputs)[at]
    if values.untyped_storage().data_ptr() in watch.made:
        return True
    values = values.flatten(1)
    return bool((values >= 0).all() and ((values.sum(1) - 1).abs() < _NOT_ONE).all())


class _SigmoidWatch(_dispatch.TorchDispatchMode):  # type: ignore[misc] # torch comes through require
    """Records, while active, where the results of sigmoids are in memory."""

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


# Scores of classes for each pixel become a mask: the class of each pixel of the image.

_PIXEL_SCORES = "segment needs scores of the classes of each pixel, float [N,classes,height,width]"


def add_mask(request: HeadRequest) -> TaskHead:
    """Add the argmax over classes, at the image's size. Raises BadInput."""
    at = request.find(SCORES, (4,), _PIXEL_SCORES, "Segmentation")
    notes = request.left_out(at)
    batch, count, *sides = request.loaded.outputs[at].shape
    if not isinstance(count, int) or count < 2:
        raise request.misfit(_PIXEL_SCORES)
    size = request.loaded.inputs[0].shape[1:3]
    places = [at] if tuple(sides) == size else [at, len(request.loaded.outputs)]
    if len(places) > 1:
        notes += (f"its scores of {sides[0]}x{sides[1]} are resized to the image's",)

    def grown(values: Any, *image_NHWC: Any) -> Any:
        values = values.to(torch.float32)
        for image in image_NHWC:
            shape = request.size if all(request.size) else tuple(image.shape[1:3])
            resize = torch.nn.functional.interpolate
            values = resize(values, size=shape, mode="bilinear", align_corners=False)
        return (values,)

    def mask(values: Any) -> Any:
        return (values.argmax(1).to(torch.int32),)

    out = TensorSpec("mask", "int32", (batch, *size))
    made = request.head(lambda *x: mask(*grown(*x)), places, [out], count, notes)
    raw = TensorSpec("pixel_scores", "float32", (batch, count, *size))
    return request.in_parts(made, grown, places, [raw], mask)


# A vector of each image or text becomes an embedding of length 1. The vectors of a text's tokens
# are pooled into one as sentence-transformers does.

_VECTORS = AnswerRule(
    ("embedding", "embeddings", "image_embeds", "text_embeds", "pooler_output", "pooled"),
)
_TOKENS = AnswerRule(
    ("last_hidden_state", "token_embeddings"), f"{INSIDE}|pooler_output", by_name=False
)
_VECTOR = "embed needs one vector for each sample, float [N,size]"
_PARTS = ("Transformer", "Pooling", "Normalize")  # modules in a folder of sentence-transformers
_NAMES = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS}


def add_embedding(request: HeadRequest) -> TaskHead:
    """Add the normalisation to length 1. Raises BadInput."""
    scores = request.stated == CLASSIFY
    at = request.find(SCORES if scores else _VECTORS, (2, 4), _VECTOR)
    notes = request.left_out(at)
    if scores:
        notes += ("the embedding is a classifier's scores: build it without its last layer",)
    batch, size, *rest = request.loaded.outputs[at].shape
    if not isinstance(size, int) or any(each != 1 for each in rest):
        raise request.misfit(_VECTOR)

    def unit(values: Any) -> Any:
        return (torch.nn.functional.normalize(values.flatten(1).to(torch.float32), dim=1),)

    out = TensorSpec("embedding", "float32", (batch, size))
    return request.head(unit, [at], [out], notes=notes)


def with_pooling(loaded: Loaded, pooling: str | None, folder: Path | None) -> Loaded:
    """Pool the vectors of a text's tokens: the mean over the mask's tokens, or the first token's.

    If `pooling` is None, a `folder` of sentence-transformers decides, else nothing is pooled.
    Raises BadInput where no output has a vector of each token, and for an unsupported folder.
    """
    pooling = pooling or _stated_pooling(folder)
    if pooling is None:
        return loaded
    request, at = HeadRequest(loaded, EMBED), _TOKENS.find(loaded, (3,))
    if at is None:
        needs = "a vector of each token is needed, float [N,T,size]"
        raise request.misfit(needs, f"`pooling` {pooling}")
    inputs = enumerate(loaded.inputs, len(loaded.outputs))
    masks = [place for place, spec in inputs if "mask" in spec.name]

    def pool(tokens_NTD: Any, *mask_NT: Any) -> Any:
        tokens_NTD = tokens_NTD.to(torch.float32)
        if pooling == CLS:
            return (tokens_NTD[:, 0],)
        if not mask_NT:
            return (tokens_NTD.mean(1),)
        counts_NT1 = mask_NT[0].to(torch.float32).unsqueeze(-1)
        return ((tokens_NTD * counts_NT1).sum(1) / counts_NT1.sum(1).clamp(min=1e-9),)

    batch, _, size = loaded.outputs[at].shape
    out = TensorSpec("pooled", "float32", (batch, size))
    return request.head(pool, [at, *masks[:1]], [out]).loaded


def _stated_pooling(folder: Path | None) -> str | None:
    if folder is None or not (folder / "modules.json").is_file():
        return None
    listed, found = read_json(folder / "modules.json"), None
    for part in listed if isinstance(listed, list) else []:
        kind, place = (str(part.get(key, "")) for key in ("type", "path"))
        kind = kind.rpartition(".")[2]
        if kind == "Pooling":
            rule = read_json(folder / place / "config.json")
            modes = [key for key in rule if rule[key] is True and key.startswith("pooling_mode")]
            several = " and ".join(modes) or "none"
            found = rule.get("pooling_mode") or _NAMES.get("".join(modes), several)
        if kind not in _PARTS or found not in (None, MEAN, CLS):
            raise BadInput(
                f"{folder}: its part {place or kind} is not offered: {found or kind}",
                hint=f"`pooling`: {MEAN} or {CLS} of the transformer's tokens instead",
            )
    return found


# Boxes of a detector, as the families of detectors give them, become boxes in pixels after NMS.

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
    loaded, classes = request.loaded, request.classes
    at: int | None = 0
    boxes_first = request.stated == DETECT or _are_raw_maps(loaded.outputs[0], loaded.outputs[1:])
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
    by_library = request.stated == DETECT and rows == 4 + (classes or 0)
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
    if request.stated == DETECT and request.classes:
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

    return _boxes(request, [at], (shape[0], many), detect, request.classes)


def _of_one_image(request: HeadRequest, places: Sequence[int]) -> TaskHead:
    """Fill the rows of a detector of torchvision, which has its own NMS, up to a fixed number."""
    many = request.boxes

    def detect(corners: Any, scores: Any, classes: Any) -> Any:
        filled = [
            torch.cat((each, each.new_zeros((many, *each.shape[1:]))))[:many]
            for each in (corners, scores, classes)
        ]
        return tuple(each.reshape(1, many, *each.shape[1:]) for each in filled)

    return _boxes(request, places, (1, many), detect, request.classes)


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
