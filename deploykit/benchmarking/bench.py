"""Time engines against the float32 model on the CPU, interleaved in one run, into a report.

It chooses the columns: it compares each engine with the baseline and searches for its fastest CPU
settings. Then it times all columns and writes the verdict. A pipeline is timed end to end and per
stage, into an ordinary report.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from deploykit.benchmarking import columns, limits
from deploykit.benchmarking.columns import BASELINE, Entry, Note
from deploykit.benchmarking.scenarios import check_scenarios, run_scenarios
from deploykit.benchmarking.timing import (
    FULL_S,
    PROCESSES,
    Block,
    Measured,
    Setup,
    Timing,
    Turns,
    make_point,
    sweep,
)
from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.evidence import Gate, Parity
from deploykit.core.files import StrPath, sha256
from deploykit.core.machine import default_threads, now, provenance, this_machine, usable_cores
from deploykit.core.tensors import TensorSpec, batch_axes, dynamic_sizes, steps_counted
from deploykit.engines.data.samples import Samples, random_feeds, read_samples
from deploykit.engines.devices import DeviceWatch
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.accuracy import TOP1, top1_scores
from deploykit.evaluation.artefacts import Progress, claim_report, no_progress
from deploykit.evaluation.feeds import comparison_feeds, given_sizes
from deploykit.evaluation.golden import find_samples, open_samples
from deploykit.evaluation.parity import compare_engines
from deploykit.evaluation.statistics import paired_drop
from deploykit.evaluation.verify import outputs_gate
from deploykit.pipelines.pipeline import OpenPipeline
from deploykit.reporting.machine_load import Watch, invalid, sum_up
from deploykit.reporting.report import (
    Accuracy,
    CpuSearch,
    NotMeasured,
    Point,
    Report,
    is_report,
    read,
    write,
)
from deploykit.reporting.verdict import verdict

log = logging.getLogger(__name__)

BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32), (1, 8, 32)
QUICK_S = 1.5  # per point
DATA, GOLDEN, RANDOM = "the data given", "golden samples", "random numbers"  # sources of the inputs
_SEARCH_SHARE, _SEARCH_MAX_S = 1 / 30, 1.0  # share of a point's time per window of the CPU search


@checked
def bench(
    engines: Sequence[ArtefactLike],
    *,
    against: Sequence[ArtefactLike] = (),
    batches: Sequence[int] | None = None,
    out: StrPath = "report",
    data: StrPath | None = None,
    axis: Mapping[str, int] = MappingProxyType({}),
    device: str = "auto",
    quick: bool = False,
    seconds: float | None = None,
    slo_ms: float | None = None,
    scenarios: Sequence[str] = (),
    layers: bool = False,
    trust: bool = False,
    force: bool = False,
    arch: str | None = None,
    command: str = "",
    on_progress: Progress | None = None,
    on_note: Callable[[str], None] = log.warning,
) -> Report:
    """Time `engines` against a float32 .onnx file on the CPU, interleaved, into a report.

    Args:
        against: what to compare with. A float32 .onnx file is the baseline, by default the first
            engine or the float32 model next to it that it was made from. Another engine is timed
            in the same run. A report gives its CPU settings, which replaces the search.
        batches: sizes to time, by default BATCHES, with `quick` QUICK_BATCHES.
        data: an .npz file with the inputs to time; by default golden samples, else random
            numbers. If it has labels, accuracy is measured.
        axis: the sizes of dynamic axes other than the batch, such as {"T": 128}, by default those
            of the data.
        seconds: how long each point is timed: 60, with `quick` 1.5. From 60 s on, ten fresh
            processes share the time.
        slo_ms: the wanted p99.
        scenarios: MLPerf scenarios to run, each for `seconds` more.
        layers: time the layers of the engines too.
        trust: open a TensorRT engine even if it cannot be proven.
        force: replace files in `out`.
        arch: builds the module for a file that holds only weights.
    """
    report = Report("", now(), command, slo_ms=slo_ms)
    notes: dict[str, None] = {}

    def note_once(note: str) -> None:  # an engine is opened several times
        if note not in notes:
            notes[note] = None
            on_note(note)

    timing = Timing.lasting(seconds if seconds is not None else QUICK_S if quick else FULL_S)
    check_scenarios(scenarios, slo_ms)
    others = [each for each in against if not is_report(each)]
    entries = columns.open_entries(engines, others, trust=trust, on_note=note_once, arch=arch)
    folder = claim_report(out, (*engines, *against, data), force=force)
    run = _Run(
        entries,
        [search for each in against if is_report(each) for search in read(each).cpu_search],
        tuple(batches if batches is not None else QUICK_BATCHES if quick else BATCHES),
        timing,
        device,
        on_progress or no_progress,
    )
    with tempfile.TemporaryDirectory(prefix="deploykit-bench-") as scratch:
        run.choose_columns(data, axis, note_once, Path(scratch))
        points = run.measure(scenarios, slo_ms, layers)
    wrong = tuple(dict.fromkeys(e.label for e in run.setups if not run.proofs.is_right(e.entry)))
    asked = {e.label for e in entries[1:] if not e.against} or {entries[0].label}
    rivals = {entry.label for entry in entries if entry.against}
    report = replace(
        report,
        title=f"{entries[0].artefact.path.stem}: latency and throughput",
        quick=timing.seconds < FULL_S,
        baseline=BASELINE,
        artefacts=tuple(entry.to_dict() for entry in entries),
        machine=this_machine().to_dict(),
        provenance={**provenance(), "inputs": run.inputs.identify()},
        accuracy=tuple(run.proofs.accuracy),
        parity=tuple(each.to_dict() for each in run.proofs.parity),
        gates=tuple(run.proofs.gates.values()),
        points=tuple(points),
        wrong=wrong,
        asked=tuple(each.label for each in run.setups if each.entry in asked),
        against=tuple(each.label for each in run.setups if each.entry in rivals),
        best_cpu=columns.best_cpu(points, wrong),
        cpu_search=tuple(run.searches.values()),
        not_measured=tuple(run.gaps),
        notes=(_describe_method(timing, points), run.inputs.describe(), *sorted(notes)),
        **run.measured,
    )
    report = replace(report, verdict=verdict(report))
    write(report, folder)
    return report


@dataclass
class _Run:
    """The entries and how to time them; then the chosen columns; then the measurements."""

    entries: list[Entry]
    earlier: list[CpuSearch]  # of reports
    batches: tuple[int, ...]
    timing: Timing
    device: str
    progress: Progress
    inputs: BenchInputs = field(init=False)
    proofs: Proofs = field(init=False)
    gpu: str = ""  # the GPU for columns of ONNX Runtime and PyTorch
    setups: list[Setup] = field(default_factory=list)
    searches: dict[tuple[str, int], CpuSearch] = field(default_factory=dict)
    gaps: list[NotMeasured] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)  # fields of the report by name

    def choose_columns(
        self, data: StrPath | None, axis: Mapping[str, int], note: Note, scratch: Path
    ) -> None:
        entries, device = self.entries, self.device
        machine, reference = this_machine(), entries[0]
        with reference.open("cpu") as base:
            task = reference.artefact.task
            samples = read_samples(Path(data), base.inputs, task=task) if data else None
            self.inputs = choose_inputs(reference.artefact, base, samples, axis)
            self.proofs = proofs = Proofs(base, reference, samples, device, note, axis)
            right = [reference, *(each for each in entries[1:] if proofs.prove(each).passed)]
            rivals, gaps = columns.find_rivals(right, machine, scratch)
            rivals = [each for each in rivals if not columns.on_gpu_alone(each, device)]
            rivals = [each for each in rivals if proofs.admit(each, gaps)]
            self.gpu, why = columns.find_gpu(reference, machine, device)
            gaps += [] if self.gpu else [NotMeasured("GPU", why)]
            on_gpu = [e for e in entries if self.gpu and "cuda" in e.artefact.runtime.devices]
            on_gpu = [e for e in on_gpu if e.on_cpu and proofs.admit(e, gaps, self.gpu)]
        for entry in (*right, *rivals):
            elsewhere = self.gpu and columns.on_gpu_alone(entry, device)
            if entry.on_cpu and entry.runtime in columns.SEARCHED and not elsewhere:
                for batch in self.batches:
                    if found := self._search_cpu(entry, batch):
                        self.searches[entry.label, batch] = found
        every = [*entries, *rivals]
        self.setups, untimed = columns.make_columns(
            every, self.searches, self.batches, device, self.gpu, on_gpu
        )
        self.gaps += [*untimed, *gaps]
        if not proofs.accuracy:
            self.gaps.append(NotMeasured("accuracy", "no labelled data were given"))

    def _search_cpu(self, entry: Entry, batch: int) -> CpuSearch | None:
        """Return the earlier search, else a new one; None for a size the model does not take."""
        specs = self.inputs.specs
        rows = specs[0].shape[0] if specs and specs[0].shape else batch
        if isinstance(rows, int) and rows != batch:
            return None
        for search in self.earlier:
            known = (search.file, search.batch, search.runtime)
            if known == (entry.artefact.name, batch, entry.runtime) and search.trials:
                return search
        what = entry.label if entry.rival else entry.artefact.name
        self.progress(f"{what}, batch {batch}: fastest settings of the CPU", 0.0)
        window_s = min(_SEARCH_MAX_S, self.timing.seconds * _SEARCH_SHARE)
        tried = columns.choices(sorted({default_threads(), usable_cores()}), entry.runtime)
        trials = columns.search_cpu(tried, entry.open_on_cpu, self.inputs(batch), batch, window_s)
        return CpuSearch(entry.artefact.name, batch, trials, entry.runtime)

    def measure(self, scenarios: Sequence[str], slo_ms: float | None, layers: bool) -> list[Point]:
        """Time the columns; fill `measured`, and `gaps` with what could not be measured."""
        setups, inputs, progress, timing = self.setups, self.inputs, self.progress, self.timing
        ceilings, unprobed = limits.cpu_ceilings(setups, timing.seconds, progress)
        gpu_ceilings, gpu_target, gpu_gaps = limits.gpu_limits(self.gpu, timing.seconds, progress)
        watch = Watch()
        before = watch.around(timing.seconds)
        apart = timing.seconds >= FULL_S
        used = self.device if ":" in self.device else "cuda:0"
        with DeviceWatch(only=(used,)) as gpu_watch:
            energy = limits.EnergyLog(gpu_watch, progress)
            count = PROCESSES if apart else 1
            points = sweep(
                setups, self.batches, timing, inputs, energy, processes=count, watch=watch
            )
            right = [each for each in setups if self.proofs.is_right(each.entry)]
            ran = run_scenarios(scenarios, right, points, timing.seconds, slo_ms, inputs, progress)
        memory = limits.measure_memory(setups, points, inputs, progress) if apart else ()
        outside = sum_up(watch, before, watch.around(timing.seconds))
        wanted = (self.entries[1:] or self.entries[:1]) if layers else ()
        by_layer, missing = limits.measure_layers(wanted, right, points, inputs, progress)
        self.gaps += [*unprobed, *gpu_gaps, *energy.gaps(points), *missing]
        self.measured = {
            "scenarios": tuple(ran),
            "memory": memory,
            "layers": tuple(by_layer),
            "throttled": gpu_watch.reasons if {point.device for point in points} - {"cpu"} else (),
            "conditions": gpu_watch.conditions,
            "outside": outside,
            "invalid": invalid(outside, watch.bound),
            "energy": energy.energy(points),
            **limits.limits_of(self.entries, setups, points, ceilings, gpu_ceilings, gpu_target),
        }
        return points


def _describe_method(timing: Timing, points: Sequence[Point]) -> str:
    count = max((point.processes for point in points), default=1)
    where = f"in {count} fresh processes, over which the intervals are"
    if count == 1:
        where = "in one process, so that what changes from process to process, 1 % or so, is unseen"
    rounds = sorted({point.rounds for point in points}) or [timing.rounds]
    number = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    return (
        f"each point: {timing.seconds:g} s in {number} rounds after "
        f"about {timing.warmup_s:.3g} s of warm-up; setups interleaved; in host memory; {where}"
    )


@dataclass(frozen=True)
class BenchInputs:
    """Makes the inputs of one call. `sizes`: sizes of dynamic axes other than the batch.

    `source`: DATA, GOLDEN or RANDOM. `arrays`: the samples, repeated or cut to fill an axis; None
    for random numbers.
    """

    specs: tuple[TensorSpec, ...]
    sizes: Mapping[str, int]
    source: str
    arrays: Mapping[str, np.ndarray] | None = None

    def __call__(self, batch: int) -> dict[str, np.ndarray]:
        """Return inputs of `batch` rows; a fixed axis 0 keeps its size."""
        sizes = {**self.sizes, **dict.fromkeys(batch_axes(self.specs), batch)}
        if self.arrays is None:
            return random_feeds(self.specs, sizes)
        return {spec.name: self._fit(spec, sizes) for spec in self.specs}

    def _fit(self, spec: TensorSpec, sizes: Mapping[str, int]) -> np.ndarray:
        array = (self.arrays or {})[spec.name]
        for place, axis in enumerate(spec.shape):
            size = axis if isinstance(axis, int) else sizes.get(axis, array.shape[place])
            if size != array.shape[place]:
                array = array.take(np.arange(size) % array.shape[place], axis=place)
        if (steps := steps_counted(spec, self.specs, sizes)) is not None:
            array = np.minimum(array, steps).astype(array.dtype)
        return np.asarray(array, order="C")  # ascontiguousarray would give a scalar an axis

    def identify(self) -> dict[str, str]:
        """Return the source of the inputs and a hash of 32 rows, to tell them from others."""
        digest = hashlib.sha256()
        for name, array in sorted(self(32).items()):
            kept = array.astype(str) if array.dtype.hasobject else array
            digest.update(f"{name} {kept.dtype} {kept.shape} ".encode() + kept.tobytes())
        return {"from": self.source, "sha256": digest.hexdigest()}

    def describe(self) -> str:
        """Return a note for the report: "inputs: golden samples, T = 128"."""
        sizes = "".join(f", {name} = {size}" for name, size in self.sizes.items())
        return f"inputs: {self.source}{sizes}"


def choose_inputs(
    artefact: Artefact, engine: Engine, samples: Samples | None, axes: Mapping[str, int]
) -> BenchInputs:
    """Return the inputs of the model that `engine` runs. Raises BadInput for wrong `axes`."""
    specs = engine.inputs
    named = dict.fromkeys(str(a) for spec in specs for a in spec.shape if isinstance(a, str))
    free = [axis for axis in named if axis not in batch_axes(specs)]
    if batch := sorted(axes.keys() & batch_axes(specs)):
        raise BadInput(f"`axis` {batch[0]} is the batch", hint="its sizes are `batches`")
    axes = given_sizes(specs, None, axes, None)
    arrays, source = (None, RANDOM) if samples is None else (samples.inputs, DATA)
    golden = find_samples(artefact.path, artefact.manifest) if artefact.manifest else None
    if samples is None and golden is not None:
        arrays = open_samples(golden, artefact.path, engine.inputs, engine.outputs)[0]
        source = GOLDEN
    shapes = {name: array.shape for name, array in (arrays or {}).items()}
    sizes = {**dynamic_sizes(specs, shapes), **axes}
    unknown = [axis for axis in free if axis not in sizes]
    if unknown:
        sizes_to_give = " ".join(f"`axis` {axis}=SIZE" for axis in unknown)
        raise BadInput(
            f"{artefact}: how large is the axis {', '.join(unknown)} of its inputs?",
            hint=f"{sizes_to_give}, or `data` of the usual size: time depends on it",
        )
    if any(0 in shape for shape in shapes.values()):
        raise BadInput(f"{artefact}: an input of size 0 cannot be timed")
    inputs = BenchInputs(specs, {axis: sizes[axis] for axis in free}, source, arrays)
    if source == RANDOM:
        try:
            engine(inputs(1))
        except BadInput as exc:
            hint = "`data`: inputs that the model takes; these were random numbers"
            raise BadInput(exc.message, hint=exc.hint or hint) from exc
    return inputs


@dataclass
class Proofs:
    """Compares entries with `base`, the open baseline. `gates` maps labels of entries to gates."""

    base: Engine
    reference: Entry
    samples: Samples | None
    device: str
    note: Note
    axis: Mapping[str, int] = field(default_factory=dict)
    parity: list[Parity] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    gates: dict[str, Gate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path, self._scores = self.reference.artefact.path, None
        if self.samples is not None and self.samples.labels is not None:
            self._scores = self._score(
                self.base, comparison_feeds(self.base, self.base, self.samples, path)[0]
            )
        if self._scores is not None:
            score = paired_drop(self._scores, self._scores, TOP1)
            row = (self.reference.precision, TOP1, score.n, score.reference, None, BASELINE)
            self.accuracy.append(Accuracy(*row))

    def prove(self, entry: Entry, gpu: str = "") -> Gate:
        """Measure parity and accuracy, on `gpu` or the CPU, and return the gate of the outputs."""
        samples, reference = self.samples, self.reference
        name = f"{entry.artefact.name} in {entry.label}" if entry.rival else entry.artefact.name
        name += f" on {gpu}" if gpu else ""
        with entry.open(gpu or ("cpu" if entry.on_cpu else self.device)) as engine:
            feeds, fewer = comparison_feeds(
                self.base, engine, samples, reference.artefact.path, self.axis
            )
            for text in (*(f"parity: {each}" for each in fewer), *engine.notes):
                self.note(text)
            names, random = (reference.artefact.name, name), samples is None
            parity = compare_engines(self.base, engine, feeds, names=names, random=random)
            scores, drop = self._score(engine, feeds), None
        if scores is not None and self._scores is not None:
            drop = paired_drop(self._scores, scores, TOP1)
        gate = outputs_gate(entry.artefact, parity, drop, entry.precision)
        gate = replace(gate, name=f"outputs of {name}")
        if entry.rival and not gate.passed:
            return gate
        if drop is not None and not gpu:
            row = Accuracy(entry.precision, TOP1, drop.n, drop.candidate, drop.drop, entry.label)
            self.accuracy.append(row)
        self.parity.append(parity)
        if not entry.rival:
            self.gates[f"{entry.label} {gpu}" if gpu else entry.label] = gate
        return gate

    def admit(self, entry: Entry, gaps: list[NotMeasured], gpu: str = "") -> bool:
        """Return whether the entry's outputs are right; else add to `gaps` why it is not timed."""
        try:
            gate = self.prove(entry, gpu)
            why = "" if gate.passed else gate.detail
        except DeploykitError as exc:
            why = exc.message
        if why:
            what = f"{entry.artefact.name} on the GPU" if gpu else f"{entry.label} on the CPU"
            gaps.append(NotMeasured(what, why))
        return not why

    def is_right(self, key: str) -> bool:
        return key not in self.gates or self.gates[key].passed

    def _score(self, engine: Engine, feeds: Sequence[Arrays]) -> np.ndarray | None:
        if self.samples is None or self.samples.labels is None:
            return None
        return top1_scores(engine, self.samples, len(next(iter(feeds[0].values()))))


