"""Where the time of a call of each engine goes, in a run of its own after the timed one."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from deploykit.api.artefacts import Progress
from deploykit.core.apart import run_apart
from deploykit.core.errors import DeploykitError, Unsupported, first_line

if TYPE_CHECKING:
    from deploykit.measure.layers import LayerKey, LayerTimes
    from deploykit.measure.report.report import NotMeasured
    from deploykit.measure.timing.sweep import Point, Setup
    from deploykit.runtimes.engine import Arrays

_KERNEL = "_kernel_time"


def measure_layers(
    wanted: Collection[str],
    setups: Sequence[Setup],
    points: Sequence[Point],
    feeds: Callable[[int], Arrays],
    on_progress: Progress | None = None,
) -> tuple[list[LayerTimes], list[NotMeasured]]:
    """Of each entry in `wanted` (keys), in one session, where that was fastest; and what failed.

    Each in a process of its own.
    """
    from deploykit.measure.report.report import NotMeasured

    found, gaps = [], []
    for key in wanted:
        if not (chosen := _fastest([each for each in setups if each.entry == key], points)):
            continue
        setup, point = chosen
        if on_progress is not None:
            on_progress(f"{setup.label}, batch {point.batch}: time of each layer", 1.0)
        try:
            if point.device != "cpu" or not point.runtime.startswith("onnxruntime"):
                raise Unsupported("they are known of ONNX Runtime on CPUs alone")
            found.append(run_apart("bench: layers", _time_layers, setup, feeds, point.batch))
        except (DeploykitError, OSError) as exc:
            gaps.append(NotMeasured(f"layers of {setup.label}", first_line(exc)))
    return found, gaps


def _fastest(setups: Sequence[Setup], points: Sequence[Point]) -> tuple[Setup, Point] | None:
    """Of those in one session in this process, with its point."""
    pairs = [
        (setup, point)
        for setup in setups
        for point in points
        if (setup.label, setup.sessions, setup.in_flight) == (point.label, 1, 1)
        and not setup.processes
        and point.batch in (setup.batches or (point.batch,))
    ]
    return max(pairs, key=lambda pair: pair[1].throughput_per_s.value, default=None)


def _time_layers(
    setup: Setup, feeds: Callable[[int], Arrays], batch: int, _: Progress
) -> LayerTimes:
    """ONNX Runtime's profiler counts whole microseconds, and each node costs it a few more."""
    from deploykit.measure.timing.layers import time_layers
    from deploykit.runtimes.onnxruntime.engine import SPINNING, OnnxRuntimeEngine

    with setup.engines() as engine, TemporaryDirectory(prefix="deploykit-layers-") as folder:
        path, spinning = cast("OnnxRuntimeEngine", engine).path, engine.options[SPINNING] == "1"
        place = str(Path(folder, "calls"))
        profiled = OnnxRuntimeEngine(path, "cpu", setup.threads, spinning=spinning, profile=place)

        def read() -> list[Counter[LayerKey]]:
            written = Path(profiled.session.end_profiling())  # type: ignore[union-attr]
            try:
                return read_profile(json.loads(written.read_bytes().decode("utf-8", "replace")))
            except (OSError, ValueError) as exc:
                raise DeploykitError(
                    f"its profile is damaged: is the disk of {folder} full?"
                ) from exc

        return time_layers((setup.label, batch), (engine, profiled), feeds(batch), read)


def read_profile(events: Sequence[Mapping[str, Any]]) -> list[Counter[LayerKey]]:
    """Milliseconds by node of each call; nodes inside the body of a loop count as the loop's."""
    begun = sorted(each["ts"] for each in events if each.get("name") == "model_run")
    runs: list[Counter[LayerKey]] = [Counter() for _ in begun]
    kernels = [each for each in events if each.get("name", "").endswith(_KERNEL)]
    end = -math.inf
    for each in sorted(kernels, key=lambda event: (event["ts"], -event["dur"])):
        if each["ts"] < end and each["ts"] + each["dur"] <= end:
            continue  # inside the one before
        end = each["ts"] + each["dur"]
        about, at = each["args"], bisect_right(begun, each["ts"]) - 1
        key = each["name"].removesuffix(_KERNEL), about["op_name"], str(about.get("node_index"))
        if at >= 0:
            runs[at][key] += each["dur"] / 1e3
    return runs
