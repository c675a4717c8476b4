"""Flatten what a module returns into a list of named tensors.

A `forward` may return a tensor, or nested tuples, lists, dicts, named tuples and dataclasses of
tensors; None is left out. `Adapter` wraps any module as one that takes its inputs by position and
returns a flat tuple.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.extras import require

torch = require("torch")

Place = tuple[str, ...]  # the keys and positions that lead to a tensor
Binding = Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]]

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\-]+")


def flatten_outputs(value: Any, place: Place = ()) -> list[tuple[Place, Any]]:
    """Each tensor in `value` and its place. Raises BadInput for anything that is not a tensor."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return [(place, value)]
    items = _items(value)
    if items is None:
        where = f"output '{'.'.join(place)}'" if place else "output"
        raise BadInput(
            f"the model's {where} is a {type(value).__name__}, not a tensor",
            hint="wrap the model in a module that returns tensors only, alone or in a tuple, list "
            "or dict",
        )
    return [leaf for key, item in items for leaf in flatten_outputs(item, (*place, str(key)))]


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of `value` by key, field or position; None if it is no container."""
    if isinstance(value, Mapping):  # also the output classes of transformers, without their Nones
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, (tuple, list)):
        # a named tuple's fields; also those of torch's own, as max(x, 1) returns
        fields: Sequence[str] = getattr(type(value), "__match_args__", ())
        named = len(fields) == len(value)
        return [(fields[at] if named else at, item) for at, item in enumerate(value)]
    return None


def to_numpy(tensor: Any) -> np.ndarray:
    """On the CPU; bfloat16, which numpy does not have, as float32."""
    plain = tensor.detach().cpu()
    array: np.ndarray = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


def output_names(places: Sequence[Place], taken: Collection[str]) -> list[str]:
    """A name for each place: keys joined by "_", positions after "output".

    No name is given twice, and none that is in `taken`.
    """
    alone = len(places) == 1 and all(key.isdigit() for key in places[0])
    used, names = set(taken), []
    for place in places:
        keys = [] if alone else [_NOT_IN_NAMES.sub("_", key) for key in place]
        if not keys or keys[0].isdigit():
            keys.insert(0, "output")
        wanted = name = "_".join(keys).strip("_") or "output"
        number = 2
        while name in used:
            name, number = f"{wanted}_{number}", number + 1
        used.add(name)
        names.append(name)
    return names


class Adapter(torch.nn.Module):  # type: ignore[misc, name-defined] # torch is imported through require
    """`module`, in eval mode, taking its inputs by position and returning a tuple of tensors."""

    def __init__(self, module: Any, bind: Binding) -> None:
        super().__init__()
        self.module = module
        self.bind = bind
        self.training = False

    def train(self, mode: bool = True) -> Adapter:
        """Nothing: `module` is in eval mode already, and some modules refuse a second call."""
        del mode
        return self

    def leaves(self, inputs: Sequence[Any]) -> list[tuple[Place, Any]]:
        """The outputs for `inputs` with the place of each. Raises what the module raises."""
        args, kwargs = self.bind(inputs)
        return flatten_outputs(self.module(*args, **kwargs))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        return tuple(tensor for _, tensor in self.leaves(inputs))


def adapt(module: Any, bind: Binding, count: int) -> Adapter:
    """An Adapter whose `forward` has `count` parameters: exporters ask for its signature."""

    def forward(self: Adapter, *inputs: Any) -> tuple[Any, ...]:
        return Adapter.forward(self, *inputs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["self", *(f"input_{number}" for number in range(count))]
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    setattr(forward, "__signature__", signature)  # noqa: B010 - unknown to the type of functions
    fixed: type[Adapter] = type("Adapter", (Adapter,), {"forward": forward})
    return fixed(module, bind)


def binding(module: Any, names: Sequence[str]) -> tuple[Binding, tuple[str, ...]]:
    """How inputs of these names reach `module.forward`, and a note if that may surprise.

    By keyword if `forward` has a parameter of each name, else by position.
    """
    parameters = parameter_names(module)
    known = [name for name in names if name in parameters]
    if names and len(known) == len(names):
        keywords = tuple(names)
        return (lambda inputs: ((), dict(zip(keywords, inputs, strict=True)))), ()
    note = f"inputs go in by position: {', '.join(names)} as {', '.join(parameters[: len(names)])}"
    return (lambda inputs: (inputs, {})), (note,) if known else ()


def wrapper_for(name: str, packed: Mapping[Any, Any] | Sequence[Any]) -> str:
    """What to write where forward takes `packed`, a dict or list of tensors, as argument `name`."""
    if isinstance(packed, Mapping):
        names = [re.sub(r"\W", "_", str(key)) for key in packed]
        whole = ", ".join(f"{key!r}: {each}" for key, each in zip(packed, names, strict=True))
        whole = f"{{{whole}}}"
    else:
        names = [f"{name}_{number}" for number in range(len(packed))]
        whole = ", ".join(names)
        whole = f"({whole})" if isinstance(packed, tuple) else f"[{whole}]"
    return (
        "a graph has one input for each tensor: wrap the model in a module with "
        f"`def forward(self, {', '.join(names)}): return self.model({whole})`"
    )


def parameter_names(module: Any) -> list[str]:
    """The parameters of `forward` that can be given by keyword; none if it does not say."""
    schema = getattr(module.forward, "schema", None)
    if schema is not None:  # TorchScript has no Python signature
        return [argument.name for argument in schema.arguments[1:]]
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in named]
