"""Put a task's outputs behind a model: what every head needs, whatever its task.

A head is a torch module, so that the comparison of the graph with PyTorch covers it. Which output
of the model it reads is decided by names and by their number, as a rank alone proves nothing: the
class scores of a DETR, [N,20,92], have the rank of a YOLO's boxes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.task import TaskOutputs
from deploykit.core.tensors import TensorSpec
from deploykit.engines.torch.loaded import Loaded, by_position
from deploykit.engines.torch.outputs import adapt
from deploykit.engines.torch.presets import Preset

torch = require("torch")

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
    def preset(self) -> Preset:
        """Return the preset that the model's library states; an empty one if it states none."""
        return self.loaded.preset or Preset("", (), None, None)

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
