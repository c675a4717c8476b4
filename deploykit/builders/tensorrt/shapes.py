"""Parse and check the size ranges of a plan: smallest, optimum and largest shape of each input.

All checks are made here, as TensorRT reports its own late and only in its log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploykit.core.errors import BadInput
from deploykit.core.tensors import BATCH, TensorSpec

Shape = tuple[int, ...]
ShapeRange = tuple[Shape, Shape, Shape]  # smallest, optimum, largest

LARGEST = (1 << 31) - 1  # TensorRT computes a tensor's offsets from 32-bit sizes
_NUMBER = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True)
class AxisRange:
    """Sizes of a dynamic axis: any from `minimum` to `maximum`, fastest at `optimum`."""

    minimum: int
    optimum: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.minimum},{self.optimum},{self.maximum}"


def parse_batch(text: str, parameter: str = "`batch`") -> AxisRange:
    """Parse "MIN,OPT,MAX", or one number for all three. Raises BadInput naming `parameter`."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (1, 3) or not all(_NUMBER.fullmatch(part) for part in parts):
        raise BadInput(
            f"{parameter}: '{text}' is not a range of sizes",
            hint="write MIN,OPT,MAX, for example 1,8,32, or one size",
        )
    sizes = [int(part) for part in parts]
    return _check_range(AxisRange(sizes[0], sizes[len(sizes) // 2], sizes[-1]), parameter)


def parse_axis(text: str) -> tuple[str, AxisRange]:
    """Parse "NAME=MIN,OPT,MAX", one of `axes`. Raises BadInput."""
    name, equals, sizes = text.partition("=")
    if not equals or not name.strip():
        raise BadInput(
            f"`axes`: '{text}' names no axis", hint="write NAME=MIN,OPT,MAX, such as T=16,128,512"
        )
    return name.strip(), parse_batch(sizes, f"`axes` {name.strip()}")


def _check_range(axis: AxisRange, parameter: str) -> AxisRange:
    """`axis` if 0 <= minimum <= optimum <= maximum with an optimum of 1 or more; else BadInput."""
    if not 0 <= axis.minimum <= axis.optimum <= axis.maximum:
        raise BadInput(
            f"{parameter}: {axis} is not a range: MIN <= OPT <= MAX is needed, none below 0",
            hint="OPT is the size to optimise for; an example: 1,8,32",
        )
    if axis.optimum < 1 or axis.maximum > LARGEST:
        raise BadInput(f"{parameter}: {axis}: OPT must be 1 or more and MAX at most {LARGEST}")
    return axis


def ranges(
    inputs: Sequence[TensorSpec], batch: AxisRange, others: Mapping[str, AxisRange]
) -> dict[str, ShapeRange]:
    """Smallest, optimum and largest shape of every input, by name.

    A dynamic axis takes its range from `others` by name, else from `batch` if it is axis 0 of an
    input or shares its name. Without such an axis `batch` must be 1 or the fixed size of axis 0.
    Raises BadInput naming the input, the axis and the parameter: a range out of order, a name that
    no input has, an axis without a range.
    """
    _check_range(batch, "`batch`")
    for name, axis in others.items():
        _check_range(axis, f"`axes` {name}")
    dynamic = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)}
    for name in others:
        if name == BATCH:
            raise BadInput(
                f"`axes`: {BATCH} is the batch", hint=f"write it as `batch` {others[name]}"
            )
        if name not in dynamic:
            known = ", ".join(sorted(dynamic - {BATCH})) or "none but the batch"
            raise BadInput(
                f"`axes`: no input has a dynamic axis '{name}'",
                hint=f"dynamic axes: {known}",
            )
    batches = {str(spec.shape[0]) for spec in inputs if spec.batched} - set(others)
    if not batches:
        _check_fixed(inputs, batch)
    sizes = {**dict.fromkeys(batches | {BATCH}, batch), **others}
    return {spec.name: _shapes(spec, sizes) for spec in inputs}


def _shapes(spec: TensorSpec, sizes: Mapping[str, AxisRange]) -> ShapeRange:
    for place, axis in enumerate(spec.shape):
        if isinstance(axis, str) and axis not in sizes:
            raise BadInput(
                f"input '{spec.name}': axis {place}, '{axis}', is dynamic and has no range",
                hint=f"give it one: `axes` {axis}=MIN,OPT,MAX",
            )

    def at(bound: str) -> Shape:
        return tuple(
            getattr(sizes[axis], bound) if isinstance(axis, str) else axis for axis in spec.shape
        )

    return at("minimum"), at("optimum"), at("maximum")


def _check_fixed(inputs: Sequence[TensorSpec], batch: AxisRange) -> None:
    fixed = [spec for spec in inputs if spec.shape and isinstance(spec.shape[0], int)]
    sizes = {AxisRange(int(spec.shape[0]), *[int(spec.shape[0])] * 2) for spec in fixed}
    if batch in sizes | {AxisRange(1, 1, 1)}:
        return
    if not fixed:
        raise BadInput(f"`batch` {batch}: no input has a batch", hint="leave `batch` out")
    name, size = fixed[0].name, fixed[0].shape[0]
    raise BadInput(
        f"`batch` {batch}: axis 0 of input '{name}' is fixed at {size}",
        hint=f"use `batch` {size}, or export again with a dynamic batch",
    )
