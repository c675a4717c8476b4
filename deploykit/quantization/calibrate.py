"""Run data through a float32 graph once and record the range of every tensor.

The same `Calibration` serves the range guard of float16 (every value seen) and the scales of INT8
and FP8 (outliers left out, where the method does so).

Which method loses least depends on the model (`benchmarks/README.md`): all share the one pass,
and the caller chooses by the error that each makes at the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.runtime import TARGET_RUNTIMES
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import Arrays
from deploykit.engines.onnxruntime.engine import onnxruntime_errors, session_options
from deploykit.evaluation.parity import axis_sizes
from deploykit.graph import cost
from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.quantization.formats import TensorHistogram, transposed
from deploykit.quantization.qdq_placement import place_pairs, quantizable_nodes

ort = require("onnxruntime")


Kept: TypeAlias = tuple[np.ndarray, list[np.ndarray]]  # numbers of samples, the outputs for them
METHODS = ("mixed", "percentile", "mse", "entropy", "minmax")  # the first is the default
MIN_SAMPLES = 8  # fewer say nothing of a range: one odd sample would set every scale
MOST_BYTES = 1 << 28  # limit of one batch's activations, and of kept outputs
Stored: TypeAlias = tuple[np.ndarray, np.ndarray]  # a weight: its scale, its numbers
_REDUCTIONS = ("ReduceMin", "ReduceMax", "ReduceSum")
_REDUCED = "{}/deploykit.{}"  # the name of an output: the tensor, the reduction


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
    "minmax". `weights`: caches what `to_pairs` made of them, which no range changes; None caches
    nothing. `outputs`: the model's, for batches of samples that the caller named.
    """

    ranges: Mapping[str, Range]
    clipped: Mapping[str, Range]
    samples: int
    method: str
    cut: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    channel_peaks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    weights: dict[tuple[str, int | None, float], Stored] | None = None
    outputs: tuple[Kept, ...] = ()

    def using(self, method: str) -> Calibration:
        """Return the calibration that `method`, one of `cut`, gives."""
        return replace(self, clipped={**self.ranges, **self.cut[method]}, method=method)


