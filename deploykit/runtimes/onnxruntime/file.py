"""Read facts about an `.onnx` file from its protobuf's field headers, without the onnx package.

The onnx package is slow to import and loads the weights; a server needs neither. An unreadable file
has no facts here: loading it reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from deploykit.core.protobuf import Pages, fields


def small_floats(path: Path) -> set[str]:
    """Which of "float16" and "float8" (E4M3) tensors, inputs, outputs or Casts are of."""
    try:
        with Pages(path) as data:
            kinds = set(_types_in(data, "model", 0, len(data)))
    except (OSError, ValueError, IndexError, RecursionError):
        return set()
    return {name for name, kind in _SMALL_FLOATS.items() if kind in kinds}


def multiplies_integers(path: Path, *, scaled_in_each_call: bool = False) -> bool:
    """Whether the file has operators that multiply 8-bit integers, as a built INT8 file has.

    `scaled_in_each_call`: only products of activations whose scale follows from each call's values.
    """
    return has_operator(path, _SCALED_IN_EACH_CALL if scaled_in_each_call else _INTEGER_PRODUCTS)


def has_operator(path: Path, kinds: Collection[bytes]) -> bool:
    """Whether a node of the file, at any depth, is one of `kinds`."""
    try:
        with Pages(path) as data:
            return _operator_in(data, "model", 0, len(data), kinds)
    except (OSError, ValueError, IndexError, RecursionError):
        return False


def slowed_by_values(path: Path) -> bool:
    """Whether values of the inputs, not their shapes alone, set how much a run computes.

    True where that is unknown.
    """
    try:
        with Pages(path) as data:
            parts = [(at, stop) for number, at, stop in fields(data, 0, len(data)) if number == 7]
            functions = any(number == 25 for number, _, _ in fields(data, 0, len(data)))
            if functions and _operator_in(data, "model", 0, len(data), set(_WORK)):
                return True  # what the nodes of a function are given is not followed
            return _values_set_work(data, *parts[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        return True


def _values_set_work(data: Pages, begin: int, end: int) -> bool:
    """Follow all that depends on the values of a graph's inputs to the operators of _WORK."""
    parts = list(fields(data, begin, end))
    from_values = {_first(data, at, stop, 1) for number, at, stop in parts if number == 11}
    from_values -= {_first(data, at, stop, 8) for number, at, stop in parts if number == 5}
    nodes = []
    for number, at, stop in parts:
        if number == 1:
            node = [each for each in fields(data, at, stop) if each[2] != -1]
            attributes = [(a, b) for n, a, b in node if n == 5]
            if any(_operator_in(data, "attribute", a, b, set(_WORK)) for a, b in attributes):
                return True  # in a branch
            takes, gives = ([data[a:b] for n, a, b in node if n == which] for which in (1, 2))
            nodes.append((_first(data, at, stop, 4), takes, gives))
    known = 0
    while known < len(from_values):  # again, as long as nodes stand before those they depend on
        known = len(from_values)
        for kind, takes, gives in nodes:
            sized = [takes[n] for n in _WORK.get(kind, ()) if n < len(takes)]
            if kind == b"Loop" or from_values.intersection(sized):
                return True
            if kind not in _SHAPES and from_values.intersection(takes):
                from_values.update(gives)
    return False


def _first(data: Pages, begin: int, end: int, wanted: int) -> bytes:
    """The field `wanted` of a message, where it is of bytes; empty without one."""
    for number, at, stop in fields(data, begin, end):
        if number == wanted and stop != -1:
            return data[at:stop]
    return b""


def stored_twice(path: Path) -> str:
    """A name that two initializers of the graph have; empty where each has its own."""
    try:
        with Pages(path) as data:
            graphs = [(at, stop) for number, at, stop in fields(data, 0, len(data)) if number == 7]
            seen: set[bytes] = set()
            for number, at, stop in fields(data, *graphs[-1]):
                if number == 5 and stop != -1:
                    name = _first(data, at, stop, 8)
                    if name in seen:
                        return name.decode(errors="replace")
                    seen.add(name)
    except (OSError, ValueError, IndexError, RecursionError):
        pass
    return ""


