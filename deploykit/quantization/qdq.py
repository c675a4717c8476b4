"""Put INT8 or FP8 into a float32 ONNX graph as QuantizeLinear/DequantizeLinear pairs.

The inputs and weights of convolutions, Gemm and MatMul pass through 8 bits. The runtimes want the
pairs in different places. TensorRT: zero points of 0, a float bias, nothing between Conv and Relu
(`Q DQ Conv Relu`), which it refuses, and 8 bits for what an Add adds to a convolution's result.
ONNX Runtime has integer kernels for a chain of nodes only if the tensors between have scales too;
given TensorRT's graph it computes in float between the pairs, slower than without.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.core.precision import BY_NAME, Precision
from deploykit.core.runtime import RUNTIMES
from deploykit.graph.edit import Editor, fold, raise_opset
from deploykit.graph.graph import Graph
from deploykit.graph.parse import subgraphs
from deploykit.graph.storage import all_nodes, read_names

RANGES_KEY = "deploykit.int8_ranges"  # key in a graph's metadata: {tensor: [low, high]}
TINY = 1e-30  # a tensor below it is dead: any scale stores its zeros


@dataclass(frozen=True)
class Range:
    """Smallest and largest value seen in one tensor over the calibration data."""

    low: float
    high: float

    def merge(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    @property
    def peak(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class Calibration:
    """Ranges by tensor name, from `samples` samples.

    `ranges`: every value seen, for the range guard of float16. `clipped`: what INT8 scales should
    cover; the same but for the tensors that the method cuts. `cut`: those tensors, by method.
    `channel_peaks`: the largest magnitude in each channel of what a MatMul or Gemm reads; none with
    "minmax". `outputs`: the model's own, by name, a row for each sample; none where they take more
    than 256 MiB, or a sample's depend on those next to it.
    """

    ranges: Mapping[str, Range]
    clipped: Mapping[str, Range]
    samples: int
    method: str
    cut: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    channel_peaks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    def using(self, method: str) -> Calibration:
        """Return the calibration that `method`, one of `cut`, gives."""
        return replace(self, clipped={**self.ranges, **self.cut[method]}, method=method)


# Which nodes compute in 8 bits, and which tensors get a scale.

_PRODUCTS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
_CHOOSES = "NonMaxSuppression"
_OUTPUT = "boxes"  # ends the names of box outputs, of detectors without NMS too


def box_nodes(graph: onnx.GraphProto) -> set[str]:
    """Names of the nodes between boxes, or NonMaxSuppression, and the products nearest to them.

    float16 holds coordinates from 512 to 1024 to half a pixel, INT8 to several pixels.
    """
    before = {value.name for value in graph.output if value.name.endswith(_OUTPUT)}
    after, found = set[str](), set[str]()
    for node in reversed(graph.node):
        inner = node.op_type not in _PRODUCTS and not before.isdisjoint(node.output)
        if inner or node.op_type == _CHOOSES:
            found.add(node.name)
            before.update(filter(None, node.input))
    for node in graph.node:
        inner = node.op_type not in _PRODUCTS and not after.isdisjoint(node.input)
        if inner or node.op_type == _CHOOSES:
            found.add(node.name)
            after.update(filter(None, node.output))
    return found


_QUANTIZED = frozenset(
    ("DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QGemm")
)
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_ACTIVATIONS = frozenset(("Relu", "Clip"))
# ONNX Runtime runs these on INT8: they move values and keep their scale ...
_MOVES = "MaxPool Flatten Reshape Transpose Squeeze Unsqueeze Slice Split Resize Gather"
MOVES = frozenset([*_MOVES.split(), "DepthToSpace", "Expand", "Tile"])
# ... and these compute new ones; Sigmoid and Mul are SiLU.
_COMPUTES = frozenset(
    ("Add", "Mul", "Sigmoid", "LeakyRelu", "GlobalAveragePool", "AveragePool", "Concat")
)

_LEAST_FP8, _MOST_FP8 = 16, 32  # channels, elements of the window


@dataclass(frozen=True)
class Placement:
    """`chosen`: places in the node list. `scaled`: tensor -> the one whose scale it shares.

    `residual`: the place of an Add -> which of its inputs is added to a chosen convolution's result
    and reads 8 bits, so that TensorRT fuses the two.
    """

    chosen: tuple[int, ...]
    scaled: Mapping[str, str]
    residual: Mapping[int, int] = field(default_factory=dict)


def operators(runtime: str, to: str = "int8") -> tuple[str, ...]:
    """Return the operators with weights that `runtime` computes in `to`, "int8" or "fp8".

    ONNX Runtime's CPU has no 8-bit ConvTranspose, and NVIDIA's own quantizer leaves it out of FP8.
    """
    turned = ("ConvTranspose",) if to == "int8" and not RUNTIMES[runtime].scales_outputs else ()
    return ("Conv", *turned, "Gemm", "MatMul")


def quantizable_nodes(editor: Editor, kinds: Collection[str], to: str = "int8") -> list[int]:
    """Return places of the nodes of these operators that read an activation and float32 weights.

    For "fp8" without those that have no kernel.
    """
    found, constants = list[int](), editor.constants
    for n, node in enumerate(editor.graph.node):
        if node.op_type not in kinds or node.domain not in ("", "ai.onnx"):
            continue
        weight = constants.get(node.input[1])
        if (
            weight is not None
            and weight.data_type == TensorProto.FLOAT
            and len(weight.dims) >= 2
            and 0 not in weight.dims
            and node.input[0] not in constants
            and not (to == "fp8" and lacks_fp8_kernel(node, constants))
        ):
            found.append(n)
    return found


def lacks_fp8_kernel(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether TensorRT has no FP8 kernel for a convolution: its build would fail.

    Sources: NVIDIA's quantizer (ModelOpt) leaves out fewer than 16 channels and windows above 32;
    TensorRT's release notes, 10.12: no FP8 in groups. The graph's types alone do not show it.
    """
    if node.op_type != "Conv":
        return False
    out, in_group, *window = constants[node.input[1]].dims
    groups = next((each.i for each in node.attribute if each.name == "group"), 1)
    return groups > 1 or min(out, in_group) < _LEAST_FP8 or math.prod(window) > _MOST_FP8


