"""Find what a module's outputs are by running it: their names, dtypes and dynamic axes.

The module runs on zeros at one set of sizes, then again with one dynamic axis larger: an output's
axis that follows one input axis gets that axis's name; one that changes in any other way gets a
name of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploykit.core.errors import BadInput, DeploykitError, first_line
from deploykit.core.extras import require
from deploykit.core.tensors import TensorSpec, concrete, make_spec, steps_counted
from deploykit.runtimes.torch.operators import absent, lacks
from deploykit.runtimes.torch.outputs import (
    Adapter,
    Place,
    output_names,
    parameter_names,
    wrapper_for,
)

torch = require("torch")

Leaves = list[tuple[Place, Any]]

_SMALL = 2
# sizes of an axis that is not the batch; an image wants more than its strides take away
_SEQUENCE_SIZES = (_SMALL, 32, 64, 224, 1024)
_IMAGE_SIZES = (64, 224, _SMALL)


AxisLimits = Mapping[str, tuple[int, "int | None"]]


class _Failed(BadInput):
    """The module raised an exception at these sizes; others may work."""


def describe(
    where: str, adapter: Adapter, inputs: Sequence[TensorSpec]
) -> tuple[tuple[TensorSpec, ...], list[Any], AxisLimits]:
    """The outputs' specs, inputs that the module takes, and the least size of axes that need one.

    Raises BadInput naming the reason.
    """
    probe, base = _first_that_runs(where, adapter, inputs)
    places = [place for place, _ in base]
    names = output_names(places, {spec.name for spec in inputs})
    axes: list[list[int | str]] = [list(tensor.shape) for _, tensor in base]
    for number, shape in enumerate(axes):  # an axis of 0 depends on the data, as nonzero(x) does
        axes[number] = [size or f"{names[number]}_{at}" for at, size in enumerate(shape)]
    movers = _moved_by_data(probe.other_data(), base, names)
    for axis in probe.sizes:
        for size, larger in probe.larger(axis):
            if [(place, tensor.ndim) for place, tensor in larger] != [
                (place, tensor.ndim) for place, tensor in base
            ]:
                raise BadInput(
                    f"{where}: the outputs' number or rank depends on axis {axis}",
                    hint=f"give axis {axis} a fixed size in `inputs`: 1 for one sample at a time",
                )
            for number, ((_, before), (_, after)) in enumerate(zip(base, larger, strict=True)):
                for at, (old, new) in enumerate(zip(before.shape, after.shape, strict=True)):
                    if old != new:
                        follows = (old, new) == (probe.sizes[axis], size)
                        name = axis if follows else f"{names[number]}_{at}"
                        movers.setdefault((number, at), set()).add(name)
    for (number, at), found in movers.items():
        axes[number][at] = found.pop() if len(found) == 1 else f"{names[number]}_{at}"
    specs = [
        make_spec(name, str(tensor.dtype).removeprefix("torch."), shape)
        for name, (_, tensor), shape in zip(names, base, axes, strict=True)
    ]
    if not specs:
        raise BadInput(f"{where}: the model returns no tensor")
    least = {axis: probe.least(axis, _unanswered(base)) for axis in probe.sizes}
    limits = {axis: (size, None) for axis, size in least.items() if size > 1}
    return tuple(specs), probe.feeds(), limits


@dataclass(frozen=True)
class _Probe:
    """A module and what it runs on: the sizes of the dynamic axes, `fill` for integers."""

    where: str
    adapter: Adapter
    inputs: Sequence[TensorSpec]
    sizes: Mapping[str, int]
    fill: int

    def feeds(self) -> list[Any]:
        """Zeros for floats, the number of steps for lengths, `fill` for integers and booleans."""
        inputs, sizes = self.inputs, self.sizes
        return [
            torch.full(
                concrete(spec, sizes),
                0 if "float" in spec.dtype else steps_counted(spec, inputs, sizes) or self.fill,
                dtype=getattr(torch, spec.dtype),
            )
            for spec in inputs
        ]

    def run(self) -> Leaves:
        """The outputs. Raises _Failed for what the module raises, and none of its warnings."""
        try:
            return self._outputs(self.feeds())
        except DeploykitError:
            raise
        except Exception as exc:  # the user's module may raise anything
            if operator := absent(exc):
                raise lacks(self.where, operator) from exc
            tried = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
            raise _Failed(
                f"{self.where}: the model does not take {', '.join(map(str, self.inputs))}"
                f"{f' (tried {tried})' if tried else ''}: {type(exc).__name__}: {first_line(exc)}",
                hint=_hint(self.adapter, self.inputs, exc),
            ) from exc

    def at(self, axis: str, size: int) -> Leaves:
        """As `run`, with another size of `axis`."""
        return replace(self, sizes={**self.sizes, axis: size}).run()

    def _outputs(self, feeds: list[Any]) -> Leaves:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of zeros, at sizes that nobody asked for
            return self.adapter.leaves(feeds)

    def other_data(self) -> Leaves:
        """The outputs for random floats; none where the module does not take those."""
        feeds, random = self.feeds(), torch.Generator().manual_seed(0)
        for feed in feeds:
            if feed.is_floating_point():
                feed.copy_(torch.rand(feed.shape, generator=random))
        try:
            return self._outputs(feeds)
        except Exception:  # noqa: BLE001 - the user's module may raise anything
            return []

    def least(self, axis: str, unanswered: set[int]) -> int:
        """The smallest size of `axis` that the module takes, as a kernel of 3 needs 3.

        Found by halving between 1 and the size at which it ran. A batch is taken to be free. At
        that size the outputs have an answer, other than those in `unanswered`.
        """
        fails, runs = 0, self.sizes[axis] if axis not in _batch_axes(self.inputs) else 1
        while fails + 1 < runs:
            size = (fails + runs) // 2 if fails else 1
            try:
                answers = _unanswered(self.at(axis, size)) <= unanswered
            except _Failed:
                answers = False
            fails, runs = (fails, size) if answers else (size, runs)
        return runs

    def larger(self, axis: str) -> list[tuple[int, Leaves]]:
        """Runs with `axis` larger: twice shows a stride, 16 times a longer one, where it fits."""
        size = self.sizes[axis]
        batch = axis in _batch_axes(self.inputs)
        candidates = [size + 1, 2 * size] if batch else [2 * size, size + 1]
        if not batch and size < _SEQUENCE_SIZES[1]:
            candidates.append(16 * size)
        found: list[tuple[int, Leaves]] = []
        failure: BadInput | None = None
        for larger in candidates:
            if batch and found:
                break
            try:
                found.append((larger, self.at(axis, larger)))
            except _Failed as exc:
                failure = failure or exc
        if not found:
            raise BadInput(
                f"{self.where}: axis {axis} is not dynamic in this model, which takes a size of "
                f"{size}: {failure}",
                hint=f"give axis {axis} a fixed size in `inputs`, or change the model",
            )
        return found


def _unanswered(leaves: Leaves) -> set[int]:
    """The floating outputs that hold NaN or infinity, as the deviation of one step does."""
    return {
        number
        for number, (_, tensor) in enumerate(leaves)
        if tensor.is_floating_point() and not (tensor < math.inf).all()  # -infinity masks
    }


def _moved_by_data(
    other: Leaves, base: Leaves, names: Sequence[str]
) -> dict[tuple[int, int], set[str]]:
    """The axes, by output and place, that have another size for other data, with names."""
    if [(place, tensor.ndim) for place, tensor in other] != [
        (place, tensor.ndim) for place, tensor in base
    ]:
        return {}
    return {
        (number, at): {f"{names[number]}_{at}"}
        for number, ((_, before), (_, after)) in enumerate(zip(base, other, strict=True))
        for at, (old, new) in enumerate(zip(before.shape, after.shape, strict=True))
        if old != new
    }


def _first_that_runs(
    where: str, adapter: Adapter, inputs: Sequence[TensorSpec]
) -> tuple[_Probe, Leaves]:
    """Sizes and a value for integers at which the module runs; else the first failure."""
    integers = any("float" not in spec.dtype for spec in inputs)
    failure: BadInput | None = None
    for sizes in _size_choices(inputs):
        for fill in (0, 1) if integers else (0,):  # a length of 0 is refused, an id of 0 is not
            probe = _Probe(where, adapter, inputs, sizes, fill)
            try:
                return probe, probe.run()
            except _Failed as exc:
                failure = failure or exc
    raise failure or BadInput(f"{where}: no size to try")


def _size_choices(inputs: Sequence[TensorSpec]) -> Iterator[dict[str, int]]:
    """Sizes by axis, no two alike; the batch stays small, the others grow from choice to choice."""
    axes = list(dict.fromkeys(a for spec in inputs for a in spec.shape if isinstance(a, str)))
    batch = _batch_axes(inputs)
    others = [axis for axis in axes if axis not in batch]
    images = any(isinstance(a, str) for s in inputs if len(s.shape) >= 4 for a in s.shape[2:])
    choices = _IMAGE_SIZES if images else _SEQUENCE_SIZES
    for base in choices if others else (_SMALL,):
        first, step = (_SMALL + len(batch), 1) if base == _SMALL else (base, 32)
        sizes = {axis: first + step * number for number, axis in enumerate(others)}
        yield {axis: sizes.get(axis, _SMALL + at) for at, axis in enumerate([*batch, *others])}


def _batch_axes(inputs: Sequence[TensorSpec]) -> list[str]:
    return list(dict.fromkeys(str(spec.shape[0]) for spec in inputs if spec.batched))


def _hint(adapter: Adapter, inputs: Sequence[TensorSpec], exc: Exception) -> str | None:
    names = parameter_names(adapter.module)
    if isinstance(exc, TypeError) and names:  # of the call: too many, or by another name
        found = f"the model's forward takes: {', '.join(names)}"
        if len(names) > 1 or len(inputs) == 1:
            return found
        as_dict = {spec.name: spec for spec in inputs}
        return f"{found}; if that is a dict of tensors, {wrapper_for(names[0], as_dict)}"
    if any(spec.batched for spec in inputs):
        return None
    lone = inputs[0]
    axes = ",".join(["N", *map(str, lone.shape)])
    return f"if that is one sample, its batch axis is missing: '{lone.name}:{lone.dtype}[{axes}]'"
