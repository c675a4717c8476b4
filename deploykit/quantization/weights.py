"""Store weights in 8 or 4 bits, without data: those of large linear layers, or compute in INT8.

MatMul and Gemm read such a weight through a DequantizeLinear. A layer that is bound by reading its
weights (a language model, one row at a time) gets faster by as much as they get smaller; others
only get smaller files.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.precision import BY_NAME, Precision
from deploykit.graph.edit import Editor, raise_opset, replace
from deploykit.graph.graph import Graph
from deploykit.graph.storage import stored_elements
from deploykit.quantization.qdq import (
    INT4,
    by_rows,
    channel_axis,
    edit_float32,
    int4_steps,
    int8_steps,
    is_set,
    nothing_to_quantize,
    quantizable_nodes,
    weight_scale,
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
                made = _store(editor, node.input[1], key[1], precision.bits)
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


def _store(editor: Editor, name: str, axis: int, bits: int) -> onnx.NodeProto:
    """Store a weight, `axis` being that of its outputs; return the DequantizeLinear that reads it.

    Blocks of INT4 run along the axis of the inputs.
    """
    values, out = editor.array(name), editor.fresh(f"{name}_dequantized")
    if bits == 4:
        axis, size = 1 - axis, _block_of(values.shape[1 - axis])
        steps, scale = int4_steps(values, axis, size, name)
        inputs = [editor.store(f"{name}_int4", steps.astype(INT4))]
        inputs.append(editor.store(f"{name}_scale", scale))
        return editor.node("DequantizeLinear", inputs, out, axis=axis, block_size=size)
    scale = weight_scale(values, axis, name)
    inputs = [editor.store(f"{name}_int8", int8_steps(values, scale, axis))]
    inputs.append(editor.store(f"{name}_scale", scale))
    inputs.append(editor.store(f"{name}_zero_point", np.zeros(scale.shape, np.int8)))
    return editor.node("DequantizeLinear", inputs, out, axis=axis)


# INT8 whose activations are scaled in each call: MatMul, Gemm, LSTM for ONNX Runtime. It needs no
# calibration, and an outlier affects only its own call. ONNX Runtime fuses what is written here
# into one kernel per layer, bias included. The range must be computed in each call, so
# convolutions, whose activations are large next to their weights, are left in float32. So are GRU
# and RNN, for which it has no such kernel.

_KINDS = ("Gemm", "MatMul", "LSTM")
_RUNTIME = "com.microsoft"  # the domain of the LSTM in integers


def dynamic_nodes(source: Graph) -> tuple[str, ...]:
    """Return the names of the nodes that `to_dynamic` quantizes."""
    editor = edit_float32(source)
    return tuple(editor.graph.node[n].name for n in _places(editor))


def to_dynamic(source: Graph, *, keep_float32: Collection[str] = ()) -> Graph:
    """Return the graph with MatMul, Gemm and LSTM of constant weights in integers.

    Weights: symmetric, one scale per output (of an LSTM: per gate and unit), max|w| / 127. `source`
    stays as it is. Raises BadInput for a graph without such a node (or with none left), one that is
    quantized already or of too old an opset, and weights that are NaN or infinite.
    """
    editor = edit_float32(source)
    raise_opset(editor.model, BY_NAME["int8-dynamic"].min_opset)
    nodes = editor.graph.node
    chosen = {n for n in _places(editor) if nodes[n].name not in keep_float32}
    if not chosen:
        weights = "constant float32 weights to quantize"
        weights += " other than those kept in float32" if keep_float32 else ""
        hint = "int8 quantizes convolutions too"
        raise nothing_to_quantize(editor, _KINDS, weights, hint)
    writer = _Writer(editor)
    for number, node in enumerate(nodes):
        if number in chosen:
            writer.write(node)
        else:
            writer.nodes.append(node)
    return editor.finish(writer.nodes)


def _places(editor: Editor) -> list[int]:
    return [n for n in quantizable_nodes(editor, _KINDS) if _plain(editor, editor.graph.node[n])]


def _plain(editor: Editor, node: onnx.NodeProto) -> bool:
    """Return whether this is a product with a matrix, without a factor or transposed activation.

    A product may have a bias. An LSTM counts if it has two constant matrices and its axis 0 is
    time.
    """
    if node.op_type == "LSTM":
        recurrent = editor.constants.get(node.input[2])
        floats = recurrent is not None and recurrent.data_type == TensorProto.FLOAT
        return floats and not is_set(node, "layout")
    factors = any(each.name in ("alpha", "beta") and each.f != 1 for each in node.attribute)
    matrix = len(editor.constants[node.input[1]].dims) == 2
    return matrix and not factors and not is_set(node, "transA")


class _Writer:
    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.nodes: list[onnx.NodeProto] = []
        self.read: dict[str, list[str]] = {}  # an activation -> its integers, scale and zero point

    def write(self, node: onnx.NodeProto) -> None:
        """Float in, float out: quantize, multiply integers, scale back, add the bias."""
        if node.op_type == "LSTM":
            self._write_lstm(node)
            return
        name, out = node.input[0], node.output[0]
        if name not in self.read:
            parts = [self.editor.fresh(f"{name}_{part}") for part in ("uint8", "scale", "zero")]
            quantize = self.editor.node("DynamicQuantizeLinear", [name], parts[0])
            quantize.output.extend(parts[1:])
            self.nodes.append(quantize)
            self.read[name] = parts
        stored, scale, zero = self.read[name]
        levels, steps = self._weight(node)
        biased = len(node.input) > 2 and node.input[2]
        product = self._add("MatMulInteger", [stored, levels, zero], f"{out}_int32", node.name)
        both = self._add("Mul", [scale, steps], f"{out}_scale")
        real = self._add("Cast", [product], f"{out}_float", to=TensorProto.FLOAT)
        result = self.editor.fresh(f"{out}_product") if biased else out
        self.nodes.append(self.editor.node("Mul", [real, both], result))
        if biased:
            self.nodes.append(self.editor.node("Add", [result, node.input[2]], out))

    def _write_lstm(self, node: onnx.NodeProto) -> None:
        """Write ONNX Runtime's own operator: LSTM's 8 inputs, then the scales of W and R."""
        names = [*node.input, *[""] * (8 - len(node.input))]
        scales = []
        for place in (1, 2):  # [directions, 4 * hidden, inputs], stored as [.., inputs, 4 * hidden]
            name, values = names[place], self.editor.array(names[place])
            rows = values.reshape(-1, values.shape[2])
            scale = weight_scale(rows, 0, name)
            steps = int8_steps(rows, scale, 0).reshape(values.shape).transpose(0, 2, 1)
            names[place] = self.editor.store(f"{name}_int8", np.ascontiguousarray(steps))
            scale = scale.reshape(values.shape[:2])
            scales.append(self.editor.store(f"{name}_scale", scale))
            scales.append(self.editor.store(f"{name}_zero", np.zeros(scale.shape, np.int8)))
        quantized = onnx.NodeProto()
        quantized.CopyFrom(node)
        quantized.op_type, quantized.domain = f"DynamicQuantize{node.op_type}", _RUNTIME
        del quantized.input[:]
        quantized.input.extend([*names, *scales])
        replace(quantized.attribute, [each for each in node.attribute if each.name != "layout"])
        self.nodes.append(quantized)
        model = self.editor.model
        if all(each.domain != _RUNTIME for each in model.opset_import):
            model.opset_import.append(helper.make_opsetid(_RUNTIME, 1))

    def _weight(self, node: onnx.NodeProto) -> tuple[str, str]:
        """Store the weight as [inputs, outputs] in steps, and its scale; return their names."""
        name, axis = node.input[1], channel_axis(node, 2)
        values = self.editor.array(name)
        scale = weight_scale(values, axis, name)
        levels = int8_steps(values, scale, axis)
        if not by_rows(node):
            levels = np.ascontiguousarray(levels.T)
        return self.editor.store(f"{name}_int8", levels), self.editor.store(f"{name}_scale", scale)

    def _add(self, kind: str, inputs: list[str], out: str, name: str = "", **more: int) -> str:
        node = self.editor.node(kind, inputs, self.editor.fresh(out), **more)
        node.name = name or node.name
        self.nodes.append(node)
        return str(node.output[0])