def onnx_files(path: Path) -> Iterator[Path]:
    """The file, then those that hold its weights; it is read only if these are asked for."""
    yield path
    yield from (path.parent / location for location in external_files(path))


def external_files(path: Path) -> list[str]:
    """The locations, relative to the model's folder, that its tensors name for their data."""
    return sorted({location for location, _, _ in external_spans(path)})


def external_spans(path: Path) -> list[tuple[str, str, str]]:
    """Location, offset and length, as the file has them or empty, of each tensor's data."""
    try:
        with Pages(path) as data:
            return list(_spans(data, "model", 0, len(data)))
    except (OSError, ValueError, IndexError, RecursionError):
        return []


def _spans(data: Pages, message: str, begin: int, end: int) -> Iterator[tuple[str, str, str]]:
    """What TensorProto.external_data (13: key 1, value 2) say, at any depth."""
    members = _MEMBERS.get(message, {})
    entries: dict[str, str] = {}
    for number, at, stop in fields(data, begin, end):
        if stop == -1:
            continue
        if message == "tensor" and number == 13:
            found = {n: data[a:b] for n, a, b in fields(data, at, stop) if b != -1}
            key, value = (found.get(each, b"").decode(errors="replace") for each in (1, 2))
            entries[key] = value
        elif number in members:
            yield from _spans(data, members[number], at, stop)
    if "location" in entries:
        yield entries["location"], entries.get("offset", ""), entries.get("length", "")


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
# Operators, and which of their inputs set how much they or later nodes compute, by values.
_WORK: Mapping[bytes, tuple[int, ...]] = {
    b"Loop": (0, 1),
    b"If": (0,),
    b"BeamSearch": (0,),
    b"GreedySearch": (0,),
    b"Sampling": (0,),
    b"WhisperBeamSearch": (0,),
    b"NonMaxSuppression": (0, 1),
    b"NonZero": (0,),
    b"Compress": (1,),
    b"Unique": (0,),
    b"ImageDecoder": (0,),
    b"AffineGrid": (1,),
    b"BlackmanWindow": (0,),
    b"CenterCropPad": (1,),
    b"Col2Im": (1, 2),
    b"ConstantOfShape": (0,),
    b"DFT": (1,),
    b"Expand": (1,),
    b"HammingWindow": (0,),
    b"HannWindow": (0,),
    b"MaxUnpool": (2,),
    b"MelWeightMatrix": (0, 1),
    b"OneHot": (1,),
    b"Pad": (1,),
    b"Range": (0, 1, 2),
    b"Resize": (1, 2, 3),
    b"STFT": (1, 3),
    b"Tile": (1, 2),
    b"Upsample": (1,),
}
_SCALED_IN_EACH_CALL = frozenset((b"ConvInteger", b"MatMulInteger", b"DynamicQuantizeMatMul"))
_INTEGER_PRODUCTS = _SCALED_IN_EACH_CALL | frozenset(
    b"QLinearConv QLinearMatMul QGemm QAttention MatMulIntegerToFloat DynamicQuantizeLSTM".split()
)
_SHAPES = (b"Shape", b"Size")
_HOLD_NODES = ("graph", "function", "node", "attribute")
_DATA_TYPE = {"tensor": 2, "tensor_type": 1}  # the field that holds a TensorProto.DataType
_TYPE_NAMES = (b"to", b"dtype")  # attributes whose number is one: of Cast, and of generators
_SMALL_FLOATS = {"float16": 10, "float8": 17}


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


def _types_in(data: Pages, message: str, begin: int, end: int) -> Iterator[int]:
    """The element types that the protobuf `message` in data[begin:end] speaks of."""
    members = _MEMBERS.get(message, {})
    name = b""
    for number, at, stop in fields(data, begin, end):
        if stop == -1:
            named = message == "attribute" and number == 3 and name in _TYPE_NAMES
            if named or number == _DATA_TYPE.get(message):
                yield at
        elif message == "attribute" and number == 1:
            name = data[at:stop]
        elif number in members:
            yield from _types_in(data, members[number], at, stop)
