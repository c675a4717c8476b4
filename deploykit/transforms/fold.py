"""Fold what is constant, and batch normalisation into the convolution before it.

In: a float32 model, changed in place. Quantization needs weights that are constants, and a
convolution whose output is the normalised one. No tensor that is still there afterwards changes its
name or meaning, so that ranges seen before stay true.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

# Cheap operators between stored weights and the node that uses them.
_FOLDED = frozenset(
    ("Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")
)


def fold(model: onnx.ModelProto) -> None:
    """Fold constants, then batch normalisations; unused constants are dropped."""
    graph = model.graph
    fed = {value.name for value in graph.input}
    constants = {t.name: t for t in graph.initializer if t.name not in fed}
    _fold_constants(model, constants)
    _fold_batch_norms(graph, constants)
    drop_unused(graph)


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove initializers that nothing reads, and notes on tensors that nothing makes."""
    used = {value.name for value in (*graph.output, *graph.input)} | set(_read_names(graph))
    keep = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(keep)
    made = {name for node in graph.node for name in node.output}
    known = [value for value in graph.value_info if value.name in made]
    del graph.value_info[:]
    graph.value_info.extend(known)


def _read_names(graph: onnx.GraphProto) -> list[str]:
    """Every name that a node reads, in the bodies of If, Loop and Scan too."""
    names = []
    for node in graph.node:
        names += node.input
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                names += _read_names(body)
                names += [value.name for value in body.output]
    return names


def _fold_constants(model: onnx.ModelProto, constants: dict[str, onnx.TensorProto]) -> None:
    graph = model.graph
    outputs = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        known = all(not name or name in constants for name in node.input)
        if node.op_type not in _FOLDED or not known or outputs.intersection(node.output):
            kept.append(node)
            continue
        values = _evaluate(model, node, constants)
        tensor = numpy_helper.from_array(values, node.output[0])
        constants[tensor.name] = tensor
        graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(kept)


def _evaluate(
    model: onnx.ModelProto, node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]
) -> np.ndarray:
    empty = [onnx.ValueInfoProto(name=name) for name in node.output]
    weights = [constants[name] for name in sorted(set(node.input)) if name]
    alone = helper.make_model(
        helper.make_graph([node], "constant", [], empty, weights),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    (values,) = ReferenceEvaluator(alone).run(None, {})
    return np.asarray(values)


def _fold_batch_norms(graph: onnx.GraphProto, constants: dict[str, onnx.TensorProto]) -> None:
    """Conv -> BatchNormalization becomes one Conv, where nothing else reads what lies between."""
    reads = Counter(_read_names(graph) + [value.name for value in graph.output])
    producers = {name: node for node in graph.node for name in node.output}
    kept = []
    for node in graph.node:
        conv = producers.get(node.input[0]) if node.input else None
        if (
            node.op_type != "BatchNormalization"
            or conv is None
            or conv.op_type != "Conv"
            or reads[conv.output[0]] != 1
            or any(name not in constants for name in (*node.input[1:], *conv.input[1:]))
            or len([name for name in node.output if name]) != 1
        ):
            kept.append(node)
            continue
        for tensor in _merged(conv, node, constants):
            constants[tensor.name] = tensor
            graph.initializer.append(tensor)
        conv.output[0] = node.output[0]
    del graph.node[:]
    graph.node.extend(kept)


def _merged(
    conv: onnx.NodeProto, norm: onnx.NodeProto, constants: dict[str, onnx.TensorProto]
) -> list[onnx.TensorProto]:
    """Weights and bias of both in one, computed in float64; `conv` reads them afterwards."""
    weight = numpy_helper.to_array(constants[conv.input[1]]).astype(np.float64)
    scale, shift, mean, variance = (
        numpy_helper.to_array(constants[name]).astype(np.float64) for name in norm.input[1:5]
    )
    old = (
        numpy_helper.to_array(constants[conv.input[2]]).astype(np.float64)
        if len(conv.input) > 2 and conv.input[2]
        else np.zeros_like(mean)
    )
    epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
    factor = scale / np.sqrt(variance + epsilon)
    weight *= factor.reshape(-1, *[1] * (weight.ndim - 1))
    names = f"{norm.output[0]}_folded_weight", f"{norm.output[0]}_folded_bias"
    source = conv.input[0]
    del conv.input[:]
    conv.input.extend([source, *names])
    bias = (old - mean) * factor + shift
    return [
        numpy_helper.from_array(array.astype(np.float32), name)
        for array, name in zip((weight, bias), names, strict=True)
    ]
