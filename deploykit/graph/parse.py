"""Parse an ONNX file without its weights, with only onnx's message classes.

`import onnx` would cost a server 50 ms and 9 MB more, and reading the weights their size.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from deploykit.core.errors import BadInput, os_reason
from deploykit.core.extras import require
from deploykit.core.files import open_readable
from deploykit.core.memory import memory_errors

MAX_NESTED = 12  # nested graphs: ONNX Runtime 1.23 opens 12 levels in 0.2 s, 20 in 30 s
SMALL_BYTES = 1024  # a smaller tensor may be a shape, whose value inference needs
_PAGE_BYTES = 1 << 14
_MAX_FIELDS = 5_000_000  # the most read from one file: each costs a microsecond
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # field numbers of onnx.proto
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


class Pages:
    """A file's bytes by position, read on demand. Raises as `open_readable`.

    The file is not mapped: truncating a mapped file ends the server's process (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        self._file = open_readable(path)
        self.size = os.fstat(self._file.fileno()).st_size
        self._left = _MAX_FIELDS
        self._at, self._page = 0, b""

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, begin: int, end: int) -> bytes:
        return os.pread(self._file.fileno(), end - begin, begin)

    def varint(self, at: int) -> tuple[int, int]:
        """Return the number at `at`, and the position after it. Raises ValueError."""
        place = at - self._at
        if not 0 <= place <= len(self._page) - 10:
            self._at, self._page, place = at, self.read(at, at + _PAGE_BYTES), 0
        value = shift = 0
        for byte in self._page[place : place + 10]:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value, at + shift // 7
        raise ValueError("not a protobuf")

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the fields from `at` to `end`: (number, wire type, start, begin of the value, end).

        Raises ValueError if the bytes are not protobuf.
        """
        while at < end:
            start = at
            key, at = self.varint(at)
            number, wire, begin = key >> 3, key & 7, at
            self._left -= 1
            if wire == 2:
                size, begin = self.varint(at)
                at = begin + size
            elif wire == 0:
                _, at = self.varint(at)
            else:
                at += {1: 8, 5: 4}.get(wire, end)
            if not number or self._left < 0 or at > end:  # zeros are not protobuf
                raise ValueError("not a protobuf")
            yield number, wire, start, begin, at


def parse_model(path: Path, whole_bytes: int = 0) -> tuple[Any, dict[int, tuple[int, int]]]:
    """Return the model without its large weights, and their offset and length by place.

    A file of up to `whole_bytes` is parsed with its weights. Raises NotFound, or BadInput if the
    file is not an ONNX model.
    """
    model, spots = messages().ModelProto(), dict[int, tuple[int, int]]()
    decode_error = require("google.protobuf.message").DecodeError
    try:
        with memory_errors(path, [path]), Pages(path) as data:
            next(data.fields(0, data.size))  # this raises for a file of zeros
            if data.size <= whole_bytes:
                model.ParseFromString(data.read(0, data.size))
            else:
                _parse(data, model, spots)
    except (decode_error, ValueError) as exc:
        raise damaged(path) from exc
    except OSError as exc:
        raise BadInput(f"{path}: cannot be read: {os_reason(exc)}") from exc
    if not model.graph.output:
        raise BadInput(f"{path}: is a truncated or damaged ONNX file: it holds no graph")
    return model, spots


def _parse(data: Pages, model: Any, spots: dict[int, tuple[int, int]]) -> None:
    for number, wire, start, begin, end in data.fields(0, data.size):
        if (number, wire) == (GRAPH, 2):
            _parse_graph(data, begin, end, model.graph, spots)
        else:
            model.MergeFromString(data.read(start, end))


def _parse_graph(
    data: Pages, at: int, stop: int, graph: Any, spots: dict[int, tuple[int, int]]
) -> None:
    others, first = bytearray(), at  # `first`: the begin of the fields between initializers
    for number, wire, start, begin, end in data.fields(at, stop):
        if (number, wire) != (INITIALIZER, 2):
            continue
        others += data.read(first, start)
        first = end
        place, tensor = len(graph.initializer), graph.initializer.add()
        if end - begin <= SMALL_BYTES:
            tensor.ParseFromString(data.read(begin, end))
            continue
        for inner, kind, head, value, last in data.fields(begin, end):
            if (inner, kind) == (RAW_DATA, 2) and last - value > SMALL_BYTES:
                spots[place] = value, last - value
            else:
                tensor.MergeFromString(data.read(head, last))
        if tensor.data_location == EXTERNAL:
            spots.pop(place, None)
    graph.MergeFromString(bytes(others + data.read(first, stop)))


def damaged(path: Path) -> BadInput:
    """Return the error for an ONNX file that a reader of protobuf refuses."""
    try:
        with Pages(path) as data:
            if _deeply_nested(data):
                return too_deep(path)
    except (BadInput, OSError, ValueError):
        pass
    return BadInput(f"{path}: is a truncated or damaged ONNX file")


def too_deep(path: Path) -> BadInput:
    return BadInput(
        f"{path}: has subgraphs in subgraphs, more than {MAX_NESTED} deep",
        hint="If, Loop and Scan hold subgraphs: export the model with fewer in one another",
    )


def _deeply_nested(data: Pages) -> bool:
    spans = [(0, data.size)]
    for numbers in (
        (GRAPH,),
        *((1,), (5,), (6, 11)) * (MAX_NESTED + 1),
    ):  # these nest: nodes, attributes, graphs
        spans = [
            (begin, end)
            for span in spans
            for number, wire, _, begin, end in data.fields(*span)
            if number in numbers and wire == 2
        ]
    return bool(spans)


class Parts:
    """All graphs, nodes and tensors of a model, with those in functions and bodies of If and Loop.

    `inner`: every stored tensor except the initializers of the main graph. Raises BadInput if
    bodies are nested too deeply.
    """

    def __init__(self, model: Any, path: Path) -> None:
        self.graphs, self.nodes, self.inner = [model.graph], list[Any](), list[Any]()
        level = [*model.graph.node, *(node for each in model.functions for node in each.node)]
        for _ in range(MAX_NESTED + 2):
            bodies = [body for node in level for body in self._look_into(node)]
            self.nodes += level
            self.graphs += bodies
            level = [node for body in bodies for node in body.node]
            if not bodies:
                break
        else:
            raise too_deep(path)
        for graph in self.graphs:
            self._sparse(graph.sparse_initializer)
            if graph is not model.graph:
                self.inner += graph.initializer

    def _look_into(self, node: Any) -> Iterator[Any]:
        """Keep the tensors of a node's attributes; return its bodies."""
        for attribute in node.attribute:
            if attribute.HasField("t"):
                self.inner.append(attribute.t)
            self.inner += attribute.tensors
            if attribute.HasField("sparse_tensor"):
                self._sparse([attribute.sparse_tensor])
            self._sparse(attribute.sparse_tensors)
        return subgraphs(node)

    def _sparse(self, tensors: Iterable[Any]) -> None:
        self.inner += [part for each in tensors for part in (each.values, each.indices)]


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


def dtype_name(data_type: int) -> str:
    """Return numpy's name of an ONNX element type ('float32'), else ONNX's own in lower case."""
    try:
        name = str(messages().TensorProto.DataType.Name(data_type)).lower()
    except ValueError:
        return f"type {data_type}"
    return {"float": "float32", "double": "float64"}.get(name, name)
