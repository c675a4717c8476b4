"""Find the floats that count: positions, lengths and sizes, which half precision would round.

float16 holds integers up to 2048, bfloat16 up to 256. Values computed from integers and constants
alone are followed until they meet activations; from there on they are as coarse as these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.onnx_graph.editor import Editor
from deploykit.onnx_graph.skeleton import inner_reads, subgraphs

_FLOATS = frozenset((TensorProto.FLOAT, TensorProto.DOUBLE))
# uint8 and int8 are exact in either half type: bytes of an image are no indices
_INTEGERS = frozenset(
    getattr(TensorProto, name) for name in ("INT16", "INT32", "INT64", "UINT16", "UINT32", "UINT64")
)
_COMPARISONS = frozenset(("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"))
_ARITHMETIC = _COMPARISONS | {
    *("Add", "Sub", "Mul", "Div", "Mod", "Pow", "Neg", "Abs", "Sign", "Floor", "Ceil", "Round"),
    *("Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos", "Min", "Max", "Clip", "Where", "Cast"),
    *("Identity", "Sum", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand"),
    *("Tile", "Slice", "Gather", "GatherND", "GatherElements", "Concat", "Split", "Pad", "Trilu"),
    *("ReduceSum", "ReduceMax", "ReduceMin", "Range", "ConstantOfShape", "Constant"),
}
_PRODUCTS = frozenset(("MatMul", "Einsum"))  # of positions and frequencies
_EXACT = 2.0**24  # the integers that float32 itself holds
_MOST = 1 << 20  # elements; a larger constant is a weight
# operator -> the float inputs that are coordinates or sizes
_ENDS = {"Range": (0, 1, 2), "Resize": (1, 2), "GridSample": (1,)}


def index_nodes(
    editor: Editor, types: Mapping[str, int], rounded: Callable[[np.ndarray], np.ndarray]
) -> set[str]:
    """Names of nodes that compute indices or lengths in float32. `rounded`: as the half type."""
    nodes = list(editor.graph.node)
    indices, constants = _integral_constants(editor, types, rounded), set(editor.constants)
    shapes = _shapes(editor)
    stay: set[str] = set()
    for node in nodes:
        floats = [name for name in node.input if types.get(name) in _FLOATS]
        known = node.op_type == "Range" or all(n in indices or n in constants for n in floats)
        counts = _makes_index(node, types) or not indices.isdisjoint(floats)
        if node.op_type in _COMPARISONS and counts:
            stay.add(node.name)
        elif known and _follows(node, shapes) and (counts or not _looks_up(node, constants)):
            if counts:
                stay.add(node.name)
            made = {name for name in node.output if types.get(name) in _FLOATS}
            (indices if counts else constants).update(made)
    stay |= _sources(editor.graph, types, stay)
    used = {name for node in nodes if node.name in stay for name in node.input}
    used |= {value.name for value in editor.graph.output}
    # a cast straight to the half type rounds no more than one by way of float32
    return stay - {n.name for n in nodes if n.op_type == "Cast" and used.isdisjoint(n.output)}


def _sources(graph: onnx.GraphProto, types: Mapping[str, int], stay: set[str]) -> set[str]:
    """Names of nodes whose floats all end in integers, in coordinates or in a node of `stay`."""
    ends: dict[str, list[bool]] = {value.name: [False] for value in graph.output}
    found: set[str] = set()
    for node in reversed(graph.node):
        floats = [name for name in node.output if types.get(name) in _FLOATS]
        read = [end for name in floats for end in ends.get(name, [])]
        inner = node.op_type in (_ARITHMETIC | _PRODUCTS) and bool(read) and all(read)
        if inner:
            found.add(node.name)
        places = _ENDS.get(node.op_type, ())
        for place, name in enumerate(node.input):
            end = inner or node.name in stay or _to_integer(node) or place in places
            ends.setdefault(name, []).append(end)
        for name in inner_reads(node):
            ends.setdefault(name, []).append(False)
    return found


def _makes_index(node: onnx.NodeProto, types: Mapping[str, int]) -> bool:
    cast = node.op_type == "Cast" and types.get(node.input[0]) in _INTEGERS
    return cast or node.op_type == "Range"


def _to_integer(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and helper.get_node_attr_value(node, "to") in _INTEGERS


def _follows(node: onnx.NodeProto, shapes: Mapping[str, list[int]]) -> bool:
    """Whether what `node` makes of indices still is one: no weights are mixed in."""
    if node.op_type == "Einsum":
        letters, _, kept = helper.get_node_attr_value(node, "equation").decode().partition("->")
        return set(letters) <= {*kept, *", "}
    if node.op_type == "MatMul":
        left, right = (shapes.get(name, []) for name in node.input)
        return left[-1:] == [1] or right[-2:-1] == [1]
    return node.op_type in _ARITHMETIC and not any(True for _ in subgraphs(node))


def _integral_constants(
    editor: Editor, types: Mapping[str, int], rounded: Callable[[np.ndarray], np.ndarray]
) -> set[str]:
    """Constants of integers that the half type does not hold, such as a table of positions."""
    read = {
        name
        for node in editor.graph.node
        if node.op_type in _ARITHMETIC | _PRODUCTS
        for name in node.input
        if name in editor.constants and types.get(name) == TensorProto.FLOAT
    }
    found = set()
    for name in read:
        if np.prod([float(size) for size in editor.constants[name].dims]) <= _MOST:
            values = editor.array(name)
            whole = bool((np.abs(values) <= _EXACT).all() and (values == np.rint(values)).all())
            if whole and not np.array_equal(rounded(values), values):
                found.add(name)
    return found


def _looks_up(node: onnx.NodeProto, constants: set[str]) -> bool:
    """Whether it is an embedding: rows of a table that the caller's integers choose."""
    return node.op_type.startswith("Gather") and node.input[1] not in constants


def _shapes(editor: Editor) -> dict[str, list[int]]:
    """The sizes of tensors' axes, 0 where one is not fixed."""
    found = {name: list(tensor.dims) for name, tensor in editor.constants.items()}
    for value in (*editor.graph.value_info, *editor.graph.input):
        found.setdefault(value.name, [d.dim_value for d in value.type.tensor_type.shape.dim])
    return found
