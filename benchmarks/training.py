"""The articles' experiment and the tables of devices, in one command.

    python benchmarks/training.py [--out out/training] [--limit-s 470] [--rehearse]

cats-dogs is trained as in the article, 20 epochs of 2,000 images at batch 150, in float32 on the
GPU and on the CPU, then in mixed precision, then compiled too. `train --compare-devices` follows
for four recipes: TF32, bf16 and fp16, the loader apart, and where augmentation takes less time. On
a machine with two GPUs two processes train, with DDP and FSDP. Each part is a process with its own
limit; `training.md` and `training.json` are written after each, and a part that fails or hangs
stops no other. Under 8 minutes: what no time is left for is skipped. A run that its limit ends
counts for the epochs that it had done. Exit 0 when no part failed, else 1, 3 without a GPU.

`--rehearse`: small sizes, and the CPU in the GPU's place: shows that the command works, no more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deploykit.core.files import write_json, write_text
from deploykit.core.machine import this_machine
from deploykit.training.compare_devices import ARTICLES
from scripts.gpu.guard import workplace
from scripts.gpu.run import NOTHING, run_all
from scripts.gpu.steps import LOADED_S, PYTHON, Result, Step

HERE = str(Path(__file__).resolve())
EPOCHS = 20
GPU = {"device": "cuda", "amp": "off", "tf32": False}
RUNS: Mapping[str, Mapping[str, Any]] = {  # name -> what `deploykit.training.train.train` gets
    "gpu float32": GPU,
    "cpu float32": {"device": "cpu"},
    "gpu mixed": {"device": "cuda"},
    "gpu mixed compiled": {"device": "cuda", "compile": True},
}
RECIPES = ("cats-dogs", "mnist-cnn", "char-lstm", "resnet18-transfer")
SMALL = """
from dataclasses import replace
from deploykit.core.files import folder, import_object
file = folder("models") / "cats_dogs.py"
drawn, whole = (import_object(f"{file}:{name}") for name in ("drawn_splits", "RECIPE"))
RECIPE = replace(whole, epochs=2, batch_size=8, data=lambda _: drawn(24, 4, 8))
"""


def planned(out: Path, rehearse: bool, gpus: int) -> Iterator[Step]:
    """In the order of their worth: what comes last may not be reached."""
    recipe, device, small = "cats-dogs", dict[str, str](), list[str]()
    if rehearse:
        recipe, device, small = str(out / "small.py"), {"device": "cpu"}, ["--batch-size", "2"]
        Path(recipe).write_text(SMALL, encoding="utf-8")

    def step(part: str, title: str, limit_s: float, *words: object, skip: str = "") -> Step:
        limit_s = LOADED_S if rehearse else limit_s
        return Step(part, title, [PYTHON, *map(str, words)], limit_s, skip=skip)

    for name, given in RUNS.items():
        words = (HERE, "--run", recipe, json.dumps({**given, **device}), "--out", place(out, name))
        yield step("experiment", name, 150 if name.startswith("cpu") else 90, *words)
    train = ("-m", "deploykit", "train")
    for each in RECIPES:
        options = ("--compare-devices", "--json", "--force", "-o", out / f"devices-{each}", *small)
        chosen = recipe if each == "cats-dogs" else each
        yield step("devices", each, 180 if each == "cats-dogs" else 90, *train, chosen, *options)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    on = [f"--device={each}" for each in device.values()]
    for name, option in (("DDP", on), ("FSDP", [*on, "--fsdp"])):
        options = ("--epochs", "2", "--json", "--force", "-o", out / f"{name}.pt", *option)
        skip = "" if gpus > 1 or rehearse else f"two GPUs are needed, {gpus} is here"
        yield step("two GPUs", name, 60, *torchrun, *train, recipe, *options, skip=skip)


def place(out: Path, name: str) -> Path:
    return out / f"{name.replace(' ', '-')}.json"


def train_once(recipe: str, options: Mapping[str, Any], out: Path) -> None:
    """Train, and write what is known into `out` after each epoch."""
    from deploykit.training.train import train

    started, ends = time.perf_counter(), list[float]()

    def after_epoch(text: str, _share: float) -> None:
        if ", loss " in text:
            ends.append(time.perf_counter())
            later = (ends[-1] - ends[0]) / max(1, len(ends) - 1)
            epoch_s = later if len(ends) > 1 else ends[0] - started
            write_json(out, {"epochs": len(ends), "seconds": None, "epoch_s": epoch_s})

    with tempfile.TemporaryDirectory() as folder:
        made = train(recipe, Path(folder, "m.pt"), on_progress=after_epoch, **options)
    record = made.evidence.training
    figures = dict(record.figures) if record else {}
    found = {
        "epochs": figures["epochs"],
        "seconds": figures["train_seconds"],
        "score": record.score.value if record else None,
        **{key: figures[key] for key in ("precision", "threads", "train_samples", "loader_share")},
    }
    write_json(out, found)
    sys.stdout.write(f"{json.dumps(found)}\n")


def collect(out: Path, results: Sequence[Result], rehearse: bool) -> None:
    """Write training.json and training.md of what there is so far."""
    runs = {
        name: json.loads(place(out, name).read_text()) for name in RUNS if place(out, name).exists()
    }
    for run in runs.values():  # killed: all its epochs at the rate of those that were done
        run["whole_s"] = run["seconds"] or run["epoch_s"] * EPOCHS
    reports = {each: out / f"devices-{each}" / "report.json" for each in RECIPES}
    verdicts = {
        each: json.loads(path.read_text())["verdict"]
        for each, path in reports.items()
        if path.exists()
    }
    machine = this_machine().to_dict()
    steps = [each.to_dict() for each in results]
    document = {"rehearsal": rehearse, "machine": machine, "runs": runs, "verdicts": verdicts}
    write_json(out / "training.json", {**document, "steps": steps})
    gpus = ", ".join(each["name"] for each in machine["gpus"] or ()) or "no GPU"
    article, cores = ARTICLES[0], machine["usable_cores"]
    lines = [
        "# Training on the GPU against the CPU",
        "",
        *(["**A rehearsal: small sizes, the CPU in the GPU's place.**", ""] if rehearse else []),
        f"`python benchmarks/training.py`; {gpus}; {cores} cores of {machine['cpu']}",
        "",
        "| cats-dogs | seconds | of epochs | times the CPU | top-1 |",
        "| --- | --: | --: | --: | --: |",
        *(_row(name, run, runs.get("cpu float32")) for name, run in runs.items()),
        f"| {article['what']}, CPU | {article['cpu']} | 20 | 1 | 0.714 |",
        f"| the same, GPU | {article['gpu']} | 20 | {article['times']}, “{article['claim']}” | |",
        "",
        *(f"- {each}: {' '.join(verdict)}" for each, verdict in verdicts.items()),
        "",
        "| part | step | result | s | figures |",
        "| --- | --- | --- | --: | --- |",
        *(each.row for each in results),
    ]
    write_text(out / "training.md", "\n".join(lines) + "\n")


def _row(name: str, run: Mapping[str, Any], cpu: Mapping[str, Any] | None) -> str:
    times = f"{cpu['whole_s'] / run['whole_s']:.3g}" if cpu else ""
    ended = "" if run["seconds"] else f" (at the rate of {run['epochs']}, its limit was up)"
    epochs = run["epochs"] if run["seconds"] else EPOCHS
    score = f"{run['score']:.3f}" if run.get("score") is not None else ""
    return f"| {name} | {run['whole_s']:.4g} | {epochs}{ended} | {times} | {score} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/training"))
    parser.add_argument("--limit-s", type=float, default=470)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--run", nargs=2, metavar=("RECIPE", "OPTIONS"), help="one part, alone")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.run:
        train_once(options.run[0], json.loads(options.run[1]), out)
        return 0
    gpus = len(this_machine().gpus)
    if not gpus and not options.rehearse:
        sys.stderr.write(f"{NOTHING}\n")
        return 3
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for name in RUNS:
        place(out, name).unlink(missing_ok=True)  # an earlier run's
    with workplace("training-"):
        results = run_all(
            planned(out, options.rehearse, gpus),
            options.limit_s,
            out,
            logs,
            lambda so_far: collect(out, so_far, options.rehearse),
        )
    return int(any(each.status == "failed" for each in results))


if __name__ == "__main__":
    sys.exit(main())
