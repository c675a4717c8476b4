"""Time engines against the CPU baseline, interleaved in one run."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deploykit.benchmarking.columns import (
    BASELINE,
    Columns,
    Entry,
    choose_columns,
    find_rivals,
    on_gpu_alone,
    open_entries,
    open_on_cpu,
)
from deploykit.benchmarking.cpu_search import best_cpu, choices_for, search_cpu
from deploykit.benchmarking.layers import measure_layers
from deploykit.benchmarking.limits import (
    EnergyLog,
    cpu_ceilings,
    gpu_limits,
    limits,
    measure_memory,
)
from deploykit.benchmarking.scenarios import choose_scenarios
from deploykit.benchmarking.timing import PROCESSES, Timing, sweep, sweep_apart
from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.evidence import Gate, Parity
from deploykit.core.files import StrPath
from deploykit.core.machine import (
    Machine,
    default_threads,
    now,
    provenance,
    this_machine,
    usable_cores,
)
from deploykit.core.tensors import TensorSpec, batch_axes, steps_counted
from deploykit.engines.data.samples import Samples, random_feeds, read_samples
from deploykit.engines.devices import Devices, EnergyMeter, GpuWatch
from deploykit.engines.engine import Engine
from deploykit.evaluation.accuracy import TOP1, top1_scores
from deploykit.evaluation.artefacts import Progress
from deploykit.evaluation.golden import find_samples, open_samples
from deploykit.evaluation.outputs import claim_report
from deploykit.evaluation.parity import compare_engines, comparison_feeds
from deploykit.evaluation.statistics import paired_drop
from deploykit.evaluation.verify import outputs_gate
from deploykit.reporting import report as reports
from deploykit.reporting.machine_load import Watch, invalid, sum_up
from deploykit.reporting.points import CpuSearch, Point, ScenarioResult
from deploykit.reporting.report import Accuracy, NotMeasured, Report, read, write
from deploykit.reporting.verdict import verdict

if TYPE_CHECKING:
    import numpy as np


# The inputs that a benchmark times: the data given, else golden samples, else random numbers.

DATA, GOLDEN, RANDOM = "the data given", "golden samples", "random numbers"


@dataclass(frozen=True)
class BenchInputs:
    """Makes the inputs of one call. `sizes`: of the dynamic axes other than the batch.

    `source`: DATA, GOLDEN or RANDOM. `arrays`: its samples, which are repeated, or cut, to fill an
    axis; None for random numbers.
    """

    specs: tuple[TensorSpec, ...]
    sizes: Mapping[str, int]
    source: str
    arrays: Mapping[str, np.ndarray] | None = None

    def __call__(self, batch: int) -> dict[str, np.ndarray]:
        """Inputs of `batch` rows; a fixed axis 0 keeps its size."""

        sizes = {**self.sizes, **dict.fromkeys(batch_axes(self.specs), batch)}
        if self.arrays is None:
            return random_feeds(self.specs, sizes)
        return {spec.name: self._fit(spec, sizes) for spec in self.specs}

    def _fit(self, spec: TensorSpec, sizes: Mapping[str, int]) -> np.ndarray:
        import numpy as np

        array = (self.arrays or {})[spec.name]
        for place, axis in enumerate(spec.shape):
            size = axis if isinstance(axis, int) else sizes.get(axis, array.shape[place])
            if size != array.shape[place]:
                array = array.take(np.arange(size) % array.shape[place], axis=place)
        if (steps := steps_counted(spec, self.specs, sizes)) is not None:
            array = np.minimum(array, steps).astype(array.dtype)
        return np.ascontiguousarray(array)

    def identify(self) -> dict[str, str]:
        """What tells them from other inputs: where they are from, and a hash of 32 rows."""
        digest = hashlib.sha256()
        for name, array in sorted(self(32).items()):
            kept = array.astype(str) if array.dtype.hasobject else array
            digest.update(f"{name} {kept.dtype} {kept.shape} ".encode() + kept.tobytes())
        return {"from": self.source, "sha256": digest.hexdigest()}

    def describe(self) -> str:
        """For the report: "inputs: golden samples, T = 128"."""
        sizes = "".join(f", {name} = {size}" for name, size in self.sizes.items())
        return f"inputs: {self.source}{sizes}"


def choose_inputs(
    artefact: Artefact, engine: Engine, samples: Samples | None, axes: Mapping[str, int]
) -> BenchInputs:
    """For the model in `artefact`, open as `engine`. `axes`: sizes that were asked for.

    Raises BadInput for an axis that the model does not have, or the batch's, and where nothing
    tells the size of one.
    """
    specs = engine.inputs
    named = dict.fromkeys(str(a) for spec in specs for a in spec.shape if isinstance(a, str))
    free = [axis for axis in named if axis not in batch_axes(specs)]
    _check_axes(axes, free, specs)
    arrays = samples.inputs if samples is not None else _golden(artefact, engine)
    source = RANDOM if arrays is None else GOLDEN if samples is None else DATA
    sizes = dict(axes)
    for spec in specs:
        for place, axis in enumerate(spec.shape):
            if arrays is not None and axis in free:
                sizes.setdefault(str(axis), arrays[spec.name].shape[place])
    unknown = [axis for axis in free if axis not in sizes]
    if unknown:
        raise BadInput(
            f"{artefact}: how large is the axis {', '.join(unknown)} of its inputs?",
            hint=f"`axis` {unknown[0]}=SIZE, or `data` of the usual size: time depends on it",
        )
    if any(size == 0 for array in (arrays or {}).values() for size in array.shape):
        raise BadInput(f"{artefact}: an input of size 0 cannot be timed")
    found = BenchInputs(specs, {axis: sizes[axis] for axis in free}, source, arrays)
    if source == RANDOM:
        try:
            engine(found(1))
        except BadInput as exc:
            hint = "`data`: inputs that the model takes; these were random numbers"
            raise BadInput(exc.message, hint=exc.hint or hint) from exc
    return found


def _check_axes(axes: Mapping[str, int], free: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    for axis, size in axes.items():
        if axis in batch_axes(specs):
            raise BadInput(f"`axis` {axis} is the batch", hint="its sizes are `batches`")
        if axis not in free:
            there = ", ".join(free) or "none"
            raise BadInput(f"`axis` {axis} is no dynamic axis of the inputs; there are: {there}")
        if size < 1:
            raise BadInput(f"`axis` {axis} must be 1 or more, got {size}")


def _golden(artefact: Artefact, engine: Engine) -> Mapping[str, np.ndarray] | None:

    golden = find_samples(artefact.path, artefact.manifest) if artefact.manifest else None
    if golden is None:
        return None
    return open_samples(golden, artefact.path, engine.inputs, engine.outputs)[1]


# Prove what a benchmark times: parity with the baseline, and accuracy where there are labels.


class Proofs:
    """Of entries against `base`, the open baseline. `gates`: by the entry's key."""

    def __init__(
        self,
        base: Engine,
        reference: Entry,
        samples: Samples | None,
        device: str,
        note: Callable[[str], None],
    ) -> None:

        self._base, self._reference, self._samples = base, reference, samples
        self._device, self._note = device, note
        self.parity: list[Parity] = []
        self.accuracy: list[Accuracy] = []
        self.gates: dict[str, Gate] = {}
        self._scores: np.ndarray | None = None
        if samples is not None and samples.labels is not None:
            feeds = comparison_feeds(base, base, samples, reference.artefact.path)[0]
            self._scores = self._top1(base, feeds)
        if self._scores is not None:
            score = paired_drop(self._scores, self._scores, TOP1)
            row = Accuracy(reference.precision, TOP1, score.n, score.reference, None, BASELINE)
            self.accuracy.append(row)

    def prove(self, item: Entry, gpu: str = "") -> Gate:
        """Parity, accuracy and the gate of `item`; those of a wrong rival are not kept.

        `gpu`: run it there, in place of the CPU.
        """

        samples, reference = self._samples, self._reference
        name = item.artefact.name
        if item.rival:
            name = f"{name} in {item.rival}"
        if gpu:
            name = f"{name} on {gpu}"
        device = gpu or ("cpu" if item.artefact.runtime.on_cpu else self._device)
        with item.open(device) as engine:
            feeds, fewer = comparison_feeds(self._base, engine, samples, reference.artefact.path)
            for text in (*(f"parity: {each}" for each in fewer), *engine.notes):
                self._note(text)
            names, random = (reference.artefact.name, name), samples is None
            parity = compare_engines(self._base, engine, feeds, names=names, random=random)
            drop, found = None, self._top1(engine, feeds)
        if found is not None and self._scores is not None:
            drop = paired_drop(self._scores, found, TOP1)
        gate = outputs_gate(item.artefact, parity, drop, item.precision)
        gate = replace(gate, name=f"outputs of {name}")
        if item.rival and not gate.passed:
            return gate
        if drop is not None and not gpu:
            row = Accuracy(item.precision, TOP1, drop.n, drop.candidate, drop.drop, item.label)
            self.accuracy.append(row)
        self.parity.append(parity)
        if not item.rival:
            self.gates[f"{item.key} {gpu}" if gpu else item.key] = gate
        return gate

    def admit(self, item: Entry, gaps: list[NotMeasured], gpu: str = "") -> bool:
        """Whether its outputs are right; else `gaps` says why it is not timed."""

        try:
            gate = self.prove(item, gpu)
        except DeploykitError as exc:
            why = exc.message
        else:
            why = "" if gate.passed else gate.detail
        if why:
            what = f"{item.artefact.name} on the GPU" if gpu else f"{item.rival} on the CPU"
            gaps.append(NotMeasured(what, why))
        return not why

    def _top1(self, engine: Engine, feeds: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray | None:

        if self._samples is None or self._samples.labels is None:
            return None
        return top1_scores(engine, self._samples, len(next(iter(feeds[0].values()))))


log = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 32)
QUICK_BATCHES = (1, 8, 32)
_AROUND_S = 0.5  # in which the machine is watched before and after
FULL_S = 60.0  # of a point
_SEARCH_SHARE, _SEARCH_MAX_S = 1 / 30, 1.0  # of a point, for each window of the search on the CPU


