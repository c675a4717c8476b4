"""Flatten what a module returns into a list of named tensors.

A `forward` may return a tensor, or nested tuples, lists, dicts, named tuples and dataclasses of
tensors; None is left out. `Adapter` wraps any module as one that takes its inputs by position and
returns a flat tuple.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, first_line
from deploykit.core.extras import require
from deploykit.core.tensors import TensorSpec, batch_axes, concrete, make_spec, steps_counted
from deploykit.engines.data.examples import Example
from deploykit.engines.torch.files import absent, dtype_of, lacks, quiet

torch = require("torch")


Place = tuple[str, ...]  # the keys and positions that lead to a tensor
Binding = Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]]

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\-]+")


def flatten_outputs(value: Any, place: Place = ()) -> list[tuple[Place, Any]]:
    """List each tensor in `value` with its place. Raises BadInput for any other value."""
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
    """Return the items of `value` by key, field or position; None if it is not a container."""
    if isinstance(value, Mapping):  # transformers' output classes are mappings too
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, (tuple, list)):
        # torch has named tuples of its own, as max(x, 1) returns
        fields: Sequence[str] = getattr(type(value), "__match_args__", ())
        named = len(fields) == len(value)
        return [(fields[at] if named else at, item) for at, item in enumerate(value)]
    return None


def to_numpy(tensor: Any) -> np.ndarray:
    """Convert to numpy, from any device; bfloat16, which numpy lacks, becomes float32."""
    plain = tensor.detach().cpu()
    array: np.ndarray = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


def output_names(places: Sequence[Place], taken: Collection[str]) -> list[str]:
    """Return a name for each place: keys joined by "_", positions after "output".

    The names are unique and not in `taken`.
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
    """Wraps `module`, in eval mode, to take inputs by position and return a tuple of tensors."""

    def __init__(self, module: Any, bind: Binding) -> None:
        super().__init__()
        self.module = module
        self.bind = bind
        self.training = False

    def train(self, mode: bool = True) -> Adapter:
        """Do nothing: `module` is in eval mode, and some modules refuse a second call."""
        del mode
        return self

    def leaves(self, inputs: Sequence[Any]) -> list[tuple[Place, Any]]:
        """Return the outputs for `inputs`, each with its place. Raises what the module raises."""
        args, kwargs = self.bind(inputs)
        return flatten_outputs(self.module(*args, **kwargs))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        return tuple(tensor for _, tensor in self.leaves(inputs))


