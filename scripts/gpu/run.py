"""`make gpu-test`: everything that needs an NVIDIA GPU, in one command.

    python -m scripts.gpu.run [--only probe,cuda,...] [--members NAME,...] [--out DIR] [--system]

In: this machine's GPU and whatever of TensorRT, ONNX Runtime and torch is installed for it. Out:
`summary.json`, `summary.md` and a log of each step in DIR, written anew after every step. Each step
is a process of its own with a time limit: one that fails, hangs or crashes is recorded, and the
rest goes on. What this machine lacks is recorded as skipped, with the reason. Exit 1 if a step
failed, 3 without a GPU, 4 where there is one and TensorRT or CUDA was skipped.

The parts: probe (versions, what loads), train (`deploykit train`), cuda (the driver API), plans
(TensorRT's engines against what every runtime promises), nvidia (what its parser and builder take),
faults, leak,
torch, ort, build (the options of `deploykit build`), zoo. `--system`: this Python as it is, no venv
and no pip; `--site DIR`: wheels that were carried there, before all others.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from deploykit.core.machine import this_machine
from scripts.gpu import builds, zoo
from scripts.gpu.guard import workplace
from scripts.gpu.steps import PYTHON, ROOT, Result, Step, run_step
from tests.support.runtimes.cases import OPENERS, absent

NOTHING = "no NVIDIA GPU here: nothing was run"
LACKING = 4  # exit code: a GPU is here, and what this is for was skipped
RUNTIMES = tuple(name for name in OPENERS if name.endswith("-cuda") or name == "tensorrt")
PARTS = ("probe", "train", "cuda", "plans", "nvidia", "faults")
PARTS += ("leak", "torch", "ort", "build", "zoo")
ESSENTIAL = {"probe", "cuda", "plans", "build"}  # parts in which nothing may be skipped
CONFORMANCE = "tests/engines/test_conformance.py"
SUITES = {  # part -> the runtime it needs, and what pytest gets
    "train": (
        "torch-cuda",
        ["tests/training/test_augment.py", "-m", "gpu"],
    ),
    "cuda": ("", ["tests/engines/test_cuda_device.py", "-m", "gpu"]),
    "plans": ("tensorrt", [CONFORMANCE, "-k", "tensorrt and not stand"]),
    "nvidia": ("tensorrt", ["tests/building", "tests/quantization", "-m", "nvidia and not gpu"]),
    "torch": ("torch-cuda", [CONFORMANCE, "-k", "torch-cuda"]),
    "ort": (
        "onnxruntime-cuda",
        [CONFORMANCE, "tests/engines/test_onnxruntime_cuda.py", "-k", "cuda", "-m", "gpu"],
    ),
}
RECIPE = ROOT / "scripts" / "gpu" / "recipe.py"
TRAINED = {  # title -> options of `deploykit train`
    "float32, data on the GPU": ["--amp", "off", "--no-tf32", "--no-augment"],
    "mixed precision, augmented": ["--augment"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--members", default="", help="of the zoo; all but the large ones")
    parser.add_argument("--precisions", default=",".join(zoo.PRECISIONS))
    parser.add_argument("--calls", type=int, default=10_000, help="of the leak check")
    parser.add_argument("--limit-s", type=float, default=7200, help="for all of it")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-test")
    parser.add_argument("--system", action="store_true", help="this Python, no venv and no pip")
    parser.add_argument("--site", type=Path, help="a folder of packages, before all others")
    options = parser.parse_args()
    use_site(options.site)
    if not has_gpu():
        sys.stderr.write(f"{NOTHING}\n")
        return 3
    if not options.system and sys.prefix == sys.base_prefix:
        parser.error("this Python is in no venv: use `make gpu-test`, or --system")
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {sorted(unknown)[0]}; one of: {', '.join(PARTS)}")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    with workplace("gpu-test-") as folder:
        plans = folder / "plans"  # a part takes what another has built
        plans.mkdir()
        os.environ["DEPLOYKIT_GPU_PLANS"] = str(plans)
        members, precisions = (
            list(filter(None, options.members.split(","))),
            options.precisions.split(","),
        )
        steps = planned(parts, members, precisions, options.calls, folder, options.out)
        results = run_all(steps, options.limit_s, options.out)
    return exit_code(results)


def use_site(site: Path | None) -> None:
    """Start this program again with a folder of packages before all others, also in its steps.

    What it has imported by now may come from elsewhere.
    """
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if site is not None and (place := str(site.resolve())) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([place, *paths])
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def has_gpu() -> bool:
    """An older Jetson has no `nvidia-smi`, but a release file."""
    machine = this_machine()
    return bool(machine.gpus or machine.l4t)


def exit_code(results: Sequence[Result], essential: Collection[str] = ESSENTIAL) -> int:
    if any(result.status == "failed" for result in results):
        return 1
    missing = [
        result for result in results if result.status == "skipped" and result.step.part in essential
    ]
    for result in missing:
        sys.stderr.write(f"error: {result.step.part} was skipped: {result.why}\n")
    return LACKING if missing else 0


def planned(
    parts: Sequence[str],
    members: Sequence[str],
    precisions: Sequence[str],
    calls: int,
    folder: Path,
    out: Path,
) -> Iterator[Step]:
    """Every step in its order; `folder` holds files of steps, `out` gets what they write.

    In the order of `parts`, so that what matters comes before a limit of time.
    """
    no_pytest = "" if importlib.util.find_spec("pytest") else "pytest is not installed"
    for part in parts:
        if part == "train":
            yield from trainings(folder)
        if part in SUITES:
            runtime, words = SUITES[part]
            why = (absent(runtime) if runtime else "") or no_pytest
            command = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *words]
            yield Step(part, f"pytest: {part}", command, 1200, skip=why)
        elif part in ("probe", "faults"):
            command = [PYTHON, "-m", f"scripts.gpu.{part}"]
            more = ["--out", str(out)] if part == "probe" else []
            yield Step(part, part, [*command, *more], 900, measures=True)
        elif part == "leak":
            for runtime in RUNTIMES:
                command = [PYTHON, "-m", "scripts.gpu.leak", runtime, "--calls", str(calls)]
                yield Step("leak", runtime, command, 600, skip=absent(runtime), measures=True)
        elif part == "build":
            yield from builds.steps(folder, absent("tensorrt"))
        elif part == "zoo":
            skips = absent("tensorrt"), absent("onnxruntime-cuda")
            yield from zoo.steps(members, precisions, folder, skips)


def trainings(folder: Path) -> Iterator[Step]:
    """Runs of `deploykit train` on the GPU, whose data need no package."""
    skip = absent("torch-cuda")
    for number, (title, options) in enumerate(TRAINED.items()):
        words = ["train", str(RECIPE), "-o", str(folder / f"trained-{number}.pt"), *options]
        command = [PYTHON, "-m", "deploykit", *words, "--device", "cuda", "--json"]
        yield Step("train", title, command, 600, skip=skip, measures=True)


def run_all(
    steps: Iterator[Step],
    limit_s: float,
    out: Path,
    logs: Path | None = None,
    after: Callable[[list[Result]], None] = lambda _results: None,
) -> list[Result]:
    """Run the steps that `limit_s` leaves time for, and write the summary after each.

    `logs`: where each step's output goes, `out` without it. `after` gets all results so far.
    """
    results: list[Result] = []
    end = time.monotonic() + limit_s
    passed: set[str] = set()
    for step in steps:
        left_s = end - time.monotonic()
        if not step.skip and left_s <= 0:
            result = Result(step, "skipped", why="the time for all of it was up")
        elif not step.skip and step.after and step.after not in passed:
            result = Result(step, "skipped", why=f"{step.after} did not pass")
        else:
            result = run_step(step, min(step.limit_s, left_s), logs or out)
        if result.status == "passed":
            passed.add(step.title)
        results.append(result)
        sys.stdout.write(f"{result.line}\n")
        sys.stdout.flush()
        write_summary(results, out)
        after(results)
    return results


def write_summary(results: Sequence[Result], out: Path) -> None:
    machine = this_machine()
    counts = {
        status: sum(result.status == status for result in results)
        for status in ("passed", "failed", "refused", "skipped")
    }
    document = {
        "date": datetime.date.today().isoformat(),
        "machine": machine.to_dict(),
        "counts": counts,
        "steps": [result.to_dict() for result in results],
    }
    text = json.dumps(document, indent=1)
    (out / "summary.json").write_text(f"{text}\n", encoding="utf-8")
    gpus = ", ".join(f"{gpu.name} (driver {gpu.driver})" for gpu in machine.gpus)
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    lines = [
        "# GPU test",
        "",
        f"{document['date']}; {gpus}; {machine.cpu}; Python {machine.python}; {packages}",
        "",
        ", ".join(f"{count} {status}" for status, count in counts.items()),
        "",
        "| part | step | result | s | figures |",
        "| --- | --- | --- | --: | --- |",
        *(result.row for result in results),
    ]
    (out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