def calibrate(
    graph: Graph,
    samples: Samples,
    *,
    method: str = METHODS[0],
    batch_size: int = 32,
    places: Iterable[np.ndarray] = (),
) -> Calibration:
    """Return the ranges of the inputs and of every float tensor of the main graph.

    Args:
        graph: in float32. One with a fixed batch runs at that size.
        samples: inputs of the graph. Samples that do not fill a fixed batch are left out.
        method: "minmax" reduces inside the graph and keeps two numbers per tensor. The others keep
            a histogram of each tensor that `qdq` may give a scale; all come from one pass, see
            `Calibration.using`. "percentile": the middle 99.999 % of the values. "mse": INT8 makes
            the least squared error at the MatMuls and Convs. "mixed": "mse" for the tensors where
            it makes much less, else "percentile". "entropy": INT8 loses the least information.
        batch_size: smaller where a batch would need more than 256 MiB of activations.
        places: batches of samples, by their numbers, whose outputs are kept up to 256 MiB.

    Raises:
        BadInput: fewer than 8 samples, samples that are NaN, infinite or all the same, and a model
            that itself gives NaN.
    """
    check_samples(samples)
    fixed = _fixed_batch(graph.inputs)
    if fixed and len(samples) < fixed:
        raise BadInput(f"{samples.where}: {len(samples)} samples do not fill the batch of {fixed}")
    counted = {} if method == "minmax" else _histograms(graph)
    editor = Editor(graph)
    weights = _weights(editor)
    names = _float_tensors(graph)
    costs = cost.node_costs(graph, axis_sizes(samples, graph.inputs, 1))
    needed = 2 * sum(each.write_bytes or 0 for each in costs)  # fused nodes are separate here
    size = fixed or max(1, min(batch_size, MOST_BYTES // max(needed, 1)))
    own = [value.name for value in editor.graph.output]
    reduced = [name for name in names if name not in counted]
    outputs = [*_add_reductions(editor.graph, reduced), *counted]
    _add_outputs(editor.graph, counted)
    ranges: dict[str, Range] = {}
    kept, kept_bytes, used = list[Kept](), 0, 0
    with onnxruntime_errors(graph.path):
        session = _session(editor.model)

        def run(wanted: Sequence[str], feeds: Arrays) -> list[np.ndarray]:
            found: list[np.ndarray] = session.run(wanted, {**feeds, **weights})
            return found

        for feeds in samples.batches(size):
            if fixed and _rows(feeds) < size:
                break
            used += _rows(feeds)
            values = dict(zip(outputs, run(outputs, feeds), strict=True))
            batch = {name: _reduce(values, name) for name in reduced}
            batch |= {name: Range(*each.add(values[name])) for name, each in counted.items()}
            ranges = {name: _merge(ranges.get(name, batch[name]), batch[name]) for name in names}
        for rows in places:
            found = run(own, {name: array[rows] for name, array in samples.inputs.items()})
            kept.append((rows, [each.copy() for each in found]))
            kept_bytes += sum(each.nbytes for each in found)
            if kept_bytes > MOST_BYTES:
                break
    if name := next((name for name, seen in ranges.items() if math.isnan(seen.low)), None):
        raise BadInput(
            f"{graph.path}: tensor '{name}' is NaN on the calibration data {samples.where}",
            hint="the float32 model itself fails on these samples",
        )
    return replace(_choose_ranges(ranges, counted, used, method), outputs=tuple(kept))


def _choose_ranges(
    ranges: Mapping[str, Range],
    counted: Mapping[str, TensorHistogram],
    samples: int,
    method: str,
) -> Calibration:
    if method == "minmax":
        return Calibration(ranges, ranges, samples, method)
    cut = {
        each: {name: _cut(ranges[name], counts, each) for name, counts in counted.items()}
        for each in METHODS
    }
    safe, least = cut["percentile"], cut["mse"]
    cut["mixed"] = {
        name: (least if counts.gains(safe[name].peak, least[name].peak) else safe)[name]
        for name, counts in counted.items()
    }
    peaks = {
        name: tuple(counts.channel_peaks.tolist())
        for name, counts in counted.items()
        if counts.importance is not None
    }
    return Calibration(ranges, ranges, samples, method, cut, peaks).using(method)


def check_samples(samples: Samples) -> None:
    """Raise BadInput for data that cannot calibrate anything; see `calibrate`."""
    if len(samples) < MIN_SAMPLES:
        raise BadInput(
            f"{samples.where}: {len(samples)} samples, calibration needs {MIN_SAMPLES} or more",
            hint="some hundred samples like those that the model will see serve best",
        )
    for name, array in samples.inputs.items():
        if array.dtype.kind != "f":
            continue
        finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if not finite.all():
            first = int(np.argmin(finite))
            raise BadInput(
                f"{samples.where}: sample {first} of '{name}' holds NaN or infinity "
                f"({np.count_nonzero(~finite)} of {len(array)} samples do)"
            )
    if all((array == array[:1]).all() for array in samples.inputs.values()):
        raise BadInput(
            f"{samples.where}: all {len(samples)} samples are the same: no range can be learned"
        )


def _histograms(graph: Graph) -> dict[str, TensorHistogram]:
    """Return one for each tensor that a placement of `qdq` may give its own scale."""
    editor = Editor(graph)
    fold(editor)
    scaled = {
        name for target in TARGET_RUNTIMES for name in place_pairs(editor, target).scaled.values()
    }
    weights = importance(editor)
    return {
        name: TensorHistogram(weights.get(name))
        for name in sorted(scaled)
        if graph.element_types.get(name) == TensorProto.FLOAT
    }


def importance(editor: Editor) -> dict[str, np.ndarray]:
    """Return what a squared error in each channel of a tensor adds at the products that read it.

    It is the energy of the weights that the channel meets: an outlier channel may meet small ones.
    Channels of convolutions differ too little to pay for it.
    """
    found: dict[str, np.ndarray] = {}
    for place in quantizable_nodes(editor, ("Gemm", "MatMul")):
        node = editor.graph.node[place]
        if any(each.name == "transA" and each.i for each in node.attribute):
            continue
        weight = editor.array(node.input[1])
        weight = weight.reshape(-1, *weight.shape[-2:])
        by_rows = node.op_type == "MatMul" or not transposed(node)
        # einsum: a square of a large weight in float64 would need twice its memory
        energy = np.einsum("bkn,bkn->k" if by_rows else "bnk,bnk->k", weight, weight)
        found[node.input[0]] = found.get(node.input[0], 0.0) + energy
    return found


def _weights(editor: Editor) -> dict[str, np.ndarray]:
    """Return the weights, which the editor's graph takes as inputs that no caller feeds.

    Fed at each run instead of being built into the session, they are in memory once, without a
    limit of 2 GiB; ONNX Runtime takes the arrays without a copy.
    """
    fed = [value.name for value in editor.graph.input if value.name not in editor.inputs]
    return {name: editor.array(name) for name in fed}


def _float_tensors(graph: Graph) -> list[str]:
    """The float32 inputs and node outputs of the main graph, in the order they are computed."""
    names = [spec.name for spec in graph.inputs]
    names += [name for node in graph.skeleton.graph.node for name in node.output if name]
    floats = [name for name in names if graph.element_types.get(name) == TensorProto.FLOAT]
    if not floats:
        raise BadInput(
            f"{graph.path}: has no float32 tensor: nothing to quantize",
            hint="export the model in float32: module.float()",
        )
    return floats


def _fixed_batch(inputs: Sequence[TensorSpec]) -> int | None:
    """Return the size of axis 0, or None if an input has a dynamic one."""
    sizes = [size for spec in inputs for size in spec.shape[:1]]
    fixed = [size for size in sizes if isinstance(size, int)]
    return fixed[0] if fixed and len(fixed) == len(sizes) else None


def _add_reductions(graph: onnx.GraphProto, names: Sequence[str]) -> list[str]:
    """Make least, largest and sum of each tensor an output; returns the new outputs.

    The sum is there for NaN, which ONNX Runtime's ReduceMin and ReduceMax leave out.
    """
    added = []
    for name in names:
        for kind in _REDUCTIONS:
            # keepdims: ONNX Runtime refuses to reduce an empty tensor to a scalar
            output = _REDUCED.format(name, kind)
            graph.node.append(helper.make_node(kind, [name], [output], keepdims=1))
            graph.output.append(helper.make_empty_tensor_value_info(output))
            added.append(output)
    return added


def _reduce(values: Mapping[str, np.ndarray], name: str) -> Range:
    low, high, total = (values[_REDUCED.format(name, kind)] for kind in _REDUCTIONS)
    if np.isnan(total).any():
        return Range(math.nan, math.nan)
    return Range(*(float(ends.item()) if ends.size else 0.0 for ends in (low, high)))


def _merge(so_far: Range, seen: Range) -> Range:
    return seen if math.isnan(seen.low) else so_far.merge(seen)


def _add_outputs(graph: onnx.GraphProto, names: Mapping[str, object]) -> None:
    there = {value.name for value in graph.output}
    for name in names:
        if name not in there:
            graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape=None))


def _session(model: onnx.ModelProto) -> Any:
    options = session_options(None)
    # The graph runs as written: a fused node would compute a tensor otherwise than the graph says
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(
        model.SerializeToString(), sess_options=options, providers=["CPUExecutionProvider"]
    )


def _rows(feeds: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(feeds.values())))


def _cut(seen: Range, counts: TensorHistogram, method: str) -> Range:
    """Return the part of `seen` to keep: all of it if a value is infinite, as in a mask."""
    if method in ("minmax", "mixed") or not np.isfinite(seen.peak):
        return seen
    if method == "percentile":
        low, high = counts.percentile()
    else:
        high = counts.least_error() if method == "mse" else counts.least_divergence()
        low = -high
    return Range(max(seen.low, low), min(seen.high, high))
