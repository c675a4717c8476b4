"""Move the INT8 pairs of a graph from where TensorRT wants them to where ONNX Runtime does.

ONNX Runtime has integer kernels only for nodes whose outputs have scales, too. A graph written for
TensorRT has none there, so `to_pairs` records the ranges of those tensors in the graph's metadata.
Taking the pairs out and writing them anew gives what `to_pairs` would have written from the start,
but for the last bit of a weight's scale. In a graph of another tool the ranges follow from its own
scales, or are measured.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.graph.edit import Editor, evaluate_node, fold
from deploykit.graph.graph import Graph
from deploykit.graph.storage import read_names, reads
from deploykit.quantization.qdq import (
    MOVES,
    RANGES_KEY,
    Calibration,
    Range,
    operators,
    place_pairs,
    quantizable_nodes,
    to_pairs,
)

_PAIR = ("QuantizeLinear", "DequantizeLinear")
# of the opset that evaluates constant pairs of any: onnx's evaluator has none below 19
_NEWER = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 21)])


def move_pairs(
    source: Graph,
    runtime: str,
    measure: Callable[[Graph], Mapping[str, Range]] | None = None,
    *,
    derive: bool = False,
) -> tuple[Graph, list[str]] | None:
    """Return the graph with its INT8 pairs placed for `runtime`, and the tensors without a range.

    These stay float, as do nodes in float32. None for a graph that is not INT8 in float32, or whose
    ranges `to_pairs` did not record, unless the scales of its pairs and those that follow from them
    do, with `derive`, or `measure`, which finds the others in the graph without pairs.
    """
    recorded = _read_ranges(source)
    plain = _without_pairs(source) if recorded or measure or derive else None
    if plain is None:
        return None
    graph, floats, seen = plain
    editor = Editor(graph)
    fold(editor)
    could = {editor.graph.node[n].name for n in quantizable_nodes(editor, operators(runtime))}
    kept = could.intersection(floats)
    scaled = place_pairs(editor, runtime, keep_float32=kept).scaled
    ranges = recorded
    if measure or derive:
        ranges = _follow(editor, seen, scaled)
    if measure:
        ranges = {**measure(graph), **{name: ranges[name] for name in seen}}
    every = dict.fromkeys(graph.element_types, Range(-np.inf, np.inf))
    calibration = Calibration({}, {**every, **ranges}, 0, "recorded")
    placed = to_pairs(graph, calibration, runtime=runtime, keep_float32=kept)
    return placed, sorted(set(scaled.values()) - ranges.keys())


def _read_ranges(source: Graph) -> dict[str, Range]:
    """Read the ranges that `to_pairs` recorded; none where they are missing or malformed."""
    entries = {entry.key: entry.value for entry in source.model.metadata_props}
    try:
        found = json.loads(entries[RANGES_KEY])
        return {str(name): Range(float(low), float(high)) for name, (low, high) in found.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _without_pairs(source: Graph) -> tuple[Graph, list[str], dict[str, Range]] | None:
    """Return the graph in float32, its weights as INT8 had rounded them.

    Next come the names of the nodes that read no pair, and the ranges that the pairs could hold.
    None if there are no pairs, other types, or a scale that is computed or not float32.
    """
    if set(source.precision) - {"int8", "float32"}:
        return None
    editor = Editor(source)
    fold(editor)
    constants = editor.constants
    quantized: dict[str, str] = {}  # an activation in integers -> the activation
    names: dict[str, str] = {}  # what a pair gives -> what replaces it
    seen: dict[str, Range] = {}
    kept, nodes = list[str](), list[onnx.NodeProto]()
    for node in editor.graph.node:
        paired = bool(node.input) and names.get(node.input[0]) in seen
        node.input[:] = [names.get(name, name) for name in node.input]
        if node.op_type not in _PAIR:
            if not quantized.keys().isdisjoint(reads(node)):
                return None
            kept += [node.name] * (not paired)
            nodes.append(node)
            continue
        (read, scale, *_), out = node.input, node.output[0]
        if any(name and name not in constants for name in node.input[1:]):
            return None
        if constants[scale].data_type != TensorProto.FLOAT:
            return None
        if read in constants:  # a weight
            feeds = {name: editor.array(name) for name in node.input if name}
            node.domain = ""  # not com.microsoft, which onnx's evaluator does not know
            values = evaluate_node(node, _NEWER, feeds)
            names[out] = editor.store(out.removesuffix("_dequantized"), values)
        elif node.op_type == "QuantizeLinear":
            quantized[out] = read
        elif read in quantized:
            names[out] = quantized[read]
            seen[quantized[read]] = _range_of_pair(editor, node)
        else:
            return None
    ends = [value.name for value in editor.graph.output]
    nodes += [editor.node("Identity", [names[name]], name) for name in ends if name in names]
    if not seen or not quantized.keys().isdisjoint(ends):
        return None
    return editor.finish(nodes), kept, seen


def _range_of_pair(editor: Editor, node: onnx.NodeProto) -> Range:
    """Return the numbers that a tensor's pair can hold; from -127 where its zero is 0."""
    scale, zero = editor.array(node.input[1]), np.zeros(1, np.uint8)
    if len(node.input) > 2 and node.input[2]:
        zero = editor.array(node.input[2])
    step, shift, held = float(scale.max()), float(zero.max()), np.iinfo(zero.dtype)
    least = -127 if held.min < 0 and shift == 0 else held.min - shift
    return Range(least * step, (held.max - shift) * step)


