"""Move the INT8 pairs of a graph from where TensorRT wants them to where ONNX Runtime does.

ONNX Runtime has integer kernels only for nodes whose outputs have scales, too. A graph written for
TensorRT has none there, so `to_pairs` records the ranges of those tensors in the graph's metadata.
Taking the pairs out and writing them anew gives what `to_pairs` would have written from the start,
but for the last bit of a weight's scale. In a graph of another tool the ranges follow from its own
scales: what a sum, a Concat or a SiLU is clipped to bounds what went into it.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.graph.skeleton import read_names
from deploykit.quantization.calibrate import Calibration, Range
from deploykit.quantization.qdq import RANGES_KEY, to_pairs
from deploykit.quantization.qdq_placement import MOVES, operators, place_pairs, quantizable_nodes

_PAIR = ("QuantizeLinear", "DequantizeLinear")
_SILU_TURNS = -1.278  # the minimum of SiLU is here; it rises after it


def move_pairs(source: Graph, runtime: str) -> Graph | None:
    """Return the graph with its INT8 pairs placed for `runtime`; None where it lacks the ranges.

    Nodes in float32 stay in float32.
    """
    ranges = _read_ranges(source)
    plain = _without_pairs(source, runtime) if ranges is not None else None
    if ranges is None or plain is None:
        return None
    calibration = Calibration(ranges, ranges, 0, "recorded")
    return to_pairs(plain.graph, calibration, runtime=runtime, keep_float32=plain.kept)


def move_foreign_pairs(
    source: Graph, runtime: str, measure: Callable[[Graph], Mapping[str, Range]] | None = None
) -> tuple[Graph, list[str]] | None:
    """Do as `move_pairs` for a graph of another tool; None for one that is not INT8 in float32.

    A tensor whose range does not follow from the scales of the graph gets the one that `measure`
    finds in the graph without pairs; without `measure` it stays float, and its name is returned.
    """
    plain = _without_pairs(source, runtime)
    if plain is None or not plain.seen:
        return None
    ranges, scaled = _follow(plain, runtime)
    if measure is not None:
        held = {each for name in plain.seen for each in (name, scaled.get(name, name))}
        own = {name: each for name, each in ranges.items() if name in held}
        ranges = {**ranges, **measure(plain.graph), **own}
    unknown = Range(-np.inf, np.inf)
    every = {name: unknown for node in plain.graph.model.graph.node for name in node.output}
    every |= {value.name: unknown for value in plain.graph.model.graph.input}
    calibration = Calibration({}, {**every, **ranges}, 0, "recorded")
    placed = to_pairs(plain.graph, calibration, runtime=runtime, keep_float32=plain.kept)
    return placed, sorted(set(scaled.values()) - ranges.keys())


def _read_ranges(source: Graph) -> dict[str, Range] | None:
    """Read the ranges that `to_pairs` recorded; None where they are missing or malformed."""
    entries = {entry.key: entry.value for entry in source.model.metadata_props}
    try:
        found = json.loads(entries[RANGES_KEY])
        return {str(name): Range(float(low), float(high)) for name, (low, high) in found.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


@dataclass(frozen=True)
class _Plain:
    """A graph in float32, its weights as INT8 had rounded them.

    `kept`: nodes that were float32 before. `seen`: the ranges that its pairs could hold.
    """

    graph: Graph
    kept: tuple[str, ...]
    seen: Mapping[str, Range]


def _without_pairs(source: Graph, runtime: str) -> _Plain | None:
    """Remove pairs; None if other types are there, or a scale is computed or not float32."""
    if set(source.precision) - {"int8", "float32"}:
        return None
    editor = Editor(source)
    fold(editor)
    quantized = {
        node.output[0]: node for node in editor.graph.node if node.op_type == "QuantizeLinear"
    }
    pairs = [node for node in editor.graph.node if node.op_type in _PAIR]
    last = [node for node in pairs if node.op_type == "DequantizeLinear"]
    if (
        any(name not in editor.constants for node in pairs for name in node.input[1:] if name)
        or any(editor.constants[node.input[1]].data_type != TensorProto.FLOAT for node in pairs)
        or any(node.input[0] not in {**quantized, **editor.constants} for node in last)
        or Counter(name for name in read_names(editor.graph) if name in quantized)
        != Counter(node.input[0] for node in last if node.input[0] in quantized)
    ):
        return None
    names: dict[str, str] = {}  # a dequantized tensor -> what replaces it
    seen: dict[str, Range] = {}
    for node in last:
        stored, out = node.input[0], node.output[0]
        before = quantized[stored].input[0] if stored in quantized else None
        if before is None or before in editor.constants:
            values = _dequantize(editor, node, quantized.get(stored))
            names[out] = editor.store(out.removesuffix("_dequantized"), values)
        else:
            names[out] = before
            seen[before] = _range_of_pair(editor, node)
    kept, nodes = [], []
    for node in editor.graph.node:
        if node.op_type in _PAIR:
            continue
        if not node.input or names.get(node.input[0]) not in seen:
            kept.append(node.name)
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        nodes.append(node)
    ends = [value.name for value in editor.graph.output if value.name in names]
    nodes += [editor.node("Identity", [names[name]], name) for name in ends]
    plain = editor.finish(nodes)
    plain_editor = Editor(plain)
    fold(plain_editor)
    places = quantizable_nodes(plain_editor, operators(runtime))
    could = {plain_editor.graph.node[place].name for place in places}
    return _Plain(plain, tuple(name for name in kept if name in could), seen)


def _dequantize(
    editor: Editor, node: onnx.NodeProto, quantize: onnx.NodeProto | None
) -> np.ndarray:
    """Return the constant behind a DequantizeLinear, which may have been quantized just before."""
    scale, zero = _parameters(editor, node)
    values = editor.array((quantize or node).input[0])
    shape = [1] * values.ndim
    if scale.size > 1:
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        shape[axis if values.ndim > 1 else 0] = -1
    scale, shift = scale.reshape(shape), zero.astype(np.float32).reshape(shape)
    if quantize is not None:
        held = np.iinfo(zero.dtype)
        values = np.clip(np.rint(values / scale) + shift, held.min, held.max)
    return np.asarray((values.astype(np.float32) - shift) * scale, np.float32)


def _parameters(editor: Editor, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point of a DequantizeLinear."""
    scale = editor.array(node.input[1])
    if len(node.input) > 2 and node.input[2]:
        return scale, editor.array(node.input[2])
    stored = editor.constants.get(node.input[0])
    unsigned = stored is None or stored.data_type == TensorProto.UINT8
    return scale, np.zeros_like(scale, np.uint8 if unsigned else np.int8)


