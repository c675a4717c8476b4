"""Write INT8 whose activations are scaled in each call: MatMul, Gemm, LSTM for ONNX Runtime.

It needs no calibration, and an outlier affects only its own call. ONNX Runtime fuses what is
written here into one kernel per layer, bias included. The range must be computed in each call, so
convolutions, whose activations are large next to their weights, are left in float32. So are GRU and
RNN, for which it has no such kernel.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.precision import BY_NAME
from deploykit.graph.edit import Editor, raise_opset, replace
from deploykit.graph.graph import Graph
from deploykit.quantization.formats import channel_axis, int8_steps, transposed, weight_scale
from deploykit.quantization.qdq_placement import (
    edit_float32,
    nothing_to_quantize,
    quantizable_nodes,
)

_KINDS = ("Gemm", "MatMul", "LSTM")
_RUNTIME = "com.microsoft"  # the domain of the LSTM in integers


def quantizable(source: Graph) -> tuple[str, ...]:
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
        hint = "`to` int8 quantizes convolutions too"
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
        return floats and not any(each.name == "layout" and each.i for each in node.attribute)
    factors = any(each.name in ("alpha", "beta") and each.f != 1 for each in node.attribute)
    turned = any(each.name == "transA" and each.i for each in node.attribute)
    return len(editor.constants[node.input[1]].dims) == 2 and not factors and not turned


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
        if node.op_type == "Gemm" and transposed(node):
            levels = np.ascontiguousarray(levels.T)
        return self.editor.store(f"{name}_int8", levels), self.editor.store(f"{name}_scale", scale)

    def _add(self, kind: str, inputs: list[str], out: str, name: str = "", **more: int) -> str:
        node = self.editor.node(kind, inputs, self.editor.fresh(out), **more)
        node.name = name or node.name
        self.nodes.append(node)
        return str(node.output[0])
