"""Whether fresh runs of `bench` on one and the same model agree as their intervals say.

    python benchmarks/identical_runs.py MODEL.onnx FOLDER [--runs 20] [-- OPTION ...]

Each run is `deploykit bench COPY --against MODEL OPTION ...`, COPY being a copy of the model, in
new processes and with the settings that the first run found. In ten minutes on a quiet machine:
`--runs 20 -- --batches 8 --seconds 2 --device cpu`.

Printed as Markdown: how many intervals hold the median of all runs, how often two runs that follow
each other show "no difference", how often the copy is said to be faster or slower, and which runs
were not valid.
A folder that holds some of the runs goes on with the next one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from child import DEPLOYKIT, header, run

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.reporting.compare import compare_reports
from deploykit.reporting.report import Report, read


def measured(model: Path, folder: Path, runs: int, options: list[str]) -> list[Path]:
    """The folders of the reports."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "copy.onnx"
    shutil.copy(model, copy)
    reports = [folder / f"run{index}" for index in range(runs)]
    for report in reports:
        if (report / "report.json").exists():
            continue
        settings = [] if report == reports[0] else ["--against", reports[0]]
        command = (
            *DEPLOYKIT,
            "bench",
            copy,
            "--against",
            model,
            "-o",
            report,
            *settings,
            *options,
        )
        ran = run(command)
        print(f"{report.name}: {ran.seconds:.0f} s {ran.error}", file=sys.stderr, flush=True)
    return [report for report in reports if (report / "report.json").exists()]


def figures(report: Report) -> dict[tuple[str, str], Interval | None]:
    found: dict[tuple[str, str], Interval | None] = {}
    for point in report.points:
        row = f"{point.label}, batch {point.batch}"
        found[row, "throughput"] = point.throughput_per_s
        for name in ("p50_ms", "p90_ms", "p99_ms"):
            found[row, name] = getattr(point.latency, name)
    return found


def coverage(reports: list[Report]) -> None:
    """Print, per row and figure, how many intervals hold the median of all runs."""
    series: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for report in reports:
        for key, interval in figures(report).items():
            if interval is not None:
                series[key].append(interval)
    print("| row | figure | median | hold it | lowest to highest | median width |")
    print("| --- | --- | --: | --: | --: | --: |")
    for (row, name), every in series.items():
        truth = statistics.median(each.value for each in every)
        held = sum(each.low <= truth <= each.high for each in every)
        spread = [each.value / truth - 1 for each in every]
        width = statistics.median((each.high - each.low) / 2 / truth for each in every)
        print(
            f"| {row} | {name} | {truth:.5g} | {held} of {len(every)} | "
            f"{min(spread):+.1%} to {max(spread):+.1%} | ±{width:.1%} |"
        )


def differences(folders: list[Path]) -> None:
    """Print how often a run is said to differ from the one before it."""
    agreed, differed, refused = 0, [], []
    for a, b in pairwise(folders):
        try:
            rows = compare_reports(a, b).rows
        except BadInput as error:
            refused.append(f"{a.name}, {b.name}: {error}")
            continue
        found = [
            f"{a.name}, {b.name}: {row.label}, batch {row.batch}: {each.figure} {each.finding}"
            for row in rows
            for each in row.figures
            if each.finding in ("faster", "slower")
        ]
        agreed += not found
        differed += found
    print(f"\nA run against the one before: no difference in {agreed} of {len(folders) - 1}.")
    for line in differed + refused:
        print(f"- {line}")


def crossings(reports: list[Report]) -> None:
    """Print how often the copy is said to be ahead."""
    ahead = [
        f"{each.label}: {each.by} from batch {each.batch} on"
        for report in reports
        for each in report.crossovers
        if each.batch is not None and each.label == "fp32 CPU copy"
    ]
    labels = sorted({each.label for report in reports for each in report.crossovers})
    print(f"\nCrossovers of {', '.join(labels)}; of the copy: {len(ahead)}.")
    for line in ahead:
        print(f"- {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    own, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    given = parser.parse_args(own.split())
    folders = measured(given.model.resolve(), given.folder.resolve(), given.runs, options.split())
    reports = [read(folder) for folder in folders]
    print(header("Identical runs of `bench`"))
    coverage(reports)
    differences(folders)
    crossings(reports)
    invalid = [
        f"{a.name}: {why}" for a, b in zip(folders, reports, strict=True) for why in b.invalid
    ]
    print(f"\nNot valid: {len(invalid)}.")
    for line in invalid:
        print(f"- {line}")


if __name__ == "__main__":
    main()
