"""Compare the search for the fastest column on the CPU with a sweep of all settings.

    python benchmarks/best_cpu.py MODEL.onnx ... [--batches 1,8] [--seconds 2]

Every runtime that is installed, each in the precisions that `bench` tries, and every choice of the
search, those of several sessions also in processes, is timed for `--seconds` in five interleaved
rounds. Prints a Markdown row for each model and batch size: what the search found, what the sweep
found, and how much slower the former is in the sweep. Exits with 1 where that is more than 5 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from deploykit.benchmarking.columns import BASELINE, Entry, find_rivals, open_entry, open_on_cpu
from deploykit.benchmarking.cpu_search import choices_for, search_cpu
from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.core.artefact import Artefact
from deploykit.core.machine import default_threads, this_machine, usable_cores
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from deploykit.reporting.points import CpuSettings

MOST = 0.05
WINDOW_S = 0.2
Column = tuple[str, CpuSettings]  # the entry's name


def swept(
    entries: Sequence[Entry], feeds: Arrays, batch: int, seconds: float
) -> dict[Column, float]:
    """Rows per second of all settings of all entries."""
    setups: dict[Column, Setup] = {}
    for entry in entries:
        every = choices_for(entry.runtime, cores())
        every += [replace(each, processes=True) for each in every if each.sessions > 1]
        for each in dict.fromkeys(every):
            label, opener = f"{name_of(entry)}: {each}", partial(open_on_cpu, entry, each)
            setups[name_of(entry), each] = Setup(label, opener, each.sessions, each.threads)
    timing = Timing(seconds / 5, seconds, 5)
    points = sweep([*setups.values()], [batch], timing, lambda _: feeds)
    rates = {point.label: point.throughput_per_s.value for point in points}
    return {column: rates[setup.label] for column, setup in setups.items()}


def searched(entries: Sequence[Entry], feeds: Arrays, batch: int) -> Column:
    """The fastest of what the searches of `bench` find."""
    found = {}
    for entry in entries:
        tried = choices_for(entry.runtime, cores())
        best = search_cpu(tried, partial(open_on_cpu, entry), feeds, batch, WINDOW_S)[0]
        found[name_of(entry), best.settings] = best.throughput_per_s
    return max(found, key=lambda each: found[each])


def name_of(entry: Entry) -> str:
    return entry.rival or BASELINE


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
    with tempfile.TemporaryDirectory() as folder:
        for path in options.models:
            own = open_entry(Artefact.open(path), False, print)
            entries = [own, *find_rivals([own], this_machine(), Path(folder))[0]]
            with own.open("cpu") as engine:
                inputs = engine.inputs
            for batch in map(int, options.batches.split(",")):
                feeds = random_feeds(inputs, {"N": batch, "batch": batch})
                found = searched(entries, feeds, batch)
                rates = swept(entries, feeds, batch, options.seconds)
                best = max(rates, key=lambda each: rates[each])
                slower = 1 - rates[found] / rates[best]
                failed |= slower > MOST
                names = f"{found[0]}, {found[1]} | {best[0]}, {best[1]}"
                figures = f"{rates[found]:,.0f} | {rates[best]:,.0f} | {slower:.1%}"
                print(f"| {path.name} | {batch} | {names} | {figures} |", flush=True)
    print(f"\nload after {os.getloadavg()[0]:.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
