"""Fold constants, and batch normalisation into the convolution before it.

Quantization needs weights that are constants, and a convolution whose output is the normalised one.
No tensor that is still there afterwards changes its name or meaning: ranges seen before stay true.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from deploykit.onnx_graph.editor import Editor, replace
from deploykit.onnx_graph.skeleton import read_names

# Cheap operators between stored weights and the node that uses them.
_FOLDED = frozenset(
    ("Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")
)


def fold(editor: Editor) -> None:
    """Fold constants, then batch normalisations."""
    _fold_constants(editor)
    _fold_batch_norms(editor)


def _fold_constants(editor: Editor) -> None:
    graph, constants = editor.graph, editor.constants
    outputs = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        known = all(not name or name in constants for name in node.input)
        if node.op_type not in _FOLDED or not known or outputs.intersection(node.output):
            kept.append(node)
            continue
        feeds = {name: editor.array(name) for name in node.input if name}
        values = evaluate_node(node, editor.model, feeds)
        constants[node.output[0]] = numpy_helper.from_array(values, node.output[0])
    replace(graph.node, kept)


def evaluate_node(
    node: onnx.NodeProto, model: onnx.ModelProto, feeds: dict[str, np.ndarray]
) -> np.ndarray:
    """The first output of a node of `model`, which reads `feeds`, by onnx's own evaluator."""
    inputs = [onnx.ValueInfoProto(name=name) for name in feeds]
    graph = helper.make_graph([node], "alone", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    (found,) = ReferenceEvaluator(alone).run(None, feeds)
    return np.asarray(found)


def _fold_batch_norms(editor: Editor) -> None:
    """A convolution takes the BatchNormalization after it in, where nothing else reads between."""
    graph, constants = editor.graph, editor.constants
    reads = Counter([*read_names(graph), *(value.name for value in graph.output)])
    producers = {name: node for node in graph.node for name in node.output}
    kept = []
    for node in graph.node:
        conv = producers.get(node.input[0]) if node.input else None
        if (
            node.op_type != "BatchNormalization"
            or conv is None
            or conv.op_type not in ("Conv", "ConvTranspose")
            or reads[conv.output[0]] != 1
            or any(name not in constants for name in (*node.input[1:], *conv.input[1:]))
            or len([name for name in node.output if name]) != 1
        ):
            kept.append(node)
            continue
        _merge(editor, conv, node)
    replace(graph.node, kept)


def _merge(editor: Editor, conv: onnx.NodeProto, norm: onnx.NodeProto) -> None:
    """Let `conv` do the work of both; its new weights and bias are computed in float64."""
    weight = editor.array(conv.input[1]).astype(np.float64)
    scale, shift, mean, variance = (
        editor.array(name).astype(np.float64) for name in norm.input[1:5]
    )
    biased = len(conv.input) > 2 and conv.input[2]
    old = editor.array(conv.input[2]) if biased else np.zeros_like(mean)
    epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
    factor = scale / np.sqrt(variance + epsilon)
    weight *= _by_channel(conv, factor, weight)
    bias = (old - mean) * factor + shift
    out = norm.output[0]
    names = [
        editor.store(f"{out}_folded_{kind}", array.astype(np.float32))
        for kind, array in (("weight", weight), ("bias", bias))
    ]
    replace(conv.input, [conv.input[0], *names])
    conv.output[0] = out


def _by_channel(conv: onnx.NodeProto, factor: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A number for each output channel, of a shape that multiplies the kernel."""
    kernel = [1] * (weight.ndim - 2)
    if conv.op_type == "Conv":
        return factor.reshape(-1, 1, *kernel)
    # [inputs, outputs / groups, ...]: a group's inputs lie next to each other
    groups = next((a.i for a in conv.attribute if a.name == "group"), 1)
    rows = np.repeat(factor.reshape(groups, -1), weight.shape[0] // groups, axis=0)
    return rows.reshape(*rows.shape, *kernel)