# A pipeline is timed like an engine: a call takes a batch of files, from their bytes to the JSON of
# the answers. The stages' times in these calls have intervals over the same rounds.


def bench_pipeline(
    opened: OpenPipeline,
    path: Path,
    files: Sequence[Path],
    batches: Sequence[int],
    timing: Timing,
    on_progress: Progress = no_progress,
) -> Report:
    """Answer `files` repeatedly by the pipeline of `path`, `batches` requests per call.

    Calls follow one another in this process. The points of stages have the scenario "stage of
    NAME". The caller writes the report.
    """
    name, points = path.stem, list[Point]()
    timed = TimedPipeline(opened, [each.read_bytes() for each in files])
    setup = Setup(name, lambda: timed, file=path.name, sha256=sha256(path))
    watch = Watch()
    before = watch.around(timing.seconds)
    turns = Turns(timing, on_progress, watch=watch)
    for batch in batches:
        timed.calls.clear()
        (found,) = turns.measure([setup], [batch], timed.feeds)
        points += [make_point([found]), *_stages(found, timed.calls)]
    outside = sum_up(watch, before, watch.around(timing.seconds))
    what = f"a call: the next of {len(files)} files in turn, from their bytes to the answers' JSON"
    report = Report(
        title=f"{name}: a pipeline from end to end and by stage",
        created=now(),
        command="",
        quick=timing.seconds < FULL_S,
        machine=this_machine().to_dict(),
        provenance=provenance(),
        points=tuple(points),
        asked=(name,),
        outside=outside,
        invalid=invalid(outside, watch.bound),
        notes=(_describe_method(timing, points), what),
    )
    return replace(report, verdict=verdict(report))


