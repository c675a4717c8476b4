#!/usr/bin/env python3
"""How far `deploykit plan` is off: predictions against measured times, over the test zoo's models.

    python benchmarks/plan_accuracy.py FOLDER [--threads 1,2] [--clock wall,cpu] [--batches 1,8]

FOLDER keeps the exported models (random weights, made by tests/support/zoo), so that a second run
takes a minute. For each clock and number of threads it runs one calibration probe, then times each
model with the same clock: wall time, or the CPU time of one thread, for machines with other work on
them. Nothing is fitted to a model, so that no error has to be taken with the model left out. It
then compares the roofline of GPUs with published results of ResNet-50, leaving out one GPU at a
time. Prints the Markdown of benchmarks/plan-accuracy.md.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import deploykit as dk  # noqa: E402
from deploykit.core.files import import_object  # noqa: E402
from deploykit.core.machine import default_threads, this_machine  # noqa: E402
from deploykit.core.profile import load_profile  # noqa: E402
from deploykit.engines.data.samples import random_feeds  # noqa: E402
from deploykit.graph.graph import Graph  # noqa: E402
from deploykit.planning.predict import REACHED, Target, infer, predict_call, target_of  # noqa: E402  # noqa: E402
from deploykit.planning.probe import CpuCalibration, measure_cpu  # noqa: E402

MODELS = (
    "mnist-cnn",
    "lstm",
    "encoder",
    "bert-tiny",
    "detector",
    "resnet18",
    "mobilenet-v3-small",
    "efficientnet-b0",
    "convnext-tiny",
    "swin-t",
    "vit-b-16",
    "vgg16",
)
ONE_BATCH = {"convnext-tiny", "swin-t", "vit-b-16", "vgg16"}  # large: batch 1 only
STEPS = 24  # axis T
CLOCKS = {"wall": "Wall time", "cpu": "CPU seconds"}
LEAST_CALLS, LEAST_S = 7, 0.3
# ResNet-50 in INT8, images/s, without transfers: MLPerf Inference v2.1 and v4.1, closed, Offline
PUBLISHED = {"a100-80gb": 42_121, "h200": 94_620, "l4": 12_800}
PUBLISHED_BATCH = 1024
Clock = Callable[[], int]


def export_all(folder: Path, names: Sequence[str]) -> None:
    """Export those that are not there yet."""
    from tests.support.zoo import weights
    from tests.support.zoo.members import ZOO

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / f"{name}.onnx").exists():
            member = ZOO[name]
            create = import_object(member.arch)
            assert callable(create)
            module = weights.seeded(create).eval()
            inputs, out = list(member.inputs), folder / f"{name}.onnx"
            dk.export(module, out=out, inputs=inputs, max_error=0.1, force=True)


def measured_s(path: Path, sizes: Mapping[str, int], threads: int, clock: Clock) -> float:
    """The median of calls with random inputs."""
    with dk.load(path, "cpu", threads=threads) as engine:
        feeds = random_feeds(engine.inputs, sizes)
        engine(feeds)
        engine(feeds)
        seconds: list[float] = []
        while len(seconds) < LEAST_CALLS or sum(seconds) < LEAST_S:
            began = clock()
            engine(feeds)
            seconds.append((clock() - began) / 1e9)
    return statistics.median(seconds)


def zoo_rows(
    folder: Path, batches: Sequence[int], found: CpuCalibration, clock: Clock
) -> list[tuple[str, int, float, float]]:
    """Model, batch, predicted and measured seconds."""
    target = target_of(load_profile("cpu"), found)
    assert isinstance(target, Target)
    rows = []
    for name in MODELS:
        path = folder / f"{name}.onnx"
        graph = Graph.open(path)
        for batch in batches[:1] if name in ONE_BATCH else batches:
            sizes = {"N": batch, "T": STEPS}
            inferred = infer(graph, batch, sizes)
            predicted = predict_call(inferred, target, inferred.stored).latency_ms / 1e3
            rows.append((name, batch, predicted, measured_s(path, sizes, found.threads, clock)))
    return rows


def shares_reached(resnet50: Path) -> dict[str, float]:
    """By GPU: the time of a bare roofline, without launches, by the published time."""
    inferred = infer(Graph.open(resnet50), PUBLISHED_BATCH, {"N": PUBLISHED_BATCH})
    found = {}
    for name, images_per_s in PUBLISHED.items():
        target = target_of(load_profile(name), None)
        assert isinstance(target, Target)
        predicted = predict_call(inferred, target, "int8").compute_ms / 1e3
        found[name] = predicted * REACHED * images_per_s / PUBLISHED_BATCH
    return found


def export_resnet50(folder: Path) -> Path:
    path = folder / "resnet50.onnx"
    if not path.exists():
        from tests.support.zoo.models import register_torchvision

        register_torchvision()
        from torchvision.models import resnet50

        inputs = ["image:float32[N,3,224,224]"]
        dk.export(resnet50(weights=None).eval(), out=path, inputs=inputs, max_error=0.1)
    return path


def cpu_table(
    rows: Sequence[tuple[str, int, float, float]], found: CpuCalibration, clock: str
) -> str:
    """Of one clock and number of threads."""
    errors = [predicted / measured - 1 for _, _, predicted, measured in rows]
    sizes = sorted(abs(error) for error in errors)
    load, cores = os.getloadavg()[0], this_machine().usable_cores
    where = (
        f"{found.cpu}, {found.runtime}, {found.created}; load average {load:.1f} on {cores} cores "
        f"at the end; the probe's calls took {found.spread:.2f} times their least. T = {STEPS}."
    )
    lines = [
        f"### {CLOCKS[clock]}, {found.threads} thread{'s' * (found.threads > 1)}",
        "",
        where,
        "",
        "| model | batch | predicted ms | measured ms | error |",
        "| --- | --: | --: | --: | --: |",
    ]
    for (name, batch, predicted, measured), error in zip(rows, errors, strict=True):
        ms = f"{predicted * 1e3:.3g} | {measured * 1e3:.3g}"
        lines.append(f"| {name} | {batch} | {ms} | {error:+.0%} |")
    within = sum(size <= 0.25 for size in sizes)
    middle = f"Median error {statistics.median(sizes):.1%}, largest {sizes[-1]:.0%}"
    fp32, int8 = (found.ops_per_s[name] / 1e9 for name in ("fp32", "int8"))
    memory, cache = found.bytes_per_s / 1e9, found.cache_bytes_per_s / 1e9
    return "\n".join(
        [
            *lines,
            "",
            f"{middle}; {within} of {len(sizes)} within 25 %.",
            f"Ceilings: {fp32:.0f} GFLOP/s fp32, {int8:.0f} GOP/s INT8.",
            f"Bandwidth: {memory:.0f} GB/s from memory, {cache:.0f} GB/s from caches.",
            "",
        ]
    )


def gpu_table(shares: Mapping[str, float]) -> str:
    lines = [
        "| GPU left out | published images/s | share reached | mean of the others | off by |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name, share in shares.items():
        others = [math.log(each) for other, each in shares.items() if other != name]
        mean = math.exp(statistics.fmean(others))
        lines.append(
            f"| {name} | {PUBLISHED[name]:,} | {share:.2f} | {mean:.2f} | {share / mean - 1:+.0%} |"
        )
    whole = math.exp(statistics.fmean(map(math.log, shares.values())))
    return "\n".join([*lines, "", f"Geometric mean of the shares: {whole:.2f}; used: {REACHED}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", default=f"{default_threads()}")
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--batches", default="1,8")
    options = parser.parse_args()
    clocks = options.clock.split(",")
    if not set(clocks) <= CLOCKS.keys():
        parser.error(f"--clock is of {', '.join(CLOCKS)}")
    export_all(options.folder, MODELS)
    batches = [int(each) for each in options.batches.split(",")]
    for clock in clocks:
        tick = time.thread_time_ns if clock == "cpu" else time.perf_counter_ns
        for threads in map(int, "1" if clock == "cpu" else options.threads.split(",")):
            found = measure_cpu(threads=threads, clock=tick)
            rows = zoo_rows(options.folder, batches, found, tick)
            print(cpu_table(rows, found, clock), flush=True)
    print(gpu_table(shares_reached(export_resnet50(options.folder))))


if __name__ == "__main__":
    main()