def adapt(module: Any, bind: Binding, count: int) -> Adapter:
    """Return an Adapter whose `forward` has `count` parameters, as exporters read its signature."""

    def forward(self: Adapter, *inputs: Any) -> tuple[Any, ...]:
        return Adapter.forward(self, *inputs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["self", *(f"input_{number}" for number in range(count))]
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    setattr(forward, "__signature__", signature)  # noqa: B010 - mypy does not know this attribute
    fixed: type[Adapter] = type("Adapter", (Adapter,), {"forward": forward})
    return fixed(module, bind)


def binding(module: Any, names: Sequence[str]) -> tuple[Binding, tuple[str, ...]]:
    """Decide how inputs of these names reach `module.forward`; a note reports a surprise.

    They are passed by keyword if `forward` has a parameter of each name, else by position.
    """
    parameters = parameter_names(module)
    known = [name for name in names if name in parameters]
    if names and len(known) == len(names):
        # the first ones go by position, in the order of `forward`: a hook sees only these
        places = _parameters(module, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        first = next((n for n, name in enumerate(names) if places[n : n + 1] != [name]), len(names))
        return (lambda x: (x[:first], dict(zip(names[first:], x[first:], strict=True)))), ()
    note = f"inputs go in by position: {', '.join(names)} as {', '.join(parameters[: len(names)])}"
    return (lambda inputs: (inputs, {})), (note,) if known else ()


WRAP = (
    "a graph has one input for each tensor: wrap the model in a module whose forward takes them "
    "one by one, and packs them for it"
)


def parameter_names(module: Any) -> list[str]:
    """Return the parameters of `forward` that accept keywords; none if it does not list them."""
    schema = getattr(module.forward, "schema", None)
    if schema is not None:  # TorchScript has no Python signature
        return [argument.name for argument in schema.arguments[1:]]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return _parameters(module, *kinds)


def _parameters(module: Any, *kinds: Any) -> list[str]:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


# The module runs on zeros at one set of sizes, then again with one dynamic axis larger: an
# output's axis that follows one input axis gets that axis's name; one that changes in any other
# way gets a name of its own.

Leaves = list[tuple[Place, Any]]

_SMALL = 2
# Sizes to try for other axes than the batch; an image must be larger than the model's strides.
_SEQUENCE_SIZES = (_SMALL, 32, 64, 224, 1024)
_IMAGE_SIZES = (64, 224, _SMALL)


class SizeRefused(BadInput):
    """The module raised an exception at these sizes; others may work."""


@dataclass(frozen=True)
class Description:
    """The outputs of a module; inputs, by position, and `sizes` of the axes that it takes.

    `limits`: the least and the largest size (None: any) of those axes that have one.
    """

    outputs: tuple[TensorSpec, ...]
    feeds: list[Any]
    sizes: Mapping[str, int]
    limits: Mapping[str, tuple[int, int | None]]


def describe(
    where: str, adapter: Adapter, inputs: Sequence[TensorSpec], example: Example
) -> Description:
    """Run the module on `example`, else on zeros. Raises BadInput naming the reason."""
    tries = _sizes_near(inputs, example) if example.arrays else _made_up_sizes(inputs, example)
    refusals: list[SizeRefused] = []
    for sizes, fill in tries:
        probe = _Probe(where, adapter, inputs, example, sizes, fill)
        found = probe.run(sizes)
        if isinstance(found, list):
            base = found
            break
        refusals.append(found)
    else:  # at the example's own sizes, or the smallest
        raise refusals[-1 if example.arrays else 0]
    follows: dict[tuple[int, int], set[str]] = defaultdict(set)  # "": not one axis of the inputs
    limits = {}
    for number, at, *_ in _changes(base, probe.other_data()) or ():
        follows[number, at].add("")
    for axis, own in probe.sizes.items():
        runs, least, most = probe.resize(axis, base)
        if least > 1 or most:
            limits[axis] = least, most
        for size, leaves in runs.items():
            changes = _changes(base, leaves)
            if changes is None:
                raise BadInput(
                    f"{where}: the outputs' number or rank depends on axis {axis}",
                    hint=f"give axis {axis} a fixed size in `inputs`: 1 for one sample at a time",
                )
            for number, at, *pair in changes:
                follows[number, at].add(axis if pair == [own, size] else "")
    specs = []
    names = output_names([place for place, _ in base], {spec.name for spec in inputs})
    for number, (name, (_, tensor)) in enumerate(zip(names, base, strict=True)):
        shape: list[int | str] = []
        for at, size in enumerate(tensor.shape):
            axes = follows[number, at] or ({size} if size else {""})  # 0: as of nonzero(x)
            shape.append((axes.pop() if len(axes) == 1 else "") or f"{name}_{at}")
        specs.append(make_spec(name, dtype_of(tensor), shape))
    if not specs:
        raise BadInput(f"{where}: the model returns no tensor")
    return Description(tuple(specs), probe.feeds(probe.sizes), probe.sizes, limits)


@dataclass(frozen=True)
class _Probe:
    """Runs a module at `sizes` of its dynamic axes, which it takes, and at others.

    `fill`: the value of integers where there is no example.
    """

    where: str
    adapter: Adapter
    inputs: Sequence[TensorSpec]
    example: Example
    sizes: Mapping[str, int]
    fill: int

    def feeds(self, sizes: Mapping[str, int]) -> list[Any]:
        """Return the example, else zeros for floats, lengths as they are, `fill` for integers."""
        inputs = self.inputs
        if self.example.arrays:
            given = self.example.feeds(inputs, sizes, floats=True)
            return [torch.tensor(given[x.name], dtype=getattr(torch, x.dtype)) for x in inputs]
        return [
            torch.full(
                concrete(spec, sizes),
                0 if "float" in spec.dtype else steps_counted(spec, inputs, sizes) or self.fill,
                dtype=getattr(torch, spec.dtype),
            )
            for spec in inputs
        ]

    def run(self, sizes: Mapping[str, int]) -> Leaves | SizeRefused:
        """Return the outputs, or why the module raises."""
        try:
            return self._outputs(self.feeds(sizes))
        except DeploykitError:
            raise
        except Exception as exc:  # the user's module may raise anything
            if operator := absent(exc):
                raise lacks(self.where, operator) from exc
            tried = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            refused = SizeRefused(
                f"{self.where}: the model does not take {', '.join(map(str, self.inputs))}"
                f"{f' (tried {tried})' if tried else ''}: {type(exc).__name__}: {first_line(exc)}",
                hint=_hint(self.adapter, self.inputs, exc),
            )
            refused.__cause__ = exc
            return refused

    def other_data(self) -> Leaves:
        """Return the outputs for random floats; none if the module does not take those."""
        feeds, random = self.feeds(self.sizes), torch.Generator().manual_seed(0)
        for feed in feeds:
            if feed.is_floating_point():
                feed.copy_(torch.rand(feed.shape, generator=random))
        try:
            return self._outputs(feeds)
        except Exception:  # noqa: BLE001 - the user's module may raise anything
            return []

    def _outputs(self, feeds: list[Any]) -> Leaves:
        with torch.inference_mode(), quiet():  # zeros at arbitrary sizes cause warnings
            return self.adapter.leaves(feeds)

    def resize(self, axis: str, base: Leaves) -> tuple[dict[int, Leaves], int, int | None]:
        """Run with `axis` larger, which shows strides, or smaller, as at the end of a table.

        Returns the outputs by size, and the least and the largest size (None: any) that the model
        takes. At the least, those outputs are finite that are finite in `base`.
        """
        batch = axis in batch_axes(self.inputs)
        size, most = self.sizes[axis], self.example.most.get(axis)

        def run(other: int) -> Leaves | SizeRefused:
            return self.run({**self.sizes, axis: other})

        def works(other: int) -> bool:
            return isinstance(run(other), list)

        def answers(other: int) -> bool:
            found = run(other)
            return isinstance(found, list) and _unanswered(found) <= _unanswered(base)

        larger = [size + 1, 2 * size] if batch else [2 * size, size + 1]
        if not batch and size < _SEQUENCE_SIZES[1]:
            larger.append(17 * size)
        larger = [each for each in larger if each <= (most or each)]
        runs: dict[int, Leaves] = {}
        refused: SizeRefused | None = None
        for other in (*larger, size - 1, size // 2):
            if other < 1 or (runs and (batch or other < size)):
                continue
            found = run(other)
            if isinstance(found, list):
                runs[other] = found
            else:
                refused = refused or found
        if not runs:
            raise BadInput(
                f"{self.where}: axis {axis} is not dynamic in this model, which takes a size of "
                f"{size}: {refused}",
                hint=f"in `inputs`, give {axis} a fixed size, or its name to the axis that it is",
            )
        if batch:
            return runs, 1, most
        if refused and most is None:
            last = _last(works, max(size, *runs), max(larger))
            most = None if any(works(factor * last) for factor in (2, 3, 4)) else last
        return runs, 1 if answers(1) else _last(answers, size, 1), most


def _last(works: Callable[[int], bool], runs: int, fails: int) -> int:
    """Find by bisection the last size that works, from one that runs to one that fails."""
    while abs(runs - fails) > 1:
        size = (runs + fails) // 2
        runs, fails = (size, fails) if works(size) else (runs, size)
    return runs


def _unanswered(leaves: Leaves) -> set[int]:
    """Return the floating outputs with NaN or infinity, as the deviation of one step has."""
    return {
        number
        for number, (_, tensor) in enumerate(leaves)
        if tensor.is_floating_point() and not (tensor < math.inf).all()  # -infinity masks
    }


def _changes(base: Leaves, other: Leaves) -> list[tuple[int, int, int, int]] | None:
    """List the sizes that differ: output, axis, both sizes. None if number or ranks differ."""
    if [(place, t.ndim) for place, t in base] != [(place, t.ndim) for place, t in other]:
        return None
    return [
        (number, at, old, new)
        for number, ((_, before), (_, after)) in enumerate(zip(base, other, strict=True))
        for at, (old, new) in enumerate(zip(before.shape, after.shape, strict=True))
        if old != new
    ]


def _made_up_sizes(
    inputs: Sequence[TensorSpec], example: Example
) -> Iterator[tuple[dict[str, int], int]]:
    """Yield sizes that differ, up to the most: only the batch does not grow with each try."""
    batch = batch_axes(inputs)
    axes = dict.fromkeys(a for spec in inputs for a in spec.shape if isinstance(a, str))
    others = [axis for axis in axes if axis not in batch]
    images = any(isinstance(a, str) for s in inputs if len(s.shape) >= 4 for a in s.shape[2:])
    integers = any("float" not in spec.dtype for spec in inputs)
    for base in (_IMAGE_SIZES if images else _SEQUENCE_SIZES) if others else (_SMALL,):
        first, step = (_SMALL + len(batch), 1) if base == _SMALL else (base, 32)
        sizes = {axis: _SMALL + at for at, axis in enumerate(batch)}
        sizes |= {axis: first + step * at for at, axis in enumerate(others)}
        sizes = {axis: min(size, example.most.get(axis, size)) for axis, size in sizes.items()}
        yield sizes, 0
        if integers:  # a length of 0 is refused
            yield sizes, 1


def _sizes_near(
    inputs: Sequence[TensorSpec], example: Example
) -> Iterator[tuple[dict[str, int], int]]:
    """Yield sizes that differ and are near the example's, then its own."""
    own = example.sizes(inputs)
    above = {axis: max(2, size) for axis, size in own.items()}  # exporters take 0, 1 for constants
    taken = {size for spec in inputs for size in spec.shape if isinstance(size, int)}
    apart: dict[str, int] = {}
    for axis, size in above.items():
        near = (*range(size, 1, -1), *range(size + 1, size + 99))
        free = (n for n in near if n not in taken and n <= example.most.get(axis, n))
        apart[axis] = next(free, own[axis])
        taken.add(apart[axis])
    for sizes in (apart, above, own):
        yield sizes, 0


def _hint(adapter: Adapter, inputs: Sequence[TensorSpec], exc: Exception) -> str | None:
    names = parameter_names(adapter.module)
    if isinstance(exc, TypeError) and names:  # the call has wrong arguments
        packs = len(names) == 1 < len(inputs)
        return f"the model's forward takes: {', '.join(names)}" + f"; {WRAP}" * packs
    if any(spec.batched for spec in inputs):
        return None
    lone = inputs[0]
    axes = ",".join(["N", *map(str, lone.shape)])
    return f"if that is one sample, its batch axis is missing: '{lone.name}:{lone.dtype}[{axes}]'"
