"""Put a task's outputs behind a model: what every head needs, and those for classes and vectors.

A head is a torch module, so that the comparison of the graph with PyTorch covers it. Which output
of the model it reads is decided by names and by their number, as a rank alone proves nothing: the
class scores of a DETR, [N,20,92], have the rank of a YOLO's boxes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.files import read_json
from deploykit.core.task import CLASSIFY, CLS, EMBED, MEAN, TaskOutputs
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.engines.torch.files import module_errors
from deploykit.engines.torch.loaded import Loaded, by_position
from deploykit.engines.torch.outputs import adapt

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
