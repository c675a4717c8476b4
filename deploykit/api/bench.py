"""Time engines against the CPU baseline, interleaved in one run."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.artefacts import Progress
from deploykit.api.feeds import comparison_feeds
from deploykit.api.outputs import claim_report
from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.machine import Machine, default_threads, this_machine
from deploykit.core.paths import StrPath
from deploykit.core.precision import narrowest
from deploykit.core.runtime import BUILT
from deploykit.core.tensors import BATCH, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from deploykit.measure.evaluate.parity import Parity
    from deploykit.measure.report.report import Accuracy, Gate, NotMeasured, Report
    from deploykit.measure.timing.sweep import Point, Setup, Timing
    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.devices import GpuWatch
    from deploykit.runtimes.engine import Engine

log = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 32)
FULL_S = 60.0  # of a point
BASELINE = "fp32 CPU"  # ONNX Runtime, one session on all physical cores


@dataclass(frozen=True)
class _Entry:
    """One artefact of the report. `precision`: "fp32", "fp16", "int8", ..."""

    artefact: Artefact
    precision: str
    built_on: Mapping[str, str]
    open: Callable[..., Engine]  # (device, threads)

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.artefact.name,
            "sha256": self.artefact.sha256,
            "precision": self.precision,
            "format": self.artefact.format,
            "built_on": dict(self.built_on),
        }


def bench(
    engines: Sequence[ArtefactLike],
    *,
    baseline: ArtefactLike | None = None,
    batches: Sequence[int] = BATCHES,
    out: StrPath = "report",
    data: StrPath | None = None,
    device: str = "auto",
    quick: bool = False,
    warmup_s: float | None = None,
    seconds: float | None = None,
    trust: bool = False,
    force: bool = False,
    command: str = "",
    on_progress: Progress | None = None,
    on_note: Callable[[str], None] = log.warning,
) -> Report:
    """Time `engines` against `baseline` (float32 .onnx on the CPU), interleaved, into a report.

    Without `baseline` it is the first engine, or the float32 model that a TensorRT engine was made
    from if that is next to it. Such an engine is proven first, or opened with `trust`: see
    `open_proven`. `data`: labelled .npz; then accuracy is measured too, paired with the baseline's.
    Each point is timed for `seconds` after `warmup_s` (60 and 10; with `quick` 5 and 2); a report
    of less than 60 is marked. `out`: the folder of the report. `force`: replace files that
    deploykit did not write there.
    """
    from deploykit.measure.report import report as reports
    from deploykit.measure.report.verdict import verdict
    from deploykit.measure.timing.sweep import Timing

    note = _Once(on_note)
    found = [_entry(Artefact.open(source), trust, note) for source in engines]
    reference = _check_baseline(_baseline(baseline, found[0], trust, note))
    every = list({item.artefact.sha256: item for item in (reference, *found)}.values())
    timing = Timing(
        warmup_s=(2.0 if quick else 10.0) if warmup_s is None else warmup_s,
        seconds=(5.0 if quick else FULL_S) if seconds is None else seconds,
    )
    folder = claim_report(out, (*engines, baseline, data), force=force)
    run = _prepare(reference, every, Path(data) if data else None, device, batches, note)
    points, watch = _time(run, batches, timing, on_progress)
    report = reports.Report(
        title=f"{reference.artefact.path.stem}: latency and throughput",
        created=now(),
        command=command,
        quick=timing.seconds < FULL_S,
        baseline=BASELINE,
        artefacts=tuple(item.to_dict() for item in every),
        points=tuple(points),
        **run.known,
        notes=(_method(timing), *sorted(note.seen)),
        throttled=watch.reasons if {point.device for point in points} - {"cpu"} else (),
        conditions=watch.conditions,
    )
    report = replace(report, verdict=verdict(report))
    reports.write(report, folder)
    return report


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
    inputs: tuple[TensorSpec, ...]
    parity: list[Parity]
    accuracy: list[Accuracy]
    gates: dict[str, Gate]  # by the artefact's hash
    setups: list[Setup]
    gaps: list[NotMeasured]

    @property
    def known(self) -> dict[str, Any]:
        """The fields of the report that do not depend on timing."""
        failed = {sha256 for sha256, gate in self.gates.items() if not gate.passed}
        return {
            "machine": self.machine.to_dict(),
            "accuracy": tuple(self.accuracy),
            "parity": tuple(item.to_dict() for item in self.parity),
            "gates": tuple(self.gates.values()),
            "wrong": tuple(setup.label for setup in self.setups if setup.sha256 in failed),
            "not_measured": tuple(self.gaps),
        }


def _prepare(
    reference: _Entry,
    every: Sequence[_Entry],
    data: Path | None,
    device: str,
    batches: Sequence[int],
    note: Callable[[str], None],
) -> _Run:
    from deploykit.measure.report.report import NotMeasured
    from deploykit.runtimes.data.samples import read_samples

    machine = this_machine()
    with reference.open("cpu") as base:
        samples = read_samples(data, base.inputs, labelled=True) if data else None
        parity, accuracy, gates = _proofs(base, reference, every, samples, device, note)
        inputs = base.inputs
    setups, gaps = _setups(reference, every, machine, device, batches)
    if samples is None:
        gaps.append(NotMeasured("accuracy", "no labelled data were given (`data`)"))
    return _Run(machine, inputs, parity, accuracy, gates, setups, gaps)


def _time(
    run: _Run, batches: Sequence[int], timing: Timing, on_progress: Progress | None
) -> tuple[list[Point], GpuWatch]:
    """The points, and what held for the GPUs meanwhile."""
    from deploykit.measure.timing.sweep import sweep
    from deploykit.runtimes.data.samples import random_feeds
    from deploykit.runtimes.devices import GpuWatch

    with GpuWatch() as watch:
        points = sweep(
            run.setups, batches, timing, lambda n: random_feeds(run.inputs, {BATCH: n}), on_progress
        )
    return list(points), watch


def _check_baseline(found: _Entry) -> _Entry:
    if found.artefact.format != "onnx" or found.precision != "fp32":
        raise BadInput(
            f"{found.artefact}: is {found.precision} in {found.artefact.format}; the baseline is a "
            "float32 model in ONNX",
            hint="`baseline`: the .onnx file that the engine was made from",
        )
    return found


def _method(timing: Timing) -> str:
    return (
        f"each point: {timing.seconds:g} s in {timing.rounds} rounds after at most "
        f"{timing.warmup_s:g} s of warm-up; setups interleaved; inputs in host memory"
    )


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _entry(artefact: Artefact, trust: bool, note: Callable[[str], None]) -> _Entry:
    from deploykit.api.open import open_proven
    from deploykit.onnx_graph.graph import Graph

    def open_it(device: str = "cpu", threads: int | None = None) -> Engine:
        return open_proven(
            artefact, device, threads=threads, trust=trust, overlap=False, on_note=note
        )[0]

    if not artefact.runtime.builder:
        raise wrong_format(artefact, artefact.format, f"an {' or '.join(BUILT)} file")
    built_on: Mapping[str, str] = {}
    if artefact.format == "onnx":
        precision = narrowest(Graph.open(artefact.path).precision)
    else:
        manifest = artefact.manifest
        built_on = manifest.built_on if manifest else {}
        counted = narrowest(manifest.precision) if manifest else "unknown"
        precision = built_on.get("precision", counted)
    return _Entry(artefact, precision, built_on, open_it)


def _baseline(
    given: ArtefactLike | None, first: _Entry, trust: bool, note: Callable[[str], None]
) -> _Entry:
    """The one given, else `first`, or the float32 model next to it that an engine was made from."""
    from deploykit.api.verify import find_sources

    if given:
        return _entry(Artefact.open(given), trust, note)
    if first.artefact.format == "onnx":
        return first
    manifest = first.artefact.manifest
    for path in find_sources(first.artefact.path, manifest) if manifest else ():
        found = _entry(Artefact.open(path), trust, note)
        if found.precision == "fp32":
            return found
    raise BadInput(
        f"{first.artefact}: the float32 model that it was made from is not next to it",
        hint="`baseline`: the .onnx file that all are compared with",
    )


def _proofs(
    base: Engine,
    reference: _Entry,
    every: Sequence[_Entry],
    samples: Samples | None,
    device: str,
    note: Callable[[str], None],
) -> tuple[list[Parity], list[Accuracy], dict[str, Gate]]:
    """Parity of each artefact with `base`, the baseline, and accuracy where there are labels."""
    from deploykit.api.verify import outputs_gate
    from deploykit.measure.evaluate.accuracy import TOP1, top1_scores
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.measure.report.report import Accuracy
    from deploykit.measure.statistics import paired_drop

    def scores(engine: Engine, feeds: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray | None:
        rows = len(next(iter(feeds[0].values())))
        return top1_scores(engine, samples, rows) if samples else None

    graph = reference.artefact.path
    parity, accuracy, gates = [], [], {}
    base_scores = scores(base, comparison_feeds(base, base, samples, graph)[0]) if samples else None
    if base_scores is not None:
        score = paired_drop(base_scores, base_scores, TOP1)
        accuracy.append(Accuracy(reference.precision, TOP1, score.n, score.reference, None))
    for item in every:
        if item is reference:
            continue
        with item.open("cpu" if item.artefact.runtime.on_cpu else device) as engine:
            names = (reference.artefact.name, item.artefact.name)
            feeds, fewer = comparison_feeds(base, engine, samples, graph)
            for text in fewer:
                note(f"parity: {text}")
            random = samples is None
            parity.append(compare_engines(base, engine, feeds, names=names, random=random))
            drop = None
            found = scores(engine, feeds)
            if found is not None and base_scores is not None:
                drop = paired_drop(base_scores, found, TOP1)
                row = Accuracy(item.precision, TOP1, drop.n, drop.candidate, drop.drop)
                accuracy.append(row)
            gates[item.artefact.sha256] = outputs_gate(item.artefact, parity[-1], drop)
    return parity, accuracy, gates


def _setups(
    reference: _Entry,
    every: Sequence[_Entry],
    machine: Machine,
    device: str,
    batches: Sequence[int],
) -> tuple[list[Setup], list[NotMeasured]]:
    """The columns: the baseline, each artefact on the CPU in two ways, and on the GPU there is.

    One that does not run on CPUs has its own, on its GPU.
    """
    from deploykit.measure.report.report import NotMeasured

    cores = default_threads()
    gpu, why = _gpu(reference, machine, device)
    setups = []
    for item in every:
        runtime, stem = item.artefact.runtime, item.artefact.path.stem
        if not runtime.on_cpu:
            setup = _setup(item, f"{stem}, {runtime.title}", device, 1, None)
            setups += _ways(setup, batches) if runtime.overlaps else [setup]
            continue
        label = BASELINE if item is reference else stem
        setups.append(_setup(item, label, "cpu", 1, cores))
        if cores > 1:
            setups.append(_setup(item, f"{label}, {cores} sessions", "cpu", cores, 1))
        if gpu and "cuda" in runtime.devices:
            setups.append(_setup(item, f"{stem}, GPU", gpu, 1, None))
    return setups, [] if gpu else [NotMeasured("GPU", why)]


def _ways(plain: Setup, batches: Sequence[int]) -> list[Setup]:
    """With and without CUDA graphs, with one call and with two in flight; the weights once."""
    opened: list[Engine] = []

    def way(slots: int, graphs: Sequence[int]) -> Engine:
        shared = opened[0].share(slots=slots, graphs=graphs) if opened else None
        opened.append(shared or plain.engines())
        return opened[-1]

    return [
        replace(
            plain,
            label=plain.label + ", CUDA graphs" * bool(graphs) + ", overlap" * (slots > 1),
            engines=partial(way, slots, graphs),
            in_flight=slots,
        )
        for slots in (1, 2)
        for graphs in ((), tuple(batches))
    ]


def _gpu(reference: _Entry, machine: Machine, device: str) -> tuple[str, str]:
    """The GPU to measure on, or "" and why there is none.

    With "auto" one that cannot be used is left out and the report says why; one that was asked for
    by name raises Unsupported.
    """
    from deploykit.runtimes.onnxruntime.engine import providers

    if device == "cpu":
        return "", "the CPU was asked for (`device`)"
    if device == "auto" and not machine.gpus and machine.l4t is None:
        return "", "no NVIDIA GPU on this machine"
    if device == "auto" and "CUDAExecutionProvider" not in providers():
        return "", "the installed onnxruntime has no CUDA provider"
    chosen = "cuda" if device == "auto" else device
    try:
        reference.open(chosen).close()
    except Unsupported as exc:
        if device != "auto":
            raise
        return "", exc.message
    return chosen, ""


def _setup(item: _Entry, label: str, device: str, sessions: int, threads: int | None) -> Setup:
    from deploykit.measure.timing.sweep import Setup

    return Setup(
        label=label,
        engines=lambda: item.open(device, threads),
        sessions=sessions,
        threads=threads,
        precision=item.precision,
        file=item.artefact.name,
        sha256=item.artefact.sha256,
    )