def _range_of_pair(editor: Editor, node: onnx.NodeProto) -> Range:
    """Return the numbers that a tensor's pair can hold; from -127 where its zero is 0."""
    scale, zero = _parameters(editor, node)
    step, shift, held = float(scale.max()), float(zero.max()), np.iinfo(zero.dtype)
    least = -127 if held.min < 0 and shift == 0 else held.min - shift
    return Range(least * step, (held.max - shift) * step)


def _follow(plain: _Plain, runtime: str) -> tuple[dict[str, Range], Mapping[str, str]]:
    """Return the ranges of tensors that need a scale for `runtime`, as far as they follow.

    The second mapping gives, for each of these tensors, the one whose scale it shares.
    A pair clips what it holds, so what is clipped after an operator may be clipped before it, where
    nothing else reads it.
    """
    editor = Editor(plain.graph)
    fold(editor)
    shared = place_pairs(editor, runtime, keep_float32=plain.kept).scaled
    makers = {name: node for node in editor.graph.node for name in node.output}
    reads = Counter([*read_names(editor.graph), *(value.name for value in editor.graph.output)])
    found: dict[str, Range] = {}

    def note(name: str, seen: Range) -> None:
        for each in {name, shared.get(name, name)}:
            least, most = _bounds(editor, makers.get(each))
            found.setdefault(each, Range(max(seen.low, least), min(seen.high, most)))

    for name, seen in plain.seen.items():
        note(name, seen)
    for node in reversed(editor.graph.node):
        if node.op_type == "Sigmoid":
            note(node.output[0], Range(0.0, 1.0))
            continue
        outs = [found[name] for name in node.output if name in found]
        if len(outs) == len(node.output) > 0:
            out = functools.reduce(Range.merge, outs)
            for place, name in enumerate(node.input):
                other = node.input[1 - place] if len(node.input) == 2 else ""
                gate = makers.get(other)
                gated = gate is not None and gate.op_type == "Sigmoid" and gate.input[0] == name
                before = _before(node.op_type, out, found.get(other), gated=gated)
                here = list(node.input).count(name) + gated  # the gate reads it too
                if before is not None and reads[name] == here:
                    note(name, before)
    return found, shared


def _bounds(editor: Editor, node: onnx.NodeProto | None) -> tuple[float, float]:
    """Return the bounds of an activation's result."""
    if node is None or node.op_type not in ("Relu", "Sigmoid", "Clip"):
        return -np.inf, np.inf
    ends = [0.0, np.inf] if node.op_type != "Clip" else [-np.inf, np.inf]
    for place, name in enumerate(node.input[1:]):
        if name in editor.constants:
            ends[place] = float(editor.array(name).max())
    return ends[0], ends[1]


def _before(kind: str, out: Range, other: Range | None, *, gated: bool) -> Range | None:
    """Return what an operator's input may be clipped to if its result is clipped to `out`."""
    if kind in ("Concat", "Relu", "Clip") or kind in MOVES:
        return out
    if kind == "Add" and other is not None:
        return Range(out.low - other.high, out.high - other.low)
    if kind != "Mul" or not gated:
        return None
    # the range of x for x * sigmoid(x) in `out`; left of its minimum, a usual peak
    x = np.linspace(_SILU_TURNS, out.high + 1.3, 4096)
    y = x / (1 + np.exp(-x))
    high = float(np.interp(out.high, y, x))
    low = float(np.interp(out.low, y, x)) if out.low > y[0] else -max(high, 2.0)
    return Range(low, high)