@checked
def bench(
    engines: Sequence[ArtefactLike],
    *,
    baseline: ArtefactLike | None = None,
    batches: Sequence[int] | None = None,
    out: StrPath = "report",
    data: StrPath | None = None,
    axis: Mapping[str, int] = MappingProxyType({}),
    device: str = "auto",
    quick: bool = False,
    warmup_s: float | None = None,
    seconds: float | None = None,
    slo_ms: float | None = None,
    price: float | None = None,
    processes: int | None = None,
    scenarios: Sequence[str] = (),
    layers: bool = False,
    trust: bool = False,
    force: bool = False,
    settings_of: StrPath | None = None,
    arch: str | None = None,
    command: str = "",
    on_progress: Progress | None = None,
    on_note: Callable[[str], None] = log.warning,
) -> Report:
    """Time `engines` against `baseline` (float32 .onnx on the CPU), interleaved, into a report.

    Without `baseline` it is the first engine, or the float32 model next to a TensorRT engine that
    was made from it; such an engine is proven first, or opened with `trust`. `data`: an .npz, which
    is what is timed, else golden samples, else random numbers; with labels, accuracy is measured.
    `axis`: the sizes of dynamic axes other than the batch, such as {"T": 128}, by default those of
    the data. Each point, by default of BATCHES, is timed for `seconds` after `warmup_s` (60 and 10;
    with `quick` of fewer batches, 1.5 and 1). `slo_ms`: the wanted p99. `price`: of an hour of the
    machine. `processes`: fresh ones that share the time, 10 for 60 s, else this one. `scenarios`:
    of MLPerf, each for `seconds` more. `layers`: time those of the engines too. `force`: replace
    files in `out`. `settings_of`: a report whose settings are taken. `arch` builds weights alone.
    """

    batches = batches if batches is not None else QUICK_BATCHES if quick else BATCHES
    empty = reports.Report("", now(), command, slo_ms=slo_ms, price=price)
    every = open_entries(engines, baseline, trust, note := _Once(on_note), arch)
    timing, count = _timing(quick, warmup_s, seconds, processes)
    after = choose_scenarios(scenarios, timing.seconds, slo_ms), layers, on_progress
    folder = claim_report(out, (*engines, baseline, data, settings_of), force=force)
    with tempfile.TemporaryDirectory(prefix="deploykit-bench-") as rounded:
        what = (data, axis, device, batches, timing, settings_of, note, on_progress)
        run = _prepare(every, Path(rounded), *what)
        points, conditions, gaps = _time(run, every, batches, timing, count, *after)
    report = replace(
        empty,
        title=f"{every[0].artefact.path.stem}: latency and throughput",
        quick=timing.seconds < FULL_S,
        baseline=BASELINE,
        artefacts=tuple(item.to_dict() for item in every),
        **run.known(points, gaps),
        notes=(_method(timing, points), run.inputs.describe(), *sorted(note.seen)),
        **conditions,
    )
    return _written(report, folder)


