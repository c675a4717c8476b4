"""One model to quantize: its data, its calibration, and its evaluation against float32."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, DeploykitError, first_line
from deploykit.core.evidence import (
    CalibrationRecord,
    Evaluation,
    Evidence,
    GoldenSamples,
    QuantizeRecord,
    SearchRecord,
)
from deploykit.core.files import sha256
from deploykit.core.precision import BY_NAME, CALIBRATED, CAST, PAIRS, WEIGHTS
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.data.samples import Samples, check_calibration, overlap, read_samples
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.evaluation import golden
from deploykit.evaluation.accuracy import (
    MAX_DROP,
    NOTHING_FOUND,
    TOP1,
    Criterion,
    Metric,
    evaluate,
    find_metric,
)
from deploykit.evaluation.artefacts import Progress
from deploykit.evaluation.feeds import (
    MOST_SAMPLES,
    Feeds,
    axis_sizes,
    batch_limits,
    batch_that_fits,
    comparison_feeds,
    given_sizes,
    rows_that_run,
)
from deploykit.evaluation.parity import DRAWS_NUMBERS, compare_engines, draws_numbers
from deploykit.evaluation.statistics import samples_to_show_no_drop
from deploykit.graph.edit import Editor, raise_opset
from deploykit.graph.graph import Graph, opset
from deploykit.quantization.half_precision import (
    PAIR_OPSET,
    lacking_in,
    open_graph,
    runs_graphs,
    simulate,
)
from deploykit.quantization.qdq import Calibration, without_kernel

if TYPE_CHECKING:
    from deploykit.quantization.scales import Scales


DEFAULT_METRIC = "top1"
_FEW_AGREE = 0.9
_RESHAPES = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice")


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
    batch: int | None = None
    axis: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Job:
    """One model to convert: its graph, its data, and the metric that it is evaluated by.

    `metric`: None without labels. `scales`: those before a calibrator is chosen. `batch_size`:
    samples per call. `sizes`: of the axes of random inputs that the user chose.
    """

    model: Artefact
    request: QuantizeRequest
    calib: Samples | None
    test: Samples | None
    metric: Metric | None
    scales: Scales
    batch_size: int = MOST_SAMPLES
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def source(self) -> Graph:
        return self.scales.graph

    @property
    def samples(self) -> Samples | None:
        """The samples to compare both graphs on; None for random inputs."""
        return self.test or self.calib

    def feeds(self, reference: Engine, candidate: Engine) -> tuple[list[Feeds], tuple[str, ...]]:
        """Return the inputs to compare both on, and notes."""
        samples, sizes = self.samples, self.sizes
        return comparison_feeds(reference, candidate, samples, None, sizes, self.batch_size)

    def scales_for(self, to: str, folder: Path) -> Scales:
        """Return the scales that precision `to` is written from. `folder`: for temporary files."""
        if BY_NAME[to].writer != PAIRS or self.calib is None:
            return self.scales
        from deploykit.quantization.scales import choose_scales

        return choose_scales(
            self.scales,
            self.calib,
            to,
            runtime=self.request.runtime,
            other_nodes=self.request.other_nodes,
            folder=folder,
            batch_size=self.batch_size,
        )

    def convert(
        self, scales: Scales, to: str, other_nodes: str, keep_float32: Collection[str] = ()
    ) -> tuple[Graph, list[str]]:
        """Return the graph in precision `to`, except the nodes in `keep_float32`, and notes."""
        from deploykit.quantization.scales import convert

        converted, kept = convert(
            scales.graph,
            to,
            scales.calibration,
            runtime=self.request.runtime,
            other_nodes=other_nodes,
            keep_float32=keep_float32,
        )
        half = to if BY_NAME[to].writer == CAST else other_nodes
        notes = []
        found = {node.op_type for node in converted.model.graph.node}
        if lacking := sorted(found & lacking_in(half, self.request.runtime)):
            notes.append(
                f"kept in float32, as TensorRT does not take them in {half}: {', '.join(lacking)}"
            )
        if narrow := without_kernel(scales.graph, self.request.runtime, to):
            notes.append(narrow)
        if kept:
            notes.append(f"kept in float32, too close to float16's limit: {', '.join(kept)}")
        if BY_NAME[half].guarded and scales.calibration is None:
            kind = BY_NAME[half].dtype
            notes.append(
                f"activations not checked for {kind} overflow: no calibration data (`calib`)"
            )
        if BY_NAME[half].cpu_note and not runs_graphs(self.request.runtime):
            notes.append(BY_NAME[half].cpu_note)
        return converted, notes

    def evidence(
        self,
        scales: Scales,
        notes: Sequence[str],
        evaluation: Evaluation | None = None,
        search: SearchRecord | None = None,
    ) -> Evidence:
        """Return the evidence of a graph that was written from `scales`."""
        return Evidence(
            parity=evaluation.parity if evaluation else None,
            accuracy=evaluation,
            quantize=QuantizeRecord(
                self.request.to, self.request.other_nodes, self.request.runtime
            ),
            calibration=scales.record,
            search=search,
            notes=tuple(dict.fromkeys((*scales.notes, *notes))),
        )


def prepare(model: Artefact, request: QuantizeRequest, on_progress: Progress) -> Job:
    """Open the graph, read and check the data, and calibrate."""
    from deploykit.quantization.calibrate import calibrate
    from deploykit.quantization.scales import Scales

    on_progress("reading the model", 0.0)
    source = Graph.open(model.path)
    source.outputs  # noqa: B018 - raises for one that is no tensor
    calib, test = (
        read_samples(path, source.inputs, task=model.task) if path else None
        for path in (request.calib, request.data)
    )
    metric = find_metric(request.metric or DEFAULT_METRIC)
    labelled = _check_labels(request, test)
    samples = test or calib
    batch = None if samples else request.batch  # of samples it says how many make a call
    sizes = given_sizes(source.inputs, batch, request.axis, samples)
    least = needed_opset(source, request.to, request.runtime, request.other_nodes)
    try:
        source, notes = with_opset(model, source, least, samples, sizes)
    except BadInput:
        if request.to != "auto" or opset(source.model) < BY_NAME["int8"].min_opset:
            raise
        notes = ()  # levels that need a newer one are steps that say so
    rows = batch_that_fits(source, axis_sizes(samples, source.inputs, 1))
    rows = min(rows, request.batch or rows)
    if calib:
        on_progress("calibrating", 0.1)
        doubts = tuple(check_calibration(calib, source.inputs))
        # the check for float16 overflow needs no outliers left out
        pairs = request.to in (*CALIBRATED, "auto")
        run = partial(calibrate, source, calib, method="mixed" if pairs else "minmax")
        try:
            calibration = run(batch_size=rows)
        except BadInput:
            with load(model, "cpu") as engine:
                rows, single = rows_that_run(engine, calib, rows)
            if not single:
                raise
            notes += single
            calibration = run(batch_size=rows)
        record = calibration_record(request, calibration, doubts)
        notes = (*notes, *doubts)
        if test and (shared := overlap(calib, test)):
            both = f"{shared} of the {len(test)} samples of {request.data} are also in"
            why = "accuracy on samples that also set the scales looks too good"
            notes += (f"{both} {request.calib}: {why}",)
        scales = Scales(source, calibration, record, notes)
    else:
        if test:
            with load(model, "cpu") as engine:
                rows, single = rows_that_run(engine, test, rows)
            notes += single
        scales = Scales(source, notes=notes)
    return Job(model, request, calib, test, metric if labelled else None, scales, rows, sizes)


def calibration_record(
    request: QuantizeRequest, calibration: Calibration, doubts: Sequence[str]
) -> CalibrationRecord:
    digest = sha256(request.calib) if request.calib and request.calib.is_file() else ""
    why = "; ".join(doubts)
    return CalibrationRecord(not doubts, why, calibration.method, calibration.samples, digest)


def _check_labels(request: QuantizeRequest, test: Samples | None) -> bool:
    """Return whether there are labels.

    Raises BadInput where a metric has none, or where even equal answers could not pass.
    """
    if test is None or test.labels is None:
        if request.metric is not None:
            missing = f", {request.data} has none" if request.data else ""
            raise BadInput(
                f"`metric` {request.metric}: needs labels{missing}",
                hint="`data`: an .npz with an array named 'labels'",
            )
        return False
    max_drop = MAX_DROP if request.max_drop is None else request.max_drop
    fewest = samples_to_show_no_drop(max_drop)
    top1 = request.metric in (None, DEFAULT_METRIC)
    if request.to == "auto" and top1 and len(test) < fewest:
        raise BadInput(
            f"{test.where}: {len(test)} samples cannot show a drop within "
            f"{max_drop * 100:g} pp even where there is none, {fewest} are needed",
            hint="give more labelled samples, or a larger `max_drop`",
        )
    return True


@contextlib.contextmanager
def open_both(job: Job, converted: Graph) -> Iterator[tuple[Engine, Engine]]:
    """Open the float32 model and `converted` as engines on the CPU."""
    with (
        tempfile.TemporaryDirectory(dir=converted.path.parent, prefix=".rounded.") as folder,
        open_graph(job.request.runtime, converted, Path(folder)) as candidate,  # needs most memory
        load(job.model, "cpu") as reference,
    ):
        yield reference, candidate


class KnownOutputs(Engine):
    """An engine that does not run where it is asked for known `samples`, in their order.

    `outputs`: a row for each of these samples, by name.
    """

    def __init__(self, engine: Engine, samples: Samples, outputs: Feeds) -> None:
        self.inputs, self.outputs, self.runtime = engine.inputs, engine.outputs, engine.runtime
        self.device, self.limits, self.max_batch = engine.device, engine.limits, engine.max_batch
        self._engine, self._samples, self._outputs, self._at = engine, samples, outputs, 0

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        rows = slice(self._at, self._at + len(replace(self._samples, inputs=feeds)))
        known = self._samples.rows(rows)
        if rows.stop > len(next(iter(self._outputs.values()))) or any(
            not np.array_equal(array, known[name]) for name, array in feeds.items()
        ):
            return self._engine(feeds)
        self._at = rows.stop
        return {name: array[rows].copy() for name, array in self._outputs.items()}


def evaluate_engines(
    job: Job,
    reference: Engine,
    candidate: Engine,
    name: str,
    converted: Graph | None = None,
    feeds: Sequence[Feeds] = (),
) -> Evaluation:
    """Compare the candidate with the float32 model, on labelled, calibration or random samples.

    Args:
        job: gives the samples, the metric and the bound.
        reference, candidate: the two engines. The first does not run again for the samples whose
            outputs the calibration kept.
        name: what tables and errors call the candidate.
        converted: the candidate's graph, to name the first tensor in it that is not finite.
        feeds: what `Job.feeds` gave.
    """
    if job.samples is None:
        feeds = feeds or job.feeds(reference, candidate)[0]
    calibration = job.scales.calibration
    known = calibration.outputs if calibration else {}
    found = evaluate(
        KnownOutputs(reference, job.calib, known) if job.calib and known else reference,
        candidate,
        job.samples,
        Criterion(job.metric, job.request.max_drop, share_outputs(job.source)),
        names=(job.model.name, name),
        batch_size=job.batch_size,
        random=feeds,
    )
    if found.passed:
        return found
    feeds = feeds or job.feeds(reference, candidate)[0]
    if draws_numbers(reference, max(feeds, key=lambda each: sum(a.size for a in each.values()))):
        return replace(found, why=f"{found.why}; {DRAWS_NUMBERS}")
    if converted is None or found.sqnr_db != -math.inf:
        return found
    from deploykit.evaluation.divergence import first_divergence

    for each in feeds:
        outputs = candidate(each).values()
        if all(np.isfinite(array).all() for array in outputs if array.dtype.kind == "f"):
            continue
        first = first_divergence(job.source, simulate(converted), each, sys.float_info.max)
        return replace(found, why=f"{found.why}; {first.text}") if first else found
    return found


def share_outputs(graph: Graph) -> set[str]:
    """Return the outputs that a sigmoid makes, and nothing but its shape is changed."""
    found = set[str]()
    for node in graph.skeleton.graph.node:
        moved = node.op_type in _RESHAPES and node.input[0] in found
        if moved or node.op_type in ("Sigmoid", "HardSigmoid"):
            found.update(node.output)
    return found.intersection(value.name for value in graph.skeleton.graph.output)


def evaluate_engine(
    reference: Engine, engine: Engine, request: QuantizeRequest, model: Artefact, name: str
) -> Evaluation | None:
    """Return the accuracy of `engine`, called `name`, against the model; None without labels.

    Samples that do not fill the smallest batch it accepts are left out. Raises BadInput.
    """
    if request.data is None:
        return None
    samples = read_samples(request.data, engine.inputs, task=model.task)
    if samples.labels is None:
        return None
    low, high = batch_limits(engine.inputs, engine.limits)
    size = min(32, high or 32) // low * low or low
    if low > len(samples):
        raise BadInput(f"{request.data}: {len(samples)} samples, the engine needs {low} or more")
    samples = samples.first(len(samples) // low * low)
    if low == 1 != high:
        size, _ = rows_that_run(reference, samples, size)
    criterion = Criterion(find_metric(request.metric or DEFAULT_METRIC), request.max_drop)
    names = (model.name, name)
    return evaluate(reference, engine, samples, criterion, names=names, batch_size=size)


def golden_samples(
    job: Job, path: Path, reference: Engine, candidate: Engine
) -> GoldenSamples | None:
    """Write golden samples next to `path`, with a bound that fits the candidate's precision.

    With data, the float32 graph's outputs on the first samples: the random inputs that `export` may
    have recorded are outside the range that INT8 and FP8 are scaled for. Without data, a copy of
    the model's own.
    """
    if job.samples is None:
        found = golden.carry(job.model, path)
    else:
        few = min(golden.SAMPLES, job.batch_size)
        size, _ = job.samples.batching(few, reference.inputs)
        found = golden.record(reference, next(job.samples.batches(size)), path)
    return golden.loosen(found, path, candidate) if found else None


def accuracy_notes(job: Job, evaluation: Evaluation) -> list[str]:
    """Notes on what an evaluation cannot show."""
    drop, agreement = evaluation.drop, evaluation.agreement
    if job.metric is not None:
        labels = job.test.labels if job.test else None
        if drop is None or labels is None or drop.metric != TOP1:
            return []
        most = float(np.unique(labels, axis=0, return_counts=True)[1].max()) / len(labels)
        found, share = (f"{value * 100:.1f} %" for value in (drop.reference.value, most))
        text = f"the float32 model answers {found} right, no more than the most frequent label"
        note = f"{text} alone, {share}: check how the labels are numbered, and give all classes"
        return [note] if drop.reference.value <= most else []
    on = job.samples.where if job.samples else "random inputs"
    notes = [f"accuracy not measured: no labelled data (`data`); agreement and SQNR are of {on}"]
    if NOTHING_FOUND in evaluation.why:
        notes.append(f"{evaluation.why}: give inputs on which the model finds something")
    if agreement is not None and agreement.value < _FEW_AGREE:
        share = f"{(1 - agreement.value) * 100:.1f} %"
        text = f"{share} of the samples change their answer: measure on labelled data before you"
        notes.append(f"{text} rely on it")
    return notes


# A stranger's file cannot be exported again, so it is raised to the opset that a precision needs.
# Operators that mean the same in both opsets keep their nodes; others (ReduceMax, Split, Upsample)
# are rewritten by onnx's version converter. Either result is compared with the model.

_RAISED_BY_WRITERS = 13
_MAX_ERROR = 1e-4  # the same arithmetic in other nodes


def needed_opset(source: Graph, to: str, runtime: str, other_nodes: str) -> int:
    """Return the least opset of a graph in `to` with these other nodes; `auto`: of any level."""
    if to == "auto":
        return BY_NAME["int8"].min_opset if RUNTIMES[runtime].on_cpu else PAIR_OPSET
    least = BY_NAME[to].min_opset
    paired = BY_NAME[to].writer in (PAIRS, WEIGHTS) and other_nodes != "fp32"
    holds = any(node.op_type.endswith("uantizeLinear") for node in source.skeleton.graph.node)
    return max(least, PAIR_OPSET) if paired or (BY_NAME[to].writer == CAST and holds) else least


def with_opset(
    model: Artefact, source: Graph, least: int, samples: Samples | None, sizes: Mapping[str, int]
) -> tuple[Graph, tuple[str, ...]]:
    """Return `source`, the graph of `model`, in opset `least` or newer, and a note if it changed.

    From 13 on the writers themselves raise one whose operators mean the same in both. Raises
    BadInput where the graph cannot be converted, or computes something else then.
    """
    now = opset(source.model)
    if now >= least or not now:  # 0: none of ONNX's own operators
        return source, ()
    editor = Editor(source)
    try:
        raise_opset(editor.model, least)
    except BadInput:
        editor = _convert_opset(source, least)
    else:
        if now >= _RAISED_BY_WRITERS:
            return source, ()
    converted = editor.finish(list(editor.graph.node))
    what = f"{model}: opset {now}, converted to {least}"
    with tempfile.TemporaryDirectory() as folder:
        path = converted.save(Path(folder) / source.path.name, temporary=True).path
        with load(model, "cpu") as reference:
            feeds, _ = comparison_feeds(reference, reference, samples, None, sizes)
            try:
                with load(path, "cpu") as engine:
                    parity = compare_engines(
                        reference,
                        engine,
                        feeds[:4],
                        max_error=_MAX_ERROR,
                        names=(model.name, f"opset {least}"),
                        random=samples is None,
                    )
                # NaN and infinity at the same places are the same answer
                same = all(
                    x.error <= _MAX_ERROR
                    or (x.floating and x.places_match and x.max_abs <= _MAX_ERROR * (x.scale or 0))
                    for x in parity.rows
                )
                why = "" if same else parity.why
            except DeploykitError as exc:
                why = exc.message.replace(f"{folder}/", "")
    if why:
        raise BadInput(
            f"{what}, does not compute the same: {why}", hint=f"export it again with opset {least}"
        )
    return converted, (f"{what}: {parity.why if parity.passed else 'equal, NaN included'}",)


def _convert_opset(source: Graph, least: int) -> Editor:
    """Let onnx rewrite the graph. Raises BadInput naming the operator that it cannot convert."""
    editor = Editor(source)
    try:  # its large weights are inputs here, of any size
        converted = onnx.version_converter.convert_version(editor.model, least)
    except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as failure:
        raise BadInput(
            f"{source.path.name}: opset {opset(source.model)} cannot be converted to {least}, "
            f"which this precision needs: {first_line(failure)}",
            hint=f"export it again with opset {least}",
        ) from failure
    editor.model.CopyFrom(converted)
    editor.graph = editor.model.graph
    for tensor in converted.graph.initializer:  # the converter adds axes and sizes
        if tensor.name not in editor.inputs:
            editor.constants.setdefault(tensor.name, tensor)
    version = helper.OP_SET_ID_VERSION_MAP[("ai.onnx", least)]
    editor.model.ir_version = max(editor.model.ir_version, version)
    return editor
