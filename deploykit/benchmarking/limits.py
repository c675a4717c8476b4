"""Add rooflines, the plan's predictions, energy and peak memory to the points of a benchmark."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploykit.benchmarking.columns import Entry
from deploykit.benchmarking.timing import Column, Setup
from deploykit.core.errors import DeploykitError
from deploykit.core.machine import default_threads, file_text, this_machine
from deploykit.core.profile import load_profile, recognise, with_gpu
from deploykit.core.subprocesses import run_apart
from deploykit.core.tensors import dynamic_sizes
from deploykit.engines.devices import DeviceWatch
from deploykit.engines.engine import Arrays
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.graph.graph import Graph
from deploykit.planning import probe
from deploykit.planning.predict import Inferred, Target, infer, predict_call, target_of
from deploykit.planning.probe import CpuCalibration, GpuCeilings, cpu_calibration
from deploykit.reporting.points import Point
from deploykit.reporting.report import NotMeasured, PeakMemory, PointEnergy, PredictedPoint

PROBE_FROM_S = 1.0  # per point; a shorter run does not wait for the CPU probe
_IDLE_S = 0.5
_ROUND = re.compile(r"(.+), batch (\d+): round \d+", re.DOTALL)


def cpu_ceilings(
    setups: Sequence[Setup], seconds: float, on_progress: Progress
) -> tuple[dict[int, CpuCalibration], list[NotMeasured]]:
    """Return the probe's measurements by number of threads; a short run reads only stored ones."""
    only_kept = seconds < PROBE_FROM_S
    wanted = {default_threads()}
    wanted |= {each.threads for each in setups if each.sessions == 1 and each.threads}
    found: dict[int, CpuCalibration] = {}
    try:
        for threads in wanted:
            each, _ = cpu_calibration(threads=threads, only_kept=only_kept, on_progress=on_progress)
            found |= {threads: each} if each else {}
    except DeploykitError as exc:
        return found, [NotMeasured("ceilings of the CPU", exc.message)]
    return found, []


def gpu_limits(
    device: str, seconds: float, on_progress: Progress
) -> tuple[GpuCeilings | None, Target | None, list[NotMeasured]]:
    """Probe the GPU `device`, unless it is "" (no GPU) or the run is short.

    Return its ceilings, the target of predictions, and what is not known, with the reasons.
    """
    if not device or seconds < PROBE_FROM_S:
        return None, None, []
    on_progress("ceilings of the GPU", 0.0)
    gaps, ceilings = [], None
    try:
        ceilings = probe.measure_gpu(device)
    except DeploykitError as exc:
        gaps.append(NotMeasured("ceilings of the GPU", exc.message))
    profile, why = recognise(with_gpu(this_machine(), int(device.partition(":")[2] or 0)))
    known = profile is not None and profile.device != "cpu"
    target = target_of(profile, None) if profile is not None and known else why
    if isinstance(target, Target):
        return ceilings, target, gaps
    return ceilings, None, [*gaps, NotMeasured("plan of the GPU", target)]


def limits(
    entries: Sequence[Entry],
    setups: Sequence[Setup],
    points: Sequence[Point],
    found: Mapping[int, CpuCalibration],
    gpu_ceilings: GpuCeilings | None,
    gpu_target: Target | None,
) -> dict[str, Any]:
    """Return the report's `predicted`, `roofline` and `gpu_roofline`; `found`: by CPU threads."""
    by_hash = {entry.artefact.sha256: entry for entry in entries}
    files = {setup.label: by_hash.get(setup.sha256) for setup in setups}
    graphs, predicted = dict[str, Graph](), list[PredictedPoint]()
    probes: dict[str, list[CpuCalibration | GpuCeilings]] = {"roofline": [*found.values()]}
    probes["gpu_roofline"] = [gpu_ceilings] if gpu_ceilings else []
    marks: dict[str, list[dict[str, Any]]] = {name: [] for name in probes}
    used = {name: {"fp32"} for name in probes}
    for point in points:
        entry, target, name = files.get(point.label), gpu_target, "gpu_roofline"
        if point.device == "cpu":  # with the point's number of threads
            cpu = target_of(load_profile("cpu"), found.get(point.threads or default_threads()))
            target, name = cpu if isinstance(cpu, Target) else None, "roofline"
        if entry is None or entry.artefact.format != "onnx" or not (probes[name] or target):
            continue
        if (inferred := infer_point(graphs, entry, point)) is None:
            continue
        moved = sum(each.traffic_bytes for each in inferred.interpreted)
        if probes[name] and inferred.flops and moved:
            per_s = inferred.flops * point.throughput_per_s.value / point.batch
            mark = {"label": point.label, "batch": point.batch}
            marks[name].append(mark | {"intensity": inferred.flops / moved, "gflops": per_s / 1e9})
            used[name].add(point.precision)
        p50 = point.latency.p50_ms
        on_ort = point.runtime.startswith("onnxruntime") and point.sessions == 1
        if target is not None and on_ort and p50 is not None:
            ms = predict_call(inferred, target, inferred.stored).latency_ms
            error = ms / p50.value - 1
            predicted.append(
                PredictedPoint(point.label, point.batch, ms, p50.value, error, target.basis)
            )
    rooflines = {
        name: {"ceilings": _ceilings(here, used[name], probes[name]), "points": here}
        for name, here in marks.items()
        if here
    }
    return {"predicted": tuple(predicted), **rooflines}