def place_pairs(
    editor: Editor,
    runtime: str,
    to: str = "int8",
    *,
    keep_float32: Collection[str] = (),
    holds: Callable[[str], bool] = lambda _: True,
) -> Placement:
    """Place pairs of `to` for `runtime`; nodes named in `keep_float32` stay as they are.

    `holds`: whether a scale can hold a tensor, given its name.
    """
    nodes = editor.graph.node
    chosen = [
        n
        for n in quantizable_nodes(editor, operators(runtime, to), to)
        if nodes[n].name not in keep_float32 and holds(nodes[n].input[0])
    ]
    scaled = {nodes[n].input[0]: nodes[n].input[0] for n in chosen}
    if RUNTIMES[runtime].scales_outputs:
        _spread(editor, scaled, set(chosen), {*keep_float32, *box_nodes(editor.graph)}, holds)
        return Placement(tuple(chosen), scaled)
    residual = {
        n: place
        for n, place in _residuals(editor, set(chosen)).items()
        if nodes[n].name not in keep_float32 and holds(nodes[n].input[place])
    }
    for n, place in residual.items():
        scaled.setdefault(nodes[n].input[place], nodes[n].input[place])
    return Placement(tuple(chosen), scaled, residual)


def edit_float32(source: Graph) -> Editor:
    """An editor with constants folded. Raises BadInput for a graph that has 8 bits already."""
    kinds = {node.op_type for node in all_nodes(source.model.graph)}
    if kinds & _QUANTIZED or any(kind.startswith("QLinear") for kind in kinds):
        name = source.path.name
        raise BadInput(f"{name}: is quantized already", hint="quantize the float32 model")
    editor = Editor(source)
    fold(editor)
    return editor


def nothing_to_quantize(editor: Editor, kinds: Sequence[str], weights: str, hint: str) -> BadInput:
    """Return the error for a graph in which no node of these operators has such weights."""
    bodies = (body for node in editor.graph.node for body in subgraphs(node))
    if not {node.op_type for body in bodies for node in all_nodes(body)}.isdisjoint(kinds):
        weights += " outside the bodies of If, Loop and Scan"
        hint = "these stay as they are: export the body as a model of its own"
    names = " or ".join((", ".join(kinds[:-1]), kinds[-1]))
    return BadInput(f"the model has no {names} with {weights}", hint=hint)


def _moves(node: onnx.NodeProto) -> bool:
    if node.op_type == "Resize":
        return any(each.name == "mode" and each.s == b"nearest" for each in node.attribute)
    return node.op_type in MOVES


