"""Find the output that a task reads, by the names and the number of all outputs of a model.

A rank alone proves nothing: the class scores of a DETR, [N,20,92], have the rank of a YOLO's boxes.
If a model has several outputs, one has the name of the task's answer, and the name of every other
one says that it is no part of that answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from deploykit.core.errors import BadInput
from deploykit.core.task import CLASSIFY, DETECT, EMBED, SEGMENT, TEXT_CLASSIFY
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.torch.loaded import Loaded

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
