"""Time engines against the CPU baseline, interleaved in one run."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.artefacts import Progress
from deploykit.api.bench_columns import (
    BASELINE,
    Entry,
    check_baseline,
    choose_setups,
    find_baseline,
    open_entry,
)
from deploykit.api.feeds import comparison_feeds
from deploykit.api.outputs import claim_report
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.machine import Machine, this_machine
from deploykit.core.paths import StrPath
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
    found = [open_entry(Artefact.open(source), trust, note) for source in engines]
    reference = check_baseline(find_baseline(baseline, found[0], trust, note))
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
    reference: Entry,
    every: Sequence[Entry],
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
    setups, gaps = choose_setups(reference, every, machine, device, batches)
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


def _method(timing: Timing) -> str:
    return (
        f"each point: {timing.seconds:g} s in {timing.rounds} rounds (5 if calls are long) after "
        f"about {timing.warmup_s:g} s of warm-up; setups interleaved; inputs in host memory"
    )


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _proofs(
    base: Engine,
    reference: Entry,
    every: Sequence[Entry],
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