def _residuals(editor: Editor, chosen: set[int]) -> dict[int, int]:
    """Map each Add of a chosen convolution's result to its other input, of the shorter path."""
    reads = Counter([*read_names(editor.graph), *(value.name for value in editor.graph.output)])
    depth: dict[str, int] = {}  # tensor -> number of nodes on the longest path to it
    fused: set[str] = set()
    found = {}
    for number, node in enumerate(editor.graph.node):
        here = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        depth.update((name, here) for name in node.output)
        if number in chosen and node.op_type in _CONVOLUTIONS and reads[node.output[0]] == 1:
            fused.add(node.output[0])
        names = list(node.input)
        if node.op_type != "Add" or editor.constants.keys() & names or not fused & set(names):
            continue
        first, second = (depth.get(name, 0) if name in fused else -1 for name in names)
        found[number] = 1 if first >= second else 0
    return found


def _spread(  # noqa: C901 - the kernels of ONNX Runtime, one rule each
    editor: Editor,
    scaled: dict[str, str],
    chosen: set[int],
    keep_float32: Collection[str],
    holds: Callable[[str], bool],
) -> None:
    """Add to `scaled` the tensors that follow, as long as ONNX Runtime has integer kernels."""
    outputs = {value.name for value in editor.graph.output}
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in editor.graph.value_info
        if value.type.tensor_type.HasField("shape")
    }
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in editor.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def after_activation(out: str) -> str:
        after = readers.get(out, [])
        fused = len(after) == 1 and after[0].op_type in _ACTIVATIONS and out not in outputs
        return str(after[0].output[0]) if fused else out

    def writes_floats(kind: str, out: str) -> bool:
        """Return whether its kernel reads integers and writes floats, with no scale."""
        after = readers.get(out, [])
        if kind == "MatMul" and ranks.get(out, 2) == 2 and any(n.op_type == "Add" for n in after):
            return False  # ONNX Runtime would make a Gemm of float32 of the two
        integers = any(_moves(node) or node.op_type in _COMPUTES - {"Add", "Mul"} for node in after)
        added = [n for n in after if n.op_type in ("Add", "Mul")]
        integers |= any(not editor.constants.keys() & n.input for n in added)
        return kind in ("Gemm", "MatMul") and not integers

    for number, node in enumerate(editor.graph.node):
        inputs = [name for name in node.input if name]
        out = node.output[0] if node.output else ""
        if node.name in keep_float32:
            continue
        if _moves(node) and inputs[0] in scaled:
            for each in node.output:  # a scale of its own would need arithmetic in between
                scaled[each] = scaled[inputs[0]]
            continue
        if node.op_type == "Concat" and out in scaled and scaled.keys() & set(inputs):
            # If a Concat's result is quantized, each part that is float can be quantized before it.
            alone = [name for name in inputs if len(readers[name]) == 1 and name not in outputs]
            alone = [name for name in alone if name not in editor.constants and holds(name)]
            scaled.update((name, name) for name in alone if name not in scaled)
        computes = node.op_type in _COMPUTES and all(name in scaled for name in inputs)
        if number not in chosen and not computes:
            continue
        out = after_activation(out)
        if writes_floats(node.op_type, out):
            continue
        if out not in outputs and holds(out):
            scaled.setdefault(out, out)


# Numbers in fewer bits: real = stored * scale.

FP8, INT4 = map(helper.tensor_dtype_to_np_dtype, (TensorProto.FLOAT8E4M3FN, TensorProto.INT4))
FP8_PEAK = BY_NAME["fp8"].max_stored  # the largest E4M3 number


def channel_axis(node: onnx.NodeProto, rank: int) -> int | None:
    """The axis of the output channels of a weight; None where one scale has to do for all."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":  # with groups, that axis counts the channels of one group
        return None if any(a.name == "group" and a.i > 1 for a in node.attribute) else 1
    if node.op_type == "Gemm":
        return 1 if by_rows(node) else 0
    return 1 if rank == 2 else None


def is_set(node: onnx.NodeProto, name: str) -> bool:
    """Return whether an attribute of 0 or 1, such as transA, is 1."""
    return any(each.name == name and each.i for each in node.attribute)


def by_rows(node: onnx.NodeProto) -> bool:
    """Return whether a product's weight is [inputs, outputs]; otherwise it is the reverse."""
    return node.op_type == "MatMul" or not is_set(node, "transB")


