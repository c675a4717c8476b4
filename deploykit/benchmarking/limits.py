"""Add to the points of a benchmark what limits them.

Rooflines, the plan's predictions, energy, peak memory, and the time of each layer, by the profiler
of the engine's runtime.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from deploykit.benchmarking.columns import Entry
from deploykit.benchmarking.timing import Setup
from deploykit.core.errors import DeploykitError, Unsupported, first_line
from deploykit.core.machine import default_threads, file_text, this_machine
from deploykit.core.profile import load_profile, recognise, with_gpu
from deploykit.core.subprocesses import run_apart
from deploykit.core.tensors import dynamic_sizes
from deploykit.engines.devices import DeviceWatch
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.graph.graph import Graph
from deploykit.planning import probe
from deploykit.planning.predict import Inferred, Target, infer, predict_call, target_of
from deploykit.planning.probe import CpuCalibration, GpuCeilings, cpu_calibration
from deploykit.reporting.report import (
    CpuSettings,
    LayerKey,
    LayerTime,
    LayerTimes,
    NotMeasured,
    PeakMemory,
    Point,
    PointEnergy,
    PredictedPoint,
)

if TYPE_CHECKING:
    from deploykit.engines.torch.engine import TorchEngine

PROBE_FROM_S = 1.0  # per point; a shorter run does not wait for the CPU probe
_IDLE_S = 0.5
_REST = "at rest"  # the step before the first


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


def limits_of(
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

    def __post_init__(self) -> None:
        self._readings: list[tuple[str, float, Mapping[str, float]]] = []  # as a step begins
        self._read(_REST)
        if self.meter.sources:
            time.sleep(_IDLE_S)
            self._read("")

    def __call__(self, what: str, share: float) -> None:
        self._read(what)
        self.forward(what, share)

    def energy(self, points: Sequence[Point]) -> tuple[PointEnergy, ...]:
        """Return joules per inference: the power in a point's rounds divided by its throughput."""
        found = []
        for point in points:
            device = "cuda:0" if point.device == "cuda" else point.device
            source, rate = self.meter.sources.get(device), point.throughput_per_s.value
            watts = self._watts(f"{point.label}, batch {point.batch}: round ", device)
            if source is not None and watts is not None and rate:
                idle_w = self._watts(_REST, device) or 0.0
                used = (watts / rate, max(0.0, watts - idle_w) / rate, idle_w, source)
                found.append(PointEnergy(point.label, point.batch, *used))
        return tuple(found)

    def gaps(self, points: Sequence[Point]) -> tuple[NotMeasured, ...]:
        used = {"cuda:0" if point.device == "cuda" else point.device for point in points}
        return tuple(
            NotMeasured(f"energy of {name}", why)
            for name, why in sorted(self.meter.why.items())
            if name in used
        )

    def _read(self, step: str) -> None:
        self._readings.append((step, self.clock(), self.meter.joules()))

    def _watts(self, step: str, device: str) -> float | None:
        """Return the mean power of a device in the steps that begin with `step`, if there were."""
        pairs = [pair for pair in pairwise(self._readings) if pair[0][0].startswith(step)]
        seconds = sum(after[1] - before[1] for before, after in pairs)
        joules = sum(after[2].get(device, 0) - before[2].get(device, 0) for before, after in pairs)
        return joules / seconds if seconds > 0 else None


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
        for engine in setup.open(stack):
            for _ in range(_CALLS):
                engine(inputs)
        children = " ".join(map(file_text, Path("/proc/self/task").glob("*/children")))
        pids = ["self", *children.split()]
        peaks = (_HIGHEST.search(file_text(Path(f"/proc/{pid}/status"))) for pid in pids)
        return sum(int(peak[1]) * 1024 for peak in peaks if peak)


_KERNEL, _CALL = "_kernel_time", "model_run"
_KEPT = 100


def measure_layers(
    wanted: Sequence[Entry],
    setups: Sequence[Setup],
    points: Sequence[Point],
    feeds: Callable[[int], Arrays],
    on_progress: Progress = no_progress,
) -> tuple[list[LayerTimes], list[NotMeasured]]:
    """Time the layers of `wanted` in one session, at the fastest batch; return the failures too."""
    found, gaps = [], []
    for entry in wanted:
        chosen = _fastest([each for each in setups if each.entry == entry.label], points)
        if not chosen:
            why = "no column is one session in the process that measures, or its outputs are wrong"
            gaps.append(NotMeasured(f"layers of {entry.artefact.name}", why))
            continue
        setup, point = chosen
        on_progress(f"{setup.label}, batch {point.batch}: time of each layer", 1.0)
        try:
            time_here = _READERS.get(point.runtime.partition(" ")[0])
            if point.device != "cpu" or time_here is None:
                raise Unsupported("only ONNX Runtime and PyTorch on CPUs report them")
            with TemporaryDirectory(prefix="deploykit-layers-") as folder:
                times: LayerTimes = run_apart(
                    "bench: layers", time_here, entry, setup, feeds(point.batch), folder
                )
        except (DeploykitError, OSError) as exc:
            gaps.append(NotMeasured(f"layers of {setup.label}", first_line(exc)))
            continue
        shown = times.layers[:_KEPT]
        found.append(replace(times, label=setup.label, batch=point.batch, layers=shown))
    return found, gaps


