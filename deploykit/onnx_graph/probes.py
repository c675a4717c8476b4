"""Make tensors inside a graph outputs, and find those of two graphs that mean the same.

The writers of deploykit keep the name of a tensor, or add a suffix to it. Two graphs from different
exporters share no names: no pair is found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.onnx_graph.graph import Graph, dtype_name
from deploykit.onnx_graph.validate import RUNTIME_DOMAINS

_TWIN = re.compile(r"(.+)_(?:float16|bfloat16|dequantized)_*")
# What numpy has no type for is given as float32, which holds each of its values.
_SHOWN_AS_FLOAT = frozenset(("bfloat16", "float8e4m3fn", "float8e5m2"))
# INT8 is left out: one step more or less is expected, and its dequantized twin shows its size.
_COMPARED = _SHOWN_AS_FLOAT | {"bool", "int32", "int64", "float16", "float32", "float64"}
# Nodes that give a tensor another type, and nodes into which others are merged.
_CONVERTS = frozenset(("Cast", "QuantizeLinear", "DequantizeLinear", "Identity"))
_MERGED = frozenset(("Conv", "ConvTranspose", "Gemm"))


@dataclass(frozen=True)
class Pair:
    """A tensor of `a` and its twin in `b`; `node` and `operator`: what makes it in `a`.

    `node` is "" for a node without a name.
    """

    a_name: str
    b_name: str
    node: str
    operator: str


def expose(graph: Graph, names: Sequence[str]) -> tuple[Graph, list[str]]:
    """A copy that has these tensors as outputs, too, and what they are called there, in order.

    Their types must be among those that `shared` compares; one that numpy lacks is shown as
    float32. Raises BadInput for a name that no node of the main graph makes.
    """
    made = {name for node in graph.model.graph.node for name in node.output if name}
    for name in names:
        if name not in made:
            raise BadInput(f"no node makes a tensor '{name}'")
    types = graph.element_types
    there = {value.name for value in graph.model.graph.output}
    probed = onnx.ModelProto()
    probed.CopyFrom(graph.model)
    shown = []
    for name in names:
        output, kind = name, types.get(name, TensorProto.UNDEFINED)
        if dtype_name(kind) in _SHOWN_AS_FLOAT:
            output, kind = f"{name}/deploykit.shown", TensorProto.FLOAT
            if output not in there:
                probed.graph.node.append(
                    helper.make_node("Cast", [name], [output], name=output, to=kind)
                )
        if output not in there:
            there.add(output)
            value = helper.make_empty_tensor_value_info(output)
            if kind:
                value = helper.make_tensor_value_info(output, kind, None)
            probed.graph.output.append(value)
        shown.append(output)
    return Graph(probed, graph.path), shown


def shared(a: Graph, b: Graph) -> tuple[Pair, ...]:
    """Tensors of the main graphs that mean the same in both, in the order in which `a` makes them.

    They have one name, or names that differ by what a transform adds: NAME_float16, NAME_bfloat16,
    NAME_dequantized. A name with another operator behind it in `b` is chance and left out. Empty
    where the graphs have no names in common, as after two exports.
    """
    twins = _makers(b)
    by_stem: dict[str, str] = {}
    for name in twins:
        by_stem.setdefault(_stem(name), name)  # the first: a node computes it, a Cast copies it
    pairs = []
    for name, node in _makers(a).items():
        other = name if name in twins else by_stem.get(_stem(name))
        if other is not None and _same_work(node, twins[other]):
            pairs.append(Pair(name, other, node.name, node.op_type))
    return tuple(pairs)


def _makers(graph: Graph) -> dict[str, onnx.NodeProto]:
    """The node behind each tensor that can be compared, constants left out, in graph order."""
    types = graph.element_types
    return {
        name: node
        for node in graph.model.graph.node
        for name in node.output
        if node.op_type != "Constant" and dtype_name(types.get(name, 0)) in _COMPARED
    }


def _stem(name: str) -> str:
    found = _TWIN.fullmatch(name)
    return found[1] if found else name


def _same_work(a: onnx.NodeProto, b: onnx.NodeProto) -> bool:
    if a.op_type == b.op_type or (a.name and a.name == b.name):
        return True
    kinds = {a.op_type, b.op_type}
    fused = a.domain.startswith(RUNTIME_DOMAINS) or b.domain.startswith(RUNTIME_DOMAINS)
    return fused or bool(kinds & _CONVERTS or kinds & _MERGED)
