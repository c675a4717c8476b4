"""Parse an ONNX file without its weights, and read the facts that opening it needs.

Only onnx's message classes are imported: `import onnx` would cost a server 50 ms and 9 MB more.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from deploykit.core.artefact import file_stamp
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.extras import require
from deploykit.core.files import open_readable, read_errors
from deploykit.core.machine import memory_errors

MAX_NESTED = 12  # nested graphs: ONNX Runtime 1.23 opens 12 levels in 0.2 s, 20 in 30 s
SMALL_BYTES = 1024  # a smaller tensor may be a shape, whose value inference needs
_MAX_INLINED = 1 << 18  # nodes that inlining may add: a file of 1.7 kB can hold 2^28
_MAX_FIELDS = 5_000_000  # the most read from one file: each costs a microsecond
# keys of onnx.proto's fields: the number, and that a length and bytes follow
GRAPH, INITIALIZER, RAW_DATA = 7 << 3 | 2, 5 << 3 | 2, 9 << 3 | 2
EXTERNAL = 1  # TensorProto.DataLocation


@cache
def messages() -> ModuleType:
    """Import onnx's message classes, the same as `import onnx` has, without its other modules."""
    package = importlib.util.find_spec("onnx")
    path = Path(str(package and package.origin)).with_name("onnx_ml_pb2.py")
    spec = importlib.util.spec_from_file_location("deploykit.onnx_messages", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reader:
    """The fields of a protobuf file by position, so that weights can be skipped.

    The file is not mapped: truncating a mapped file ends the server's process (SIGBUS).
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, _MAX_FIELDS

    def read(self, begin: int, end: int) -> bytes:
        self._file.seek(begin)
        return self._file.read(end - begin)

    def _varint(self) -> int:
        value = shift = 0
        while shift < 70 and (byte := self._file.read(1)):
            value |= (byte[0] & 0x7F) << shift
            if byte[0] < 0x80:
                return value
            shift += 7
        raise ValueError("not a protobuf")

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the fields from `at` to `end`: (key, start, begin of the bytes, end).

        Raises ValueError if the bytes are not protobuf.
        """
        while at < end:
            self._file.seek(at)
            start, key = at, self._varint()
            size = self._varint() if key & 7 in (0, 2) else {1: 8, 5: 4}.get(key & 7, end)
            begin = self._file.tell()
            at = begin + size if key & 7 else begin
            self._left -= 1
            if key < 8 or self._left < 0 or at > end:  # zeros are not protobuf
                raise ValueError("not a protobuf")
            yield key, start, begin, at


def parse_model(path: Path, whole_bytes: int = 0) -> tuple[Any, dict[int, tuple[int, int]]]:
    """Return the model without its large weights, and their offset and length by place.

    A file of up to `whole_bytes` is parsed with its weights. Raises NotFound, or BadInput if the
    file is not an ONNX model.
    """
    model, spots = messages().ModelProto(), dict[int, tuple[int, int]]()
    decode_error = require("google.protobuf.message").DecodeError
    try:
        with memory_errors(path, [path]), read_errors(path), open_readable(path) as file:
            data, size = Reader(file), os.fstat(file.fileno()).st_size
            next(data.fields(0, size))  # this raises for a file of zeros
            if size <= whole_bytes:
                model.ParseFromString(data.read(0, size))
            else:
                for key, start, begin, end in data.fields(0, size):
                    if key == GRAPH:
                        _parse_graph(data, begin, end, model.graph, spots)
                    else:
                        model.MergeFromString(data.read(start, end))
    except (decode_error, ValueError) as exc:
        raise damaged(path) from exc
    if not model.graph.output:
        raise BadInput(f"{path}: is a truncated or damaged ONNX file: it holds no graph")
    return model, spots


def _parse_graph(
    data: Reader, at: int, stop: int, graph: Any, spots: dict[int, tuple[int, int]]
) -> None:
    others = bytearray()
    for key, start, begin, end in data.fields(at, stop):
        if key != INITIALIZER:
            others += data.read(start, end)
            continue
        place, tensor = len(graph.initializer), graph.initializer.add()
        if end - begin <= SMALL_BYTES:
            tensor.ParseFromString(data.read(begin, end))
            continue
        for inner, head, value, last in data.fields(begin, end):
            if inner == RAW_DATA and last - value > SMALL_BYTES:
                spots[place] = value, last - value
            else:
                tensor.MergeFromString(data.read(head, last))
        if tensor.data_location == EXTERNAL:
            spots.pop(place, None)
    graph.MergeFromString(bytes(others))


def damaged(path: Path) -> BadInput:
    """Return the error for an ONNX file that a reader of protobuf refuses."""
    return BadInput(f"{path}: is a truncated or damaged ONNX file, or one with too deep subgraphs")


class Parts:
    """All graphs, nodes and tensors of a model, with those in functions and bodies of If and Loop.

    `inner`: every stored tensor except the initializers of the main graph. Raises BadInput if
    bodies are nested too deeply, or functions call one another so that they cannot be inlined.
    """

    def __init__(self, model: Any, path: Path) -> None:
        self.graphs, self.nodes, self.inner = [model.graph], list[Any](), list[Any]()
        nodes = self._walk(model.graph.node, path)
        inside = {(each.domain, each.name): self._walk(each.node, path) for each in model.functions}
        calls = {
            key: {(node.domain, node.op_type) for node in nodes} & inside.keys()
            for key, nodes in inside.items()
        }
        sizes: dict[tuple[str, str], int] = {}  # of each function, inlined
        try:
            for key in TopologicalSorter(calls).static_order():
                sizes[key] = _inlined(inside[key], sizes)
        except CycleError as exc:
            name = exc.args[1][0][1]
            raise BadInput(
                f"{path}: its function '{name}' calls itself, which ONNX forbids"
            ) from exc
        if sizes and _inlined(nodes, sizes) > _MAX_INLINED + sum(map(_size, self.nodes)):
            raise BadInput(
                f"{path}: its functions call one another so often that the graph, inlined, is "
                "too large",
                hint="export the model without functions, or with fewer in one another",
            )
        for graph in self.graphs:
            self._sparse(graph.sparse_initializer)
            if graph is not model.graph:
                self.inner += graph.initializer

    def _walk(self, level: Iterable[Any], path: Path) -> list[Any]:
        """Keep these nodes, and those, the graphs and the tensors inside; return all nodes."""
        first, level = len(self.nodes), list(level)
        for _ in range(MAX_NESTED + 2):
            self.nodes += level
            bodies = [body for node in level for body in subgraphs(node)]
            self.graphs += bodies
            for attribute in (attribute for node in level for attribute in node.attribute):
                if attribute.HasField("t"):
                    self.inner.append(attribute.t)
                self.inner += attribute.tensors
                if attribute.HasField("sparse_tensor"):
                    self._sparse([attribute.sparse_tensor])
                self._sparse(attribute.sparse_tensors)
            if not bodies:
                return self.nodes[first:]
            level = [node for body in bodies for node in body.node]
        raise BadInput(
            f"{path}: has subgraphs in subgraphs, more than {MAX_NESTED} deep",
            hint="If, Loop and Scan hold subgraphs: export the model with fewer in one another",
        )

    def _sparse(self, tensors: Iterable[Any]) -> None:
        self.inner += [part for each in tensors for part in (each.values, each.indices)]


def _size(node: Any) -> int:
    """Return what a copy of the node costs: 1, and 1 more for each 256 bytes of its constants."""
    return 1 + int(node.ByteSize()) // 256


def _inlined(nodes: Iterable[Any], sizes: Mapping[tuple[str, str], int]) -> int:
    return sum(sizes.get((node.domain, node.op_type), 0) + _size(node) for node in nodes)


def subgraphs(node: Any) -> Iterator[Any]:
    """Yield the bodies of If, Loop and Scan."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def duplicate(names: Iterable[str]) -> str:
    """Return the first name that occurs twice, as text; empty if none does."""
    counts = Counter(names)
    return next((str(name) for name, count in counts.items() if count > 1), "")


@cache
def dtype_name(data_type: int) -> str:
    """Return numpy's name of an ONNX element type ('float32'), else ONNX's own in lower case."""
    try:
        name = str(messages().TensorProto.DataType.Name(data_type)).lower()
    except ValueError:
        return f"type {data_type}"
    return {"float": "float32", "double": "float64"}.get(name, name)


# The first computes the activations' scale in each call; the second holds all products of 8-bit
# integers, as in a built INT8 file.
SCALED_IN_EACH_CALL = frozenset(("ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul"))
INTEGER_PRODUCTS = SCALED_IN_EACH_CALL | {
    *("QLinearConv", "QLinearMatMul", "QGemm", "QAttention"),
    *("MatMulIntegerToFloat", "DynamicQuantizeLSTM"),
}
_WHOLE_BYTES = 8 << 20  # up to here, reading the whole file is faster than skipping its weights
FLOAT16, FLOAT8 = 10, 17  # TensorProto.DataType; FLOAT8 is E4M3
_TYPE_NAMES = ("to", "dtype")  # attributes that hold an element type, in Cast and in generators
_SHAPES = ("Shape", "Size")
# Operator -> the inputs whose values decide how much it, or later nodes, compute.
_WORK: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Loop", "NonMaxSuppression", "MelWeightMatrix"), (0, 1)),
    **dict.fromkeys(("If", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"), (0,)),
    **dict.fromkeys(("NonZero", "Unique", "ImageDecoder", "ConstantOfShape"), (0,)),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), (0,)),
    **dict.fromkeys(("AffineGrid", "CenterCropPad", "Compress", "DFT"), (1,)),
    **dict.fromkeys(("Expand", "OneHot", "Pad", "Upsample"), (1,)),
    **dict.fromkeys(("Col2Im", "Tile"), (1, 2)),
    "MaxUnpool": (2,),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
}


class ExternalData(NamedTuple):
    """The location of a tensor's data; `offset` and `length` as the file has them, or empty."""

    location: str
    offset: str
    length: str


class Value(NamedTuple):
    """An input or output. `shape`, or an axis of it, is None if the file does not state it."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class OnnxFacts:
    """The facts that a runtime needs before it opens a file.

    `operators`, `element_types` (of tensors, inputs, outputs and Casts), `external`: at any depth.
    `slowed_by_values`: the inputs' values, not their shapes alone, decide how much a run computes.
    `twice`: a name that two initializers of the graph have, or empty.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operators: frozenset[str]
    element_types: frozenset[int]
    external: tuple[ExternalData, ...]
    slowed_by_values: bool
    twice: str


def read_facts(path: Path) -> OnnxFacts:
    """Read the facts of the file at `path`; a file with the same stamp is not read again.

    Raises NotFound, or BadInput for a file that no native library should open: one that is not an
    ONNX model, or that nests the bodies of If and Loop too deeply.
    """
    return _read(path, file_stamp(path))


@lru_cache(maxsize=32)
def _read(path: Path, _stamp: tuple[int, int, int] | None) -> OnnxFacts:
    model, _ = parse_model(path, whole_bytes=_WHOLE_BYTES)
    parts, graph = Parts(model, path), model.graph
    tensors = [*graph.initializer, *parts.inner]
    values = [v for g in parts.graphs for part in (g.input, g.output, g.value_info) for v in part]
    types = {tensor.data_type for tensor in tensors}
    types.update(value.type.tensor_type.elem_type for value in values)
    types.update(a.i for node in parts.nodes for a in node.attribute if a.name in _TYPE_NAMES)
    external = []
    for tensor in tensors:
        entries = {_text(item.key): _text(item.value) for item in tensor.external_data}
        if "location" in entries:
            offset, length = (entries.get(key, "") for key in ("offset", "length"))
            external.append(ExternalData(entries["location"], offset, length))
    operators = frozenset(node.op_type for node in parts.nodes)
    names = [tensor.name for tensor in graph.initializer]
    stored = set(names)
    return OnnxFacts(
        inputs=tuple(read_value(each) for each in graph.input if each.name not in stored),
        outputs=tuple(map(read_value, graph.output)),
        operators=operators,
        element_types=frozenset(types),
        external=tuple(external),
        slowed_by_values=not operators.isdisjoint(_WORK) and _values_set_work(parts, stored),
        twice=duplicate(names),
    )


def onnx_files(path: Path) -> Iterator[Path]:
    """Yield the file, then its weights files; the file is read only for the latter."""
    yield path
    yield from (path.parent / location for location in external_files(path))


def external_files(path: Path) -> list[str]:
    """Return the locations, relative to the model's folder, that its tensors name for their data.

    Return none for a file that cannot be read: opening it raises the error.
    """
    with contextlib.suppress(DeploykitError):
        return sorted({each.location for each in read_facts(path).external})
    return []


def read_value(value: Any) -> Value:
    """Return an input or output as the file states it; a size below 0 is unknown."""
    kind = value.type.tensor_type
    shape = None
    if kind.HasField("shape"):
        shape = tuple(
            axis.dim_value
            if axis.HasField("dim_value") and axis.dim_value >= 0
            else _text(axis.dim_param) or None
            for axis in kind.shape.dim
        )
    return Value(_text(value.name), dtype_name(kind.elem_type), shape)


def _text(value: str | bytes) -> str:
    """Decode a string of the file, which protobuf returns as bytes if it is not UTF-8."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def _values_set_work(parts: Parts, stored: set[str]) -> bool:
    """Return whether the values of a graph's inputs reach an operator of _WORK.

    They are not followed into functions and bodies: one of these that has such an operator counts.
    """
    graph = parts.graphs[0]
    if any(node.op_type in _WORK for node in parts.nodes[len(graph.node) :]):
        return True
    from_values = {value.name for value in graph.input} - stored
    nodes = [(node.op_type, list(node.input), list(node.output)) for node in graph.node]
    known = 0
    while known < len(from_values):  # nodes may come before the ones that they depend on
        known = len(from_values)
        for kind, takes, gives in nodes:
            sized = [takes[n] for n in _WORK.get(kind, ()) if n < len(takes)]
            if kind == "Loop" or from_values.intersection(sized):
                return True
            if kind not in _SHAPES and from_values.intersection(takes):
                from_values.update(gives)
    return False
