"""SmoothQuant: move outliers of a LayerNorm's output into the weights of the MatMuls that read it.

A channel that is a hundred times larger than the others sets the one scale of its tensor, and the
others round to nothing. Dividing each channel by a factor, and multiplying the weights that it
meets by the same, computes the same but rounds better: G. Xiao et al., "SmoothQuant", ICML 2023.
Factors here are powers of two, so that float32 gives the same to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.graph.skeleton import read_names
from deploykit.quantization.formats import transposed
from deploykit.quantization.qdq_placement import quantizable_nodes

ALPHA = 0.5  # the paper's share of the difficulty that moves into the weights


@dataclass(frozen=True)
class _Smoothed:
    """A LayerNorm and the MatMuls and Gemms that read its output, by their places in the graph.

    `alone`: nothing else reads it, so that the factors go into the LayerNorm's own scale and bias.
    """

    name: str  # name of the output
    norm: int
    readers: tuple[int, ...]
    alone: bool


def smooth(
    source: Graph, channel_peaks: Mapping[str, Sequence[float]]
) -> tuple[Graph, tuple[str, ...]]:
    """Return the float32 graph with smoothed LayerNorms, and the outputs of these.

    `channel_peaks`: the largest magnitude in each channel of a LayerNorm's output; one that has
    none there is left alone. `source` stays as it is.
    """
    editor = Editor(source)
    fold(editor)
    before: dict[int, onnx.NodeProto] = {}  # the place of a node -> what goes before it
    done = []
    for each in _find(editor):
        if each.name not in channel_peaks:
            continue
        readers = [editor.graph.node[place] for place in each.readers]
        factors = _factors(editor, readers, np.asarray(channel_peaks[each.name], np.float64))
        if (factors == 1).all():
            continue
        done.append(each.name)
        for node in readers:
            _multiply(editor, node, 1, factors[:, None] if _by_rows(node) else factors)
        if each.alone:
            norm = editor.graph.node[each.norm]
            for place in range(1, len(norm.input)):
                _multiply(editor, norm, place, 1 / factors)
            continue
        inverse = editor.store(f"{each.name}_smoothing", (1 / factors).astype(np.float32))
        smoothed = editor.fresh(f"{each.name}_smoothed")
        before[each.readers[0]] = editor.node("Mul", [each.name, inverse], smoothed)
        for node in readers:
            node.input[0] = smoothed
    nodes: list[onnx.NodeProto] = []
    for place, node in enumerate(editor.graph.node):
        nodes += [before[place], node] if place in before else [node]
    return editor.finish(nodes), tuple(done)


def _find(editor: Editor) -> list[_Smoothed]:
    nodes, constants = editor.graph.node, editor.constants
    readers: dict[str, list[int]] = {}
    for place in quantizable_nodes(editor, ("Gemm", "MatMul")):
        node = nodes[place]
        turned = any(each.name == "transA" and each.i for each in node.attribute)
        if len(constants[node.input[1]].dims) == 2 and not turned:
            readers.setdefault(node.input[0], []).append(place)
    reads = Counter([*read_names(editor.graph), *(value.name for value in editor.graph.output)])
    found = []
    for place, node in enumerate(nodes):
        name = node.output[0] if node.output else ""
        if (
            node.op_type == "LayerNormalization"
            and name in readers
            and all(each in constants for each in node.input[1:] if each)
        ):
            reading = tuple(readers[name])
            found.append(_Smoothed(name, place, reading, reads[name] == len(reading)))
    return found


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
