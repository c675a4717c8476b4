"""Walk a graph, and copy it without its weights.

In a skeleton, weights above 1 KiB are inputs: however large the model, it is small enough to copy,
check and infer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput, first_line
from deploykit.graph.parse import SMALL_BYTES, subgraphs

_PACKED_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}


def make_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose weights above 1 KiB are inputs of the same name."""
    skeleton = onnx.ModelProto()
    copy_fields(model, skeleton, left_out="graph")
    graph = skeleton.graph
    copy_fields(model.graph, graph, left_out="initializer")
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


def copy_fields(source: Any, target: Any, *, left_out: str) -> None:
    for field, value in source.ListFields():
        if field.name == left_out:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)
