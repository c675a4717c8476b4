"""Measure: engines against the CPU baseline in one run, and a running server under load."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.artefacts import PARITY_BATCHES, Progress
from deploykit.core.artefact import read_manifest, sniff
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.files import make_folder, sha256
from deploykit.core.machine import Machine, default_threads, this_machine
from deploykit.core.precision import narrowest
from deploykit.core.tensors import BATCH, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from deploykit.measure.evaluate.parity import Parity
    from deploykit.measure.load.generator import LoadResult
    from deploykit.measure.report.report import Accuracy, NotMeasured, Report
    from deploykit.measure.timing.sweep import Point, Setup, Timing
    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.engine import Engine

log = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 32)
BASELINE = "fp32 CPU"  # ONNX Runtime, one session on all physical cores


@dataclass(frozen=True)
class _Artefact:
    path: Path
    precision: str  # "fp32", "fp16", "int8"
    sha256: str
    format: str  # "onnx", "tensorrt"
    built_on: Mapping[str, str]
    open: Callable[..., Engine]  # (device, threads)

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.path.name,
            "sha256": self.sha256,
            "precision": self.precision,
            "format": self.format,
            "built_on": dict(self.built_on),
        }


def bench(
    engines: Sequence[Path],
    *,
    baseline: Path | None = None,
    batches: Sequence[int] = BATCHES,
    out: Path = Path("report"),
    data: Path | None = None,
    device: str = "auto",
    quick: bool = False,
    warmup_s: float | None = None,
    seconds: float | None = None,
    trust: bool = False,
    command: str = "",
    on_progress: Progress | None = None,
    on_note: Callable[[str], None] = log.warning,
) -> Report:
    """Time `engines` against `baseline` (float32 .onnx on the CPU), interleaved, into a report.

    Without `baseline` it is the first engine, or the float32 model that a TensorRT engine was made
    from where that lies beside it. Such an engine is proven first, or taken on `trust`: see
    `open_proven`. `data`: labelled .npz; then accuracy is measured too, paired with the baseline's.
    Each point is timed for `seconds` after `warmup_s` (60 and 10; with `quick` 5 and 2, and marked
    so).
    """
    from deploykit.measure.report import report as reports
    from deploykit.measure.report.verdict import verdict
    from deploykit.measure.timing.sweep import Timing, sweep
    from deploykit.runtimes.data.samples import random_feeds, read_samples
    from deploykit.runtimes.devices import ThrottleWatch

    make_folder(out)
    told: set[str] = set()

    def note(text: str) -> None:  # once, as an engine is opened several times
        if text not in told:
            told.add(text)
            on_note(text)

    found = [_artefact(path, trust, note) for path in engines]
    reference = _artefact(baseline, trust, note) if baseline else _baseline(found[0], trust, note)
    if reference.format != "onnx" or reference.precision != "fp32":
        raise BadInput(
            f"{reference.path}: is {reference.precision} in {reference.format}; the baseline is a "
            "float32 model in ONNX",
            hint="--baseline model.onnx, the file that the engine was made from",
        )
    every = list({item.sha256: item for item in (reference, *found)}.values())
    machine = this_machine()
    timing = Timing(
        warmup_s=(2.0 if quick else 10.0) if warmup_s is None else warmup_s,
        seconds=(5.0 if quick else 60.0) if seconds is None else seconds,
    )
    with reference.open("cpu") as opened:
        inputs = opened.inputs
    samples = read_samples(data, inputs, labelled=True) if data else None
    parity, accuracy = _proofs(reference, every, samples, device)
    setups, gaps = _setups(reference, every, machine, device)
    if samples is None:
        gaps.append(reports.NotMeasured("accuracy", "no labelled data were given (--data)"))
    with ThrottleWatch() as watch:
        points = sweep(
            setups, batches, timing, lambda n: random_feeds(inputs, {BATCH: n}), on_progress
        )
    report = reports.Report(
        title=f"{reference.path.stem}: latency and throughput",
        created=now(),
        command=command,
        quick=quick,
        baseline=BASELINE,
        machine=machine.to_dict(),
        artefacts=tuple(item.to_dict() for item in every),
        accuracy=tuple(accuracy),
        parity=tuple(item.to_dict() for item in parity),
        points=tuple(points),
        notes=(_method(timing), *sorted(told)),
        throttled=watch.reasons if any(point.device != "cpu" for point in points) else (),
        not_measured=tuple(gaps),
    )
    report = replace(report, verdict=verdict(report))
    reports.write(report, out)
    return report


def load_test(
    url: str,
    *,
    model: str | None = None,
    rate: float | None = None,
    concurrency: int | None = None,
    duration_s: float = 10.0,
    batch: int = 1,
    out: Path | None = None,
    command: str = "",
) -> LoadResult:
    """Load a running server: `rate` requests per second (open loop) or `concurrency` of them."""
    from deploykit.measure.load.generator import run_load
    from deploykit.measure.report import report as reports
    from deploykit.measure.report.verdict import verdict

    if out is not None:
        make_folder(out)
    result = run_load(
        url, model=model, rate=rate, concurrency=concurrency, duration_s=duration_s, batch=batch
    )
    if out is not None:
        report = reports.Report(
            title=f"{result.model} under load",
            created=now(),
            command=command,
            machine=this_machine().to_dict(),
            serving=(result,),
        )
        reports.write(replace(report, verdict=verdict(report)), out)
    return result


def best_cpu(points: Sequence[Point], batch: int, by: str) -> Point:
    """The best CPU point of a batch: tuned threads, sessions and precision, whatever won."""
    from deploykit.measure.timing.sweep import best

    return best([p for p in points if p.device == "cpu" and p.batch == batch], by)


def _method(timing: Timing) -> str:
    return (
        f"each point: {timing.seconds:g} s in {timing.rounds} rounds after at most "
        f"{timing.warmup_s:g} s of warm-up; setups interleaved; inputs in host memory"
    )


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _artefact(path: Path, trust: bool, note: Callable[[str], None]) -> _Artefact:
    from deploykit.api.open import open_proven
    from deploykit.onnx_graph.graph import Graph

    def opened(device: str = "cpu", threads: int | None = None) -> Engine:
        return open_proven(path, device, threads=threads, trust=trust, on_note=note)[0]

    kind = sniff(path)
    if kind not in ("onnx", "tensorrt"):
        raise BadInput(f"{path}: is a {kind} file; bench takes .onnx and .trt files")
    built_on: Mapping[str, str] = {}
    if kind == "onnx":
        precision = narrowest(Graph.open(path).precision)
    else:
        manifest = read_manifest(path)
        built_on = manifest.built_on if manifest else {}
        counted = narrowest(manifest.precision) if manifest else "unknown"
        precision = built_on.get("precision", counted)
    return _Artefact(path, precision, sha256(path), kind, built_on, opened)


def _baseline(first: _Artefact, trust: bool, note: Callable[[str], None]) -> _Artefact:
    """`first` itself, or the float32 model beside it that an engine was made from."""
    from deploykit.api.verify import sources

    manifest = read_manifest(first.path) if first.format == "tensorrt" else None
    if first.format == "onnx":
        return first
    for path in sources(first.path, manifest) if manifest else ():
        found = _artefact(path, trust, note)
        if found.precision == "fp32":
            return found
    raise BadInput(
        f"{first.path}: the float32 model that it was made from is not beside it",
        hint="--baseline model.onnx, what all are compared with",
    )


def _proofs(
    reference: _Artefact, every: Sequence[_Artefact], samples: Samples | None, device: str
) -> tuple[list[Parity], list[Accuracy]]:
    """Parity of each artefact with the baseline, and accuracy where there are labels."""
    from deploykit.measure.evaluate.accuracy import TOP1, top1_scores
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.measure.report.report import Accuracy
    from deploykit.measure.statistics import paired_drop
    from deploykit.runtimes.data.samples import random_feeds

    def feeds_of(inputs: Sequence[TensorSpec], most: int) -> list[Mapping[str, np.ndarray]]:
        """Within the batch that both engines take."""
        if samples:
            return list(samples.batches(min(32, most) if inputs[0].batched else 1))
        sizes = dict.fromkeys(min(size, most) for size in PARITY_BATCHES)
        return [random_feeds(tuple(inputs), {BATCH: size}, size) for size in sizes]

    parity, accuracy = [], []
    with reference.open() as base:
        base_scores = top1_scores(base, samples) if samples else None
        for item in every:
            with item.open(device if item.format == "tensorrt" else "cpu") as engine:
                most = engine.max_batch or 64
                if item is not reference:
                    names = (reference.path.name, item.path.name)
                    feeds = feeds_of(base.inputs, most)
                    parity.append(compare_engines(base, engine, feeds, names=names))
                if samples is not None and base_scores is not None:
                    drop = paired_drop(base_scores, top1_scores(engine, samples, most), TOP1)
                    against = None if item is reference else drop.drop
                    row = Accuracy(item.precision, TOP1, drop.n, drop.candidate, against)
                    accuracy.append(row)
    return parity, accuracy


def _setups(
    reference: _Artefact, every: Sequence[_Artefact], machine: Machine, device: str
) -> tuple[list[Setup], list[NotMeasured]]:
    """The columns: the baseline, each artefact on the CPU in two ways, and on the GPU there is.

    A TensorRT engine has one, on its GPU.
    """
    from deploykit.measure.report.report import NotMeasured

    cores = default_threads()
    gpu, why = _gpu(reference, machine, device)
    setups = []
    for item in every:
        if item.format == "tensorrt":
            setups.append(_setup(item, f"{item.path.stem}, TensorRT", device, 1, None))
            continue
        label = BASELINE if item is reference else item.path.stem
        setups.append(_setup(item, label, "cpu", 1, cores))
        if cores > 1:
            setups.append(_setup(item, f"{label}, {cores} sessions", "cpu", cores, 1))
        if gpu:
            setups.append(_setup(item, f"{item.path.stem}, GPU", gpu, 1, None))
    return setups, [] if gpu else [NotMeasured("GPU", why)]


def _gpu(reference: _Artefact, machine: Machine, device: str) -> tuple[str, str]:
    """The GPU to measure on, or "" and why there is none.

    With "auto" one that cannot be used is left out and the report says why; one that was asked for
    by name raises Unsupported.
    """
    from deploykit.runtimes.onnxruntime.engine import providers

    if device == "cpu":
        return "", "--device cpu was asked for"
    if device == "auto" and not machine.gpus:
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


def _setup(item: _Artefact, label: str, device: str, sessions: int, threads: int | None) -> Setup:
    from deploykit.measure.timing.sweep import Setup

    return Setup(
        label=label,
        engines=lambda: item.open(device, threads),
        sessions=sessions,
        threads=threads,
        precision=item.precision,
        file=item.path.name,
        sha256=item.sha256,
    )
