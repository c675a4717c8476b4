"""Set the scales of a precision: smooth outliers, and choose the calibrator that loses least.

No calibrator is best for every model, and the error at each tensor does not show which one is:
the errors at the outputs do (`benchmarks/calibrators.py`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from deploykit.api.evaluate import (
    Job,
    QuantizeRequest,
    calibrate_in_time,
    convert_graph,
    left_out,
)
from deploykit.api.feeds import axis_sizes
from deploykit.api.open_graph import open_graph
from deploykit.core.errors import BadInput
from deploykit.core.evidence import CalibrationRecord
from deploykit.core.files import sha256
from deploykit.core.precision import BY_NAME, PAIRS
from deploykit.core.runtime import RUNTIMES

if TYPE_CHECKING:
    import numpy as np

    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.budget import Pace
    from deploykit.quantization.calibrate import Calibration
    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.engine import Arrays, Engine

# Samples to choose on: an eighth of them, and more as long as a calibrator costs fewer operations
LEAST_SHARE, OPERATIONS = 1 / 8, 1e11
# On the first few of them a calibrator is out that does not gain a quarter of a decibel
FEW, WORTH = 8, 0.06
# What cuts more, or less, than one that is out is not tried
_FURTHER = {"entropy": "mse", "minmax": "percentile"}
_SHARE = 1 / 4  # of the time left, for the trials of the calibrators
EQUAL = 1e-8  # noise by signal of two graphs that compute the same


def calibrate_for(job: Job, to: str, folder: Path, *, smoothquant: bool = False) -> Job:
    """The job with the graph and the ranges that `to` is written from.

    `smoothquant`: smooth outliers first, as also where the request asks for it; the ranges are then
    those of the smoothed graph. `folder`: for temporary files. Raises BadInput where there are no
    outliers to smooth.
    """
    if BY_NAME[to].writer != PAIRS or job.calibration is None or job.calib is None:
        return job
    smoothquant |= job.request.smoothquant
    if not smoothquant and len(job.calibration.cut) < 2:
        return job  # a calibrator was named
    with tempfile.TemporaryDirectory(dir=folder, prefix=".calibrators.") as name:
        pace = job.budget.pace(_SHARE) if job.budget else None
        reference = _reference(job)
        if smoothquant:
            job = _smooth(job, reference, Path(name))
        return _choose(job, to, reference, Path(name), pace)


_Reference: TypeAlias = "list[tuple[Arrays, list[np.ndarray]]]"  # batches: inputs, outputs


def _choose(job: Job, to: str, reference: _Reference, folder: Path, pace: Pace | None) -> Job:
    """The job with the first calibrator, or that which is seen to make less noise at the outputs.

    `pace`: where it has no time for all of them, of those that were tried, else the first.
    """
    calibration, record = job.calibration, job.calibration_record
    if calibration is None or record is None or len(calibration.cut) < 2:
        return job
    import numpy as np

    other_nodes = job.request.other_nodes if to == job.request.to else "fp32"
    trials = replace(calibration, weights={})
    cut = calibration.cut
    twins = {each: next(other for other in cut if cut[other] == cut[each]) for each in cut}
    first, *others = dict.fromkeys(twins.values())
    noise: dict[str, np.ndarray] = {}  # of each sample
    late: list[str] = []

    def run(methods: Iterable[str], batches: _Reference) -> None:
        for method in methods:
            if pace and pace.out_of_time():
                late.append(method)
                continue
            tried = replace(job, calibration=trials.using(method))
            found = _trial(tried, to, other_nodes, batches, folder)
            noise[method] = np.concatenate([noise.get(method, found[:0]), found])

    few = math.ceil(FEW / max(_rows(reference[:1]), 1))
    run([first, *(each for each in others if each not in _FURTHER)], reference[:few])
    for each in (each for each in others if each in _FURTHER):
        near = noise.get(twins[_FURTHER[each]])
        works = first in noise and math.isfinite(noise[first].mean())
        if near is None or not works or _gains(noise[first], near):
            run([each], reference[:few])
    left = [each for each in noise if each != first and _gains(noise[first], noise[each])]
    if reference[few:] and left:
        run([first, *left], reference[few:])
    best = _least_noise({each: noise[each] for each in (first, *left) if each in noise}) or first
    noise |= {each: noise[twin] for each, twin in twins.items() if twin in noise}
    shares = {method: float(rows.mean()) for method, rows in noise.items()}
    floating = any(array.dtype.kind == "f" for _, outputs in reference for array in outputs)
    sqnr_db = {
        method: _decibels(share)
        for method, share in shares.items()
        if floating and share < math.inf
    }
    record = replace(record, method=best, sqnr_db=sqnr_db)
    missing = ", ".join(each for each in cut if twins[each] in late and each not in noise)
    notes = (f"{to.upper()} by {best}: no time to try {missing}",) if missing else ()
    job = replace(job, calibration=calibration.using(best), calibration_record=record)
    return replace(job, notes=(*job.notes, *notes))


def _trial(job: Job, to: str, other_nodes: str, reference: _Reference, folder: Path) -> np.ndarray:
    """The noise of each sample at the outputs with the job's calibration."""
    from deploykit.runtimes.onnxruntime.engine import open_as_written

    graph = convert_graph(job, to, other_nodes)[0].save(folder / "tried.onnx", temporary=True)
    if RUNTIMES[job.request.runtime].on_cpu or other_nodes != "fp32":
        engine = open_graph(job.request.runtime, graph, folder)
    else:
        engine = open_as_written(graph.path)  # optimised, it would hold the weights in float32, too
    with engine:
        return _noise(engine, reference)


