"""Move the INT8 pairs of a graph from where TensorRT wants them to where ONNX Runtime does.

ONNX Runtime has integer kernels only for nodes whose outputs have scales, too. A graph written for
TensorRT has none there, so `to_pairs` records the ranges of those tensors in the graph's metadata.
Taking the pairs out and writing them anew gives what `to_pairs` would have written from the start,
but for the last bit of a weight's scale. For a graph of another tool the ranges are measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto

from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.graph.skeleton import read_names
from deploykit.quantization.calibrate import Calibration, Range
from deploykit.quantization.qdq import RANGES_KEY, to_pairs
from deploykit.quantization.qdq_placement import operators, quantizable_nodes

_PAIR = ("QuantizeLinear", "DequantizeLinear")


def move_pairs(
    source: Graph, runtime: str, measure: Callable[[Graph], Mapping[str, Range]] | None = None
) -> Graph | None:
    """Return the graph with its INT8 pairs placed for `runtime`. Nodes in float32 stay so.

    `measure`: returns the ranges in the graph without pairs; without it those are taken that
    `to_pairs` recorded. None for a graph without ranges, or that is not INT8 in float32.
    """
    recorded = {} if measure else _read_ranges(source)
    plain = None if recorded is None else _without_pairs(source)
    if recorded is None or plain is None:
        return None
    graph, kept, seen = plain
    ranges = dict(measure(graph) if measure else recorded)
    if measure:  # what a pair can hold, but from 0 on after a Relu
        own = {n: Range(r.low if ranges[n].low < 0 else 0.0, r.high) for n, r in seen.items()}
        ranges |= own
    editor = Editor(graph)
    fold(editor)
    could = {editor.graph.node[n].name for n in quantizable_nodes(editor, operators(runtime))}
    calibration = Calibration(ranges, ranges, 0, "recorded")
    return to_pairs(graph, calibration, runtime=runtime, keep_float32=could.intersection(kept))


def _read_ranges(source: Graph) -> dict[str, Range] | None:
    """Read the ranges that `to_pairs` recorded; None where they are missing or malformed."""
    entries = {entry.key: entry.value for entry in source.model.metadata_props}
    try:
        found = json.loads(entries[RANGES_KEY])
        return {str(name): Range(float(low), float(high)) for name, (low, high) in found.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _without_pairs(source: Graph) -> tuple[Graph, list[str], dict[str, Range]] | None:
    """Return the graph in float32, its weights as INT8 had rounded them.

    Next come the names of the nodes that read no pair, and the ranges that the pairs could hold.
    None if there are no pairs, other types, or a scale that is computed or not float32.
    """
    if set(source.precision) - {"int8", "float32"}:
        return None
    editor = Editor(source)
    fold(editor)
    quantized = {
        node.output[0]: node for node in editor.graph.node if node.op_type == "QuantizeLinear"
    }
    pairs = [node for node in editor.graph.node if node.op_type in _PAIR]
    last = [node for node in pairs if node.op_type == "DequantizeLinear"]
    if (
        any(name not in editor.constants for node in pairs for name in node.input[1:] if name)
        or any(editor.constants[node.input[1]].data_type != TensorProto.FLOAT for node in pairs)
        or any(node.input[0] not in {**quantized, **editor.constants} for node in last)
        or Counter(name for name in read_names(editor.graph) if name in quantized)
        != Counter(node.input[0] for node in last if node.input[0] in quantized)
    ):
        return None
    names: dict[str, str] = {}  # a dequantized tensor -> what replaces it
    seen: dict[str, Range] = {}
    for node in last:
        stored, out = node.input[0], node.output[0]
        before = quantized[stored].input[0] if stored in quantized else None
        if before is None or before in editor.constants:
            values = _dequantize(editor, node, quantized.get(stored))
            names[out] = editor.store(out.removesuffix("_dequantized"), values)
        else:
            names[out] = before
            seen[before] = _range_of_pair(editor, node)
    kept, nodes = [], []
    for node in editor.graph.node:
        if node.op_type in _PAIR:
            continue
        if not node.input or names.get(node.input[0]) not in seen:
            kept.append(node.name)
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        nodes.append(node)
    ends = [value.name for value in editor.graph.output if value.name in names]
    nodes += [editor.node("Identity", [names[name]], name) for name in ends]
    return (editor.finish(nodes), kept, seen) if seen else None


def _dequantize(
    editor: Editor, node: onnx.NodeProto, quantize: onnx.NodeProto | None
) -> np.ndarray:
    """Return the constant behind a DequantizeLinear, which may have been quantized just before."""
    scale, zero = _parameters(editor, node)
    values = editor.array((quantize or node).input[0])
    shape = [1] * values.ndim
    if scale.size > 1:
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        shape[axis if values.ndim > 1 else 0] = -1
    scale, shift = scale.reshape(shape), zero.astype(np.float32).reshape(shape)
    if quantize is not None:
        held = np.iinfo(zero.dtype)
        values = np.clip(np.rint(values / scale) + shift, held.min, held.max)
    return np.asarray((values.astype(np.float32) - shift) * scale, np.float32)


def _parameters(editor: Editor, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point of a DequantizeLinear."""
    scale = editor.array(node.input[1])
    if len(node.input) > 2 and node.input[2]:
        return scale, editor.array(node.input[2])
    stored = editor.constants.get(node.input[0])
    unsigned = stored is None or stored.data_type == TensorProto.UINT8
    return scale, np.zeros_like(scale, np.uint8 if unsigned else np.int8)


def _range_of_pair(editor: Editor, node: onnx.NodeProto) -> Range:
    """Return the numbers that a tensor's pair can hold; from -127 where its zero is 0."""
    scale, zero = _parameters(editor, node)
    step, shift, held = float(scale.max()), float(zero.max()), np.iinfo(zero.dtype)
    least = -127 if held.min < 0 and shift == 0 else held.min - shift
    return Range(least * step, (held.max - shift) * step)
