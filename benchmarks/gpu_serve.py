"""The server on an NVIDIA GPU: worker processes, tensors and JPEGs.

    python benchmarks/gpu_serve.py [--parts workers,front-ends] [--workers 1,2,4,8,16]
        [--out out/gpu-serve] [--limit-s 570]
    python benchmarks/gpu_serve.py --rehearse     small, the CPU in the GPU's place

`workers`: ResNet-50 in fp16 (random weights, made here) on ONNX Runtime's CUDA provider behind
`deploykit serve --workers N`, asked by `deploykit load` on the same cores for uint8 tensors and for
JPEGs: rate, latency, where a request's time goes, processor time and energy of each; and the engine
alone, which no server can pass. `front-ends`: `--workers` with an engine of no cost, which shows
how the server itself scales.

Each step is a process with its own limit; gpu_serve.md and .json are written after each, and one
that fails stops no other. Exit 0 when no step failed, else 1; 2 for wrong options, 3 without a GPU
or a runtime for it. About 9 minutes, by estimate: `--parts` and `--workers` make shorter calls.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "serve"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/

import numpy as np
from processes import Running, free_port, started

from deploykit.core.errors import DeploykitError
from deploykit.core.files import make_folder, read_json, write_json, write_text
from deploykit.core.machine import this_machine
from scripts.gpu.guard import workplace
from scripts.gpu.run import run_all, use_site
from scripts.gpu.steps import LOADED_S, PYTHON, Result, Step

BENCHMARKS = Path(__file__).resolve().parent
HERE, NAME = str(Path(__file__).resolve()), "gpu_serve"
PARTS = ("workers", "front-ends")
WORKERS, CONNECTIONS = (1, 2, 4, 8, 16), (1, 32, 256)
IN_TURN = 6, 26  # rows of batches that a server of 32 connections was seen to make
STAND_IN = str(BENCHMARKS / "serve" / "servers" / "stand_in.py")
Row = dict[str, Any]


def planned(options: argparse.Namespace, work: Path) -> Iterator[Step]:
    """In the order of their worth: what comes last may not be reached."""
    rehearse = ["--rehearse"] * options.rehearse

    def step(part: str, title: str, limit_s: float, *words: str, after: str = "") -> Step:
        command = [PYTHON, HERE, "--one", *words, "--work", str(work), *rehearse]
        return Step(part, title, command, LOADED_S if options.rehearse else limit_s, after=after)

    if "workers" in options.parts:
        yield step("workers", "make the model", 150, "make")
        yield step("workers", "the engine alone", 60, "engine", after="make the model")
        for count in options.workers:
            words, after = ("serve", "--workers", str(count)), "make the model"
            yield step("workers", f"served by {count}", 90, *words, after=after)
    if "front-ends" in options.parts:
        for count in options.workers:
            words = ("front-ends", "--workers", str(count))
            yield step("front-ends", f"no engine, {count}", 50, *words)


def run_one(options: argparse.Namespace) -> int:
    """One step; what it has found is written after each row."""
    name, work, rehearse, count = options.one, options.work, options.rehearse, options.workers[0]
    seconds = 0.3 if rehearse else 2.0
    found: Iterator[Row]
    if name == "make":
        found = iter([make(work, rehearse)])
    elif name == "engine":
        found = engine_alone(work, seconds, rehearse)
    else:
        found = serve(name, work, count, rehearse)
        name = f"{name}-{count}"
    kept: list[Row] = []
    for row in found:
        kept.append(row)
        sys.stdout.write(f"{json.dumps(row)}\n")
        write_json(work / f"{name}.rows.json", kept)
    failed = [row["error"] for row in kept if "error" in row]
    sys.stderr.write("".join(f"error: {each}\n" for each in failed[:1]))
    return int(bool(failed))


def make(work: Path, rehearse: bool) -> Row:
    """m.onnx, a classifier in fp16 that takes uint8 images, and m.jpg.

    Its batch norms have the statistics of photos. With those of a new model each photo gets the
    same scores, which proves nothing about its rows, so that the server would not join them.
    """
    import torch
    from gpu_zoo import member

    import deploykit as dk
    from tests.support.zoo.members import photos, prepare

    def tune(module: Any, _sample: Any) -> None:
        module.train()
        with torch.no_grad():
            for seed in range(4 if rehearse else 20):
                module(torch.from_numpy(photos(4 if rehearse else 16, seed)))
        module.eval()

    name = "resnet18" if rehearse else "resnet50"
    files = prepare(replace(member(name), tune=tune), work, samples=16)
    dk.export(files.model, out=work / "fp32.onnx", arch=name, task="classify")
    made = dk.quantize(work / "fp32.onnx", "fp16", work / "m.onnx")
    (work / "m.jpg").write_bytes(jpeg(224))
    return {"model": name, "precision": "fp16", "bytes": made.path.stat().st_size}


def jpeg(side: int) -> bytes:
    """Smooth shapes with some noise, as a photo has: about 1 bit for each pixel."""
    from PIL import Image

    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    smooth = np.asarray(small.resize((side, side), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + rng.integers(-6, 7, smooth.shape), 0, 255).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(noisy).save(data, "JPEG", quality=85)
    return data.getvalue()


def engine_alone(work: Path, seconds: float, rehearse: bool) -> Iterator[Row]:
    """Images per second of bare calls: of one batch size, and of two in turn, as servers have."""
    from contextlib import nullcontext

    import deploykit as dk
    from deploykit.benchmarking.timing import run_block
    from deploykit.engines.data.samples import random_feeds
    from scripts.gpu.cpu_as_gpu import cpu_as_gpu

    with cpu_as_gpu() if rehearse else nullcontext(), dk.load(work / "m.onnx", "cuda") as engine:
        calls = {n: random_feeds(engine.inputs, {"N": n}) for n in (1, 8, 32, 128, *IN_TURN)}
        for batch in (1, 8) if rehearse else (1, 8, 32, 128):
            block = run_block(
                [engine], calls[batch], batch, seconds, time.perf_counter_ns, settle_s=seconds / 2
            )
            yield {"batch": str(batch), "per_s": block.rate, "device": engine.device}
        sizes = " and ".join(map(str, IN_TURN))
        for how in ("", ", prepared as in a server"):
            if how:
                engine.prepare((calls[n] for n in (32, 8, 1)), joined=True)
            rate = in_turn(engine, [calls[n] for n in IN_TURN], seconds)
            yield {"batch": f"{sizes} in turn{how}", "per_s": rate, "device": engine.device}


def in_turn(engine: Any, calls: Sequence[Any], seconds: float) -> float:
    """Rows per second of calls of different sizes, one after the other, after one of each."""
    for feeds in calls:
        engine(feeds)
    rows, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        for feeds in calls:
            engine(feeds)
        rows += sum(IN_TURN)
    return rows / (time.perf_counter() - started)


def serve(which: str, work: Path, count: int, rehearse: bool) -> Iterator[Row]:
    """Start a server of `count` worker processes; load it in each way."""
    port = free_port()
    kinds: Mapping[str, Sequence[str]] = {"no engine": ()}
    command = [PYTHON, STAND_IN, str(port), str(count)]
    if which == "serve":
        kinds = {"uint8 tensors": (), "JPEG": ("--data", str(work / "m.jpg"))}
        program = "scripts.gpu.cpu_as_gpu" if rehearse else "deploykit"
        command = [PYTHON, "-m", program, "serve", f"m={work / 'm.onnx'}", "--device", "cuda"]
        command += ["--workers", str(count), "--http-port", str(port), "--grpc-port=none"]
    with started(command, lambda: ready(port), cwd=BENCHMARKS.parent) as running:
        if which == "serve" and not joins(port):
            yield {"error": "the server runs requests one by one: its log says why"}
            return
        for kind, more in kinds.items():
            for connections in (8,) if rehearse else CONNECTIONS:
                row = load(running, port, connections, more, rehearse)
                yield {"kind": kind, "workers": count, "connections": connections, **row}


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def joins(port: int) -> bool:
    """Whether the server puts requests into batches."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/m/config", timeout=5) as reply:
        return bool(json.load(reply)["max_batch_size"] > 1)


