"""Make a typed graph and judge it: what `quantize` does once and `--to auto` often."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.evidence import Evaluation
from deploykit.core.precision import ALL, BY_NAME, CAST
from deploykit.core.tensors import TensorSpec

if TYPE_CHECKING:
    from deploykit.measure.evaluate.metrics import Metric
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.calibrate import Calibration
    from deploykit.runtimes.data.samples import Samples


MOST_SAMPLES, MOST_BYTES = 32, 64 << 20


@dataclass(frozen=True)
class Job:
    """One model on its way to a lower precision: what it is judged on, and by what."""

    source: Graph
    calib: Samples | None
    test: Samples | None
    metric: Metric | None
    max_drop: float | None
    min_sqnr_db: float | None
    runtime: str
    calibration: Calibration | None
    batch_size: int = MOST_SAMPLES  # of one call


def typed_graph(
    job: Job,
    to: str,
    rest: str = "fp32",
    wide: Collection[str] = (),
) -> tuple[Graph, list[str]]:
    """The source in precision `to` but for the nodes named in `wide`, and notes on what is not."""
    from deploykit.quantization.convert import convert

    typed, kept = convert(
        job.source, to, job.calibration, runtime=job.runtime, other_nodes=rest, keep_float32=wide
    )
    half = to if BY_NAME[to].writer == CAST else rest
    return typed, _half_notes(job, half, kept) if half != "fp32" else []


def judged(job: Job, typed: Graph, name: str) -> Evaluation:
    """`typed` against the float32 model, on labelled, calibration or random samples.

    A graph for TensorRT is run with every float16 and bfloat16 tensor rounded through its type, as
    half arithmetic does; one for ONNX Runtime is run as it will be.
    """
    from deploykit.measure.evaluate.evaluation import evaluate
    from deploykit.runtimes.engine import load

    with (
        tempfile.TemporaryDirectory(dir=typed.path.parent, prefix=".judged.") as folder,
        opened(job, typed, Path(folder)) as candidate,  # first: it needs the most memory to open
        load(job.source.path, "cpu") as reference,
    ):
        return evaluate(
            reference,
            candidate,
            samples=job.test or job.calib,
            metric=job.metric,
            max_drop=job.max_drop,
            min_sqnr_db=job.min_sqnr_db,
            names=(job.source.path.name, name),
            batch_size=job.batch_size,
        )


def opened(job: Job, typed: Graph, folder: Path) -> Any:
    from deploykit.onnx_graph.graph import dtype_name
    from deploykit.quantization import simulate
    from deploykit.runtimes.engine import load
    from deploykit.runtimes.onnxruntime.engine import open_as_written

    if job.runtime == "onnxruntime":
        return load(typed.path, "cpu")
    types = {dtype_name(kind) for kind in typed.element_types.values()}
    if not any(each.simulated and each.dtype in types for each in ALL):
        return load(typed.path, "cpu")
    rounded = simulate.simulate(typed).save(folder / "rounded.onnx")
    return open_as_written(rounded.path)


def _half_notes(job: Job, half: str, kept: Collection[str]) -> list[str]:
    notes = []
    if kept:
        notes.append(f"kept in float32, too close to float16's limit: {', '.join(kept)}")
    if half == "fp16" and job.calibration is None:
        notes.append("activations not checked for float16 overflow: no calibration data (--calib)")
    return notes + [BY_NAME[half].cpu_note] * bool(BY_NAME[half].cpu_note)


def axis_sizes(samples: Samples | None, inputs: Sequence[TensorSpec], batch: int) -> dict[str, int]:
    """The sizes of the dynamic axes in `samples`, with `batch` at axis 0."""
    if samples is None:
        return {str(spec.shape[0]): batch for spec in inputs if spec.batched}
    return {
        axis: batch if place == 0 else size
        for spec in inputs
        for place, (axis, size) in enumerate(
            zip(spec.shape, samples.inputs[spec.name].shape, strict=True)
        )
        if isinstance(axis, str)
    }


def batch_that_fits(source: Graph, sizes: Mapping[str, int]) -> int:
    """Samples for one call: 32, fewer where the largest tensor of one sample is large.

    `sizes`: of the dynamic axes at batch 1. Two engines run, each holding some such tensors.
    """
    from deploykit.quantization import cost

    largest = max((each.write_bytes or 0 for each in cost.node_costs(source, sizes)), default=0)
    return max(1, min(MOST_SAMPLES, MOST_BYTES // max(largest, 1)))
