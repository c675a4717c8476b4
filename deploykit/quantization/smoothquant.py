"""SmoothQuant: move outliers of a LayerNorm's output into the weights of the MatMuls that read it.

A channel that is a hundred times larger than the others sets the one scale of its tensor, and the
others round to nothing. Dividing each channel by a factor, and multiplying the weights that it
meets by the same, computes the same but rounds better: G. Xiao et al., "SmoothQuant", ICML 2023.
Factors here are powers of two, so that float32 gives the same to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.graph.skeleton import read_names
from deploykit.quantization.formats import transposed
from deploykit.quantization.qdq_placement import quantizable_nodes

ALPHA = 0.5  # the paper's share of the difficulty that moves into the weights


def smooth(
    source: Graph, channel_peaks: Mapping[str, Sequence[float]]
) -> tuple[Graph, tuple[str, ...]]:
    """Return the float32 graph with smoothed LayerNorms, and the outputs of these.

    `channel_peaks`: the largest magnitude in each channel of a LayerNorm's output; one that has
    none there is left alone. `source` stays as it is.
    """
    editor = Editor(source)
    fold(editor)
    constants, readers = editor.constants, dict[str, list[onnx.NodeProto]]()
    for place in quantizable_nodes(editor, ("Gemm", "MatMul")):
        node = editor.graph.node[place]
        turned = any(each.name == "transA" and each.i for each in node.attribute)
        if len(constants[node.input[1]].dims) == 2 and not turned:
            readers.setdefault(node.input[0], []).append(node)
    reads = Counter([*read_names(editor.graph), *(value.name for value in editor.graph.output)])
    nodes, done = list[onnx.NodeProto](), list[str]()
    for norm in editor.graph.node:
        nodes.append(norm)
        name = norm.output[0] if norm.output else ""
        if (
            norm.op_type != "LayerNormalization"
            or name not in channel_peaks.keys() & readers.keys()
            or any(each and each not in constants for each in norm.input[1:])
        ):
            continue
        peaks = np.asarray(channel_peaks[name], np.float64)
        factors = _factors(editor, readers[name], peaks)
        if (factors == 1).all():
            continue
        done.append(name)
        for node in readers[name]:
            _multiply(editor, node, 1, factors[:, None] if _by_rows(node) else factors)
        if reads[name] == len(readers[name]):  # nothing else reads it: no node is added
            for place in range(1, len(norm.input)):
                _multiply(editor, norm, place, 1 / factors)
            continue
        inverse = editor.store(f"{name}_smoothing", (1 / factors).astype(np.float32))
        smoothed = editor.fresh(f"{name}_smoothed")
        nodes.append(editor.node("Mul", [name, inverse], smoothed))
        for node in readers[name]:
            node.input[0] = smoothed
    return editor.finish(nodes), tuple(done)


def _factors(editor: Editor, readers: Sequence[onnx.NodeProto], peaks: np.ndarray) -> np.ndarray:
    """Return each channel's divisor: sqrt(its peak / that of its weights), a power of two."""
    weights = np.zeros_like(peaks)
    for node in readers:
        magnitudes = np.abs(editor.array(node.input[1]))
        weights = np.maximum(weights, magnitudes.max(axis=1 if _by_rows(node) else 0))
    known = (peaks > 0) & (weights > 0) & np.isfinite(peaks)
    ratio = np.log2(np.where(known, peaks, 1)) * ALPHA
    ratio -= np.log2(np.where(known, weights, 1)) * (1 - ALPHA)
    return np.asarray(np.exp2(np.rint(ratio - np.median(ratio))))


def _by_rows(node: onnx.NodeProto) -> bool:
    """Return whether a weight is [inputs, outputs]; otherwise it is [outputs, inputs]."""
    return node.op_type == "MatMul" or not transposed(node)


def _multiply(editor: Editor, node: onnx.NodeProto, place: int, factors: np.ndarray) -> None:
    name = node.input[place]
    if name:
        values = (editor.array(name) * factors).astype(np.float32)
        node.input[place] = editor.store(f"{name}_smoothed", values)
