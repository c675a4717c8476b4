"""Infer the shape and type of every tensor of a graph, with dynamic axes at given sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.core.tensors import axis_name
from deploykit.graph.edit import evaluate_node
from deploykit.graph.graph import Graph
from deploykit.graph.parse import SMALL_BYTES
from deploykit.graph.skeleton import infer_shapes, stored_bytes, stored_elements

_ROUNDS = 64  # inference needs one for each shape that depends on an inferred one
_ARITHMETIC = """
    Add And Cast Ceil Concat Div Equal Flatten Floor Gather Greater Identity Less Max Min Mod Mul
    Neg Not Or Pow ReduceProd Reshape ScatterND Slice Sqrt Squeeze Sub Transpose Unsqueeze Where"""
_ON_SHAPES = frozenset(_ARITHMETIC.split())
_GENERATORS = frozenset(("ConstantOfShape", "Expand", "Range"))
_LARGEST_SHAPE = 4096  # elements: paddings and indices are evaluated as shapes are


@dataclass(frozen=True)
class TensorShapes:
    """The named nodes of the main graph, functions inlined, with the known shapes and types.

    `shapes` holds only completely known shapes. `constants`: initializers and Constant nodes, for
    their `dims` and type; the data of large ones stay in the source model.
    """

    nodes: Sequence[onnx.NodeProto]
    outputs: Sequence[str]
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, int]
    constants: Mapping[str, onnx.TensorProto]

    def elements(self, name: str) -> int | None:
        shape = self.shapes.get(name)
        return None if shape is None else math.prod(shape)

    def bytes(self, name: str) -> int | None:
        """Return the size in memory, packed; None if the shape or the type is not known."""
        shape, kind = self.shapes.get(name), self.types.get(name)
        if shape is None or kind is None:
            return None
        return stored_bytes(onnx.TensorProto(data_type=kind, dims=shape))


def fixed_shapes(graph: Graph, sizes: Mapping[str, int]) -> TensorShapes:
    """Infer shapes with each dynamic axis at its size; an axis that `sizes` lacks is 1.

    An axis without a name has the name that `specs` gives: `N` at place 0, else `INPUT_PLACE`.
    Raises BadInput for a size below 1.
    """
    for axis, size in sizes.items():
        if size < 1:
            raise BadInput(f"axis {axis} cannot be of size {size}: 1 or more is needed")
    fixed = onnx.ModelProto()
    fixed.CopyFrom(graph.skeleton)
    _fix(fixed.graph, sizes)
    inferred = infer_shapes(fixed, data_prop=True).graph
    nodes = list(inferred.node)
    constants = dict(graph.initializers)
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("t"):
                constants[node.output[0]] = attribute.t
    shapes = {name: tuple(tensor.dims) for name, tensor in constants.items()}
    types = {name: tensor.data_type for name, tensor in constants.items()}
    made = {name for node in nodes for name in node.output if name}
    for _ in range(_ROUNDS):
        _read(inferred, shapes, types)
        if made <= shapes.keys() or not _compute_shapes(fixed, shapes):
            break
        inferred = infer_shapes(fixed, data_prop=True).graph
    return TensorShapes(
        nodes, [value.name for value in fixed.graph.output], shapes, types, constants
    )


def _read(
    graph: onnx.GraphProto, shapes: dict[str, tuple[int, ...]], types: dict[str, int]
) -> None:
    """Add the results of inference to `shapes` and `types`."""
    for tensor in graph.initializer:
        shapes[tensor.name], types[tensor.name] = tuple(tensor.dims), tensor.data_type
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        if kind.elem_type:
            types[value.name] = kind.elem_type
        axes = kind.shape.dim
        sizes = tuple(axis.dim_value if axis.HasField("dim_value") else -1 for axis in axes)
        if kind.HasField("shape") and min(sizes, default=0) >= 0:  # inferred: also below 0
            shapes[value.name] = sizes


def _compute_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Replace arithmetic on shapes by its result, in place; return whether there was any."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    kept = []
    for node in graph.node:
        try:
            with np.errstate(all="ignore"):
                values = _evaluate(node, model, constants, shapes)
        except Exception:  # noqa: BLE001 - the evaluator raises anything
            values = None  # the shapes of a damaged graph stay unknown
        if values is None or values.size > _LARGEST_SHAPE:
            kept.append(node)
            continue
        constants[node.output[0]] = numpy_helper.from_array(values, node.output[0])
        graph.initializer.append(constants[node.output[0]])
    found = len(kept) < len(graph.node)
    del graph.node[:]
    graph.node.extend(kept)
    return found


def _evaluate(
    node: onnx.NodeProto,
    model: onnx.ModelProto,
    constants: Mapping[str, onnx.TensorProto],
    shapes: Mapping[str, tuple[int, ...]],
) -> np.ndarray | None:
    """Return a node's output for constants, or a tensor's shape; None if that is not known."""
    names = [name for name in node.input if name]
    if node.op_type == "Shape" and names[0] in shapes:
        feeds = {names[0]: np.broadcast_to(np.float32(0), shapes[names[0]])}
    elif all(name in constants for name in names) and _small(node, constants):
        feeds = {name: numpy_helper.to_array(constants[name]) for name in names}
    else:
        return None
    return evaluate_node(node, model, feeds)


def _fix(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Fix the dynamic axes of all inputs, in place."""
    known: dict[str, int] = {}
    for value in graph.input:
        for place, axis in enumerate(value.type.tensor_type.shape.dim):
            if axis.dim_value < 0 or not axis.HasField("dim_value"):
                name = axis_name(value.name, place, axis.dim_param)
                axis.dim_value = known[name] = sizes.get(name, 1)
    for value in (*graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in known:
                axis.dim_value = known[axis.dim_param]
            elif axis.dim_value < 0 or not axis.HasField("dim_value"):
                axis.Clear()  # inference finds the value of an expression such as N*49


def _small(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node is arithmetic whose result cannot be large."""
    if node.op_type == "Constant":
        return all(stored_bytes(a.t) <= SMALL_BYTES for a in node.attribute if a.HasField("t"))
    if node.op_type not in _GENERATORS:
        return node.op_type in _ON_SHAPES
    values = numpy_helper.to_array(constants[node.input[-1 if node.op_type == "Expand" else 0]])
    if node.op_type == "Range":
        limit, step = (numpy_helper.to_array(constants[name]).item() for name in node.input[1:3])
        return bool(step) and abs(limit - values.item()) <= abs(step) * _LARGEST_SHAPE
    return math.prod(int(size) for size in values.flat) <= _LARGEST_SHAPE


def elements_of(tensor: onnx.TensorProto) -> int:
    """Return the elements that count as weights: 0 for strings, booleans and integers of shapes."""
    integers = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.STRING)
    return 0 if tensor.data_type in integers else stored_elements(tensor)