def _follow(
    editor: Editor, seen: Mapping[str, Range], shared: Mapping[str, str]
) -> dict[str, Range]:
    """Return the ranges of pairs, and of the tensors that these bound.

    A pair clips what it holds, so what is clipped after an operator may be clipped before it, where
    nothing else reads it. `shared`: tensor -> the one whose scale it shares.
    """
    makers = {name: node for node in editor.graph.node for name in node.output}
    counts = Counter([*read_names(editor.graph), *(value.name for value in editor.graph.output)])
    found: dict[str, Range] = {}

    def note(name: str, bound: Range) -> None:
        for each in (name, shared.get(name, name)):
            least = _least(editor, makers.get(each))
            found.setdefault(each, Range(max(bound.low, least), bound.high))

    for name, bound in seen.items():
        note(name, bound)
    for node in reversed(editor.graph.node):
        if node.op_type == "Sigmoid":
            note(node.output[0], Range(0.0, 1.0))
        elif all(name in found for name in node.output):
            out = functools.reduce(Range.merge, (found[name] for name in node.output))
            for place, name in enumerate(node.input):
                other = node.input[1 - place] if len(node.input) == 2 else ""
                gate = makers.get(other)
                gated = gate is not None and gate.op_type == "Sigmoid" and gate.input[0] == name
                before = _before(node.op_type, out, found.get(other), gated=gated)
                # the gate reads it too
                if before and counts[name] == list(node.input).count(name) + gated:
                    note(name, before)
    return found


def _least(editor: Editor, node: onnx.NodeProto | None) -> float:
    """Return the lower bound of an activation's result."""
    if node is not None and node.op_type in ("Relu", "Sigmoid"):
        return 0.0
    if (
        node is not None
        and node.op_type == "Clip"
        and set(node.input[1:2]) & editor.constants.keys()
    ):
        return float(editor.array(node.input[1]).max())
    return -np.inf


def _before(kind: str, out: Range, other: Range | None, *, gated: bool) -> Range | None:
    """Return what an operator's input may be clipped to if its result is clipped to `out`."""
    if kind in ("Concat", "Relu", "Clip") or kind in MOVES:
        return out
    if kind == "Add" and other is not None:
        return Range(out.low - other.high, out.high - other.low)
    if kind != "Mul" or not gated:
        return None
    # the range of x for x * sigmoid(x) in `out`; left of its minimum, at -1.278, a usual peak
    x = np.linspace(-1.278, out.high + 1.3, 4096)
    y = x / (1 + np.exp(-x))
    high = float(np.interp(out.high, y, x))
    return Range(float(np.interp(out.low, y, x)) if out.low > y[0] else -max(high, 2.0), high)
