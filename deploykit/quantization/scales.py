"""Write a graph in another precision, and choose what the scales of INT8 and FP8 are written from.

No calibrator is best for every model, and the error at each tensor does not show which one is: the
errors at the outputs do (`benchmarks/README.md`). So does whether smoothing LayerNorms pays.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeAlias

import numpy as np
import onnx

from deploykit.core.errors import BadInput
from deploykit.core.evidence import CalibrationRecord
from deploykit.core.precision import BY_NAME, CAST, DYNAMIC, WEIGHTS
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.engines.onnxruntime.engine import open_as_written
from deploykit.evaluation.feeds import axis_sizes
from deploykit.graph import cost
from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.graph.storage import read_names
from deploykit.quantization import half_precision, qdq, weights
from deploykit.quantization.calibrate import MOST_BYTES, calibrate, noise_share
from deploykit.quantization.half_precision import open_graph
from deploykit.quantization.qdq import Calibration, by_rows, is_set, quantizable_nodes

# The choice uses an eighth of the samples, and more as long as a calibrator costs fewer operations
LEAST_SHARE, OPERATIONS = 1 / 8, 5e10
FEW, WORTH = 8, 0.06  # samples per call; the share of the noise that a choice must gain: 0.27 dB
OUTLIERS = 8.0  # largest peak of a channel by the usual one: below it smoothing is not tried

# the number of samples, the inputs, and the model's outputs
Batches: TypeAlias = list[tuple[int, Arrays, list[np.ndarray]]]


@dataclass(frozen=True)
class Scales:
    """The graph, smoothed or not, and the calibration that a precision is written from."""

    graph: Graph
    calibration: Calibration | None = None
    record: CalibrationRecord | None = None
    notes: tuple[str, ...] = ()


def convert(
    source: Graph,
    to: str,
    calibration: Calibration | None = None,
    *,
    runtime: str = "tensorrt",
    other_nodes: str = "fp32",
    keep_float32: Collection[str] = (),
) -> tuple[Graph, tuple[str, ...]]:
    """Return the graph in `to`, and the nodes that float16's range guard kept in float32.

    `keep_float32`: names of nodes to leave as they are. `other_nodes`: the precision of the nodes
    around 8-bit ones and stored weights. Raises BadInput as the writers do, and where `to` needs a
    calibration and there is none.
    """
    precision, ranges = BY_NAME[to], calibration.ranges if calibration else None
    if precision.writer == CAST:
        return half_precision.to_half(
            source, to, ranges, keep_float32=keep_float32, runtime=runtime
        )
    if precision.writer == WEIGHTS:
        typed = weights.to_weight_only(source, to)
    elif precision.writer == DYNAMIC:
        typed = weights.to_dynamic(source, keep_float32=keep_float32)
    elif calibration is None:
        raise BadInput(
            f"{to} needs calibration data", hint="`calib`: an .npz or a folder, 100 samples"
        )
    else:
        typed = qdq.to_pairs(source, calibration, to, runtime=runtime, keep_float32=keep_float32)
    if other_nodes == "fp32":
        return typed, ()
    return half_precision.to_half(typed, other_nodes, ranges, runtime=runtime)


def choose_scales(
    scales: Scales,
    samples: Samples,
    to: str,
    *,
    runtime: str,
    other_nodes: str,
    folder: Path,
    batch_size: int,
) -> Scales:
    """Return `scales` with the calibrator and smoothing that make the least noise in `to`.

    Args:
        scales: calibrated on `samples`, of a graph that is in its file.
        samples: the calibration data.
        to: "int8" or "fp8".
        runtime, other_nodes: as in `convert`.
        folder: for temporary files.
        batch_size: the most samples per call.
    """
    calibration = scales.calibration
    if calibration is None or not calibration.cut:
        return scales
    batches = _batches(scales.graph, calibration, samples, batch_size)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".calibrators.") as name:
        trials = _Trials(to, runtime, other_nodes, batches, Path(name))
        best, noise = trials.choose(scales, calibration)
        peaks = {
            name: each
            for name, each in calibration.channel_peaks.items()
            if max(each) > OUTLIERS * median(each)
        }
        norms = any(n.op_type == "LayerNormalization" for n in scales.graph.skeleton.graph.node)
        if not (peaks and norms):
            return best
        graph, names = smooth(scales.graph, peaks)
        if not names:
            return best
        again = calibrate(graph, samples, batch_size=batch_size)
        record = scales.record and replace(scales.record, smoothed=names)
        smoothed, less = trials.choose(Scales(graph, again, record, scales.notes), again)
        rows = min(len(noise), len(less))  # of the first batch, or of all
        return smoothed if _gains(noise[:rows], less[:rows]) else best


def _batches(graph: Graph, found: Calibration, samples: Samples, batch_size: int) -> Batches:
    """Return the samples to choose on, with the outputs that the calibration kept, or new ones.

    The new ones end with the batch that makes them more than 256 MiB.
    """
    places = places_to_choose_on(graph, samples, batch_size)
    if known := found.outputs.values():
        return [(len(rows), samples.rows(rows), [a[rows] for a in known]) for rows in places]
    batches: Batches = []
    with load(graph.path, "cpu") as engine:
        for rows in places:
            feeds = samples.rows(rows)
            batches.append((len(rows), feeds, [*engine(feeds).values()]))
            if sum(array.nbytes for *_, each in batches for array in each) > MOST_BYTES:
                break
    return batches


@dataclass(frozen=True)
class _Trials:
    """Writes one precision with one calibration after the other, and measures the noise."""

    to: str
    runtime: str
    other_nodes: str
    batches: Batches
    folder: Path

    def choose(self, scales: Scales, calibration: Calibration) -> tuple[Scales, np.ndarray]:
        """Choose the first calibrator, or the one that is seen to make less noise.

        The others run on more than the first batch only if one of them gains there. The second
        result is the noise of each sample.
        """
        cut = calibration.cut
        twins = {each: next(other for other in cut if cut[other] == cut[each]) for each in cut}
        first, *others = dict.fromkeys(twins.values())

        def run(methods: Iterable[str], batches: Batches) -> dict[str, np.ndarray]:
            trials = {
                each: replace(scales, calibration=calibration.using(each)) for each in methods
            }
            return {each: self.noise(trial, batches) for each, trial in trials.items()}

        noise = run((first, *others), self.batches[:1])
        left = [each for each in others if _gains(noise[first], noise[each])]
        if left and self.batches[1:]:
            more = run((first, *left), self.batches[1:])
            noise = {each: np.concatenate([noise[each], rows]) for each, rows in more.items()}
        best = least_noise(noise)
        shown = {each: noise[twin] for each, twin in twins.items() if twin in noise}
        record = scales.record and replace(scales.record, method=best, sqnr_db=self._sqnr_db(shown))
        return replace(scales, calibration=calibration.using(best), record=record), noise[best]

    def noise(self, scales: Scales, batches: Batches) -> np.ndarray:
        """Return the noise of each sample at the outputs with these scales."""
        typed, _ = convert(
            scales.graph,
            self.to,
            scales.calibration,
            runtime=self.runtime,
            other_nodes=self.other_nodes,
        )
        graph = typed.save(self.folder / "tried.onnx", temporary=True)
        if RUNTIMES[self.runtime].on_cpu or self.other_nodes != "fp32":
            engine = open_graph(self.runtime, graph, self.folder)
        else:
            engine = open_as_written(graph.path)  # optimised, it would hold float32 weights, too
        with engine:
            return _noise(engine, batches)

    def _sqnr_db(self, noise: Mapping[str, np.ndarray]) -> dict[str, float]:
        shares = {method: float(rows.mean()) for method, rows in noise.items()}
        floating = any(array.dtype.kind == "f" for *_, outputs in self.batches for array in outputs)
        return {
            method: -10 * math.log10(share) if share else math.inf
            for method, share in shares.items()
            if floating and share < math.inf
        }


def places_to_choose_on(source: Graph, calib: Samples, batch_size: int) -> Iterator[np.ndarray]:
    """Batches of calibration samples, by their numbers; the first ones span all data as well."""
    least, used = calib.batching(batch_size, source.inputs)
    costs = cost.node_costs(source, axis_sizes(calib, source.inputs, 1))
    operations = sum(each.flops or 0 for each in costs)
    wanted = max(least, int(used * LEAST_SHARE), int(OPERATIONS / max(operations, 1)))
    places = np.arange(0, used, max(1, used // wanted))
    turns = max(1, len(places) // FEW)
    places = np.concatenate([places[turn::turns] for turn in range(turns)])
    size, _ = calib.batching(min(FEW, batch_size), source.inputs)
    whole = len(places) if size < least else len(places) // size * size  # a fixed batch is filled
    for start in range(0, whole, size):
        yield places[start : start + size]


def _gains(first: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the other makes less noise by a quarter of a decibel."""
    return bool(other.mean() < (1 - WORTH) * first.mean())


