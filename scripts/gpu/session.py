"""`make gpu-session`: one call of ten minutes on a machine with a GPU, in the order of its worth.

    python -m scripts.gpu.session --out DIR [--site DIR] [--limit-s 580]

Each step is a process with its own limit, and everything lies in DIR as soon as it is known:
`summary.json` and `summary.md`, `probe.json`, and `session.log` with what all steps wrote. Exit
codes as those of `scripts.gpu.run`, but for TensorRT, which such a machine may lack: training and
torch's engine are what else proves something there. What is measured there has calls of its own:
benchmarks/gpu_zoo.py, gpu_serve.py and training.py.

What the machine lacks travels before, each part in a call of its own, one right after another, with
`scripts/gpu/carry.py` (sizes in CONTRIBUTING.md). TensorRT does not: its last wheel on PyPI, 8.6.0,
is for Python 3.10 and older than what deploykit runs (819 MB, 15 parts), and the lean runtime
(47 MB, 1 part) runs only engines that a full TensorRT of its version built.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.gpu import run, zoo
from scripts.gpu.guard import workplace
from scripts.gpu.steps import PYTHON, Result, Step
from tests.support.runtimes.cases import absent

LIMIT_S = 580  # of a call of ten minutes; the rest is for the start and the copies
ZOO = ("encoder", "lstm")


def planned(folder: Path, out: Path) -> Iterator[Step]:
    """In the order of their worth: what comes last may not be reached."""
    minute = dict.fromkeys(("probe", "train", "cuda", "torch"), 60)
    limits = {**minute, "ort": 90, "faults": 90}

    def part(name: str) -> Iterator[Step]:
        for step in run.planned([name], [], [], 500, folder, out):
            yield limited(step, limits[name])

    def module(title: str, limit_s: float, *words: str, skip: str = "") -> Step:
        command = [PYTHON, "-m", *words]
        return Step("session", title, command, limit_s, skip=skip, measures=True)

    no_ort, no_torch = absent("onnxruntime-cuda"), absent("torch-cuda")
    yield from part("probe")
    yield from part("train")
    yield from part("cuda")
    yield module("a waiting thread leaves Python's lock", 30, "scripts.gpu.lock")
    leak = ("scripts.gpu.leak", "torch-cuda", "--calls", "2000", "--openings", "10")
    yield module("leak: torch-cuda", 60, *leak, skip=no_torch)
    yield from part("torch")
    yield from part("ort")
    for step in zoo.steps(ZOO, ("fp32", "fp16"), folder, ("TensorRT is not part of it", no_ort)):
        yield limited(step, 60)
    yield from part("faults")
    place = folder / "server"
    place.mkdir(exist_ok=True)
    yield module("a server under load", 90, "scripts.gpu.server", str(place), skip=no_ort)


def limited(step: Step, limit_s: float) -> Step:
    return Step(**{**vars(step), "limit_s": min(step.limit_s, limit_s)})


def gathered(results: list[Result], logs: Path, out: Path) -> None:
    """One file of all logs: a machine may give back a few files only."""
    with (out / "session.log").open("w", encoding="utf-8") as whole:
        for result in results:
            whole.write(f"== {result.line}\n")
            for path in sorted(logs.glob(f"{result.step.log}.log")):
                whole.write(f"{path.read_text(encoding='utf-8').rstrip()}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/gpu-session")))
    parser.add_argument("--site", type=Path, help="a folder of packages, before all others")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all of it")
    options = parser.parse_args()
    run.use_site(options.site)
    if not run.has_gpu():
        sys.stderr.write(f"{run.NOTHING}\n")
        return 3
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with workplace("gpu-session-") as folder:
        logs = folder / "logs"
        logs.mkdir()
        results = run.run_all(
            planned(folder, out),
            options.limit_s,
            out,
            logs,
            lambda so_far: gathered(so_far, logs, out),
        )
    return run.exit_code(results, {"probe", "train", "cuda", "torch"})


if __name__ == "__main__":
    sys.exit(main())
