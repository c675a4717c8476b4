"""Read, check, copy and write ONNX models without holding their weights.

Weights above 1 KiB stay in the file: the model in memory refers to them as ONNX refers to external
data, by file, offset and length. Writing copies one weight at a time. In a skeleton they are
inputs, so that it is small enough to copy, check and infer.

A file is checked before a native library opens it: `onnx.checker` accepts tensors whose data are
too short, and ONNX Runtime reads data files that are hard links to files of other folders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

from deploykit.core.artefact import sniff, wrong_format
from deploykit.core.errors import BadInput, first_line
from deploykit.core.files import atomic_write, check_data_file, open_readable, read_errors
from deploykit.core.machine import memory_errors
from deploykit.graph.parse import (
    GRAPH,
    INITIALIZER,
    RAW_DATA,
    SMALL_BYTES,
    Parts,
    duplicate,
    parse_model,
    subgraphs,
)

MAX_BYTES = (1 << 31) - 1  # the limit of one protobuf message
ALIGNMENT_BYTES = 4096  # a runtime can map weights that start at a multiple of it


def refer(tensor: onnx.TensorProto, file: str, offset: int, length: int) -> None:
    """Make `tensor` refer to data in `file`, next to the model."""
    tensor.ClearField("raw_data")
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def load_data(tensor: onnx.TensorProto, folder: Path) -> None:
    """Put the data of a reference into the tensor itself."""
    if tensor.data_location == TensorProto.EXTERNAL:
        data = tensor_data(tensor, folder)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = data


def tensor_data(tensor: onnx.TensorProto, folder: Path) -> bytes:
    """Return the values' bytes in the layout of raw_data; `folder`: the folder of its file."""
    if tensor.data_location == TensorProto.EXTERNAL:
        entry = {item.key: item.value for item in tensor.external_data}
        path, length = folder / str(entry["location"]), stored_bytes(tensor)
        with memory_errors(path, [path]), read_errors(path), open_readable(path) as handle:
            handle.seek(int(entry.get("offset", "0")))
            data: bytes = handle.read(length)
        if len(data) != length:
            raise BadInput(f"{path}: tensor '{tensor.name}' ends too early: was the file changed?")
        return data
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def tensor_array(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """Return the tensor's values; read only."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    data, dtype = tensor_data(tensor, folder), helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if dtype.kind in "fiub" and len(data) == dtype.itemsize * int(np.prod(tensor.dims)):
        return np.frombuffer(data, dtype.newbyteorder("<")).reshape(tuple(tensor.dims))
    whole = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data)
    return numpy_helper.to_array(whole)


def write(
    model: onnx.ModelProto, folder: Path, out: Path, limit_bytes: int, *, temporary: bool = False
) -> onnx.ModelProto:
    """Write `model`, whose data are in `folder`, to `out`; above the limit OUT.data holds weights.

    The data file is in its place before the model. Returns the model as `parse` would read it.
    `temporary` omits the fsync.
    """

    @contextmanager
    def writer(file: Path) -> Iterator[BinaryIO]:
        with atomic_write(file, durable=not temporary) as tmp, tmp.open("wb") as handle:
            yield handle

    written, large = copy_without_weights(model), dict[str, int]()  # name -> bytes
    for tensor in model.graph.initializer:
        kept, nbytes = written.graph.initializer.add(), stored_bytes(tensor)
        if nbytes > SMALL_BYTES:
            large[tensor.name] = nbytes
            kept.name, kept.data_type = tensor.name, tensor.data_type
            kept.dims.extend(tensor.dims)
        else:
            kept.CopyFrom(tensor)
    data = ((t.name, tensor_data(t, folder)) for t in model.graph.initializer if t.name in large)
    # reserve 64 bytes per tensor for its name and shape
    if written.ByteSize() + sum(large.values()) + 64 * len(large) <= limit_bytes:
        file = out.name
        with writer(out) as handle:
            offsets = _write_inline(written, large, data, handle)
    else:
        file, offsets = f"{out.name}.data", {}
        with writer(out.with_name(file)) as handle:
            for name, values in data:
                handle.write(bytes(-handle.tell() % ALIGNMENT_BYTES))
                offsets[name] = handle.tell()
                handle.write(values)
    for tensor in written.graph.initializer:
        if tensor.name in large:
            refer(tensor, file, offsets[tensor.name], large[tensor.name])
    if file != out.name:
        with writer(out) as handle:
            handle.write(written.SerializeToString(deterministic=True))
    return written


def _write_inline(
    model: onnx.ModelProto,
    large: Mapping[str, int],
    data: Iterator[tuple[str, bytes]],
    handle: BinaryIO,
) -> dict[str, int]:
    """Write one protobuf message with the data of `large` in it; return where each begins."""
    head, tensors = copy_without_weights(model), list[tuple[str, bytes]]()
    start = head.graph.SerializeToString(deterministic=True)
    head.ClearField("graph")
    for tensor in model.graph.initializer:
        inner, more = tensor.SerializeToString(deterministic=True), large.get(tensor.name, 0)
        inner += varint(RAW_DATA) + varint(more) if more else b""
        prefix = varint(INITIALIZER) + varint(len(inner) + more) + inner
        tensors.append((tensor.name, prefix))
    size = len(start) + sum(len(prefix) for _, prefix in tensors) + sum(large.values())
    handle.write(head.SerializeToString(deterministic=True))
    handle.write(varint(GRAPH) + varint(size) + start)
    offsets = {}
    for name, prefix in tensors:
        handle.write(prefix)
        if name in large:
            offsets[name] = handle.tell()
            handle.write(next(data)[1])
    return offsets


def varint(value: int) -> bytes:
    """Return a number as protobuf encodes it."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def point_to(path: Path, name: str) -> None:
    """Make the model at `path` look for its weights in a file called `name`, next to it."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    with atomic_write(path) as tmp:
        tmp.write_bytes(model.SerializeToString(deterministic=True))


STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
# ONNX Runtime writes these in the graphs that it optimised; other readers have no schema for them.
RUNTIME_DOMAINS = ("com.microsoft", "com.ms.")
# Those that it writes in the standard domain at any opset: source, its contrib_defs.cc.
RUNTIME_OPERATORS = ("LayerNormalization", "SimplifiedLayerNormalization")


def read_model(path: Path) -> onnx.ModelProto:
    """Read and check the model at `path`; weights above 1 KiB are references into its files.

    Raises NotFound or BadInput.
    """
    kind = sniff(path)
    if kind != "onnx":
        raise wrong_format(path, kind, "an ONNX file")
    if path.stat().st_size > MAX_BYTES:
        raise BadInput(f"{path}: is larger than 2 GiB, which no ONNX file without external data is")
    model: onnx.ModelProto
    model, spots = parse_model(path)
    parts = Parts(model, path)
    _check_nodes(model, parts, path)
    _check_types(model, parts, path)
    stored = list(model.graph.initializer)
    for tensor in (*stored, *parts.inner):
        _check_tensor(tensor, path)
    for tensor in (*(each for each in stored if stored_bytes(each) <= SMALL_BYTES), *parts.inner):
        load_data(tensor, path.parent)
    for place, (offset, length) in spots.items():
        tensor = stored[place]
        _check_length(tensor, length, f"{path}: tensor '{tensor.name}'")
        refer(tensor, path.name, offset, length)
    return model


def _check_nodes(model: onnx.ModelProto, parts: Parts, path: Path) -> None:
    """Raise BadInput for what onnx's checker lets pass."""
    newest = defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > newest:
            raise BadInput(
                f"{path}: has opset {entry.version}",
                hint=f"the newest that the installed onnx {onnx.__version__} knows is {newest}",
            )
    if twice := duplicate(value.name for value in model.graph.output):
        raise BadInput(f"{path}: two outputs have the name '{twice}'", hint="rename one")
    local = {(function.domain, function.name) for function in model.functions}
    for number, node in enumerate(parts.nodes):
        where = f"{path}: node '{node.name or f'#{number}'}'"
        strings = (node.op_type, node.domain, *node.input, *node.output)
        if not all(isinstance(each, str) for each in strings):
            raise BadInput(f"{where}: has a name that is not UTF-8")
        known = node.domain in STANDARD_DOMAINS or node.domain.startswith(RUNTIME_DOMAINS)
        if not known and (node.domain, node.op_type) not in local:
            raise BadInput(f"{where}: operator {node.op_type} of unknown domain '{node.domain}'")


def for_checker(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return a copy with RUNTIME_OPERATORS in a domain that onnx does not check."""
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in Parts(copy, path).nodes:
        known = node.op_type not in RUNTIME_OPERATORS or defs.has(node.op_type, version)
        node.domain = node.domain if known else RUNTIME_DOMAINS[0]
    if RUNTIME_DOMAINS[0] not in {each.domain for each in copy.opset_import}:
        copy.opset_import.add(domain=RUNTIME_DOMAINS[0], version=1)
    return copy


def _check_types(model: onnx.ModelProto, parts: Parts, path: Path) -> None:
    """Raise BadInput unless each input, output and typed value has a known element type or none."""
    known = set(TensorProto.DataType.values())
    for graph in (*parts.graphs, *model.functions):
        values = [*graph.value_info]
        if isinstance(graph, onnx.GraphProto):
            values += [*graph.input, *graph.output]
        for value in values:
            kind = value.type.tensor_type.elem_type
            if kind not in known or not isinstance(value.name, str):
                raise BadInput(f"{path}: tensor '{value.name}' has an unknown element type {kind}")


def _check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    where = f"{path}: tensor '{tensor.name}'"
    if tensor.data_type not in TensorProto.DataType.values() or not tensor.data_type:
        raise BadInput(f"{where}: has an unknown element type {tensor.data_type}")
    if tensor.HasField("segment"):
        raise BadInput(f"{where}: is in segments, which no runtime reads")
    if any(size < 0 for size in tensor.dims):
        raise BadInput(f"{where}: has the shape {list(tensor.dims)}")
    if tensor.data_location == TensorProto.EXTERNAL:
        # its data must be in a regular file below the model's folder that is long enough
        values = {entry.key: entry.value for entry in tensor.external_data}
        location = values.get("location", "")
        info = check_data_file(path, location, where)
        try:
            offset = int(values.get("offset", "0"))
            length = int(values.get("length", str(stored_bytes(tensor))))
        except ValueError:
            raise BadInput(f"{where}: its offset or length is not a number") from None
        if length != stored_bytes(tensor) or offset < 0 or offset + length > info.st_size:
            raise BadInput(
                f"{where}: needs {stored_bytes(tensor)} bytes; the file says offset {offset}, "
                f"length {length} in {location} of {info.st_size} bytes"
            )
    elif tensor.HasField("raw_data"):
        _check_length(tensor, len(tensor.raw_data), where)


def _check_length(tensor: onnx.TensorProto, length: int, where: str) -> None:
    if length != stored_bytes(tensor):
        raise BadInput(
            f"{where}: shape {list(tensor.dims)} needs {stored_bytes(tensor)} bytes, "
            f"the file holds {length}"
        )


_PACKED_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}


def make_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose weights above 1 KiB are inputs of the same name."""
    skeleton = copy_without_weights(model)
    graph = skeleton.graph
    fed = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if stored_bytes(tensor) <= SMALL_BYTES:
            graph.initializer.add().CopyFrom(tensor)
        elif tensor.name not in fed:
            value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(value)
    return skeleton


def infer_shapes(model: onnx.ModelProto, *, data_prop: bool = False) -> onnx.ModelProto:
    """Return a copy with the types and shapes that onnx infers. Raises BadInput."""
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=data_prop)
    except Exception as exc:  # a damaged graph raises many classes
        raise BadInput(f"no shapes can be inferred in the graph: {first_line(exc)}") from exc


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield every node, also in bodies of If, Loop and Scan."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def stored_elements(tensor: onnx.TensorProto) -> int:
    """Return the number of elements that `dims`, checked on loading, claims."""
    return math.prod(tensor.dims)


def stored_bytes(tensor: onnx.TensorProto) -> int:
    """Return the size in bytes that `dims` and the type claim; 0 for strings."""
    name = TensorProto.DataType.Name(tensor.data_type)
    if name == "STRING":
        return 0
    if name in _PACKED_BITS:
        return -(-stored_elements(tensor) * _PACKED_BITS[name] // 8)
    itemsize: int = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return stored_elements(tensor) * itemsize


def read_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield every name that a node reads, also in bodies of If, Loop and Scan."""
    for node in graph.node:
        yield from node.input
        yield from inner_reads(node)


def inner_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that the bodies of an If, Loop or Scan read and return."""
    for body in subgraphs(node):
        yield from read_names(body)
        yield from (value.name for value in body.output)


def reads(node: onnx.NodeProto) -> list[str]:
    """Return the names that a node and its bodies read."""
    return [name for name in (*node.input, *inner_reads(node)) if name]


def unused_name(name: str, taken: set[str]) -> str:
    """Return `name`, with underscores behind it if it is taken; it is taken from now on."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def copy_without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that has no initializers."""
    graph = {f.name: value for f, value in model.graph.ListFields() if f.name != "initializer"}
    others: dict[str, Any] = {f.name: value for f, value in model.ListFields() if f.name != "graph"}
    return onnx.ModelProto(**others, graph=graph)