def least_noise(noise: Mapping[str, np.ndarray]) -> str:
    """Return the first, or one that makes less noise: by WORTH, and by a standard error.

    The least alone is a choice by few samples: what it wins on these it may lose on all others.
    """
    first = next(iter(noise))
    for method in sorted(noise, key=lambda each: float(noise[each].mean())):
        if not _gains(noise[first], noise[method]):  # both may be infinite
            continue
        less = noise[first] - noise[method]
        error = less.std() / math.sqrt(max(len(less) - 1, 1)) if np.isfinite(less).all() else 0.0
        if less.mean() > error:
            return method
    return first


def _noise(engine: Engine, batches: Batches) -> np.ndarray:
    """Return each sample's noise energy by its batch's signal energy, averaged over float outputs.

    Where all outputs are integers, it is the share that differs.
    """
    found = []
    for rows, feeds, wanted in batches:
        pairs = list(zip(wanted, engine(feeds).values(), strict=True))
        pairs = [pair for pair in pairs if pair[0].dtype.kind == "f"] or pairs
        found.append(sum(noise_by_row(a, b, rows) for a, b in pairs) / len(pairs))
    return np.concatenate(found)


def noise_by_row(wanted: np.ndarray, got: np.ndarray, rows: int) -> np.ndarray:
    """The noise of one output, whose mean is that of the batch; even where it has no rows."""
    share = noise_share([wanted], [got])
    if wanted.shape != got.shape or wanted.shape[:1] != (rows,) or not 0 < share < math.inf:
        return np.full(rows, share)
    there = np.isfinite(wanted)
    energy = (np.where(there, wanted, 0) - np.where(there, got, 0).astype(np.float64)) ** 2
    by_row = energy.reshape(rows, -1).sum(axis=1)
    return np.asarray(share * rows * by_row / by_row.sum())


