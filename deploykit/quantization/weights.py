"""Store the weights of large linear layers in 8 or 4 bits, and compute as before, without data.

MatMul and Gemm read such a weight through a DequantizeLinear. A layer that is bound by reading its
weights (a language model, one row at a time) gets faster by as much as they get smaller; others
only get smaller files.
"""

from __future__ import annotations

import numpy as np
import onnx

from deploykit.core.precision import BY_NAME, Precision
from deploykit.graph.edit import Editor, raise_opset
from deploykit.graph.graph import Graph
from deploykit.graph.skeleton import stored_elements
from deploykit.quantization.formats import INT4, channel_axis, int4_steps, int8_steps, weight_scale
from deploykit.quantization.qdq_placement import (
    edit_float32,
    nothing_to_quantize,
    quantizable_nodes,
)

_BLOCKS = (128, 64, 32)  # inputs that share an INT4 scale; those TensorRT was seen to accept
LEAST_ELEMENTS = 1 << 16  # below 256 x 256 a file shrinks by less than its other parts weigh


def to_weight_only(
    source: Graph, to: str = "int8-weight-only", *, least_elements: int = LEAST_ELEMENTS
) -> Graph:
    """Return the graph with weights of `to`, "int8-weight-only" or "int4-weight-only".

    Only those of its large MatMul and Gemm nodes are stored so.

    INT8: one scale per output, max|w| / 127. INT4: one scale for each 128 inputs of an output, or
    for 64 or 32 where 128 does not divide their number; a node that none of these fits stays as it
    is. A weight of fewer than `least_elements` stays too, as does one that other kinds of nodes
    share. INT4 raises a model to opset 21. `source` is left as it is.
    Raises BadInput for a model that has no such node, is quantized already, or cannot be raised,
    and for weights that are NaN or infinite.
    """
    precision = BY_NAME[to]
    editor = edit_float32(source)
    chosen = set(_chosen(editor, precision, least_elements))
    if not chosen:
        weights = f"constant weights of {least_elements} elements or more that "
        weights += f"{precision.onnx_type} can hold"
        hint = "weight-only precision serves large linear layers; fp16 halves any model"
        raise nothing_to_quantize(editor, ("Gemm", "MatMul"), weights, hint)
    raise_opset(editor.model, precision.min_opset)
    nodes: list[onnx.NodeProto] = []
    done: dict[tuple[str, int], str] = {}
    for number, node in enumerate(editor.graph.node):
        if number in chosen:
            out_axis = channel_axis(node, 2)
            key = (node.input[1], out_axis or 0)
            if key not in done:
                made = _WRITERS[precision.dtype](editor, node.input[1], key[1])
                nodes.append(made)
                done[key] = made.output[0]
            node.input[1] = done[key]
        nodes.append(node)
    return editor.finish(nodes)


def _chosen(editor: Editor, precision: Precision, least_elements: int) -> list[int]:
    """Return the places of the nodes whose weights are to be stored in fewer bits."""
    found = []
    for number in quantizable_nodes(editor, ("Gemm", "MatMul")):
        node = editor.graph.node[number]
        weight = editor.constants[node.input[1]]
        if len(weight.dims) != 2:
            continue
        inputs = weight.dims[1 - (channel_axis(node, 2) or 0)]
        large = stored_elements(weight) >= least_elements
        if large and (precision.bits == 8 or _block_of(inputs)):
            found.append(number)
    return found


def _block_of(inputs: int) -> int:
    """Return the largest block that divides the number of inputs; 0 where none does."""
    return next((size for size in _BLOCKS if inputs % size == 0), 0)


def _int8(editor: Editor, name: str, axis: int) -> onnx.NodeProto:
    values = editor.array(name)
    scale = weight_scale(values, axis, name)
    stored = editor.store(f"{name}_int8", int8_steps(values, scale, axis))
    inputs = [stored, editor.store(f"{name}_scale", scale)]
    inputs.append(editor.store(f"{name}_zero_point", np.zeros(scale.shape, np.int8)))
    return editor.node("DequantizeLinear", inputs, editor.fresh(f"{name}_dequantized"), axis=axis)


def _int4(editor: Editor, name: str, out_axis: int) -> onnx.NodeProto:
    """Blocks run along the axis of the inputs."""
    values, axis = editor.array(name), 1 - out_axis
    size = _block_of(values.shape[axis])
    steps, scale = int4_steps(values, axis, size, name)
    stored = editor.store(f"{name}_int4", steps.astype(INT4))
    at = editor.store(f"{name}_scale", scale)
    out = editor.fresh(f"{name}_dequantized")
    return editor.node("DequantizeLinear", [stored, at], out, axis=axis, block_size=size)


_WRITERS = {"int8": _int8, "int4": _int4}  # called with (editor, weight, axis of the outputs)