def _stages(found: Measured, calls: Sequence[dict[str, float]]) -> list[Point]:
    """Return the time of each stage in the timed calls, which are the last, round after round."""
    counts = [len(block.calls_ns) for block in found.blocks]
    ends = list(itertools.accumulate(counts, initial=len(calls) - sum(counts)))
    timed = [calls[begin:end] for begin, end in itertools.pairwise(ends)]
    points = []
    for stage in calls[0]:
        blocks = []
        for each in timed:
            took_ns = np.array([max(1, round(call[stage] * 1e9)) for call in each], np.int64)
            rows = found.batch * len(each)
            blocks.append(Block(took_ns, rows, rows / (took_ns.sum() / 1e9)))
        part = replace(found, setup=replace(found.setup, label=stage), blocks=blocks)
        scenario = f"stage of {found.setup.label}"
        points.append(replace(make_point([part]), scenario=scenario))
    return points


class TimedPipeline(Engine):
    """Takes files in turn. `calls`: the seconds of each call's stages, with reading and JSON."""

    runtime = "pipeline"
    max_batch = None

    def __init__(self, opened: OpenPipeline, files: Sequence[bytes]) -> None:
        self._opened = opened
        self._files = itertools.cycle(files)
        self.inputs = (TensorSpec(opened.graph.input, "string", ("N",)),)
        self.outputs = (TensorSpec(opened.graph.answer, "string", ("N",)),)
        self.device = opened.device
        self.calls: list[dict[str, float]] = []

    def feeds(self, batch: int) -> Arrays:
        """Return a placeholder per file: the call takes the next files in turn."""
        return {self.inputs[0].name: np.full(batch, "", object)}

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        graph, now, stages = self._opened.graph, time.perf_counter, dict[str, float]()
        count = len(feeds[graph.input])
        began_s = now()
        inputs = [graph.read(each) for each in itertools.islice(self._files, count)]
        stages[graph.input] = now() - began_s
        found = self._opened.run(inputs, stages.__setitem__)
        ended_s = now()
        for each in found:
            graph.answer_json(each)
        stages["JSON"] = now() - ended_s
        self.calls.append(stages)
        return {}

    def close(self) -> None:
        """Do nothing: the function that opened the pipeline closes it."""
