"""Run data through a float32 graph once and note the range of every tensor.

In: an `.onnx` file and samples. Out: a `Calibration`, tensor name -> `Range`. The same one serves
the range guard of `halves` and the scales of `qdq`.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.extras import require
from deploykit.runtimes.data import Samples
from deploykit.runtimes.onnxruntime import onnxruntime_errors, session_options
from deploykit.transforms.checks import MAX_BYTES
from deploykit.transforms.graph import element_types, load_graph, specs

ort = require("onnxruntime")
ort_calibrate = require("onnxruntime.quantization.calibrate")

METHODS = ("minmax", "percentile")
MIN_SAMPLES = 8  # fewer say nothing of a range: one odd sample would set every scale
PERCENTILE = 99.99
_BINS = 2048
_REDUCTIONS = ("ReduceMin", "ReduceMax", "ReduceSum")


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

    Only "minmax" holds every value seen: "percentile" leaves outliers out on purpose, which can
    serve INT8 scales and is wrong for the range guard of float16.
    """

    ranges: Mapping[str, Range]
    samples: int
    method: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "samples": self.samples,
            "ranges": {name: [r.low, r.high] for name, r in self.ranges.items()},
        }


def calibrate(
    path: Path, samples: Samples, *, method: str = "minmax", batch_size: int = 32
) -> Calibration:
    """Ranges of the inputs and of every float tensor of the main graph; `samples` fit its inputs.

    "minmax" reduces inside the graph and keeps two numbers a tensor; "percentile" (the middle
    99.99 % of the values) keeps a histogram of each, and one batch of every tensor in memory.
    A graph with a fixed batch runs at that size; samples that do not fill the last are left out.
    Raises BadInput for a wrong method, fewer than 8 samples, samples that are NaN, infinite or
    all the same, and for a model that itself gives NaN.
    """
    if method not in METHODS:
        raise BadInput(
            f"unknown calibration method '{method}'", hint="one of: " + ", ".join(METHODS)
        )
    if batch_size < 1:
        raise BadInput(f"batch size {batch_size} is below 1")
    check_samples(samples)
    model = load_graph(path)
    fixed = _fixed_batch(model)
    size = fixed or batch_size
    used = len(samples) // size * size if fixed else len(samples)
    if not used:
        raise BadInput(f"{samples.where}: {len(samples)} samples do not fill the batch of {size}")
    names = _float_tensors(model)
    outputs = _add_reductions(model, names) if method == "minmax" else _add_outputs(model, names)
    with onnxruntime_errors(path):
        session = _session(model)
        batches = (feeds for feeds in samples.batches(size) if _rows(feeds) == size or not fixed)
        runs = (dict(zip(outputs, session.run(outputs, feeds), strict=True)) for feeds in batches)
        ranges: dict[str, Range] = {}
        if method == "minmax":
            for values in runs:
                for name in names:
                    seen = _reduced(values, name)
                    ranges[name] = ranges[name].merge(seen) if name in ranges else seen
                    if math.isnan(seen.low):
                        ranges[name] = seen
        else:
            ranges = _clipped(runs)
    for name, seen in ranges.items():
        if math.isnan(seen.low) or math.isnan(seen.high):
            raise BadInput(
                f"{path}: tensor '{name}' is NaN on the calibration data {samples.where}",
                hint="the float32 model itself fails on these samples",
            )
    return Calibration({name: ranges[name] for name in names if name in ranges}, used, method)


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


def _float_tensors(model: onnx.ModelProto) -> list[str]:
    """The float32 inputs and node outputs of the main graph, in the order they are computed."""
    types = element_types(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in constants]
    names += [name for node in model.graph.node for name in node.output if name]
    return [name for name in names if types.get(name) == TensorProto.FLOAT]


def _fixed_batch(model: onnx.ModelProto) -> int | None:
    """The size of axis 0 where no input has a dynamic one."""
    inputs = specs(model)[0]
    sizes = [spec.shape[0] for spec in inputs if spec.shape]
    return (
        next((n for n in sizes if isinstance(n, int)), None)
        if all(not spec.batched for spec in inputs)
        else None
    )


def _add_reductions(model: onnx.ModelProto, names: list[str]) -> list[str]:
    """Make least, largest and sum of each tensor an output; returns the new outputs.

    The sum is there for NaN, which ONNX Runtime's ReduceMin and ReduceMax leave out.
    """
    added = []
    for name in names:
        for kind in _REDUCTIONS:
            # keepdims: ONNX Runtime refuses to reduce an empty tensor to a scalar
            output = _reduction(name, kind)
            model.graph.node.append(helper.make_node(kind, [name], [output], keepdims=1))
            model.graph.output.append(helper.make_empty_tensor_value_info(output))
            added.append(output)
    return added


def _reduction(name: str, kind: str) -> str:
    return f"{name}/deploykit.{kind}"


def _reduced(values: Mapping[str, np.ndarray], name: str) -> Range:
    low, high, total = (values[_reduction(name, kind)] for kind in _REDUCTIONS)
    if np.isnan(total).any():
        return Range(math.nan, math.nan)
    return Range(_least(low), _most(high))


def _add_outputs(model: onnx.ModelProto, names: list[str]) -> list[str]:
    there = {value.name for value in model.graph.output}
    for name in names:
        if name not in there:
            model.graph.output.append(
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape=None)
            )
    return names


def _session(model: onnx.ModelProto) -> Any:
    if model.ByteSize() > MAX_BYTES:
        raise Unsupported("a model larger than 2 GiB cannot be calibrated in this version")
    options = session_options(None)
    # as written: a fused node would compute a tensor otherwise than the graph says
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(
        model.SerializeToString(), sess_options=options, providers=["CPUExecutionProvider"]
    )


def _rows(feeds: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(feeds.values())))


def _least(values: np.ndarray) -> float:
    return float(values.min()) if values.size else 0.0


def _most(values: np.ndarray) -> float:
    return float(values.max()) if values.size else 0.0


def _clipped(runs: Iterator[dict[str, np.ndarray]]) -> dict[str, Range]:
    """Ranges without the outermost values, from ONNX Runtime's histograms."""
    collector = ort_calibrate.HistogramCollector(
        method="percentile",
        symmetric=False,
        num_bins=_BINS,
        num_quantized_bins=_BINS,
        percentile=PERCENTILE,
        scenario="same",
    )
    infinite: dict[str, Range] = {}  # no histogram can hold these: an attention mask of -inf, say
    for values in runs:
        for name, array in values.items():
            if not np.isfinite(array).all():
                seen = Range(_least(array), _most(array))
                infinite[name] = seen.merge(infinite.get(name, seen))
        collector.collect_value({k: v for k, v in values.items() if k not in infinite})
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its settings
        found = collector.compute_percentile()
    ranges = {name: Range(float(found[name][0]), float(found[name][1])) for name in found}
    return ranges | infinite
