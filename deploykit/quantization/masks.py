"""Clamp the constants that mask attention, -3.4e38 as a rule, to what float16 holds.

exp() of either is 0. With -infinity instead, a row that is masked as a whole would become NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from deploykit.onnx_graph.editor import Editor
from deploykit.onnx_graph.skeleton import all_nodes, subgraphs

MASK = -1e30  # what is below has no meaning but to mask
_BOUNDS = frozenset(("Clip", "Max", "Min"))  # a constant there bounds values
# what is masked ends here: as zeros, or as a truth value
_ENDS = {
    *("Softmax", "Exp", "Sigmoid", "ReduceLogSumExp", "Attention", "Equal", "Less"),
    *("LessOrEqual", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "ArgMax"),
}


def clamp_masks(editor: Editor, types: Mapping[str, int], to: float) -> dict[str, int]:
    """Replace what is below -1e30 in constants by `to`; returns the types of new constants.

    Nothing is replaced where a bound of Clip is such a constant, or a mask reaches an output.
    """
    stored = {
        name
        for name in editor.constants
        if types.get(name) == TensorProto.FLOAT and _masks(editor.array(name))
    }
    nodes = list(all_nodes(editor.graph))
    held = [node for node in nodes if any(map(_masks, _attributes(node).values()))]
    if not (stored or held) or _escapes(editor.graph, stored, {node.name for node in held}):
        return {}
    new = {name: editor.store(f"{name}_clamp", _clamp(editor.array(name), to)) for name in stored}
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = new.get(name, name)
    for node in held:
        for place, values in _attributes(node).items():
            attribute = node.attribute[place]
            if attribute.HasField("t"):
                clamped = _clamp(values, to)
                attribute.t.CopyFrom(numpy_helper.from_array(clamped, attribute.t.name))
            else:
                attribute.f = to
    return dict.fromkeys(new.values(), int(TensorProto.FLOAT))


def _attributes(node: onnx.NodeProto) -> dict[int, np.ndarray]:
    """The float constants that a Constant or ConstantOfShape holds, by place."""
    return {
        place: numpy_helper.to_array(each.t)
        if each.HasField("t")
        else np.array([each.f], np.float32)
        for place, each in enumerate(node.attribute)
        if each.t.data_type == TensorProto.FLOAT or each.name == "value_float"
    }


def _escapes(graph: onnx.GraphProto, stored: set[str], held: set[str]) -> bool:
    """Whether a mask is a bound, or is still one where a graph ends."""
    masks = set(stored)
    for node in graph.node:
        inner = [n for body in subgraphs(node) for n in all_nodes(body)]
        reads = {name for each in (node, *inner) for name in each.input}
        if node.name in held or any(each.name in held for each in inner) or masks & reads:
            if node.op_type in _BOUNDS and masks.intersection(node.input[1:]):
                return True
            if node.op_type not in _ENDS:
                masks.update(node.output)
    return not masks.isdisjoint(value.name for value in graph.output)


def _masks(values: np.ndarray) -> bool:
    return bool(values.size) and bool((np.isfinite(values) & (values < MASK)).any())


def _clamp(values: np.ndarray, to: float) -> np.ndarray:
    return np.where(np.isfinite(values) & (values < MASK), np.float32(to), values)