def load(running: Running, port: int, connections: int, more: Sequence[str], rehearse: bool) -> Row:
    """One closed loop: its figures, or why there are none."""
    words = [PYTHON, "-m", "deploykit", "load", f"http://127.0.0.1:{port}", "--json", *more]
    words += ["--concurrency", str(connections)]
    words += ["--duration", "1" if rehearse else "4"]
    before_s = running.cpu_s()
    with GpuSampler() as gpu:
        done = subprocess.run(words, capture_output=True, text=True, timeout=80, check=False)
    cpu_s = running.cpu_s() - before_s
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return {"error": (lines or [f"error: exit {done.returncode}"])[0].removeprefix("error: ")}
    found = json.loads(done.stdout)
    rate, watts = found["achieved_per_s"]["value"], gpu.median("power_w")
    asked = rate * (found["warmup_s"] + found["duration_s"])
    names = ("achieved_per_s", "ok", "failed", "refused", "errors", "limits", "marks")
    return {
        **{name: found[name] for name in names},
        **{name: ((found["latency"] or {}).get(name) or {}).get("value") for name in LATENCIES},
        "cpu_us": 1e6 * cpu_s / asked if asked else None,
        "gpu_busy": gpu.median("utilization"),
        "joules": watts / rate if watts is not None and rate else None,
        "processes": found["processes"],
    }


LATENCIES = ("p50_ms", "p99_ms")