def _written(report: Report, folder: Path) -> Report:

    report = replace(report, verdict=verdict(report))
    write(report, folder)
    return report


def _timing(
    quick: bool, warmup_s: float | None, seconds: float | None, processes: int | None
) -> tuple[Timing, int]:
    """Also in how many processes."""

    if processes is not None and processes < 1:
        raise BadInput(f"`processes` must be 1 or more, got {processes}")
    timing = Timing(
        warmup_s=(1.0 if quick else 10.0) if warmup_s is None else warmup_s,
        seconds=(1.5 if quick else FULL_S) if seconds is None else seconds,
    )
    return timing, processes or (PROCESSES if timing.seconds >= FULL_S else 1)


class _Once:
    """Passes each note on once, as an engine is opened several times."""

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self.seen: set[str] = set()
        self._on_note = on_note

    def __call__(self, note: str) -> None:
        if note not in self.seen:
            self.seen.add(note)
            self._on_note(note)


@dataclass(frozen=True)
class _Run:
    """What is known before anything is timed, and the setups to time."""

    machine: Machine
    inputs: BenchInputs
    parity: list[Parity]
    accuracy: list[Accuracy]
    gates: dict[str, Gate]  # by the entry's key
    columns: Columns
    gaps: list[NotMeasured]
    asked: Set[str]  # keys of the engines; the baseline's where there is no other

    def known(self, points: Sequence[Point], gaps: Sequence[NotMeasured]) -> dict[str, Any]:
        """The fields of the report that depend on the run and its points."""

        failed = {key for key, gate in self.gates.items() if not gate.passed}
        columns = self.columns.setups
        wrong = tuple(dict.fromkeys(each.label for each in columns if each.entry in failed))
        return {
            "machine": self.machine.to_dict(),
            "provenance": {**provenance(), "inputs": self.inputs.identify()},
            "accuracy": tuple(self.accuracy),
            "parity": tuple(item.to_dict() for item in self.parity),
            "gates": tuple(self.gates.values()),
            "points": tuple(points),
            "wrong": wrong,
            "asked": tuple(each.label for each in columns if each.entry in self.asked),
            "best_cpu": best_cpu(points, wrong),
            "cpu_search": tuple(self.columns.searches),
            "not_measured": (*self.columns.gaps, *self.gaps, *gaps),
        }


