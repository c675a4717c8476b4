"""Measure the time of each layer with the profiler of the engine's runtime."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from deploykit.benchmarking.columns import Entry
from deploykit.benchmarking.timing import Setup
from deploykit.core.errors import DeploykitError, Unsupported, first_line
from deploykit.core.subprocesses import run_apart
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.reporting.report import (
    CpuSettings,
    LayerKey,
    LayerTime,
    LayerTimes,
    NotMeasured,
    Point,
)

if TYPE_CHECKING:
    from deploykit.engines.torch.engine import TorchEngine

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
