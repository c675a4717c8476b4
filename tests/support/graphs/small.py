"""Small ONNX graphs: from a few nodes that no checker has seen, or from ONNX's text syntax."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

node = helper.make_node


def value(
    name: str, kind: int = TensorProto.FLOAT, shape: Sequence[int | str | None] = ("N", 4)
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def write_graph(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] = (value("x"),),
    outputs: Sequence[onnx.ValueInfoProto] = (value("y"),),
    weights: dict[str, np.ndarray] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
) -> Path:
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, tensors),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("local", 1)],
        functions=functions or [],
        ir_version=10,
    )
    path.write_bytes(model.SerializeToString())
    return path


def parse(head: str, body: str, opset: int = 18, **constants: ArrayLike) -> onnx.ModelProto:
    """A graph of ONNX's text syntax with those of the constants that it reads.

    Python's numbers are stored as float32 or int64. A node is called as its first output.
    """
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g {head} {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for each in model.graph.node:
        each.name = each.name or each.output[0]
    read = set(re.findall(r"\w+", body))
    for name in sorted(read & constants.keys()):
        array = np.asarray(constants[name])
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def write_text(
    folder: Path, head: str, body: str, constants: dict[str, np.ndarray], opset: int = 17
) -> Path:
    """Write m.onnx: the graph g of ONNX's text syntax, with its constants."""
    onnx.save(parse(head, body, opset, **constants), folder / "m.onnx")
    return folder / "m.onnx"