class GpuSampler:
    """The first GPU's load and power, five times a second, until the block ends."""

    def __init__(self) -> None:
        self._states: list[Any] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> GpuSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _loop(self) -> None:
        from deploykit.engines.devices import Devices, cuda_names

        devices = Devices()
        names = cuda_names(devices.read())
        while not self._ended.wait(0.2):
            self._states += [each for each in devices.read() if names.get(each.uuid) == "cuda:0"]
        devices.close()

    def median(self, name: str) -> float | None:
        """Of the second half, when the load was on; None where nothing reports it."""
        late = self._states[len(self._states) // 2 :]
        known = [getattr(state, name) for state in late if getattr(state, name) is not None]
        return statistics.median(known) if known else None


# The results


def collect(options: argparse.Namespace, work: Path, results: Sequence[Result]) -> None:
    """Write gpu_serve.json and .md of what the steps have left so far."""
    found = {path.name.partition(".")[0]: read_json(path) for path in work.glob("*.rows.json")}
    served = [row for name, rows in found.items() for row in rows if "workers" in row]
    document = {
        "rehearsal": options.rehearse,
        "machine": this_machine().to_dict(),
        **{name: found.get(name, []) for name in ("make", "engine")},
        "served": sorted(served, key=lambda row: (row["kind"], row["connections"], row["workers"])),
        "steps": [each.to_dict() for each in results],
    }
    write_json(options.out / f"{NAME}.json", document)
    lines = [*head(document), *served_table(document["served"])]
    lines += ["", "| part | step | result | s | figures |", "| --- | --- | --- | --: | --- |"]
    write_text(options.out / f"{NAME}.md", "\n".join([*lines, *(r.row for r in results)]) + "\n")


def head(document: Mapping[str, Any]) -> Iterator[str]:
    machine = document["machine"]
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"] or ()) or "no GPU"
    yield "# The server on a GPU\n"
    if document["rehearsal"]:
        yield "**A rehearsal: small sizes, the CPU in the GPU's place. No figure counts.**\n"
    yield f"{gpus}; {machine['usable_cores']} cores of {machine['cpu']}, the load on the same.\n"
    for row in document["make"]:
        yield f"{row['model']} in {row['precision']}, random weights, {row['bytes']:,} bytes.\n"
    for row in document["engine"]:
        yield f"- the engine alone on {row['device']}, batch {row['batch']}: {row['per_s']:,.0f}/s"


def served_table(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "\n## Served\n"
    yield "✗: why to doubt.\n"
    names = ("what", "connections", "workers", "requests/s", "of one worker's", "p50 ms", "p99 ms")
    names += ("CPU us", "GPU busy", "mJ", "doubts")
    yield f"| {' | '.join(names)} |"
    yield f"| --- | {'--: | ' * (len(names) - 2)}--- |"
    ones = {(row["kind"], row["connections"]): row for row in rows if row["workers"] == 1}
    for row in rows:
        start = f"| {row['kind']} | {row['connections']} | {row['workers']}"
        if "error" in row:
            yield f"{start} | not measured: {row['error']} |{' |' * (len(names) - 4)}"
            continue
        rate, one = row["achieved_per_s"]["value"], ones.get((row["kind"], row["connections"]), {})
        alone = one.get("achieved_per_s", {}).get("value")
        doubts = "; ".join([*row["limits"], *row["marks"], *row["errors"]])
        cells = [
            f"{rate:,.0f}",
            shown(rate / alone if alone else None, ".2f"),
            *(shown(row[name], ".3g") for name in LATENCIES),
            shown(row["cpu_us"], ".0f"),
            shown(row["gpu_busy"], ".0%"),
            shown(row["joules"] and 1e3 * row["joules"], ".3g"),
            f"✗ {doubts}" * bool(doubts),
        ]
        yield f"{start} | {' | '.join(cells)} |"


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--workers", type=numbers, help="1,2,4,8,16")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out"), "gpu-serve"))
    parser.add_argument("--limit-s", type=float, default=570, help="for all of it")
    parser.add_argument("--site", type=Path, help="a folder of packages, before all others")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--one", help="one step, alone")
    parser.add_argument("--work", type=Path, help="the folder of its files")
    options = parser.parse_args(words)
    options.workers = options.workers or ([1, 2] if options.rehearse else list(WORKERS))
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {sorted(unknown)[0]}; one of: {', '.join(PARTS)}")
    return options


def main() -> int:
    options = options_of()
    use_site(options.site)
    if options.one:
        return run_one(options)
    from gpu_zoo import lacking

    if not options.rehearse and (why := lacking()):
        sys.stderr.write(f"error: {why}\n")
        return 3
    try:
        options.out = make_folder(options.out.resolve())
        logs = make_folder(options.out / "logs")
        with workplace("gpu-serve-") as work:
            results = run_all(
                planned(options, work),
                options.limit_s,
                options.out,
                logs,
                lambda so_far: collect(options, work, so_far),
            )
    except (DeploykitError, OSError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    return int(any(each.status == "failed" for each in results))


if __name__ == "__main__":
    sys.exit(main())
