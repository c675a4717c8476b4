"""Write an ONNX file of a few nodes, from x to y, that no checker has seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

node = helper.make_node


def value(
    name: str, kind: int = TensorProto.FLOAT, shape: Sequence[int | str | None] = ("N", 4)
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def write_graph(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    outputs: Sequence[onnx.ValueInfoProto] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
) -> Path:
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    ends = [
        [value("x")] if inputs is None else inputs,
        [value("y")] if outputs is None else outputs,
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends, tensors),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("local", 1)],
        functions=functions or [],
        ir_version=10,
    )
    path.write_bytes(model.SerializeToString())
    return path


def write_text(
    folder: Path, head: str, body: str, constants: dict[str, np.ndarray], opset: int = 17
) -> Path:
    """Write m.onnx: the graph g of ONNX's text syntax, with its constants."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g {head} {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for name, array in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"