# SmoothQuant moves outliers of a LayerNorm's output into the weights of the MatMuls that read it.
# A channel that is a hundred times larger than the others sets the one scale of its tensor, and the
# others round to nothing. Dividing each channel by a factor, and multiplying the weights that it
# meets by the same, computes the same but rounds better: G. Xiao et al., "SmoothQuant", ICML 2023.
# Factors here are powers of two, so that float32 gives the same to the last bit.

ALPHA = 0.5  # the paper's share of the difficulty that moves into the weights


def smooth(
    source: Graph, channel_peaks: Mapping[str, Sequence[float]]
) -> tuple[Graph, tuple[str, ...]]:
    """Return the float32 graph with smoothed LayerNorms, and the outputs of these.

    `channel_peaks`: the largest magnitude in each channel of a LayerNorm's output; one that has
    none there is left alone. `source` stays as it is.
    """
    editor = Editor(source)
    fold(editor)
    constants, readers = editor.constants, dict[str, list[onnx.NodeProto]]()
    for place in quantizable_nodes(editor, ("Gemm", "MatMul")):
        node = editor.graph.node[place]
        if len(constants[node.input[1]].dims) == 2 and not is_set(node, "transA"):
            readers.setdefault(node.input[0], []).append(node)
    reads = Counter([*read_names(editor.graph), *(value.name for value in editor.graph.output)])
    nodes, done = list[onnx.NodeProto](), list[str]()
    for norm in editor.graph.node:
        nodes.append(norm)
        name = norm.output[0] if norm.output else ""
        if (
            norm.op_type != "LayerNormalization"
            or name not in channel_peaks.keys() & readers.keys()
            or any(each and each not in constants for each in norm.input[1:])
        ):
            continue
        peaks = np.asarray(channel_peaks[name], np.float64)
        factors = _factors(editor, readers[name], peaks)
        if (factors == 1).all():
            continue
        done.append(name)
        for node in readers[name]:
            _multiply(editor, node, 1, factors[:, None] if by_rows(node) else factors)
        if reads[name] == len(readers[name]):  # nothing else reads it: no node is added
            for place in range(1, len(norm.input)):
                _multiply(editor, norm, place, 1 / factors)
            continue
        inverse = editor.store(f"{name}_smoothing", (1 / factors).astype(np.float32))
        smoothed = editor.fresh(f"{name}_smoothed")
        nodes.append(editor.node("Mul", [name, inverse], smoothed))
        for node in readers[name]:
            node.input[0] = smoothed
    return editor.finish(nodes), tuple(done)


def _factors(editor: Editor, readers: Sequence[onnx.NodeProto], peaks: np.ndarray) -> np.ndarray:
    """Return each channel's divisor: sqrt(its peak / that of its weights), a power of two."""
    weights = np.zeros_like(peaks)
    for node in readers:
        magnitudes = np.abs(editor.array(node.input[1]))
        weights = np.maximum(weights, magnitudes.max(axis=1 if by_rows(node) else 0))
    known = (peaks > 0) & (weights > 0) & np.isfinite(peaks)
    ratio = np.log2(np.where(known, peaks, 1)) * ALPHA
    ratio -= np.log2(np.where(known, weights, 1)) * (1 - ALPHA)
    return np.asarray(np.exp2(np.rint(ratio - np.median(ratio))))


def _multiply(editor: Editor, node: onnx.NodeProto, place: int, factors: np.ndarray) -> None:
    name = node.input[place]
    if name:
        values = (editor.array(name) * factors).astype(np.float32)
        node.input[place] = editor.store(f"{name}_smoothed", values)
