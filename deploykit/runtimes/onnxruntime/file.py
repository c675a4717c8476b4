"""Read facts about an `.onnx` file from its protobuf's field headers, without the onnx package.

The onnx package is slow to import and loads the weights; a server needs neither. An unreadable file
has no facts here: loading it reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from deploykit.core.protobuf import Pages, fields


def holds_half(path: Path) -> bool:
    """Whether the graph holds float16: in a tensor, an input or output, or the type of a Cast."""
    return _holds(path, _FLOAT16)


def holds_float8(path: Path) -> bool:
    """Whether the graph holds the 8-bit float E4M3."""
    return _holds(path, _FLOAT8)


def holds_operator(path: Path, kinds: Collection[str]) -> bool:
    """Whether a node, at any depth, is one of these operators. True where that is unknown."""
    try:
        with Pages(path) as data:
            return _operator_in(data, "model", 0, len(data), {kind.encode() for kind in kinds})
    except (OSError, ValueError, IndexError, RecursionError):
        return True


def external_files(path: Path) -> list[str]:
    """The locations, relative to the model's folder, that its tensors name for their data."""
    try:
        with Pages(path) as data:
            return sorted(set(_locations(data, "model", 0, len(data))))
    except (OSError, ValueError, IndexError, RecursionError):
        return []


def _holds(path: Path, kind: int) -> bool:
    try:
        with Pages(path) as data:
            return _type_in(data, "model", 0, len(data), kind)
    except (OSError, ValueError, IndexError, RecursionError):
        return False


def _locations(data: Pages, message: str, begin: int, end: int) -> Iterator[str]:
    """The `location` entries (key 1, value 2) of TensorProto.external_data (13), at any depth."""
    members = _MEMBERS.get(message, {})
    for number, at, stop in fields(data, begin, end):
        if stop == -1:
            continue
        if message == "tensor" and number == 13:
            entry = {n: data[a:b] for n, a, b in fields(data, at, stop) if b != -1}
            if entry.get(1) == b"location":
                yield entry.get(2, b"").decode(errors="replace")
        elif number in members:
            yield from _locations(data, members[number], at, stop)


# Where tensors and types stand, by the field numbers of onnx.proto: message -> {field: message}.
_MEMBERS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "value": {2: "type"},
    "type": {1: "tensor_type"},
}
_HOLD_NODES = ("graph", "function", "node", "attribute")
_DATA_TYPE = {"tensor": 2, "tensor_type": 1}  # the field that holds a TensorProto.DataType
_TYPE_NAMES = (b"to", b"dtype")  # attributes whose number is one: of Cast, and of generators
_FLOAT16, _FLOAT8 = 10, 17


def _operator_in(data: Pages, message: str, begin: int, end: int, kinds: Collection[bytes]) -> bool:
    members = _MEMBERS.get(message, {})
    for number, at, stop in fields(data, begin, end):
        if stop == -1:
            continue
        if message == "node" and number == 4 and data[at:stop] in kinds:
            return True
        inner = members.get(number)
        if inner in _HOLD_NODES and _operator_in(data, inner, at, stop, kinds):
            return True
    return False


def _type_in(data: Pages, message: str, begin: int, end: int, kind: int) -> bool:
    """Whether the protobuf `message` in data[begin:end] speaks of the element type `kind`."""
    members = _MEMBERS.get(message, {})
    name = b""
    for number, at, stop in fields(data, begin, end):
        if stop == -1:
            if at == kind and number == _DATA_TYPE.get(message):
                return True
            if at == kind and message == "attribute" and number == 3 and name in _TYPE_NAMES:
                return True
        elif message == "attribute" and number == 1:
            name = data[at:stop]
        elif number in members and _type_in(data, members[number], at, stop, kind):
            return True
    return False
