"""Run data through a float32 graph once and record the range of every tensor.

The same `Calibration` serves the range guard of float16 (every value seen) and the scales of INT8
and FP8 (outliers left out, where the method does so).

Which method loses least depends on the model (`benchmarks/README.md`): all share the one pass,
and the caller chooses by the error that each makes at the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.runtime import TARGET_RUNTIMES
from deploykit.engines.batching import spread_places
from deploykit.engines.data.samples import Samples, check_finite
from deploykit.engines.onnxruntime.engine import onnxruntime_errors, session_options
from deploykit.evaluation.feeds import axis_sizes
from deploykit.graph import cost
from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.quantization.qdq import (
    TINY,
    Calibration,
    Range,
    by_rows,
    is_set,
    place_pairs,
    quantizable_nodes,
)

ort = require("onnxruntime")

METHODS = ("mixed", "percentile", "mse")  # the first is the default
MIN_SAMPLES = 8  # fewer say nothing of a range: one odd sample would set every scale
MOST_BYTES = 1 << 28  # limit of one batch's activations, and of kept outputs
PERCENTILE = 99.999  # measured best of 99.9 to 99.9999: benchmarks/quantizers.py
EQUAL = 1e-8  # noise by signal of two runs that compute the same: -80 dB
WORTH_CLIPPING = 10**0.07  # 0.7 dB: of 0.3, 0.7 and 1.5 the best in measurements
_CHECKED = 4  # samples that run once more, next to others
_SIDE = 4096  # bins on either side of zero
_CHUNK = 1 << 16  # values at a time: what fits into a core's cache
_LEVELS = 128  # levels of an INT8 magnitude
_CUTS = np.geomspace(1, 0.01, 64)  # shares of the peak that the search for the least error tries
_REDUCTIONS = ("ReduceMin", "ReduceMax", "ReduceSum")
_REDUCED = "{}/deploykit.{}"  # the name of an output: the tensor, the reduction


class TensorHistogram:
    """Counts of finite values in equal bins over [-limit, limit]; the limit doubles at need.

    `importance`: the weight of an error in each channel, which is the last axis of the values; None
    where all channels are the same.
    """

    def __init__(self, importance: np.ndarray | None = None) -> None:
        self.limit, self.has_nan = 0.0, False
        self.counts = np.zeros(2 * _SIDE, np.int64)
        self.importance = importance
        self.weighted = np.zeros(2 * _SIDE)  # the importance of the values in each bin, added up
        # the largest magnitude in each channel
        self.channel_peaks = np.zeros(0 if importance is None else len(importance), np.float32)

    def add(self, values: np.ndarray) -> tuple[float, float]:
        """Count the finite float32 `values`, of any shape; return the least and the largest.

        Afterwards `has_nan` says whether one of them was NaN.
        """
        flat, weights = values.reshape(-1), self.importance
        ends = low, high = _ends(flat)
        self.has_nan = math.isnan(low)
        if weights is not None and flat.size:
            rows = flat.reshape(-1, len(weights))
            seen = np.fmax(np.fmax.reduce(rows), -np.fmin.reduce(rows))
            self.channel_peaks = np.fmax(self.channel_peaks, seen)
        if self.has_nan:
            ends = low, high = _ends(flat[~np.isnan(flat)])
        if not (math.isfinite(low) and math.isfinite(high)) or self.has_nan:
            flat, weights = flat[np.isfinite(flat)], None
            low, high = _ends(flat)
        peak = max(high, -low)
        if peak > TINY:
            self.limit = self.limit or peak
            while peak > self.limit:
                self.counts, self.weighted = (
                    np.pad(each.reshape(-1, 2).sum(axis=1), _SIDE // 2)
                    for each in (self.counts, self.weighted)
                )
                self.limit *= 2
        if self.limit:
            self._count(flat, weights)
        else:  # nothing but zeros so far
            self.counts[_SIDE] += flat.size
        return ends

    def _count(self, flat: np.ndarray, weights: np.ndarray | None) -> None:
        per_bin = np.float32(_SIDE / self.limit)
        chunk = _CHUNK if weights is None else max(_CHUNK // len(weights), 1) * len(weights)
        repeated = None if weights is None else np.tile(weights, chunk // len(weights))
        for start in range(0, flat.size, chunk):
            scaled = flat[start : start + chunk] * per_bin
            scaled += np.float32(_SIDE)
            places = scaled.astype(np.intp)  # bincount wants this type
            self.counts += _count_values(places)
            if repeated is not None:
                self.weighted += _count_values(places, repeated[: len(places)])

    def percentile(self, share: float = PERCENTILE) -> tuple[float, float]:
        """Return the ends of the middle `share` per cent, to a bin."""
        tail = self.counts.sum() * (100 - share) / 200
        edges = np.linspace(-self.limit, self.limit, 2 * _SIDE + 1)
        low = int(np.argmax(np.cumsum(self.counts) > tail))
        high = 2 * _SIDE - int(np.argmax(np.cumsum(self.counts[::-1]) > tail))
        return min(float(edges[low]), 0.0), max(float(edges[high]), 0.0)

    def least_error(self) -> tuple[float, float]:
        """Return the ends at which INT8's rounding and clipping add up to the least squared error.

        Rounding costs a twelfth of a squared step, and no more than the value itself.
        """
        mass = self._mass()
        tops = _CUTS * (np.flatnonzero(mass).max(initial=0) + 1) / _SIDE
        peak = self.limit * float(min(tops, key=lambda top: _squared_error(mass, top)))
        return -peak, peak

    def gains(self, safe: float, least: float) -> bool:
        """Return whether [-least, least] makes much less squared INT8 error than [-safe, safe].

        Clipping for less may cut off what matters most at the outputs, which a tensor's own error
        does not show.
        """
        if not self.limit:
            return False
        errors = [_squared_error(self._mass(), peak / self.limit) for peak in (safe, least)]
        return errors[0] > WORTH_CLIPPING * errors[1]

    def _mass(self) -> np.ndarray:
        """Return the weight of each magnitude, smallest first."""
        counts = self.weighted if self.weighted.any() else self.counts
        mass: np.ndarray = (counts[_SIDE:] + counts[_SIDE - 1 :: -1]).astype(np.float64)
        mass[0] = 0.0  # zeros, of Relu or padding, are exact at any scale
        return mass


def _squared_error(mass: np.ndarray, top: float) -> float:
    """Return INT8's squared error. `top`: the largest value kept, where the last bin ends at 1."""
    values = (np.arange(_SIDE) + 0.5) / _SIDE
    rounded = np.minimum(values, top / (_LEVELS - 1) / math.sqrt(12))
    return float(mass @ np.where(values < top, rounded, values - top) ** 2)


