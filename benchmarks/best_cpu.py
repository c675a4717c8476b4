"""Compare the search for the settings of the CPU with a sweep of all of them.

    python benchmarks/best_cpu.py MODEL.onnx ... [--batches 1,8] [--seconds 2]

Every choice of the search, and each of several sessions also in processes, is timed for `--seconds`
in five interleaved rounds. Prints a Markdown row for each model and batch size: the settings that
the search found, those of the sweep, and how much slower the former are in the sweep. Exits with 1
where that is more than 5 %.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from deploykit.core.machine import default_threads, usable_cores
from deploykit.measure.timing.cpu_search import CpuSettings, choices, search_cpu
from deploykit.measure.timing.processes import ProcessEngine
from deploykit.measure.timing.sweep import Setup, Timing, sweep
from deploykit.runtimes.data.samples import random_feeds
from deploykit.runtimes.engine import Arrays, Engine
from deploykit.runtimes.onnxruntime.engine import open_engine

MOST = 0.05
WINDOW_S = 0.2


def open_session(path: Path, settings: CpuSettings) -> Engine:
    opener = partial(open_engine, path, "cpu", settings.threads, spinning=settings.spinning)
    return ProcessEngine(opener) if settings.processes else opener()


def swept(path: Path, feeds: Arrays, batch: int, seconds: float) -> dict[CpuSettings, float]:
    """Rows per second of all settings."""
    every = choices(cores())
    every += [replace(each, processes=True) for each in every if each.sessions > 1]
    setups = [
        Setup(str(each), partial(open_session, path, each), each.sessions, each.threads)
        for each in every
    ]
    points = sweep(setups, [batch], Timing(seconds / 5, seconds, 5), lambda _: feeds)
    rates = {point.label: point.throughput_per_s.value for point in points}
    return {each: rates[str(each)] for each in every}


def cores() -> list[int]:
    return sorted({default_threads(), usable_cores()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    failed = False
    print(f"{cores()} cores, load before {os.getloadavg()[0]:.1f}\n")
    print("| model | batch | search | sweep | search's choice, rows/s | best, rows/s | slower by |")
    print("| --- | --: | --- | --- | --: | --: | --: |")
    for path in options.models:
        for batch in map(int, options.batches.split(",")):
            with open_session(path, CpuSettings()) as engine:
                feeds = random_feeds(engine.inputs, {"N": batch, "batch": batch})
            opener = partial(open_session, path)
            found = search_cpu(choices(cores()), opener, feeds, batch, WINDOW_S)[0].settings
            rates = swept(path, feeds, batch, options.seconds)
            best = max(rates, key=lambda each: rates[each])
            slower = 1 - rates[found] / rates[best]
            failed |= slower > MOST
            figures = f"{rates[found]:,.0f} | {rates[best]:,.0f} | {slower:.1%}"
            print(f"| {path.name} | {batch} | {found} | {best} | {figures} |", flush=True)
    print(f"\nload after {os.getloadavg()[0]:.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
