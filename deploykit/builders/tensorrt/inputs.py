"""Read the names of a model's dynamic input axes from its protobuf.

TensorRT's parser keeps the names only in some versions; the onnx package is slow to import and
loads the weights. Constants are field numbers of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploykit.core.protobuf import Pages, fields
from deploykit.core.tensors import BATCH, TensorSpec

_GRAPH, _INPUT = 7, 11  # of ModelProto, of GraphProto
_NAME, _TYPE = 1, 2  # of ValueInfoProto
_TENSOR_TYPE, _SHAPE = 1, 2  # of TypeProto, of its Tensor
_DIM, _DIM_PARAM = 1, 2  # of TensorShapeProto, of its Dimension


def axis_names(path: Path) -> dict[str, tuple[str | None, ...]]:
    """Axis names by input, None for an unnamed axis; {} for a file that cannot be read."""
    try:
        with Pages(path) as data:
            values = _inside(data, [(0, len(data))], _GRAPH, _INPUT)
            return {_text(data, value, _NAME) or "": _axes(data, value) for value in values}
    except (OSError, ValueError, IndexError):
        return {}


def spec(name: str, dtype: str, shape: Sequence[int], names: Sequence[str | None]) -> TensorSpec:
    """The spec of an input of TensorRT's `shape`, in which -1 is a dynamic axis.

    An axis that `names` leaves unnamed is `N` at position 0, else `NAME_POSITION`.
    """
    named = [*names, *[None] * len(shape)]
    return TensorSpec(
        name,
        dtype,
        tuple(
            size if size >= 0 else named[place] or (BATCH if place == 0 else f"{name}_{place}")
            for place, size in enumerate(shape)
        ),
    )


Span = tuple[int, int]


def _axes(data: Pages, value: Span) -> tuple[str | None, ...]:
    dims = _inside(data, [value], _TYPE, _TENSOR_TYPE, _SHAPE, _DIM)
    return tuple(_text(data, dim, _DIM_PARAM) for dim in dims)


def _inside(data: Pages, spans: list[Span], *numbers: int) -> list[Span]:
    """The spans of the messages reached by following `numbers`, field by field."""
    for number in numbers:
        spans = [
            (begin, end)
            for span in spans
            for found, begin, end in fields(data, *span)
            if found == number and end != -1
        ]
    return spans


def _text(data: Pages, span: Span, number: int) -> str | None:
    found = _inside(data, [span], number)
    return data[slice(*found[-1])].decode(errors="replace") or None if found else None
