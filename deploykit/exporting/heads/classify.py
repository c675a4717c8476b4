"""Scores of classes become probabilities, of an image or of a text."""

from __future__ import annotations

from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.task import EMBED
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.torch.files import module_errors
from deploykit.engines.torch.loaded import Loaded
from deploykit.exporting.heads.head import INSIDE, AnswerRule, HeadRequest, TaskHead

torch = require("torch")
_dispatch: Any = require("torch.utils._python_dispatch")


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
    if request.preset.task == EMBED and not request.labelled:
        raise BadInput(
            f"`task` {request.kind}: by {request.preset.source} the outputs are features",
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
    sizes = {axis: low for axis, (low, _) in loaded.limits.items()}
    feeds = random_feeds(loaded.inputs, sizes, integers=1)  # any vocabulary has id 0
    inputs = (torch.from_numpy(feeds[x.name]).to(getattr(torch, x.dtype)) for x in loaded.inputs)
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
