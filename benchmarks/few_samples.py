"""What `auto` loses to the best single calibrator with few samples to calibrate on.

    python benchmarks/few_samples.py OUT.md [FOLDER]

The networks of `calibrators.py`, with 32 to 256 samples, drawn twice each from the 720 that
were not trained on; the others test. FOLDER keeps the graphs for the next run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from calibrators import (
    BOUND_DB,
    LAYOUTS,
    MODELS,
    folder_of,
    made_with,
    outputs,
    prepare,
    sqnr_db,
)

import deploykit as dk
from deploykit.engines.data.samples import Samples
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import METHODS, calibrate
from deploykit.quantization.qdq import to_pairs

SIZES, SEEDS = (32, 48, 64, 128, 256), (10, 11)

Losses = dict[tuple[str, int], list[dict[str, float]]]  # by layout and samples: of each method


def losses(name: str, folder: Path) -> Losses:
    """What each calibrator, and "auto", loses to the best single one, in dB, for each seed."""
    path, *parts, _ = prepare(name, folder)
    pool, out, data = np.concatenate(parts), folder / "grid.onnx", folder / "grid.npz"
    wanted, source = outputs(path, pool), Graph.open(path)
    found: Losses = {}
    for size in SIZES:
        for seed in SEEDS:
            order = np.random.default_rng(seed).permutation(len(pool))
            calib, test = order[:size], order[size:]
            np.savez(data, x=pool[calib])
            ranges = calibrate(source, Samples({"x": pool[calib]}, None, "data"))
            for runtime in LAYOUTS:
                sqnr = {}
                for method in METHODS:
                    to_pairs(source, ranges.using(method), runtime=runtime).save(out)
                    sqnr[method] = sqnr_db(wanted[test], outputs(out, pool[test]))
                try:
                    made = dk.quantize(path, "int8", out, calib=data, runtime=runtime, force=True)
                except dk.GateFailed as exc:
                    made = exc.result
                assert made.evidence.calibration is not None
                best = max(sqnr.values())
                sqnr["auto"] = sqnr[made.evidence.calibration.method]
                lost = {method: best - each for method, each in sqnr.items()}
                found.setdefault((runtime, size), []).append(lost)
    return found


def grid(out: Path, folder: Path) -> None:
    """Write the table of `losses`: the mean of the seeds, and the worst."""
    heads = ["model", "layout", *map(str, SIZES), *(f"{each}, all sizes" for each in METHODS)]
    lines = ["| " + " | ".join(heads) + " |", "| --- | --- |" + " --: |" * (len(heads) - 2)]
    every: list[dict[str, float]] = []
    for name in MODELS:
        found = losses(name, folder)
        for runtime, label in LAYOUTS.items():
            by_size = [found[runtime, size] for size in SIZES]
            of_all = [each for runs in by_size for each in runs]
            every += of_all
            cells = [_summary(runs, "auto") for runs in by_size]
            cells += [_summary(of_all, method) for method in METHODS]
            lines.append("| " + " | ".join([name, label, *cells]) + " |")
            print(lines[-1], flush=True)
    totals = [f"{_summary(every, method)} of {method}" for method in ("auto", *METHODS)]
    above = sum(each["auto"] > BOUND_DB for each in every)
    lines += ["", f"Over all {len(every)} runs: " + ", ".join(totals) + ".", ""]
    lines += [f"`auto` loses more than {BOUND_DB} dB in {above} of them."]
    head = [
        "# Calibrators with few samples",
        "",
        made_with("few_samples.py"),
        (
            "What a calibrator loses to the best single one of the same run, in dB: the mean of "
            f"{len(SEEDS)} draws of the calibration samples, and the worst. The columns with "
            "numbers are `auto` with so many samples."
        ),
        "",
    ]
    out.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    print(*lines[-3:], sep="\n")


def _summary(runs: list[dict[str, float]], method: str) -> str:
    lost = [each[method] for each in runs]
    return f"{sum(lost) / len(lost):.2f} ({max(lost):.2f})"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        place = folder_of(sys.argv, scratch)
        grid(Path(sys.argv[1]), place)
