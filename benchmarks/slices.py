"""Race sessions of ONNX Runtime on one thread, in short slices in turn, and write the table.

Seconds are of the calling thread's processor (`time.thread_time`; sessions have one thread), so
that other work on the machine counts little; ratios are taken slice by slice, and the middle one is
printed with the range of three quarters of them.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from deploykit.engines.onnxruntime.engine import SLOWER_ON_CPU, session_options

SLICES, SLICE_S = 21, 0.08


def session(path: Path, *, fused: bool) -> ort.InferenceSession:
    """`fused`: with the two fusions of ONNX Runtime's that we switch off."""
    off = () if fused else SLOWER_ON_CPU
    for exact in (True, False):  # 1.32 fails on some graphs where it keeps integer sums exact
        try:
            return ort.InferenceSession(
                str(path),
                session_options(1, exact=exact),
                providers=["CPUExecutionProvider"],
                disabled_optimizers=off,
            )
        except ort_state.Fail:
            if not exact:
                raise
    raise AssertionError("not reached")


def race(
    sessions: Mapping[str, ort.InferenceSession], feeds: Mapping[str, np.ndarray]
) -> dict[str, list[float]]:
    """Seconds of each slice, by name; every slice runs all of them, in turn and back."""
    first = next(iter(sessions.values()))
    for each in sessions.values():
        each.run(None, feeds)
    started = time.thread_time()
    first.run(None, feeds)
    calls = max(1, round(SLICE_S / max(time.thread_time() - started, 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(SLICES):
        for name in list(sessions)[:: 1 if number % 2 else -1]:
            started = time.thread_time()
            for _ in range(calls):
                sessions[name].run(None, feeds)
            seconds[name].append((time.thread_time() - started) / calls)
    return seconds


def cells(seconds: Mapping[str, Sequence[float]], base: str, name: str) -> str:
    """How many times as fast as `base` is `name`, with the range, and its milliseconds."""
    mine = seconds[name]
    ratios = sorted(a / b for a, b in zip(seconds[base], mine, strict=True))
    edge, middle = len(ratios) // 8, ratios[len(ratios) // 2]
    ms = sorted(mine)[len(mine) // 2] * 1e3
    return f"{middle:.2f} ({ratios[edge]:.2f} to {ratios[-1 - edge]:.2f}) | {ms:.2f}"


def main(
    script: str, title: str, head: Sequence[str], rows: Callable[[Path], Iterator[str]]
) -> None:
    """Write the table of `rows` to the file that the command line names, and print it."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python benchmarks/{script} OUT.md")
    torch.set_num_threads(1)
    made_with = (
        f"`OMP_NUM_THREADS=1 python benchmarks/{script} OUT.md`; Python "
        f"{platform.python_version()}, onnx {onnx.__version__}, onnxruntime {ort.__version__}, "
        f"torch {torch.__version__}. {SLICES} slices in turn in one process, processor seconds of "
        "one thread; the machine had other work."
    )
    lines = [f"# {title}", "", made_with, "", *head]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for line in rows(Path(folder)):
            print(line, flush=True)
            lines.append(line)
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
