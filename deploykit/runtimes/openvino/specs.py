"""Read the inputs and outputs of an `.onnx` file from its protobuf's field headers.

OpenVINO forgets the names of dynamic axes and leaves out inputs that no node reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from deploykit.core.errors import Unsupported
from deploykit.core.protobuf import Pages, damaged, fields
from deploykit.core.tensors import TensorSpec, axis_name

_GRAPH, _INITIALIZER, _INPUT, _OUTPUT = 7, 5, 11, 12  # field numbers of onnx.proto
_DTYPES: Mapping[int, str] = {  # of TensorProto.DataType
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}
_OTHERS: Mapping[int, str] = {8: "string", 16: "bfloat16"}
Axes = tuple["int | str | None", ...]  # None: the file does not say


def read_specs(path: Path) -> tuple[tuple[TensorSpec, ...], list[tuple[str, str, Axes | None]]]:
    """The inputs; of each output the name, the dtype, and the shape where the file has one.

    Raises BadInput for what is no ONNX model, Unsupported for tensors that OpenVINO does not take.
    """
    try:
        with Pages(path) as data:
            graphs = [(at, end) for n, at, end in fields(data, 0, len(data)) if n == _GRAPH]
            parts = list(fields(data, *graphs[-1]))
            stored = {_text(data, at, end, 8) for n, at, end in parts if n == _INITIALIZER}
            values = {
                kind: [_value(data, at, end) for n, at, end in parts if n == kind]
                for kind in (_INPUT, _OUTPUT)
            }
    except (OSError, ValueError, IndexError) as exc:
        raise damaged(path) from exc
    if not values[_OUTPUT]:
        raise damaged(path)
    inputs = tuple(
        TensorSpec(name, _dtype(path, name, kind), name_axes(name, shape or ()))
        for name, kind, shape in values[_INPUT]
        if name not in stored
    )
    return inputs, [(name, _dtype(path, name, k), shape) for name, k, shape in values[_OUTPUT]]


def name_axes(name: str, shape: Axes) -> tuple[int | str, ...]:
    """`shape` with a name for each axis of unknown size, as ONNX Runtime's engine gives."""
    return tuple(axis_name(name, n) if axis is None else axis for n, axis in enumerate(shape))


def _dtype(path: Path, name: str, kind: int) -> str:
    if kind not in _DTYPES:
        raise Unsupported(
            f"{path}: tensor '{name}' is of {_OTHERS.get(kind, f'type {kind}')}, which the engine "
            "for OpenVINO does not take",
            hint="run it with ONNX Runtime: build it with the profile 'cpu'",
        )
    return _DTYPES[kind]


def _value(data: Pages, begin: int, end: int) -> tuple[str, int, Axes | None]:
    """Of a ValueInfoProto: name, element type, shape."""
    kind, shape = 0, None
    for at, stop in _inside(data, begin, end, 2, 1):  # type.tensor_type
        for number, first, last in fields(data, at, stop):
            if (number, last) == (1, -1):
                kind = first
            elif number == 2:
                dims = [(a, b) for n, a, b in fields(data, first, last) if n == 1]
                shape = tuple(_axis(data, a, b) for a, b in dims)
    return _text(data, begin, end, 1), kind, shape


def _axis(data: Pages, begin: int, end: int) -> int | str | None:
    for number, at, stop in fields(data, begin, end):
        if (number, stop) == (1, -1):
            return at
        if number == 2 and stop > at:
            return data[at:stop].decode(errors="replace")
    return None


def _inside(data: Pages, begin: int, end: int, *path: int) -> Iterator[tuple[int, int]]:
    """Where the messages are that the field numbers `path` lead to."""
    if not path:
        yield begin, end
        return
    for number, at, stop in fields(data, begin, end):
        if number == path[0] and stop != -1:
            yield from _inside(data, at, stop, *path[1:])


def _text(data: Pages, begin: int, end: int, wanted: int) -> str:
    found = next(_inside(data, begin, end, wanted), (0, 0))
    return data[found[0] : found[1]].decode(errors="replace")
