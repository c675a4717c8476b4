"""Convert a graph to a lower precision and evaluate it: `quantize` does it once, `auto` often."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api import golden
from deploykit.api.artefacts import Progress
from deploykit.api.feeds import MOST_SAMPLES, axis_sizes, batch_that_fits
from deploykit.api.open_graph import open_graph, runs_graphs
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import (
    CalibrationRecord,
    Evaluation,
    Evidence,
    GoldenSamples,
    QuantizeRecord,
)
from deploykit.core.precision import BY_NAME, CALIBRATED, CAST
from deploykit.core.profile import Profile
from deploykit.core.tensors import BATCH

if TYPE_CHECKING:
    import numpy as np

    from deploykit.measure.evaluate.metrics import Metric
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.budget import Budget
    from deploykit.quantization.calibrate import Calibration
    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.engine import Engine

DEFAULT_METRIC = "top1"
_FEW_AGREE = 0.9
_CALIBRATION_SHARE = 1 / 3  # of the time left


@dataclass(frozen=True)
class QuantizeRequest:
    """The parameters of `quantize`."""

    to: str
    runtime: str
    target: Profile | None = None
    other_nodes: str = "fp32"
    calib: Path | None = None
    data: Path | None = None
    metric: str | None = None
    max_drop: float | None = None
    min_sqnr_db: float | None = None
    calibrator: str | None = None
    smoothquant: bool = False
    budget_s: float = 600.0


@dataclass(frozen=True)
class Job:
    """One model to convert: its graph, its data, and the metric that it is evaluated by."""

    model: Artefact
    source: Graph
    request: QuantizeRequest
    calib: Samples | None
    test: Samples | None
    metric: Metric | None
    calibration: Calibration | None
    calibration_record: CalibrationRecord | None
    notes: tuple[str, ...]
    batch_size: int = MOST_SAMPLES  # of one call
    budget: Budget | None = None  # with `auto`

    @property
    def samples(self) -> Samples | None:
        """The samples to compare both graphs on; None for random inputs."""
        return self.test or self.calib


def prepare(
    model: Artefact,
    request: QuantizeRequest,
    on_progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Job:
    """Open the graph, read and check the data, and calibrate; `auto` within a third of its budget.

    Its budget begins here, on `clock`.
    """
    from deploykit.api.calibration import calibration_record, places_to_choose_on
    from deploykit.measure.evaluate.metrics import find_metric
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization import calibrate
    from deploykit.quantization.budget import Budget
    from deploykit.runtimes.data.checks import check_calibration
    from deploykit.runtimes.data.samples import read_samples

    budget = Budget(clock(), request.budget_s, clock) if request.to == "auto" else None
    on_progress("reading the model", 0.0)
    source, to = Graph.open(model.path), request.to
    read = partial(read_samples, inputs=source.inputs, task=model.task)
    calib = read(request.calib) if request.calib else None
    test = read(request.data) if request.data else None
    metric = find_metric(request.metric or DEFAULT_METRIC)
    labelled = test is not None and test.labels is not None
    _check_labels(request, test)
    doubts = tuple(check_calibration(calib, source.inputs)) if calib else ()
    if budget:
        budget.check()
    if calib:
        on_progress("calibrating", 0.1)
    # scales may leave outliers out; the check for float16 overflow needs only them
    method = request.calibrator or (calibrate.AUTO if to in (*CALIBRATED, "auto") else "minmax")
    sizes = axis_sizes(test or calib, source.inputs, 1)
    batch_size, calibration = batch_that_fits(source, sizes), None
    if calib:
        choice = method == calibrate.AUTO or request.smoothquant
        places = places_to_choose_on(source, calib, batch_size) if choice else ()
        calibration = calibrate_in_time(source, calib, method, budget, places)
    record = calibration_record(request, calibration, method, doubts)
    return Job(
        model,
        source,
        request,
        calib,
        test,
        metric if labelled else None,
        calibration,
        record,
        (*doubts, *_overlap(request, calib, test), *left_out(calib, calibration)),
        batch_size,
        budget,
    )


def calibrate_in_time(
    graph: Graph,
    samples: Samples,
    method: str,
    budget: Budget | None,
    places: Iterable[np.ndarray] = (),
) -> Calibration:
    """Calibrate on all samples, or on as many as a third of the time that is left does for.

    Raises OutOfTime where the budget does not do for the fewest.
    """
    from deploykit.quantization.calibrate import calibrate

    if budget is None:
        return calibrate(graph, samples, method=method, places=places, every_output=True)
    out_of_time, step = budget.pace(_CALIBRATION_SHARE).out_of_time, budget.steps()
    return calibrate(
        graph, samples, method=method, out_of_time=out_of_time, step=step, places=places
    )


def left_out(samples: Samples | None, calibration: Calibration | None) -> tuple[str, ...]:
    """For the user: which samples the calibration left out for time."""
    if samples is None or calibration is None or not calibration.stopped:
        return ()
    used = f"{calibration.samples} of {len(samples)} samples"
    return (f"calibrated on {used}: all of them would take too much of the time budget",)


def write_graph(job: Job, tmp: Path, name: str, on_progress: Progress) -> tuple[Graph, Evidence]:
    """Write the graph in the requested precision to `tmp`; its evidence, with notes for the user.

    Only `auto` has evaluated it by then.
    """
    request, search, evaluation = job.request, None, None
    if request.to == "auto":
        from deploykit.api import auto_precision

        converted, job, search, evaluation, notes = auto_precision.search_precision(
            job, tmp, name, on_progress
        )
    else:
        if request.to in CALIBRATED:
            from deploykit.api.calibration import calibrate_for

            on_progress("choosing the calibrator", 0.2)
            job = calibrate_for(job, request.to, tmp.parent)
        on_progress(f"converting to {request.to}", 0.3)
        converted, notes = convert_graph(job, request.to, request.other_nodes)
        converted = converted.save(tmp)
    return converted, Evidence(
        parity=evaluation.parity if evaluation else None,
        accuracy=evaluation,
        quantize=QuantizeRecord(request.to, request.other_nodes, request.runtime),
        calibration=job.calibration_record,
        search=search,
        notes=tuple(dict.fromkeys((*job.notes, *notes))),
    )


def convert_graph(
    job: Job, to: str, other_nodes: str = "fp32", keep_float32: Collection[str] = ()
) -> tuple[Graph, list[str]]:
    """The source in precision `to`, except the nodes in `keep_float32`, and notes for the user."""
    from deploykit.quantization.convert import convert

    converted, kept = convert(
        job.source,
        to,
        job.calibration,
        runtime=job.request.runtime,
        other_nodes=other_nodes,
        keep_float32=keep_float32,
    )
    half = to if BY_NAME[to].writer == CAST else other_nodes
    return converted, _half_notes(job, half, kept) if half != "fp32" else []


@contextlib.contextmanager
def open_both(job: Job, converted: Graph) -> Iterator[tuple[Engine, Engine]]:
    """The float32 model and `converted` as engines on the CPU."""
    from deploykit.runtimes.engine import load

    with (
        tempfile.TemporaryDirectory(dir=converted.path.parent, prefix=".rounded.") as folder,
        open_graph(job.request.runtime, converted, Path(folder)) as candidate,  # needs the most
        load(job.model, "cpu") as reference,
    ):
        yield reference, candidate


def evaluate_engines(
    job: Job,
    reference: Engine,
    candidate: Engine,
    name: str,
    step: Callable[[int], object] = lambda _: None,
) -> Evaluation:
    """The candidate against the float32 model, on labelled, calibration or random samples.

    `step`: called before each batch with how many are left; what it raises passes through.
    """
    from deploykit.measure.evaluate.evaluation import evaluate
    from deploykit.runtimes.recorded import KnownOutputs

    request, known = job.request, job.calibration.every_output if job.calibration else {}
    if job.calib is not None and job.samples is job.calib and known:
        reference = KnownOutputs(reference, job.calib.inputs, known)
    return evaluate(
        reference,
        candidate,
        samples=job.samples,
        metric=job.metric,
        max_drop=request.max_drop,
        min_sqnr_db=request.min_sqnr_db,
        names=(job.model.name, name),
        batch_size=job.batch_size,
        step=step,
    )


def evaluate_engine(
    reference: Engine, engine: Engine, request: QuantizeRequest, names: tuple[str, str]
) -> Evaluation | None:
    """The accuracy of `engine` against the model; None without data that has labels.

    Samples that do not fill the smallest batch it accepts are left out. Raises BadInput.
    """
    from deploykit.measure.evaluate.evaluation import evaluate
    from deploykit.measure.evaluate.metrics import find_metric
    from deploykit.runtimes.data.samples import read_samples

    if request.data is None:
        return None
    task = engine.source.task if engine.source else None
    samples = read_samples(request.data, engine.inputs, task=task)
    if samples.labels is None:
        return None
    low, high = engine.limits.get(BATCH, (1, None))
    low = max(low, 1)
    size = min(32, high or 32) // low * low or low
    if low > 1:
        if len(samples) < low:
            raise BadInput(
                f"{request.data}: {len(samples)} samples, the engine needs {low} or more"
            )
        samples = samples.first(len(samples) // low * low)
    return evaluate(
        reference,
        engine,
        samples=samples,
        metric=find_metric(request.metric or DEFAULT_METRIC),
        max_drop=request.max_drop,
        names=names,
        batch_size=size,
    )


def golden_samples(
    job: Job, path: Path, reference: Engine, candidate: Engine
) -> GoldenSamples | None:
    """Golden samples next to `path`, the candidate's file, with a bound that fits its precision.

    With data, the float32 graph's outputs on the first samples: the random inputs that `export` may
    have recorded are outside the range that INT8 and FP8 are scaled for. Without data, a copy of
    the model's own.
    """
    samples = job.samples
    if samples is None:
        found = golden.carry(job.model, path)
    else:
        size, _ = samples.batching(golden.SAMPLES, reference.inputs)
        found = golden.record(reference, next(samples.batches(size)), path)
    return golden.loosen(found, path, candidate) if found else None


def _check_labels(request: QuantizeRequest, test: Samples | None) -> None:
    """Raise BadInput where a metric has no labels, or where even equal answers could not pass."""
    from deploykit.measure.evaluate.evaluation import MAX_DROP
    from deploykit.measure.statistics import samples_to_show_no_drop

    metric = request.metric or DEFAULT_METRIC
    if test is None or test.labels is None:
        if request.metric is not None:
            missing = f", {request.data} has none" if request.data else ""
            raise BadInput(
                f"`metric` {metric}: needs labels{missing}",
                hint="`data`: an .npz with an array named 'labels'",
            )
        return
    max_drop = MAX_DROP if request.max_drop is None else request.max_drop
    fewest = samples_to_show_no_drop(max_drop)
    if request.to == "auto" and metric == DEFAULT_METRIC and len(test) < fewest:
        raise BadInput(
            f"{test.where}: {len(test)} samples cannot show a drop within "
            f"{max_drop * 100:g} pp even where there is none, {fewest} are needed",
            hint="give more labelled samples, or a larger `max_drop`",
        )


def _overlap(
    request: QuantizeRequest, calib: Samples | None, test: Samples | None
) -> tuple[str, ...]:
    from deploykit.runtimes.data.checks import overlap

    shared = overlap(calib, test) if calib and test else 0
    if not shared or test is None:
        return ()
    note = f"{shared} of the {len(test)} samples of {request.data} are also in {request.calib}"
    return (f"{note}: accuracy on samples that also set the scales looks too good",)


def accuracy_notes(job: Job, evaluation: Evaluation) -> list[str]:
    """Notes on what an evaluation without labels cannot show."""
    if job.metric is not None:
        return []
    on = job.samples.where if job.samples else "random inputs"
    notes = [f"accuracy not measured: no labelled data (`data`); agreement and SQNR are of {on}"]
    agreement = evaluation.agreement
    if agreement is not None and agreement.value < _FEW_AGREE:
        notes.append(
            f"{(1 - agreement.value) * 100:.1f} % of the samples change their answer: measure on "
            "labelled data before you rely on it"
        )
    return notes


def _half_notes(job: Job, half: str, kept: Collection[str]) -> list[str]:
    notes = []
    if kept:
        notes.append(f"kept in float32, too close to float16's limit: {', '.join(kept)}")
    if BY_NAME[half].guarded and job.calibration is None:
        kind = BY_NAME[half].dtype
        notes.append(f"activations not checked for {kind} overflow: no calibration data (`calib`)")
    note = "" if runs_graphs(job.request.runtime) else BY_NAME[half].cpu_note
    return notes + [note] * bool(note)