def _ends(values: np.ndarray) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _count_values(places: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Count the values in each bin; the peak itself belongs to the last one."""
    found: np.ndarray = np.bincount(places, weights, 2 * _SIDE + 1)
    found[-2] += found[-1]
    return found[:-1]


def calibrate(
    graph: Graph,
    samples: Samples,
    *,
    method: str = METHODS[0],
    batch_size: int = 32,
) -> Calibration:
    """Return the ranges of the inputs and of every float tensor, and the model's outputs.

    Args:
        graph: in float32. One with a fixed batch runs at that size.
        samples: inputs of the graph. Samples that do not fill a fixed batch are left out.
        method: "minmax", every value, for the range guard alone: reduced inside the graph. The
            `METHODS` keep a histogram of each tensor that `qdq` may give a scale; all come from one
            pass, see `Calibration.using`. "percentile": the middle 99.999 % of the values. "mse":
            INT8 makes the least squared error at the MatMuls and Convs. "mixed": "mse" for the
            tensors where it makes much less, else "percentile".
        batch_size: smaller where a batch would need more than 256 MiB of activations.

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
    own = [spec.name for spec in graph.outputs]  # raises for one that is no tensor
    outputs = _add_outputs(editor.graph, [n for n in names if n not in counted], counted)
    outputs += [name for name in own if name not in counted]
    ranges: dict[str, Range] = {}
    kept, kept_bytes = list[dict[str, np.ndarray]](), 0
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
            answers = {name: values[name] for name in own}
            floats = [each for each in answers.values() if each.dtype.kind == "f"]
            if nan and any(np.isnan(each).any() for each in floats):
                raise BadInput(
                    f"{graph.path}: tensor '{nan[0]}' is NaN on the calibration data "
                    f"{samples.where}",
                    hint="the float32 model itself fails on these samples",
                )
            kept_bytes += sum(each.nbytes for each in answers.values())
            if kept_bytes <= MOST_BYTES:
                kept.append({name: each.copy() for name, each in answers.items()})
        known = _by_sample(kept, size, used) if kept_bytes <= MOST_BYTES else {}
        if known:
            few, _ = samples.batching(min(_CHECKED, batch_size), graph.inputs)
            rows = np.array(spread_places(used, few))
            again = session.run(own, {**samples.rows(rows), **weights})
            if noise_share([known[name][rows] for name in own], again) > EQUAL:
                known = {}
    return replace(_choose_ranges(ranges, counted, used, method), outputs=known)


def _by_sample(
    batches: Sequence[Mapping[str, np.ndarray]], size: int, samples: int
) -> dict[str, np.ndarray]:
    """Return the outputs of all batches, joined; none where one has not a row for each sample."""
    for start, batch in zip(range(0, samples, size), batches, strict=True):
        for name, array in batch.items():
            if array.shape != (min(size, samples - start), *batches[0][name].shape[1:]):
                return {}
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _choose_ranges(
    ranges: Mapping[str, Range], counted: Mapping[str, TensorHistogram], samples: int, method: str
) -> Calibration:
    if method == "minmax":
        return Calibration(ranges, ranges, samples, method)
    safe = {name: _cut(ranges[name], counts.percentile) for name, counts in counted.items()}
    least = {name: _cut(ranges[name], counts.least_error) for name, counts in counted.items()}
    mixed = {
        name: (least if counts.gains(safe[name].peak, least[name].peak) else safe)[name]
        for name, counts in counted.items()
    }
    cut = dict(zip(METHODS, (mixed, safe, least), strict=True))
    peaks = {
        name: tuple(counts.channel_peaks.tolist())
        for name, counts in counted.items()
        if counts.importance is not None
    }
    return Calibration(ranges, ranges, samples, method, cut, peaks).using(method)


def noise_share(wanted: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> float:
    """Return noise energy by signal energy, added up over the outputs.

    Places that are not finite in `wanted` are left out; a value that is not where `wanted` is
    finite makes it infinite. An integer output counts the share that differs, one of another shape
    counts 1.
    """
    total = 0.0
    for a, b in zip(wanted, got, strict=True):
        if a.shape != b.shape:  # a size that depends on the values, such as the number of boxes
            total += 1.0
            continue
        if a.dtype.kind in "biuO":
            total += float(np.mean(a != b)) if a.size else 0.0
            continue
        there = np.isfinite(a)
        x, y = a[there].astype(np.float64), b[there].astype(np.float64)
        if not np.isfinite(y).all():
            return math.inf
        signal, noise = float(np.sum(x**2)), float(np.sum((x - y) ** 2))
        total += noise / signal if signal > 0 else (math.inf if noise > 0 else 0.0)
    return total


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
        if is_set(node, "transA"):
            continue
        weight = editor.array(node.input[1])
        weight = weight.reshape(-1, *weight.shape[-2:])
        # einsum: a square of a large weight in float64 would need twice its memory
        energy = np.einsum("bkn,bkn->k" if by_rows(node) else "bnk,bnk->k", weight, weight)
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


def _cut(seen: Range, ends: Callable[[], tuple[float, float]]) -> Range:
    """Return the part of `seen` to keep: all of it if a value is infinite, as in a mask."""
    if not np.isfinite(seen.peak):
        return seen
    low, high = ends()
    return Range(max(seen.low, low), min(seen.high, high))
