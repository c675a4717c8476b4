"""Read and write ONNX files without holding their weights.

Weights above 1 KiB stay in the file: the model in memory refers to them as ONNX refers to external
data, by file, offset and length. Writing copies one weight at a time, so that even a large model
needs only the memory of its largest weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput, os_reason
from deploykit.core.files import atomic_write, open_readable
from deploykit.core.machine import memory_errors
from deploykit.graph.parse import GRAPH, INITIALIZER, RAW_DATA, SMALL_BYTES
from deploykit.graph.skeleton import copy_fields, stored_bytes

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
        try:
            with memory_errors(path, [path]), open_readable(path) as handle:
                handle.seek(int(entry.get("offset", "0")))
                data: bytes = handle.read(length)
        except OSError as exc:
            raise BadInput(f"{path}: cannot be read: {os_reason(exc)}") from exc
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

    written = onnx.ModelProto()
    copy_fields(model, written, left_out="graph")
    copy_fields(model.graph, written.graph, left_out="initializer")
    large = {t.name: t for t in model.graph.initializer if stored_bytes(t) > SMALL_BYTES}
    for tensor in model.graph.initializer:
        kept = written.graph.initializer.add()
        if tensor.name in large:
            kept.name, kept.data_type = tensor.name, tensor.data_type
            kept.dims.extend(tensor.dims)
        else:
            kept.CopyFrom(tensor)
    data = {name: stored_bytes(tensor) for name, tensor in large.items()}
    # reserve 64 bytes per tensor for its name and shape
    if written.ByteSize() + sum(data.values()) + 64 * len(large) <= limit_bytes:
        with writer(out) as handle:
            offsets = _write_inline(written, large, folder, handle)
        file = out.name
    else:
        file = f"{out.name}.data"
        with writer(out.with_name(file)) as handle:
            offsets = dict(_write_aligned(large, folder, handle))
    for tensor in written.graph.initializer:
        if tensor.name in large:
            refer(tensor, file, offsets[tensor.name], data[tensor.name])
    if file != out.name:
        with writer(out) as handle:
            handle.write(written.SerializeToString(deterministic=True))
    return written


def _write_inline(
    model: onnx.ModelProto,
    large: Mapping[str, onnx.TensorProto],
    folder: Path,
    handle: BinaryIO,
) -> dict[str, int]:
    """Write one protobuf message with the data of `large` in it; return where each begins."""
    head, body = onnx.ModelProto(), onnx.GraphProto()
    copy_fields(model, head, left_out="graph")
    copy_fields(model.graph, body, left_out="initializer")
    start = body.SerializeToString(deterministic=True)
    prefixes = []
    for tensor in model.graph.initializer:
        inner, more = tensor.SerializeToString(deterministic=True), 0
        if tensor.name in large:
            more = stored_bytes(tensor)
            inner += varint(RAW_DATA << 3 | 2) + varint(more)
        prefix = varint(INITIALIZER << 3 | 2) + varint(len(inner) + more) + inner
        prefixes.append((tensor, prefix, more))
    size = len(start) + sum(len(prefix) + more for _, prefix, more in prefixes)
    handle.write(head.SerializeToString(deterministic=True))
    handle.write(varint(GRAPH << 3 | 2) + varint(size) + start)
    offsets = {}
    for tensor, prefix, more in prefixes:
        handle.write(prefix)
        if more:
            offsets[tensor.name] = handle.tell()
            handle.write(tensor_data(large[tensor.name], folder))
    return offsets


def _write_aligned(
    large: Mapping[str, onnx.TensorProto], folder: Path, handle: BinaryIO
) -> Iterator[tuple[str, int]]:
    for name, tensor in large.items():
        handle.write(bytes(-handle.tell() % ALIGNMENT_BYTES))
        yield name, handle.tell()
        handle.write(tensor_data(tensor, folder))


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
