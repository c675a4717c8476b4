"""Put INT8 or FP8 into a float32 ONNX graph as QuantizeLinear/DequantizeLinear pairs.

The inputs and weights of convolutions, Gemm and MatMul pass through 8 bits. The runtimes want the
pairs in different places. TensorRT: zero points of 0, a float bias, nothing between Conv and Relu
(`Q DQ Conv Relu`), which it refuses, and 8 bits for what an Add adds to a convolution's result.
ONNX Runtime's integer kernels need the outputs quantized too; given TensorRT's graph it computes in
float between the pairs, slower than without.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx

from deploykit.core.precision import BY_NAME, Precision
from deploykit.core.runtime import RUNTIMES
from deploykit.graph.edit import Editor, raise_opset
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import Calibration
from deploykit.quantization.formats import (
    FP8,
    TINY,
    channel_axis,
    fp8_numbers,
    int8_steps,
    weight_scale,
)
from deploykit.quantization.qdq_placement import (
    Placement,
    edit_float32,
    lacks_fp8_kernel,
    nothing_to_quantize,
    operators,
    place_pairs,
    quantizable_nodes,
)

RANGES_KEY = "deploykit.int8_ranges"  # key in a graph's metadata: {tensor: [low, high]}


@dataclass(frozen=True)
class Scale:
    """real = (stored - zero) * scale, stored being INT8, UINT8 or FP8."""

    scale: float
    zero: int = 0


def to_pairs(
    source: Graph,
    calibration: Calibration,
    to: str = "int8",
    *,
    runtime: str = "tensorrt",
    keep_float32: Collection[str] = (),
) -> Graph:
    """Return the graph with pairs of `to` (int8, fp8) for `runtime` (tensorrt, onnxruntime).

    INT8: symmetric weights, one scale per output channel, max|w| / 127, and one scale per input
    tensor, peak / 127 of the calibration's `clipped`; for ONNX Runtime the whole range over 255
    steps, with a zero point, and pairs on the outputs as well. FP8 (E4M3): one scale per tensor,
    peak / 448, always placed for TensorRT, and a model below opset 19 is raised to it. A MatMul of
    two activations stays float, as do a node whose input was infinite and those named in
    `keep_float32`. Batch normalisation is folded into its convolution first; `source` stays
    as it is.
    Raises BadInput for a model without an operator that `runtime` has in 8 bits and that has
    constant weights (or with none left), one that is quantized already or whose opset is too
    old, and weights that are NaN or infinite.
    """
    precision = BY_NAME[to]
    float8 = precision.dtype == "float8"
    editor = edit_float32(source)
    raise_opset(editor.model, precision.min_opset)
    runtime = "tensorrt" if float8 else runtime
    placement = _placement(editor, calibration, runtime, to, keep_float32)
    chained = RUNTIMES[runtime].scales_outputs
    if not float8 and not chained:  # record what `move_pairs` needs to place them for ONNX Runtime
        scaled = place_pairs(editor, "onnxruntime", keep_float32=keep_float32).scaled
        wanted = {*scaled, *scaled.values()}
        seen = {name: calibration.clipped[name] for name in wanted & set(calibration.clipped)}
        ends = {n: [each.low, each.high] for n, each in seen.items() if np.isfinite(each.peak)}
        if ends.keys() == wanted:
            text = json.dumps(ends, sort_keys=True)
            editor.model.metadata_props.add(key=RANGES_KEY, value=text)
    writer = _Writer(editor, calibration, precision)
    return writer.write(placement, chained=chained, keep_float32=keep_float32)


def quantizable(source: Graph, runtime: str, to: str = "int8") -> tuple[str, ...]:
    """Return the names of the nodes that `to_pairs` quantizes if no value is infinite."""
    editor = edit_float32(source)
    places = quantizable_nodes(editor, operators(runtime, to), to)
    return tuple(editor.graph.node[n].name for n in places)


def without_kernel(source: Graph, runtime: str, to: str) -> str:
    """Return a note on the nodes that stay as they are as `to` has no kernel for them; else ""."""
    if to != "fp8":
        return ""
    editor = edit_float32(source)
    nodes = [editor.graph.node[n] for n in quantizable_nodes(editor, operators(runtime, to))]
    left = sum(lacks_fp8_kernel(node, editor.constants) for node in nodes)
    note = "stay as they are: TensorRT has no FP8 kernel for groups, fewer than 16 channels or"
    return f"{left} convolution(s) {note} windows above 32" if left else ""


def _placement(
    editor: Editor, calibration: Calibration, runtime: str, to: str, keep_float32: Collection[str]
) -> Placement:
    placement = place_pairs(
        editor,
        runtime,
        to,
        keep_float32=keep_float32,
        holds=lambda name: bool(np.isfinite(calibration.clipped[name].peak)),
    )
    if not placement.chosen:
        kinds = operators(runtime, to)
        transposed = set(operators("tensorrt")) - set(kinds)
        there = transposed & {node.op_type for node in editor.graph.node}
        hint = without_kernel(Graph(editor.model), runtime, to) or (
            "8 bits cannot speed it up; fp16 may"
        )
        if there:
            where = "TensorRT computes it in int8 only" if to == "fp8" else "TensorRT has"
            hint = f"{runtime} has no {to} kernel for its {', '.join(there)}; {where}"
        weights = "constant float32 weights to quantize"
        weights += " other than those kept in float32" if keep_float32 else ""
        raise nothing_to_quantize(editor, kinds, weights, hint)
    return placement


class _Writer:
    """Emits the nodes in order, each pair once, just before the first node that reads it."""

    def __init__(self, editor: Editor, calibration: Calibration, precision: Precision) -> None:
        self.editor = editor
        self.calibration = calibration
        self.float8 = precision.dtype == "float8"
        self.max_stored = precision.max_stored
        self.nodes: list[onnx.NodeProto] = []
        self.done: dict[tuple[str, int | None], str] = {}  # (tensor, axis) -> its dequantized twin
        self.scales: dict[str, Scale] = {}
        self.stored: type[np.int8 | np.uint8] = np.int8

    def write(
        self, placement: Placement, *, chained: bool = False, keep_float32: Collection[str] = ()
    ) -> Graph:
        """Rewire what the chosen nodes read.

        `chained`: for ONNX Runtime, also rewire what nodes not in `keep_float32` read (`DQ op Q`),
        with zero points and the bias in integers.
        """
        # ONNX Runtime's x86 kernels take UINT8: it converts INT8, but not a tensor read twice
        self.stored = np.uint8 if chained else np.int8
        for name in set(placement.scaled.values()):
            self.scales[name] = self._scale(name, asymmetric=chained)
        for number, node in enumerate(self.editor.graph.node):
            names = list(node.input)
            chosen = number in placement.chosen
            for place, name in enumerate(names):
                if chosen and place == 1:
                    node.input[1] = self._weight(node)
                elif name in placement.scaled and (
                    (chained and node.name not in keep_float32)
                    or (chosen and place == 0)
                    or placement.residual.get(number) == place
                ):
                    node.input[place] = self._activation(name, self.scales[placement.scaled[name]])
            if chained and chosen and len(names) > 2 and names[2] in self.editor.constants:
                self._bias(node, names, self.scales[placement.scaled[names[0]]])
            self.nodes.append(node)
        return self.editor.finish(self.nodes)

    def _scale(self, name: str, *, asymmetric: bool) -> Scale:
        seen = self.calibration.clipped[name]
        if not asymmetric:
            return Scale(_step(seen.peak, self.max_stored))
        low, high = min(seen.low, 0.0), max(seen.high, 0.0)
        scale = _step(high - low, 255)
        return Scale(scale, int(np.clip(round(-low / scale), 0, 255)))

    def _activation(self, name: str, at: Scale) -> str:
        key = (name, None)
        if key not in self.done:
            editor, kind = self.editor, "float8" if self.float8 else np.dtype(self.stored).name
            scale = editor.store(f"{name}_scale", np.float32(at.scale))
            zero = self._zero(name, self.stored(at.zero))
            stored, out = editor.fresh(f"{name}_{kind}"), editor.fresh(f"{name}_dequantized")
            self.done[key] = out
            self.nodes.append(editor.node("QuantizeLinear", [name, scale, zero], stored))
            self.nodes.append(editor.node("DequantizeLinear", [stored, scale, zero], out))
        return self.done[key]

    def _zero(self, name: str, values: np.ndarray | np.generic) -> str:
        stored = values.astype(FP8) if self.float8 else values
        return self.editor.store(f"{name}_zero_point", stored)

    def _weight(self, node: onnx.NodeProto) -> str:
        name = node.input[1]
        axis = None if self.float8 else channel_axis(node, len(self.editor.constants[name].dims))
        if (name, axis) not in self.done:
            values, kind = self.editor.array(name), "float8" if self.float8 else "int8"
            scale = weight_scale(values, axis, name, self.max_stored)
            steps = fp8_numbers(values, scale) if self.float8 else int8_steps(values, scale, axis)
            stored = self.editor.store(f"{name}_{kind}", steps)
            self.done[name, axis] = self._dequantize(name, stored, np.int8, scale, axis)
        return self.done[name, axis]

    def _bias(self, node: onnx.NodeProto, names: list[str], at: Scale) -> None:
        """ONNX Runtime's QLinearConv adds an INT32 bias in steps of input times weight scale."""
        bias, weight = self.editor.array(names[2]), self.editor.array(names[1])
        axis = channel_axis(node, weight.ndim)
        scale = weight_scale(weight, axis, names[1]) * np.float32(at.scale)
        scaled = any(a.name in ("alpha", "beta") and a.f != 1 for a in node.attribute)
        if scaled or bias.ndim != 1 or bias.shape != scale.shape:
            return
        steps = np.rint(bias.astype(np.float64) / scale)
        if np.abs(steps).max(initial=0) < 2**31:
            stored = self.editor.store(f"{names[2]}_int32", steps.astype(np.int32))
            node.input[2] = self._dequantize(names[2], stored, np.int32, scale, 0)

    def _dequantize(
        self, name: str, stored: str, dtype: type, scale: np.ndarray, axis: int | None
    ) -> str:
        """Emit the DequantizeLinear that gives the constant `stored` its scale back."""
        at = self.editor.store(f"{name}_scale", scale)
        zero = self._zero(name, np.zeros(scale.shape, dtype))
        out = self.editor.fresh(f"{name}_dequantized")
        self.nodes.append(self.editor.node("DequantizeLinear", [stored, at, zero], out, axis=axis))
        return out


def _step(width: float, steps: float) -> float:
    return float(np.float32(width / steps)) if width > TINY else 1.0
