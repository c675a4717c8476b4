"""Convert a graph to a lower precision and evaluate it: `quantize` does it once, `auto` often."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import (
    CalibrationRecord,
    Evaluation,
    Evidence,
    GoldenSamples,
    QuantizeRecord,
    SearchRecord,
    SearchStep,
)
from deploykit.core.files import sha256
from deploykit.core.precision import BY_NAME, CALIBRATED, CAST, DYNAMIC, PAIRS, auto_levels
from deploykit.core.profile import Profile, load_profile, precisions_everywhere
from deploykit.core.runtime import RUNTIMES
from deploykit.core.tensors import BATCH
from deploykit.engines.data.samples import Samples, check_calibration, overlap, read_samples
from deploykit.engines.engine import Arrays, Engine, KnownOutputs, load
from deploykit.evaluation import golden
from deploykit.evaluation.accuracy import Metric, find_metric
from deploykit.evaluation.artefacts import Progress
from deploykit.evaluation.evaluation import MAX_DROP, evaluate
from deploykit.evaluation.parity import MOST_SAMPLES, axis_sizes, batch_that_fits
from deploykit.evaluation.simulate import open_graph, runs_graphs
from deploykit.evaluation.statistics import samples_to_show_no_drop
from deploykit.graph import cost, storage
from deploykit.graph import cost as roofline
from deploykit.graph.cost import Ceilings, NodeCost
from deploykit.graph.graph import Graph
from deploykit.quantization import search
from deploykit.quantization.search import Budget, Level, Outcome, Pace, Verdict, noise_share
from deploykit.quantization.smoothquant import smooth

if TYPE_CHECKING:
    import numpy as np

    from deploykit.quantization.calibrate import Calibration


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
    from deploykit.quantization import calibrate

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
        converted, job, search, evaluation, notes = search_precision(job, tmp, name, on_progress)
    else:
        if request.to in CALIBRATED:
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


# Precision "auto": cost and evaluate the candidates of a runtime for the search.

GENERIC_PROFILE = "l4"  # predicts the costs where no profile is named
COST_BATCH = 8
SMOOTHQUANT = "+smoothquant"  # after a precision's name
_SENSITIVITY_SAMPLES = 16
_RUNS = 7  # the median is the cost, where it is measured


@dataclass(frozen=True)
class _Candidate:
    """A graph in one precision, on disk: large models would not fit into memory several times."""

    graph: Graph
    cost_s: float
    notes: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.graph.path


def search_precision(
    job: Job, out: Path, name: str, on_progress: Progress
) -> tuple[Graph, Job, SearchRecord, Evaluation | None, list[str]]:
    """Write the cheapest graph that passes to `out`, the model itself where float32 stays.

    For ONNX Runtime a cost is measured on this machine's CPU, for TensorRT it is predicted from the
    peaks of the target. Returns that graph, the job with its calibration, what was tried, the
    evaluation where something passed, and notes for the user.
    """

    budget = job.budget or Budget(time.monotonic(), job.request.budget_s)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".auto.") as folder:
        candidates = _Candidates(job, Path(folder), name, budget)
        on_progress(candidates.cost_note, 0.0)

        def report(step: SearchStep) -> None:
            count, result = len(step.float32_nodes), "passes" if step.passed else "fails"
            kept = f", {count} nodes kept in float32" if count else ""
            share = min((budget.clock() - budget.began) / budget.seconds, 1.0)
            on_progress(f"{step.precision}{kept} {result}: {step.why}", share)

        outcome = search.search(
            candidates.levels(),
            candidates.evaluate,
            float32_cost_s=candidates.cost_s(job.source),
            budget=budget,
            on_step=report,
        )
        notes = [outcome.why, *outcome.notes, candidates.cost_note]
        notes += [note for each in candidates.jobs.values() for note in each.notes]
        if outcome.best is None:
            return job.source.save(out), job, _record(outcome), None, notes
        best, kept = outcome.best.model, outcome.best.float32_nodes
        if kept:
            notes.append(f"kept in float32 by the search: {', '.join(kept)}")
        data = best.path.with_name(f"{best.path.name}.data")
        if data.exists():
            storage.point_to(best.path, f"{out.name}.data")
            data.replace(out.with_name(f"{out.name}.data"))
        best.path.replace(out)
        passed = candidates.passed[best.path]
        job = candidates.job_for(outcome.best.precision)
        return Graph.open(out), job, _record(outcome), passed, [*notes, *best.notes]


def _record(outcome: Outcome[Any]) -> SearchRecord:
    best = outcome.best
    return SearchRecord(
        passed=best is not None,
        why=outcome.why,
        precision=best.precision if best else "float32",
        float32_nodes=best.float32_nodes if best else (),
        cost_s=best.cost_s if best else None,
        drop=best.verdict.drop if best else None,
        stopped=outcome.stopped,
        notes=outcome.notes,
        steps=outcome.steps,
    )


class _Candidates:
    """Writes, costs and evaluates the candidates of one search."""

    def __init__(self, job: Job, folder: Path, name: str, budget: Budget) -> None:
        if job.calib is None:
            raise BadInput("precision auto needs calibration data: `calib`")
        self.job, self.folder, self.calib = job, folder, job.calib
        self.budget = budget
        self.measured = RUNTIMES[job.request.runtime].on_cpu
        self.target = job.request.target or load_profile(GENERIC_PROFILE)
        self.offered: Collection[str] = self.target.precisions
        self.inputs = job.source.inputs
        self.sizes = axis_sizes(self.calib, self.inputs, COST_BATCH)
        batch = f"batch {COST_BATCH}"
        self.cost_note = f"costs are predicted for {self.target.name}, {batch}"
        if self.measured:
            self.cost_note = f"costs are measured on this machine, {batch}"
        elif job.request.target is None:
            self.offered = precisions_everywhere(job.request.runtime)
            self.cost_note = (
                f"no `profile` was named: tried what every target runs ({', '.join(self.offered)})"
                f", and {self.cost_note}"
            )
        self.name = name  # of the resulting file, for tables and errors
        self.passed: dict[Path, Evaluation] = {}
        self.written = 0
        self.reference_outputs: dict[str, Any] = {}
        self.jobs: dict[tuple[str, bool], Job] = {}  # with the calibration of a precision

    def levels(self) -> list[Level[Any]]:
        """Precisions to try, fewest bits first."""
        from deploykit.quantization import dynamic, qdq

        computing = tuple(cost.name for cost in self._costs(self.job.source) if cost.flops)
        levels = []
        for each, other in auto_levels(self.job.request.runtime, self.offered):
            name = each.name if other == "fp32" else f"{each.name}+{other}"
            nodes = computing
            if each.writer == PAIRS:
                nodes = qdq.quantizable(self.job.source, self.job.request.runtime, each.name)
            elif each.writer == DYNAMIC:
                nodes = dynamic.quantizable(self.job.source)
                if not nodes:
                    continue
            levels.append(self._level(name, each.bits, nodes))
            if each.writer == PAIRS and not self.job.request.smoothquant and self._has_outliers():
                levels.append(self._level(name + SMOOTHQUANT, each.bits, nodes))
        return levels

    def job_for(self, precision: str) -> Job:
        """The job with the scales of `precision`: its calibrator is chosen once."""

        to, smooth = precision.partition("+")[0], precision.endswith(SMOOTHQUANT)
        if (to, smooth) not in self.jobs:
            self.jobs[to, smooth] = calibrate_for(self.job, to, self.folder, smoothquant=smooth)
        return self.jobs[to, smooth]

    def _has_outliers(self) -> bool:

        calibration = self.job.calibration
        return calibration is not None and bool(
            smooth(self.job.source, calibration.channel_peaks)[1]
        )

    def make(self, precision: str, keep_float32: Collection[str]) -> _Candidate:
        """The model in `precision` but for the nodes in `keep_float32`, on disk, with its cost."""
        graph, notes = self._convert(precision, keep_float32)
        self.written += 1
        graph = graph.save(self.folder / f"{self.written}.onnx")
        return _Candidate(graph, self.cost_s(graph), tuple(notes))

    def _convert(self, precision: str, keep_float32: Collection[str]) -> tuple[Graph, list[str]]:
        to, _, other_nodes = precision.removesuffix(SMOOTHQUANT).partition("+")
        job = self.job_for(precision)
        return convert_graph(job, to, other_nodes or "fp32", keep_float32)

    def cost_s(self, graph: Graph) -> float:
        """Seconds of one call at COST_BATCH: measured, or the sum of its nodes' rooflines."""

        if not self.measured:
            return roofline.predicted_s(self._costs(graph), self._ceilings())
        feeds = self._feeds(COST_BATCH)
        with self._open(graph) as engine:
            engine(feeds)
            times_s, step = list[float](), self.budget.steps()
            for number in range(_RUNS):
                step(_RUNS - number)
                began = time.perf_counter()
                engine(feeds)
                times_s.append(time.perf_counter() - began)
        return statistics.median(times_s)

    def evaluate(self, candidate: _Candidate) -> Verdict:

        with open_both(self.job, candidate.graph) as (reference, engine):
            step = self.budget.steps()
            found = evaluate_engines(self.job, reference, engine, self.name, step)
        if found.passed:
            self.passed[candidate.path] = found
        else:
            candidate.path.unlink()
            candidate.path.with_name(f"{candidate.path.name}.data").unlink(missing_ok=True)
        if found.drop is not None:
            figure = found.drop.drop.high
        elif found.agreement is not None:
            figure = 1 - found.agreement.low
        else:
            figure = math.inf if found.sqnr_db is None else 10 ** (-found.sqnr_db / 10)
        return search.Verdict(found.passed, figure, found.describe())

    def _level(self, precision: str, bits: int, nodes: tuple[str, ...]) -> Level[Any]:

        every = frozenset(nodes)
        savings: dict[str, float] = {}

        def sensitivity(name: str) -> float:
            model, _ = self._convert(precision, every - {name})
            wanted, got = self._reference(), self._outputs(model)
            return search.noise_share(wanted, got)

        def saving_s(name: str) -> float:
            if not savings:
                savings.update(self._savings(precision))
            return savings.get(name, 0.0)

        return search.Level(
            precision,
            bits,
            nodes,
            make=lambda keep_float32: self.make(precision, keep_float32),
            cost_s=lambda candidate: candidate.cost_s,
            sensitivity=sensitivity,
            saving_s=saving_s,
        )

    def _savings(self, precision: str) -> Mapping[str, float]:
        """Predicted seconds that each node saves; where costs are measured, its operations."""

        float32 = self._costs(self.job.source)
        if self.measured:
            return {each.name: float(each.flops or 0) for each in float32}
        converted = self._costs(self._convert(precision, ())[0])
        return roofline.savings_s(float32, converted, self._ceilings())

    def _costs(self, graph: Graph) -> tuple[NodeCost, ...]:

        return cost.node_costs(graph, self.sizes)

    def _ceilings(self) -> Ceilings:

        target = self.target
        return Ceilings(target.peak_ops_per_s, target.bandwidth_bytes_per_s or 0.0)

    def _feeds(self, samples: int) -> dict[str, Any]:
        """The first calibration samples; a graph with a fixed batch gets that many."""
        calib = self.calib
        size, _ = calib.batching(samples, self.inputs)
        return next(calib.batches(size))

    def _reference(self) -> list[Any]:
        if not self.reference_outputs:
            with load(self.job.model, "cpu") as engine:
                self.reference_outputs = engine(self._feeds(_SENSITIVITY_SAMPLES))
        return list(self.reference_outputs.values())

    def _outputs(self, graph: Graph) -> list[Any]:
        with self._open(graph) as engine:
            return list(engine(self._feeds(_SENSITIVITY_SAMPLES)).values())

    def _open(self, graph: Graph) -> Any:
        return open_graph(
            self.job.request.runtime,
            graph.save(self.folder / "part.onnx", temporary=True),
            self.folder,
        )


# Set the scales of a precision: smooth outliers, and choose the calibrator that loses least.
#
# No calibrator is best for every model, and the error at each tensor does not show which one is:
# the errors at the outputs do (`benchmarks/README.md`).

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
    from deploykit.engines.onnxruntime.engine import open_as_written

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

    share = noise_share([wanted], [got])
    if wanted.shape != got.shape or wanted.shape[:1] != (rows,) or not 0 < share < math.inf:
        return np.full(rows, share)
    there = np.isfinite(wanted)
    energy = (np.where(there, wanted, 0) - np.where(there, got, 0).astype(np.float64)) ** 2
    by_row = energy.reshape(rows, -1).sum(axis=1)
    return np.asarray(share * rows * by_row / by_row.sum())


def _decibels(share: float) -> float:
    return -10 * math.log10(share) if share else math.inf
