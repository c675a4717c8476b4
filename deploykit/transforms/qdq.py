"""Put INT8 into a float32 ONNX graph as QuantizeLinear/DequantizeLinear pairs.

In: a float32 model and its `Calibration`. Out: a model in which the inputs and weights of Conv,
Gemm and MatMul pass through INT8. The runtimes want the pairs in different places. TensorRT: zero
points of 0, a float bias and nothing between Conv and Relu (`Q DQ Conv Relu`); it refuses the rest.
ONNX Runtime's integer kernels need the outputs quantized too; given TensorRT's graph it computes in
float between the pairs, slower than without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.transforms.calibrate import Calibration, Range
from deploykit.transforms.checks import all_nodes
from deploykit.transforms.fold import drop_unused, fold
from deploykit.transforms.graph import opset

RUNTIMES = ("tensorrt", "onnxruntime")
QUANTIZED = ("Conv", "Gemm", "MatMul")
LEAST_OPSET = 13  # the first with a scale per channel

_ACTIVATIONS = frozenset(("Relu", "Clip"))
# What ONNX Runtime runs on INT8: these move values and keep their scale ...
_MOVES = frozenset(("MaxPool", "Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze"))
# ... and these compute new ones.
_COMPUTES = frozenset(("Add", "Mul", "GlobalAveragePool", "AveragePool", "Concat", "LeakyRelu"))


@dataclass(frozen=True)
class Scale:
    """real = (stored - zero) * scale, stored being INT8."""

    scale: float
    zero: int = 0


def to_int8(
    model: onnx.ModelProto, calibration: Calibration, *, runtime: str = "tensorrt"
) -> onnx.ModelProto:
    """The model with Q/DQ pairs for `runtime`, "tensorrt" or "onnxruntime".

    Weights: symmetric, one scale per output channel, max|w| / 127. Inputs: one scale per tensor,
    peak / 127; for ONNX Runtime the whole range over 255 steps, with a zero point, and pairs on the
    outputs as well. A MatMul of two activations stays float, as does a node whose input was
    infinite. Batch normalisation is folded into its convolution first; `model` is left as it is.
    Raises BadInput for a model with no Conv, Gemm or MatMul with constant weights, one that is
    quantized already, one below opset 13, and one that is not what `calibration` saw.
    """
    if runtime not in RUNTIMES:
        raise BadInput(f"unknown runtime '{runtime}'", hint="one of: " + ", ".join(RUNTIMES))
    if any(node.op_type == "DequantizeLinear" for node in all_nodes(model.graph)):
        raise BadInput("the model is quantized already", hint="quantize the float32 model")
    if opset(model) < LEAST_OPSET:
        raise BadInput(
            f"the model is of opset {opset(model)}; INT8 needs {LEAST_OPSET} or newer",
            hint="export it again with a newer opset",
        )
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    else:
        source, model = model, onnx.ModelProto()
        model.CopyFrom(source)
    fold(model)
    writer = _Writer(model, calibration, asymmetric=runtime == "onnxruntime")
    chosen = [n for n, node in enumerate(model.graph.node) if writer.quantizable(node)]
    if not chosen:
        raise BadInput(
            "the model has no Conv, Gemm or MatMul with constant float32 weights to quantize",
            hint="INT8 cannot speed it up; fp16 may: --to fp16",
        )
    sources = [model.graph.node[number].input[0] for number in chosen]
    scales = {name: writer.input_scale(name) for name in sources}
    if runtime == "onnxruntime":
        writer.spread(scales, set(chosen))
    writer.write(scales, set(chosen), everywhere=runtime == "onnxruntime")
    drop_unused(model.graph)
    return model


class _Writer:
    """Emits the nodes in order, each pair once, just before the first node that reads it."""

    def __init__(
        self, model: onnx.ModelProto, calibration: Calibration, *, asymmetric: bool
    ) -> None:
        graph = model.graph
        fed = {value.name for value in graph.input}
        self.graph = graph
        self.ranges = calibration.ranges
        self.asymmetric = asymmetric
        self.constants = {t.name: t for t in graph.initializer if t.name not in fed}
        self.outputs = {value.name for value in graph.output}
        self.taken = {name for node in graph.node for name in (*node.input, *node.output)}
        self.nodes: list[onnx.NodeProto] = []
        self.done: dict[tuple[str, int | None], str] = {}  # (tensor, axis) -> its dequantized twin

    def quantizable(self, node: onnx.NodeProto) -> bool:
        """Whether it is a Conv, Gemm or MatMul of an activation and constant float32 weights."""
        if node.op_type not in QUANTIZED or node.domain not in ("", "ai.onnx"):
            return False
        weight = self.constants.get(node.input[1])
        if weight is None or weight.data_type != TensorProto.FLOAT or len(weight.dims) < 2:
            return False
        return node.input[0] not in self.constants and np.isfinite(self._range(node.input[0]).peak)

    def input_scale(self, name: str) -> Scale:
        seen = self._range(name)
        if not self.asymmetric:
            return Scale(_step(seen.peak, 127))
        low, high = min(seen.low, 0.0), max(seen.high, 0.0)
        scale = _step(high - low, 255)
        return Scale(scale, int(np.clip(round(-128 - low / scale), -128, 127)))

    def spread(self, scales: dict[str, Scale], chosen: set[int]) -> None:
        """Add to `scales` the tensors that follow, as long as ONNX Runtime has integer kernels."""
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        for number, node in enumerate(self.graph.node):
            inputs = [name for name in node.input if name]
            out = node.output[0]
            if number in chosen:
                after = readers.get(out, [])
                if len(after) == 1 and after[0].op_type in _ACTIVATIONS and out not in self.outputs:
                    out = after[0].output[0]
            elif node.op_type in _MOVES and inputs[0] in scales:
                scales.setdefault(out, scales[inputs[0]])
                continue
            elif node.op_type not in _COMPUTES or any(name not in scales for name in inputs):
                continue
            if out not in self.outputs and np.isfinite(self._range(out).peak):
                scales.setdefault(out, self.input_scale(out))

    def write(self, scales: Mapping[str, Scale], chosen: set[int], *, everywhere: bool) -> None:
        """Rewire the chosen nodes, or with `everywhere` every reader of a tensor in `scales`."""
        for number, node in enumerate(self.graph.node):
            names = list(node.input)
            for place, name in enumerate(names):
                if number in chosen and place == 1:
                    node.input[1] = self._weight(name, _channel_axis(node, self.constants[name]))
                elif name in scales and (everywhere or (number in chosen and place == 0)):
                    node.input[place] = self._activation(name, scales[name])
            if everywhere and number in chosen and len(names) > 2 and names[2] in self.constants:
                self._bias(node, names, scales[names[0]])
            self.nodes.append(node)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)

    def _range(self, name: str) -> Range:
        seen = self.ranges.get(name)
        if seen is None:
            raise BadInput(
                f"the calibration holds no range for tensor '{name}'",
                hint="calibrate the same file that is quantized",
            )
        return seen

    def _activation(self, name: str, at: Scale) -> str:
        key = (name, None)
        if key not in self.done:
            scale = self._store(f"{name}_scale", np.float32(at.scale))
            zero = self._store(f"{name}_zero_point", np.int8(at.zero))
            stored, self.done[key] = self._fresh(f"{name}_int8"), self._fresh(f"{name}_dequantized")
            self._emit("QuantizeLinear", [name, scale, zero], stored)
            self._emit("DequantizeLinear", [stored, scale, zero], self.done[key])
        return self.done[key]

    def _weight(self, name: str, axis: int | None) -> str:
        key = (name, axis)
        if key not in self.done:
            values = numpy_helper.to_array(self.constants[name])
            scale = weight_scale(values, axis)
            shape = [1] * values.ndim
            if axis is not None:
                shape[axis] = -1
            steps = np.rint(values / scale.reshape(shape if axis is not None else ()))
            self.done[key] = self._dequantized(
                name, np.clip(steps, -127, 127), np.int8, scale, axis
            )
        return self.done[key]

    def _bias(self, node: onnx.NodeProto, names: list[str], at: Scale) -> None:
        """ONNX Runtime's QLinearConv adds an INT32 bias in steps of input times weight scale."""
        bias = numpy_helper.to_array(self.constants[names[2]])
        weight = numpy_helper.to_array(self.constants[names[1]])
        scale = weight_scale(weight, _channel_axis(node, self.constants[names[1]])) * at.scale
        scaled = any(a.name in ("alpha", "beta") and a.f != 1 for a in node.attribute)
        if scaled or bias.ndim != 1 or bias.shape != scale.shape:
            return
        steps = np.rint(bias.astype(np.float64) / scale)
        if np.abs(steps).max(initial=0) < 2**31:
            scale32 = scale.astype(np.float32)
            node.input[2] = self._dequantized(names[2], steps, np.int32, scale32, 0)

    def _dequantized(
        self, name: str, steps: np.ndarray, dtype: type, scale: np.ndarray, axis: int | None
    ) -> str:
        """Store `steps` and emit the DequantizeLinear that gives them their scale back."""
        stored = self._store(f"{name}_{np.dtype(dtype).name}", steps.astype(dtype))
        at = self._store(f"{name}_scale", scale)
        zero = self._store(f"{name}_zero_point", np.zeros(scale.shape, dtype))
        out = self._fresh(f"{name}_dequantized")
        self._emit("DequantizeLinear", [stored, at, zero], out, axis)
        return out

    def _emit(self, kind: str, inputs: list[str], output: str, axis: int | None = None) -> None:
        name = f"{kind}_{output}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=name, axis=axis))

    def _store(self, name: str, values: np.ndarray | np.generic) -> str:
        name = self._fresh(name)
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def _fresh(self, name: str) -> str:
        while name in self.taken or name in self.constants:
            name += "_"
        self.taken.add(name)
        return name


def weight_scale(values: np.ndarray, axis: int | None) -> np.ndarray:
    """The symmetric scale of `values`, float32: shape (channels,) along `axis`, () without one."""
    others = tuple(i for i in range(values.ndim) if i != axis) if axis is not None else None
    peak = np.abs(values).max(axis=others)
    return np.asarray(np.where(peak > _TINY, peak / np.float32(127), 1.0), np.float32)


_TINY = 1e-30  # a range below it is a dead tensor: any scale stores its zeros


def _step(width: float, steps: int) -> float:
    return float(np.float32(width / steps)) if width > _TINY else 1.0


def _channel_axis(node: onnx.NodeProto, weight: onnx.TensorProto) -> int | None:
    """The axis of the output channels; None where they are not one axis of a plain matrix."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        return 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1
    return 1 if len(weight.dims) == 2 else None
