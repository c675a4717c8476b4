"""A graph without the weight of its weights.

In: a model. Out: a copy whose weights above 1 KiB are inputs instead: small enough to be copied,
checked and inferred at will, however large the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import helper

from deploykit.onnx_graph.validate import all_nodes, stored_bytes, subgraphs

SMALL_BYTES = 1024  # what is below may be a shape, whose value inference needs


def light_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose weights above 1 KiB are inputs of the same name."""
    light = onnx.ModelProto()
    _copy_fields(model, light, left_out="graph")
    graph = light.graph
    _copy_fields(model.graph, graph, left_out="initializer")
    fed = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if stored_bytes(tensor) <= SMALL_BYTES:
            graph.initializer.add().CopyFrom(tensor)
        elif tensor.name not in fed:
            value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(value)
    return light


def read_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name that a node reads, in the bodies of If, Loop and Scan too."""
    for node in all_nodes(graph):
        yield from node.input
        for body in subgraphs(node):
            yield from (value.name for value in body.output)


def _copy_fields(source: Any, target: Any, *, left_out: str) -> None:
    for field, value in source.ListFields():
        if field.name == left_out:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)
