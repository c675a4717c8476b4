"""What a start costs: `deploykit --help` as a whole process, an interpreter, a server, a device.

In: nothing. Out, as Markdown: wall time of both in turn, of a server's way to readiness on a small
model, with its memory and whether torch is in it, and of `deploykit boot` on a bundle of that model
and on a larger one: the first start, which builds, and later ones from the cached engine.

    python benchmarks/start.py [--runs 20] [--boots 10]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from mnist_graph import write_mnist

PROGRAM = str(Path(sys.executable).with_name("deploykit"))


def wall_ms(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - started) * 1e3


def start(*arguments: str | Path) -> tuple[float, float, bool]:
    """Seconds from the process's start to its ready line, MiB then, whether torch is in it."""
    started = time.perf_counter()
    command = [PROGRAM, *map(str, arguments), "--http-port", "0", "--grpc-port", "0"]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=nothing, text=True) as process:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        ready_s = time.perf_counter() - started
        status = Path(f"/proc/{process.pid}/status").read_text()
        kib = int(status.partition("VmRSS:")[2].split()[0])
        torch = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
        process.terminate()
    return ready_s, kib / 1024, torch


def prove(model: Path) -> Path:
    """Give a graph on float32[N,...] the manifest and the golden samples that a bundle needs."""
    from deploykit.core.artefact import write_manifest
    from deploykit.core.evidence import Evidence
    from deploykit.engines.data.samples import random_feeds
    from deploykit.engines.engine import load
    from deploykit.evaluation import golden
    from deploykit.evaluation.artefacts import onnx_manifest
    from deploykit.graph.graph import Graph

    with load(model, "cpu") as engine:
        samples = golden.record(engine, random_feeds(engine.inputs, {"N": golden.SAMPLES}), model)
    evidence = Evidence(golden=samples)
    manifest = onnx_manifest(Graph.open(model), (), tools=("onnx",), evidence=evidence)
    write_manifest(model, manifest)
    return model


def write_large(out: Path) -> Path:
    """A network of 46 MB, the size of ResNet-18: one product of 3072 by 3750."""
    import onnx
    from onnx import helper, numpy_helper

    weights = np.random.default_rng(0).normal(0, 0.01, (3072, 3750)).astype(np.float32)
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["product"]),
        helper.make_node("Relu", ["product"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "large",
        [value("x", onnx.TensorProto.FLOAT, ["N", 3, 32, 32])],
        [value("y", onnx.TensorProto.FLOAT, ["N", 3750])],
        [numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), out)
    return out


def boots(model: Path, folder: Path, runs: int) -> None:
    """Print what starts of a bundle cost; the bundle's folder is what an image would hold."""
    import deploykit as dk

    bundle = folder / f"{model.stem}-bundle"
    dk.bundle(prove(model), "cpu", out=bundle)
    cache = folder / f"{model.stem}-cache"
    first, *later = (start("boot", bundle, "--cache", cache)[0] for _number in range(runs + 1))
    size = model.stat().st_size / 1e6
    print(
        f"\n`deploykit boot` of a bundle, a model of {size:.1f} MB, profile cpu: ready "
        f"{first:.2f} s after the start of its process when it builds the engine, "
        f"{statistics.median(later):.2f} s from the cached engine (median of {runs} runs, "
        f"{min(later):.2f} to {max(later):.2f})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--boots", type=int, default=10)
    options = parser.parse_args()
    runs = options.runs
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "deploykit --help": [PROGRAM, "--help"],
        "deploykit profiles": [PROGRAM, "profiles"],
        "deploykit export --help": [PROGRAM, "export", "--help"],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(runs + 1):
        for name, command in commands.items():
            taken = wall_ms(command)
            if number:  # the first of each warms the file cache
                samples[name].append(taken)
    print("| command | min ms | median ms | max ms | runs |\n|---|--:|--:|--:|--:|")
    for name, values in samples.items():
        middle = statistics.median(values)
        print(
            f"| `{name}` | {min(values):.0f} | {middle:.0f} | {max(values):.0f} | {len(values)} |"
        )
    with tempfile.TemporaryDirectory() as folder:
        model = write_mnist(Path(folder) / "mnist.onnx")
        starts = [start("serve", "--engine", model) for _ in range(6)][1:]
    ready, memory = (statistics.median(column) for column in list(zip(*starts, strict=True))[:2])
    with_torch = any(start[2] for start in starts)
    print(
        f"\nA server of a small CNN: ready {ready:.2f} s after the start of its process, "
        f"{memory:.0f} MiB resident then (medians of {len(starts)}); "
        f"torch {'IS' if with_torch else 'is not'} loaded."
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        boots(write_mnist(folder / "mnist.onnx"), folder, options.boots)
        boots(write_large(folder / "large.onnx"), folder, options.boots)


if __name__ == "__main__":
    main()