def weight_scale(values: np.ndarray, axis: int | None, name: str, steps: float = 127) -> np.ndarray:
    """The symmetric scale of `values`, float32: shape (channels,) along `axis`, () without one.

    Raises BadInput for NaN and infinity, naming the tensor.
    """
    others = tuple(i for i in range(values.ndim) if i != axis) if axis is not None else None
    peak = np.maximum(values.max(axis=others), -values.min(axis=others))  # abs() would copy
    if not np.isfinite(peak).all():
        raise BadInput(
            f"weight '{name}' holds NaN or infinity: it cannot be quantized",
            hint="the trained weights themselves are broken; see the training's loss",
        )
    return np.asarray(np.where(peak > TINY, peak / np.float32(steps), 1.0), np.float32)


def int8_steps(values: np.ndarray, scale: np.ndarray, axis: int | None) -> np.ndarray:
    """`values` in steps of `scale`, rounded to even, in -127..127; the shape of `values`."""
    if axis is not None:
        scale = scale.reshape([-1 if place == axis else 1 for place in range(values.ndim)])
    steps = np.asarray(values / scale)
    np.rint(steps, out=steps)
    return np.clip(steps, -127, 127, out=steps).astype(np.int8)


def fp8_numbers(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`values` / `scale` as E4M3 without infinity (ONNX's FLOAT8E4M3FN), rounded to even.

    Values above 448 become 448: P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    return np.asarray(np.clip(values / scale, -FP8_PEAK, FP8_PEAK)).astype(FP8)


def int4_steps(
    values: np.ndarray, axis: int, block: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Steps in -7..7 of a matrix, and the scale of each `block` values along `axis`.

    `block` divides that axis. The scale has the matrix's shape, this axis divided by `block`.
    Raises BadInput for NaN and infinity, naming the tensor.
    """
    matrix = values if axis == 0 else values.T
    steps = np.empty(matrix.shape, np.int8)
    scale = np.empty((len(matrix) // block, matrix.shape[1]), np.float32)
    for number in range(len(scale)):
        part = slice(number * block, (number + 1) * block)
        scale[number] = weight_scale(matrix[part], 1, name, 7)
        steps[part] = np.clip(np.rint(matrix[part] / scale[number]), -7, 7)
    if axis == 0:
        return steps, scale
    return np.ascontiguousarray(steps.T), np.ascontiguousarray(scale.T)


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
    return _Writer(editor, calibration, precision, chained=chained).write(placement, keep_float32)


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
        others = set(operators("tensorrt")) - set(kinds)
        there = others & {node.op_type for node in editor.graph.node}
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
    """Emits the nodes in order, each pair once, just before the first node that reads it.

    `chained`: for ONNX Runtime, also rewire what nodes not in `keep_float32` read (`DQ op Q`), with
    zero points and the bias in integers.
    """

    def __init__(
        self, editor: Editor, calibration: Calibration, precision: Precision, *, chained: bool
    ) -> None:
        self.editor, self.chained = editor, chained
        self.calibration = calibration
        self.float8 = precision.dtype == "float8"
        self.max_stored = precision.max_stored
        self.nodes: list[onnx.NodeProto] = []
        self.done: dict[tuple[str, int | None], str] = {}  # (tensor, axis) -> its dequantized twin
        self.scales: dict[str, Scale] = {}
        # ONNX Runtime's x86 kernels take UINT8: it converts INT8, but not a tensor read twice
        self.stored: type[np.int8 | np.uint8] = np.uint8 if chained else np.int8

    def write(self, placement: Placement, keep_float32: Collection[str]) -> Graph:
        """Rewire what the chosen nodes read."""
        for name in set(placement.scaled.values()):
            self.scales[name] = self._scale(name)
        for number, node in enumerate(self.editor.graph.node):
            names = list(node.input)
            chosen = number in placement.chosen
            for place, name in enumerate(names):
                if chosen and place == 1:
                    node.input[1] = self._weight(node)
                elif name in placement.scaled and (
                    (self.chained and node.name not in keep_float32)
                    or (chosen and place == 0)
                    or placement.residual.get(number) == place
                ):
                    node.input[place] = self._activation(name, self.scales[placement.scaled[name]])
            if self.chained and chosen and len(names) > 2 and names[2] in self.editor.constants:
                self._bias(node, names, self.scales[placement.scaled[names[0]]])
            self.nodes.append(node)
        return self.editor.finish(self.nodes)

    def _scale(self, name: str) -> Scale:
        seen = self.calibration.clipped[name]
        if not self.chained:
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