def _prepare(
    every: Sequence[Entry],
    folder: Path,
    data: StrPath | None,
    axes: Mapping[str, int],
    device: str,
    batches: Sequence[int],
    timing: Timing,
    settings_of: StrPath | None,
    note: Callable[[str], None],
    on_progress: Progress | None,
) -> _Run:

    earlier = read(Path(settings_of)).cpu_search if settings_of else ()
    machine, reference = this_machine(), every[0]
    with reference.open("cpu") as base:
        task = reference.artefact.task
        samples = read_samples(Path(data), base.inputs, task=task) if data else None
        inputs = choose_inputs(reference.artefact, base, samples, axes)
        proofs = Proofs(base, reference, samples, device, note)
        right = [reference, *(each for each in every[1:] if proofs.prove(each).passed)]
        rivals, gaps = find_rivals(right, machine, folder)
        rivals = [each for each in rivals if not on_gpu_alone(each, device)]
        rivals = [each for each in rivals if proofs.admit(each, gaps)]
        right += rivals
        search_s = min(_SEARCH_MAX_S, timing.seconds * _SEARCH_SHARE)
        search = partial(_search_cpu, right, inputs, search_s, earlier, on_progress)
        every = (*every, *rivals)
        what = (machine, device, batches, search, proofs.admit)
        columns = choose_columns(reference, every, *what)
    if not proofs.accuracy:
        gaps.append(NotMeasured("accuracy", "no labelled data were given"))
    asked = frozenset(each.key for each in every[1:] if not each.rival) or {reference.key}
    return _Run(machine, inputs, proofs.parity, proofs.accuracy, proofs.gates, columns, gaps, asked)


