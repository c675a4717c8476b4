"""Move the INT8 pairs of a graph from where TensorRT wants them to where ONNX Runtime does.

ONNX Runtime has integer kernels only for nodes whose outputs have scales, too. A graph written for
TensorRT has none there, so `to_pairs` records the ranges of those tensors in the graph's metadata.
Taking the pairs out and writing them anew gives what `to_pairs` would have written from the start,
but for the last bit of a weight's scale.
"""

from __future__ import annotations

import json

import numpy as np

from deploykit.onnx_graph.editor import Editor
from deploykit.onnx_graph.graph import Graph
from deploykit.quantization.calibrate import Calibration, Range
from deploykit.quantization.qdq import RANGES_KEY, to_pairs
from deploykit.quantization.qdq_placement import operators, quantizable_nodes


def move_pairs(source: Graph, runtime: str) -> Graph | None:
    """The graph with its INT8 pairs placed for `runtime`; None where it does not hold the ranges.

    Nodes that were left in float32 stay so.
    """
    entries = {entry.key: entry.value for entry in source.model.metadata_props}
    if RANGES_KEY not in entries or set(source.precision) - {"int8", "float32"}:
        return None
    try:
        ranges = {
            str(name): Range(float(low), float(high))
            for name, (low, high) in json.loads(entries[RANGES_KEY]).items()
        }
    except (ValueError, TypeError, AttributeError):
        return None  # not as `to_pairs` wrote it
    plain, kept = _without_pairs(source, runtime)
    calibration = Calibration(ranges, ranges, 0, "recorded")
    return to_pairs(plain, calibration, runtime=runtime, keep_float32=kept)


def _without_pairs(source: Graph, runtime: str) -> tuple[Graph, tuple[str, ...]]:
    """The graph in float32, its weights as INT8 had rounded them; and what was float32 before."""
    editor = Editor(source)
    quantized = {
        node.output[0]: node.input[0]
        for node in editor.graph.node
        if node.op_type == "QuantizeLinear"
    }
    names: dict[str, str] = {}  # a dequantized tensor -> what replaces it
    weights = set()
    for node in editor.graph.node:
        if node.op_type == "DequantizeLinear":
            stored, out = node.input[0], node.output[0]
            if stored in quantized:
                names[out] = quantized[stored]
            else:
                weights.add(out)
                axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
                values = _dequantize(editor.array(stored), editor.array(node.input[1]), axis)
                names[out] = editor.store(out.removesuffix("_dequantized"), values)
    kept, nodes = [], []
    for node in editor.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        if len(node.input) > 1 and node.input[1] not in weights:
            kept.append(node.name)
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        nodes.append(node)
    plain = editor.finish(nodes)
    plain_editor = Editor(plain)
    places = quantizable_nodes(plain_editor, operators(runtime))
    could = {plain_editor.graph.node[place].name for place in places}
    return plain, tuple(name for name in kept if name in could)


def _dequantize(stored: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray:
    shape = [1] * stored.ndim
    if scale.ndim:
        shape[axis] = -1
    return np.asarray(stored.astype(np.float32) * scale.reshape(shape))