def _smooth(job: Job, reference: _Reference, folder: Path) -> Job:
    """The job of the smoothed graph, after the proof that this computes what the model does."""
    from deploykit.quantization.calibrate import AUTO, METHODS
    from deploykit.quantization.smoothquant import smooth
    from deploykit.runtimes.engine import load

    calibration, record, calib = job.calibration, job.calibration_record, job.calib
    if calibration is None or record is None or calib is None:
        return job
    peaks = calibration.channel_peaks
    if not peaks:
        peaks = calibrate_in_time(job.source, calib, METHODS[0], job.budget).channel_peaks
    graph, names = smooth(job.source, peaks)
    if not names:
        raise BadInput(
            "`smoothquant`: no LayerNormalization before a MatMul or Gemm has outlier channels",
            hint="leave it out: there is nothing to smooth",
        )
    with load(graph.save(folder / "smoothed.onnx", temporary=True).path, "cpu") as engine:
        share = float(_noise(engine, reference).mean())
    if share > EQUAL:
        raise BadInput(
            f"`smoothquant`: the smoothed graph does not compute what {job.model.name} does "
            f"(SQNR {_decibels(share):.0f} dB in float32)",
            hint="leave it out",
        )
    found = calibrate_in_time(graph, calib, job.request.calibrator or AUTO, job.budget)
    found = replace(found, every_output=calibration.every_output)  # of the model itself
    return replace(
        job,
        source=graph,
        calibration=found,
        calibration_record=replace(record, smoothed=names, samples=found.samples),
        notes=(*job.notes, *left_out(calib, found)),
    )


def places_to_choose_on(source: Graph, calib: Samples, batch_size: int) -> Iterator[np.ndarray]:
    """Batches of calibration samples, by their numbers, from the beginning to the end of the data.

    The first few are spread over it as well.
    """
    import numpy as np

    from deploykit.onnx_graph import cost

    least, used = calib.batching(batch_size, source.inputs)
    costs = cost.node_costs(source, axis_sizes(calib, source.inputs, 1))
    operations = sum(each.flops or 0 for each in costs)
    wanted = max(least, int(used * LEAST_SHARE), int(OPERATIONS / max(operations, 1)))
    places = np.arange(0, used, max(1, used // wanted))
    early = places[:: max(1, len(places) // FEW)][:FEW]
    places = np.concatenate([early, np.setdiff1d(places, early)])
    size, _ = calib.batching(min(FEW, batch_size), source.inputs)
    whole = len(places) if size < least else len(places) // size * size  # a fixed batch is filled
    for start in range(0, whole, size):
        yield places[start : start + size]


def calibration_record(
    request: QuantizeRequest, calibration: Calibration | None, method: str, doubts: Sequence[str]
) -> CalibrationRecord | None:
    if calibration is None or request.calib is None:
        return None
    digest = sha256(request.calib) if request.calib.is_file() else ""
    return CalibrationRecord(not doubts, "; ".join(doubts), method, calibration.samples, digest)


def _reference(job: Job) -> _Reference:
    """Calibration samples, and the model's outputs for them."""
    if job.calib is None or job.calibration is None:
        return []
    inputs, kept = job.calib.inputs, job.calibration.outputs
    return [({n: a[rows] for n, a in inputs.items()}, outputs) for rows, outputs in kept]


def _rows(reference: _Reference) -> int:
    return sum(len(next(iter(feeds.values()))) for feeds, _ in reference)


def _gains(first: np.ndarray, other: np.ndarray) -> bool:
    """Whether the other makes less noise by a quarter of a decibel."""
    return bool(other.mean() < (1 - WORTH) * first.mean())


def _least_noise(noise: Mapping[str, np.ndarray]) -> str | None:
    """The first, but for one that makes less noise by more than chance would: by a standard error.

    The least alone is a choice by few samples: what it wins on these it may lose on all others.
    """
    first = next(iter(noise), None)
    for method in sorted(noise, key=lambda each: float(noise[each].mean())):
        if first is None or method == first:
            break
        rows = min(len(noise[first]), len(noise[method]))
        less = noise[first][:rows] - noise[method][:rows]
        if not math.isfinite(less.mean()) or less.mean() > less.std() / math.sqrt(max(rows - 1, 1)):
            return method
    return first


def _noise(engine: Engine, reference: _Reference) -> np.ndarray:
    """Noise energy of each sample by the signal energy in its batch, the mean of floating outputs.

    Where all outputs are integers: the share that differs.
    """
    import numpy as np

    found = []
    for feeds, wanted in reference:
        rows = _rows([(feeds, wanted)])
        pairs = list(zip(wanted, engine(feeds).values(), strict=True))
        pairs = [pair for pair in pairs if pair[0].dtype.kind == "f"] or pairs
        found.append(sum(_by_row(a, b, rows) for a, b in pairs) / len(pairs))
    return np.concatenate(found)


def _by_row(wanted: np.ndarray, got: np.ndarray, rows: int) -> np.ndarray:
    """The noise of one output, whose mean is that of the batch; even where it has no rows."""
    import numpy as np

    from deploykit.quantization.search import noise_share

    share = noise_share([wanted], [got])
    if wanted.shape != got.shape or wanted.shape[:1] != (rows,) or not 0 < share < math.inf:
        return np.full(rows, share)
    there = np.isfinite(wanted)
    energy = (np.where(there, wanted, 0) - np.where(there, got, 0).astype(np.float64)) ** 2
    by_row = energy.reshape(rows, -1).sum(axis=1)
    return np.asarray(share * rows * by_row / by_row.sum())


def _decibels(share: float) -> float:
    return -10 * math.log10(share) if share else math.inf