def _failed(gate: Gate | None) -> bool:
    return gate is not None and not gate.passed


def _search_cpu(
    right: Sequence[Entry],
    inputs: BenchInputs,
    window_s: float,
    earlier: Sequence[CpuSearch],
    on_progress: Progress | None,
    item: Entry,
    batch: int,
) -> CpuSearch | None:
    """None for an artefact whose outputs are wrong, and for a size that is not the model's.

    What is among the `earlier` ones is not searched again.
    """

    specs = inputs.specs
    rows = specs[0].shape[0] if specs and specs[0].shape else batch
    if item not in right or (isinstance(rows, int) and rows != batch):
        return None
    for each in earlier:
        known = (each.file, each.batch, each.runtime) == (item.artefact.name, batch, item.runtime)
        if known and each.trials:
            return each
    if on_progress is not None:
        what = item.rival or item.artefact.name
        on_progress(f"{what}, batch {batch}: fastest settings of the CPU", 0.0)
    feeds = inputs(batch)
    cores = sorted({default_threads(), usable_cores()})
    tried = choices_for(item.runtime, cores)
    trials = search_cpu(tried, partial(open_on_cpu, item), feeds, batch, window_s)
    return CpuSearch(item.artefact.name, batch, trials, item.runtime)


def _time(
    run: _Run,
    every: Sequence[Entry],
    batches: Sequence[int],
    timing: Timing,
    count: int,
    scenarios: Callable[..., list[ScenarioResult]],
    layers: bool,
    on_progress: Progress | None,
) -> tuple[list[Point], dict[str, Any], tuple[NotMeasured, ...]]:
    """The points, the fields of the report on the machine meanwhile, and what was not measured."""

    ceilings, unprobed = cpu_ceilings(run.columns.setups, timing.seconds, on_progress)
    gpu = gpu_limits(run.columns.gpu, timing.seconds, on_progress)
    watch, around_s = Watch(), min(_AROUND_S, timing.seconds / 10)
    before = watch.over(around_s, time.sleep)
    setups = run.columns.setups
    with GpuWatch() as gpu_watch:
        with EnergyMeter(devices=Devices()) as meter:
            energy = EnergyLog(meter, on_progress)
            what = (setups, batches, timing, run.inputs, energy)
            if count > 1:
                points = sweep_apart(*what, processes=count, watch=watch)
            else:
                points = sweep(*what, watch=watch)
        right = [each for each in setups if not _failed(run.gates.get(each.entry))]
        ran = scenarios(setups=right, points=points, feeds=run.inputs, on_progress=on_progress)
    memory = measure_memory(setups, points, run.inputs, on_progress) if count > 1 else ()
    outside = sum_up(watch, before, watch.over(around_s, time.sleep))
    wanted = (every[1:] or every[:1]) if layers else ()
    layer_times, missing = measure_layers(wanted, right, points, run.inputs, ceilings, on_progress)
    on_gpu = {point.device for point in points} - {"cpu"}
    found = {
        "scenarios": tuple(ran),
        "memory": memory,
        "layers": tuple(layer_times),
        "throttled": gpu_watch.reasons if on_gpu else (),
        "conditions": gpu_watch.conditions,
        "outside": outside,
        "invalid": invalid(outside, watch.bound),
        "energy": energy.energy(points),
        **limits(every, run.columns.setups, points, ceilings, gpu),
    }
    return points, found, (*unprobed, *gpu.gaps, *energy.gaps(points), *missing)


def _method(timing: Timing, points: Sequence[Point]) -> str:
    count = max((point.processes for point in points), default=1)
    where = f"in {count} fresh processes, over which the intervals are"
    if count == 1:
        where = "in one process, so that what changes from process to process, 1 % or so, is unseen"
    rounds = sorted({point.rounds for point in points}) or [timing.rounds]
    number = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    return (
        f"each point: {timing.seconds:g} s in {number} rounds after "
        f"about {timing.warmup_s:g} s of warm-up; setups interleaved; in host memory; {where}"
    )