def _fastest(setups: Sequence[Setup], points: Sequence[Point]) -> tuple[Setup, Point] | None:
    """Return the fastest setup of one session in this process, or in PyTorch, with its point."""
    pairs = [
        (setup, point)
        for setup, point in product(setups, points)
        if setup.made(point)
        and (point.runtime.startswith("torch") or (setup.sessions == 1 and not setup.processes))
    ]
    return max(pairs, key=lambda pair: pair[1].throughput_per_s.value, default=None)


def _time_modules(entry: Entry, setup: Setup, feeds: Arrays, _: str, __: Progress) -> LayerTimes:
    from deploykit.engines.torch.engine import LayerWatch

    settings = CpuSettings(threads=setup.threads) if setup.threads else None
    with entry.open_session(settings) as engine, entry.open_session(settings) as other:
        watch = LayerWatch(cast("TorchEngine", other))
        return time_layers(engine, watch, feeds, lambda: watch.runs)


def _time_nodes(_: Entry, setup: Setup, feeds: Arrays, folder: str, __: Progress) -> LayerTimes:
    from deploykit.engines.onnxruntime.engine import SPINNING, OnnxRuntimeEngine

    with setup.engines() as engine:
        path, spinning = cast("OnnxRuntimeEngine", engine).path, engine.options[SPINNING] == "1"
        place = str(Path(folder, "calls"))
        profiled = OnnxRuntimeEngine(path, "cpu", setup.threads, spinning=spinning, profile=place)

        def read() -> list[Counter[LayerKey]]:
            written = profiled.session.end_profiling()  # type: ignore[union-attr]
            return read_profile(Path(written).read_bytes())

        with profiled:
            return time_layers(engine, profiled, feeds, read)


_READERS = {"onnxruntime": _time_nodes, "torch": _time_modules}


def read_profile(data: bytes) -> list[Counter[LayerKey]]:
    """Return milliseconds by node for each call in a profile of ONNX Runtime.

    Nodes in the body of a loop count as the loop. A profile keeps a million events: nodes whose
    call is not complete are left out.
    """
    try:
        events = [each for each in json.loads(data) if each["name"].endswith((_KERNEL, _CALL))]
    except ValueError:
        why = "its profile is not whole, or a name in it has quotation marks"
        raise DeploykitError(f"{why}: is the disk of TMPDIR full, or onnxruntime old?") from None
    runs = list[Counter[LayerKey]]()
    call_ended = ended = -2  # before all
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        begun, us, about = event["ts"], event["dur"], event["args"]
        if event["name"] == _CALL:
            runs.append(Counter())
            call_ended = begun + us
        elif begun >= ended or begun + us > ended:  # not nested in the node before
            ended = begun + us
            if begun <= call_ended + 1:  # both are rounded down
                name = event["name"].removesuffix(_KERNEL)
                runs[-1][name, about.get("op_name", ""), about.get("node_index", "")] += us / 1e3
    return runs


_LENGTH_S, _FEWEST, _MOST, _WARM, _TURNS = 1.0, 8, 200, 3, 4  # limits of the calls per side


def time_layers(
    engine: Engine,
    profiled: Callable[[Arrays], object],
    feeds: Arrays,
    read: Callable[[], Sequence[Counter[LayerKey]]],
) -> LayerTimes:
    """Time calls without and with a profiler in turns; `read` returns the ms of all profiled calls.

    Each turn makes a few calls, as threads that spin after a call slow the next one. The middle
    half of the values counts, per layer: other work interrupts a call in a single layer.
    """
    sides: tuple[Callable[[Arrays], object], ...] = (engine, profiled)
    once_s = [max(_time(side, feeds) for side in sides) for _ in range(_WARM)][-1]
    each = math.ceil(max(_FEWEST, min(_MOST, _LENGTH_S / once_s)) / _TURNS)
    calls_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for times_s, side in zip(calls_s, sides, strict=True):
            times_s += [_time(side, feeds) for _ in range(each)]
    runs = [run for run in read()[-len(calls_s[1]) :] if run]
    if not runs:
        raise DeploykitError("its profile holds no whole call")
    layers = [
        LayerTime(key[0], key[1], _mean([run[key] for run in runs]))
        for key in dict.fromkeys(key for run in runs for key in run)
    ]
    return LayerTimes(
        label="",
        batch=0,
        runtime=engine.runtime,
        calls=len(calls_s[1]),
        call_ms=1e3 * _mean(calls_s[0]),
        profiled_ms=1e3 * _mean(calls_s[1]),
        sum_ms=math.fsum(layer.ms for layer in layers),
        count=len(layers),
        layers=tuple(sorted(layers, key=lambda layer: -layer.ms)),
    )


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half, which excludes other work and cold starts."""
    ranked, quarter = sorted(values), len(values) // 4
    return fmean(ranked[quarter : len(ranked) - quarter])


def _time(call: Callable[[Arrays], object], feeds: Arrays) -> float:
    begun = time.perf_counter()
    call(feeds)
    return time.perf_counter() - begun
