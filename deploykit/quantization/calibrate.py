"""Run data through a float32 graph once and record the range of every tensor.

The same `Calibration` serves the range guard of float16 (every value seen) and the scales of INT8
and FP8 (outliers left out, where the method does so).

Which method loses least depends on the model (`benchmarks/README.md`): all share the one pass,
and the caller chooses by the error that each makes at the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.runtime import TARGET_RUNTIMES
from deploykit.engines.data.samples import Samples, check_finite
from deploykit.engines.onnxruntime.engine import onnxruntime_errors, session_options
from deploykit.evaluation.feeds import axis_sizes
from deploykit.graph import cost
from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.quantization.formats import TensorHistogram, transposed
from deploykit.quantization.qdq_placement import place_pairs, quantizable_nodes

ort = require("onnxruntime")

Kept: TypeAlias = tuple[np.ndarray, list[np.ndarray]]  # numbers of samples, the outputs for them
METHODS = ("mixed", "percentile", "mse", "minmax")  # the first is the default
MIN_SAMPLES = 8  # fewer say nothing of a range: one odd sample would set every scale
MOST_BYTES = 1 << 28  # limit of one batch's activations, and of kept outputs
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
    "minmax". `outputs`: the model's, for batches of samples that the caller named.
    """

    ranges: Mapping[str, Range]
    clipped: Mapping[str, Range]
    samples: int
    method: str
    cut: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    channel_peaks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
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
            it makes much less, else "percentile".
        batch_size: smaller where a batch would need more than 256 MiB of activations.
        places: batches of samples, by their numbers, whose outputs are kept up to 256 MiB.

    Raises:
        BadInput: fewer than 8 samples, samples that are NaN, infinite or all the same, and a model
            that itself gives NaN.
    """
    check_samples(samples)
    counted = {} if method == "minmax" else _histograms(graph)
    editor = Editor(graph)
    # Weights are fed at each run instead of being built into the session: they are in memory once,
    # without a limit of 2 GiB, as ONNX Runtime takes the arrays without a copy.
    fed = [value.name for value in editor.graph.input if value.name not in editor.inputs]
    weights = {name: editor.array(name) for name in fed}
    names = _float_tensors(graph)
    costs = cost.node_costs(graph, axis_sizes(samples, graph.inputs, 1))
    needed = 2 * sum(each.write_bytes or 0 for each in costs)  # fused nodes are separate here
    most = max(1, min(batch_size, MOST_BYTES // max(needed, 1)))
    size, used = samples.batching(most, graph.inputs)
    own = [value.name for value in editor.graph.output]
    outputs = _add_outputs(editor.graph, [n for n in names if n not in counted], counted)
    ranges: dict[str, Range] = {}
    kept, kept_bytes = list[Kept](), 0
    options = session_options(None)
    # The graph runs as written: a fused node would compute a tensor otherwise than the graph says
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with onnxruntime_errors(graph.path):
        session = ort.InferenceSession(
            editor.model.SerializeToString(),
            sess_options=options,
            providers=["CPUExecutionProvider"],
        )
        for feeds in samples.first(used).batches(size):
            found = session.run(outputs, {**feeds, **weights})
            values = dict(zip(outputs, found, strict=True))
            nan = []  # a 0/0 that a Where leaves out makes no answer NaN
            for name in names:
                if name in counted:
                    seen = Range(*counted[name].add(values[name]))
                    has_nan = counted[name].has_nan
                else:
                    ends = (values[_REDUCED.format(name, kind)] for kind in _REDUCTIONS)
                    low, high, total = (float(end.item()) if end.size else 0.0 for end in ends)
                    seen = Range(low, high) if low <= high else Range(0.0, 0.0)
                    has_nan = total != total
                nan += [name] * has_nan
                ranges[name] = ranges.get(name, seen).merge(seen)
            answers = session.run(own, {**feeds, **weights}) if nan else []
            if any(np.isnan(each).any() for each in answers if each.dtype.kind == "f"):
                raise BadInput(
                    f"{graph.path}: tensor '{nan[0]}' is NaN on the calibration data "
                    f"{samples.where}",
                    hint="the float32 model itself fails on these samples",
                )
        for rows in places:
            feeds = samples.rows(rows)
            found = [each.copy() for each in session.run(own, {**feeds, **weights})]
            kept.append((rows, found))
            kept_bytes += sum(each.nbytes for each in found)
            if kept_bytes > MOST_BYTES:
                break
    return replace(_choose_ranges(ranges, counted, used, method), outputs=tuple(kept))


def _choose_ranges(
    ranges: Mapping[str, Range], counted: Mapping[str, TensorHistogram], samples: int, method: str
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
        if not array.size:
            raise BadInput(
                f"{samples.where}: input '{name}' is empty in all samples, {list(array.shape)}: no "
                "range can be learned",
                hint="give samples of later steps, in which it holds values",
            )
    check_finite(samples)
    arrays = map(samples.each, samples.inputs)
    if all((array == array[:1]).all() for array in arrays):
        raise BadInput(
            f"{samples.where}: all {len(samples)} samples are the same: no range can be learned"
        )


def _histograms(graph: Graph) -> dict[str, TensorHistogram]:
    """Return one for each tensor that a placement of `qdq` may give its own scale."""
    editor = Editor(graph)
    fold(editor)
    placed = [place_pairs(editor, target) for target in TARGET_RUNTIMES]
    scaled = {name for each in placed for name in each.scaled.values()}
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


def _add_outputs(graph: onnx.GraphProto, reduced: Sequence[str], whole: Iterable[str]) -> list[str]:
    """Make least, largest and sum of the `reduced` tensors outputs, and `whole` ones; their names.

    The sum is there for NaN, which ONNX Runtime's ReduceMin and ReduceMax leave out.
    """
    added = []
    for name in reduced:
        for kind in _REDUCTIONS:
            # keepdims: ONNX Runtime refuses to reduce an empty tensor to a scalar
            output = _REDUCED.format(name, kind)
            graph.node.append(helper.make_node(kind, [name], [output], keepdims=1))
            graph.output.append(helper.make_empty_tensor_value_info(output))
            added.append(output)
    there = {value.name for value in graph.output}
    for name in whole:
        if name not in there:
            graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape=None))
        added.append(name)
    return added


def _cut(seen: Range, counts: TensorHistogram, method: str) -> Range:
    """Return the part of `seen` to keep: all of it if a value is infinite, as in a mask."""
    if method in ("minmax", "mixed") or not np.isfinite(seen.peak):
        return seen
    if method == "percentile":
        low, high = counts.percentile()
    else:
        high = counts.least_error()
        low = -high
    return Range(max(seen.low, low), min(seen.high, high))
