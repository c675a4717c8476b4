"""What a torch.export file (`.pt2`) says of itself: it holds its inputs, ranges and outputs.

The program is not run: each output's shape is written in it, in the symbols of the inputs' axes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.tensors import BATCH, TensorSpec, make_spec
from deploykit.runtimes.torch.outputs import Adapter, adapt, flatten_outputs, output_names

torch = require("torch")
pytree = require("torch.utils._pytree")  # the only reader of the structures in a program

_SYMBOL = re.compile(r"\bs\d+\b")  # torch numbers them as it likes

AxisLimits = dict[str, tuple[int, "int | None"]]


@dataclass(frozen=True)
class Program:
    """A program as a module.

    `limits`: smallest and largest size (None: any) of its dynamic axes. `notes`: the axes that take
    only some sizes in between.
    """

    module: Adapter
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    limits: AxisLimits
    notes: tuple[str, ...]


def open_program(where: str, program: Any, wanted: Sequence[TensorSpec]) -> Program:
    """Raises BadInput when `wanted` are not the program's inputs, or it holds no tensors."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    arguments = list(program.graph_signature.user_inputs)  # names of tensors, or constants
    names = [name for name in arguments if isinstance(values.get(name), torch.Tensor)]
    tensors = [values[name] for name in names]
    inputs, axes = _inputs(where, names, tensors, wanted)

    def bind(feeds: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        fed = dict(zip(names, feeds, strict=True))
        leaves = [fed.get(item, item) for item in arguments]
        args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
        return args, kwargs

    answers = [values.get(name, name) for name in program.graph_signature.user_outputs]
    found = flatten_outputs(pytree.tree_unflatten(answers, program.call_spec.out_spec))
    if not found:
        raise BadInput(f"{where}: the model returns no tensor")
    outputs = [
        make_spec(
            name,
            _dtype(tensor),
            [_output_axis(size, axes, f"{name}_{at}") for at, size in enumerate(tensor.shape)],
        )
        for name, (_, tensor) in zip(
            output_names([place for place, _ in found], {spec.name for spec in inputs}),
            found,
            strict=True,
        )
    ]
    module = adapt(program.module(), bind, len(names))
    notes = tuple(
        f"axis {axis} takes only sizes of the form {_SYMBOL.sub('k', str(expression))}"
        for expression, axis in axes.items()
        if isinstance(axis, str) and not expression.is_Symbol
    )
    limits = _limits(where, program, axes)
    return Program(module, tuple(inputs), tuple(outputs), limits, notes)


def _inputs(
    where: str, names: Sequence[str], tensors: Sequence[Any], wanted: Sequence[TensorSpec]
) -> tuple[list[TensorSpec], dict[Any, int | str]]:
    """The inputs' specs, and what each symbol of the program is called in them."""
    axes: dict[Any, int | str] = {}
    own = []
    for name, tensor in zip(names, tensors, strict=True):
        for at, size in enumerate(tensor.shape):
            batch = at == 0 and BATCH not in axes.values()
            if not isinstance(size, int):
                axes.setdefault(size.node.expr, BATCH if batch else f"{name}_{at}")
        shape = [size if isinstance(size, int) else axes[size.node.expr] for size in tensor.shape]
        own.append(make_spec(name, _dtype(tensor), shape))
    if not wanted:
        return own, axes
    hint = f"the file's own are {', '.join(map(str, own)) or 'none'}"
    if [(len(s.shape), s.dtype) for s in wanted] != [(len(s.shape), s.dtype) for s in own]:
        raise BadInput(f"{where}: does not take {', '.join(map(str, wanted))}", hint=hint)
    named: dict[Any, int | str] = {}
    for spec, tensor in zip(wanted, tensors, strict=True):
        for at, (axis, size) in enumerate(zip(spec.shape, tensor.shape, strict=True)):
            fixed = isinstance(size, int)
            if axis != (size if fixed else named.setdefault(size.node.expr, axis)):
                raise BadInput(f"{where}: axis {at} of input {spec} differs", hint=hint)
    return list(wanted), named


def _output_axis(size: Any, axes: Mapping[Any, int | str], own_name: str) -> int | str:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression in axes:
        return axes[expression]
    fixed = {symbol: value for symbol, value in axes.items() if isinstance(value, int)}
    left = expression.subs(fixed)
    return int(left) if left.is_Integer else own_name


def _limits(where: str, program: Any, axes: Mapping[Any, int | str]) -> AxisLimits:
    """Raises BadInput for a fixed size that the program does not allow."""
    limits: AxisLimits = {}
    for symbol, span in program.range_constraints.items():
        axis = axes.get(symbol)
        low = max(1, int(span.lower))
        high = int(span.upper) if span.upper.is_Integer else None
        if isinstance(axis, int) and not low <= axis <= (high or axis):
            raise BadInput(
                f"{where}: an axis has size {axis}, but the file takes {low} to {high or 'any'}"
            )
        if isinstance(axis, str):
            limits[axis] = (low, high)
    return limits


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
