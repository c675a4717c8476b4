"""Time engines against the CPU baseline, interleaved in one run."""

from __future__ import annotations

import datetime
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deploykit.api.arguments import checked
from deploykit.api.artefacts import Progress
from deploykit.api.bench_columns import (
    BASELINE,
    Columns,
    Entry,
    choose_columns,
    on_gpu_alone,
    open_entries,
    open_on_cpu,
)
from deploykit.api.bench_inputs import BenchInputs, choose_inputs
from deploykit.api.bench_layers import measure_layers
from deploykit.api.bench_limits import EnergyLog, cpu_ceilings, gpu_limits, limits
from deploykit.api.bench_memory import measure_memory
from deploykit.api.bench_proofs import Proofs
from deploykit.api.bench_rivals import find_rivals
from deploykit.api.bench_scenarios import choose_scenarios
from deploykit.api.outputs import claim_report
from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import BadInput
from deploykit.core.machine import Machine, default_threads, this_machine, usable_cores
from deploykit.core.paths import StrPath
from deploykit.core.provenance import provenance

if TYPE_CHECKING:
    from deploykit.measure.evaluate.parity import Parity
    from deploykit.measure.report.report import Accuracy, Gate, NotMeasured, Report
    from deploykit.measure.timing.cpu_search import CpuSearch
    from deploykit.measure.timing.scenarios import ScenarioResult
    from deploykit.measure.timing.sweep import Point, Timing

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
    from deploykit.measure.report import report as reports

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
    from deploykit.measure.report.report import write
    from deploykit.measure.report.verdict import verdict

    report = replace(report, verdict=verdict(report))
    write(report, folder)
    return report


def _timing(
    quick: bool, warmup_s: float | None, seconds: float | None, processes: int | None
) -> tuple[Timing, int]:
    """Also in how many processes."""
    from deploykit.measure.timing.fresh import PROCESSES
    from deploykit.measure.timing.sweep import Timing

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
        from deploykit.measure.timing.cpu_search import best_cpu

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
    from deploykit.measure.report.report import NotMeasured, read
    from deploykit.runtimes.data.samples import read_samples

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
    from deploykit.measure.timing.cpu_search import CpuSearch, choices_for, search_cpu

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
    from deploykit.measure.outside import Watch, invalid, sum_up
    from deploykit.measure.timing.fresh import sweep_apart
    from deploykit.measure.timing.sweep import sweep
    from deploykit.runtimes.devices import Devices, GpuWatch
    from deploykit.runtimes.energy import EnergyMeter

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


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
