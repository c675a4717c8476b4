"""Write a model to disk: in one file, or its weights beside it where one file cannot hold them.

In: a model with its weights in memory. Out: OUT, and above the limit OUT.data: the bytes of each
weight of 1 KiB or more, one after the other, each at a multiple of 4096, so that a runtime can map
them instead of copying.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, numpy_helper

from deploykit.core.files import atomic_write
from deploykit.onnx_graph.skeleton import SMALL_BYTES, light_model
from deploykit.onnx_graph.validate import stored_bytes

ALIGNMENT_BYTES = 4096


def write_model(model: onnx.ModelProto, out: Path, limit_bytes: int) -> None:
    """Write `model` to `out`; see `save_graph`. The data file is in its place before the model."""
    large = [t for t in model.graph.initializer if stored_bytes(t) > SMALL_BYTES]
    light = light_model(model)
    # protobuf's ByteSize would serialize the whole; 64 bytes a tensor hold its name and shape
    needed = light.ByteSize() + sum(stored_bytes(t) + len(t.name) + 64 for t in large)
    if needed <= limit_bytes:
        with atomic_write(out) as tmp:
            tmp.write_bytes(model.SerializeToString(deterministic=True))
        return
    graph = light.graph
    fed = {value.name for value in model.graph.input}
    kept = [value for value in graph.input if value.name in fed]
    del graph.input[:]
    graph.input.extend(kept)
    data = out.with_name(f"{out.name}.data")
    with atomic_write(data) as tmp, tmp.open("wb") as handle:
        for tensor in large:
            handle.write(bytes(-handle.tell() % ALIGNMENT_BYTES))
            offset = handle.tell()
            handle.write(_stored(tensor))
            told = {
                "location": data.name,
                "offset": str(offset),
                "length": str(handle.tell() - offset),
            }
            outside = graph.initializer.add()
            outside.name, outside.data_type = tensor.name, tensor.data_type
            outside.dims.extend(tensor.dims)
            outside.data_location = TensorProto.EXTERNAL
            for key, value in told.items():
                outside.external_data.add(key=key, value=value)
    with atomic_write(out) as tmp:
        tmp.write_bytes(light.SerializeToString(deterministic=True))


def point_to(path: Path, name: str) -> None:
    """Make the model at `path` look for its weights in a file called `name`, beside it."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    with atomic_write(path) as tmp:
        tmp.write_bytes(model.SerializeToString(deterministic=True))


def _stored(tensor: onnx.TensorProto) -> bytes:
    """The bytes of its values as raw_data lays them out."""
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)