def infer_point(graphs: dict[str, Graph], entry: Entry, point: Point) -> Inferred | None:
    """Return the graph at the timed sizes; None where these are not known."""
    sha256 = entry.artefact.sha256
    try:
        graph = graphs.setdefault(sha256, Graph.open(entry.artefact.path))
        sizes = dynamic_sizes(graph.inputs, point.shapes)
        return infer(graph, point.batch, sizes) if point.shapes else None
    except DeploykitError:
        return None  # the measurements stand without a prediction


def _ceilings(
    marks: Sequence[Mapping[str, Any]],
    used: Collection[str],
    found: Sequence[CpuCalibration | GpuCeilings],
) -> dict[str, float]:
    """Return the highest rate that a probe in the precisions `used`, or a point, reached."""
    by_precision: dict[str, float] = {}
    for each in found:
        for name, rate in each.ops_per_s.items():
            if name in used:
                key = f"gflops {name}"
                by_precision[key] = max(by_precision.get(key, 0.0), rate / 1e9)
    moved = [mark["gflops"] / mark["intensity"] for mark in marks]
    return {
        "gflops": max([*by_precision.values(), *(mark["gflops"] for mark in marks)]),
        "gbytes_per_s": max([*(each.cache_bytes_per_s / 1e9 for each in found), *moved]),
        "memory_gbytes_per_s": max(each.bytes_per_s / 1e9 for each in found),
        **by_precision,
    }


@dataclass
class EnergyLog:
    """Reads the energy meters between the steps of a sweep, to divide the energy by point."""

    meter: DeviceWatch
    forward: Progress
    clock: Callable[[], float] = time.perf_counter
    idle_w: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spent: dict[tuple[str, int], list[tuple[float, Mapping[str, float]]]] = {}
        self._step: tuple[str, int] | None = None
        self._last = (self.clock(), self.meter.joules())
        if self.meter.sources:
            time.sleep(_IDLE_S)  # the idle span to measure
            seconds, joules = self._since()
            self.idle_w = {name: used / seconds for name, used in joules.items() if seconds > 0}

    def __call__(self, what: str, share: float) -> None:
        """Begin a step; the energy used so far belongs to the previous one."""
        since = self._since()
        if self._step is not None:
            self._spent.setdefault(self._step, []).append(since)
        match = _ROUND.fullmatch(what)
        self._step = (match[1], int(match[2])) if match else None
        self.forward(what, share)

    def energy(self, points: Sequence[Point]) -> tuple[PointEnergy, ...]:
        """Return joules per inference: the power in a point's rounds divided by its throughput."""
        found = []
        for point in points:
            device = "cuda:0" if point.device == "cuda" else point.device
            source = self.meter.sources.get(device)
            steps = self._spent.get((point.label, point.batch), [])
            seconds = sum(each for each, _ in steps)
            rate = point.throughput_per_s.value
            if source is None or not seconds or not rate:
                continue
            watts = sum(joules.get(device, 0.0) for _, joules in steps) / seconds
            idle_w = self.idle_w.get(device, 0.0)
            above = max(0.0, watts - idle_w) / rate
            found.append(PointEnergy(point.label, point.batch, watts / rate, above, idle_w, source))
        return tuple(found)

    def gaps(self, points: Sequence[Point]) -> tuple[NotMeasured, ...]:
        used = {"cuda:0" if point.device == "cuda" else point.device for point in points}
        return tuple(
            NotMeasured(f"energy of {name}", why)
            for name, why in sorted(self.meter.why.items())
            if name in used
        )

    def _since(self) -> tuple[float, dict[str, float]]:
        (before_s, before), now = self._last, (self.clock(), self.meter.joules())
        self._last = now
        used = {name: value - before.get(name, 0.0) for name, value in now[1].items()}
        return now[0] - before_s, used


_CALLS = 3
_HIGHEST = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def measure_memory(
    setups: Sequence[Setup],
    points: Sequence[Point],
    feeds: Callable[[int], Arrays],
    on_progress: Progress = no_progress,
) -> tuple[PeakMemory, ...]:
    """Measure each label's peak memory at its largest batch, in a process of its own."""
    largest = {each.label: each.batch for each in sorted(points, key=lambda each: each.batch)}
    found = []
    for setup in setups:
        batch = largest.get(setup.label)
        if batch is None or (setup.batches and batch not in setup.batches):
            continue
        on_progress(f"{setup.label}: memory", 1.0)
        peak = run_apart("bench: a process whose memory is read", _peak_bytes, setup, feeds, batch)
        found += [PeakMemory(setup.label, batch, peak)] * bool(peak)
    return tuple(found)


def _peak_bytes(
    setup: Setup, feeds: Callable[[int], Arrays], batch: int, _on_progress: Progress
) -> int:
    """Run in a separate process; return the peak, or 0 if /proc does not have it."""
    inputs = feeds(batch)
    with contextlib.ExitStack() as stack:
        for engine in Column.open(setup, stack).engines:
            for _ in range(_CALLS):
                engine(inputs)
        children = " ".join(map(file_text, Path("/proc/self/task").glob("*/children")))
        pids = ["self", *children.split()]
        peaks = (_HIGHEST.search(file_text(Path(f"/proc/{pid}/status"))) for pid in pids)
        return sum(int(peak[1]) * 1024 for peak in peaks if peak)
