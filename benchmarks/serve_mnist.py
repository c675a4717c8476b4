"""How much of an engine's speed the HTTP server passes on, and where the rest goes.

In: an .onnx file with one float32 input whose axis 0 is the batch (default: a random CNN of MNIST's
size). Out, as Markdown: the in-process ceiling, the served rate and latency at several numbers of
connections in the same run, the time to readiness, the memory, and the cost of each step.

    python benchmarks/serve_mnist.py [--model FILE] [--seconds 5] [--connections 1,32,128]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from http_client import infer_request, load
from mnist_graph import write_mnist

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", default="1,32,128")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.max_batch)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_mnist(Path(folder) / "mnist.onnx")
        counts = [int(count) for count in options.connections.split(",")]
        measure(model, counts, options.seconds, options.max_batch, Path(folder))


def serve(model: Path, max_batch: int) -> None:
    """The server's process: prints its port when ready."""
    from deploykit.engines.engine import load as open_engine
    from deploykit.serving.options import ServeOptions
    from deploykit.serving.server import Server, run

    with open_engine(model, "cpu") as engine:
        options = ServeOptions(http_port=0, max_batch=max_batch)
        run(Server({"m": engine}, options), lambda _, port, __: print(port, flush=True))


def measure(model: Path, counts: list[int], seconds: float, max_batch: int, folder: Path) -> None:
    from deploykit.core.machine import this_machine
    from deploykit.core.tensors import concrete
    from deploykit.engines.engine import load as open_engine

    machine = this_machine()
    with open_engine(model, "cpu") as engine:
        spec = engine.inputs[0]
        rows = np.random.default_rng(0).random(concrete(spec, {}), dtype=np.float32)
        runtime = engine.runtime
        ceiling = {
            batch: images_per_s(engine, batch, seconds / 4) for batch in (1, 2, 4, 8, 16, 32, 64)
        }
        engine_us = 1e6 * max_batch / images_per_s(engine, max_batch, seconds / 4)
        steps = step_costs_us(engine, rows, max_batch)
    begin_s = time.perf_counter()
    command = [sys.executable, __file__, "--serve", "--model", str(model)]
    server = subprocess.Popen(
        [*command, "--max-batch", str(max_batch)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        ready_s = time.perf_counter() - begin_s
        ready_rss = rss_mib(server.pid)
        request = folder / "request"
        request.write_bytes(infer_request("127.0.0.1", port, "m", spec.name, rows))
        print(
            f"{machine.cpu}, {machine.usable_cores} cores shared with the client, {runtime}, "
            f"Python {machine.python}, max batch {max_batch}, {seconds:g} s a row\n"
        )
        best = max(ceiling.values())
        print(
            "In-process ceiling, images/s: "
            + ", ".join(f"{rate:,.0f} at {batch}" for batch, rate in ceiling.items())
        )
        print(
            "\n| connections | requests/s | of ceiling | p50 ms | p99 ms | mean batch | errors "
            "| loop CPU µs/request | other threads CPU µs/request |"
        )
        print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        for count in counts:
            cpu, stats = thread_cpu_s(server.pid), statistics(port)
            result = load("127.0.0.1", port, count, seconds, request)
            cpu_end, stats_end = thread_cpu_s(server.pid), statistics(port)
            done = stats_end["inference_count"] - stats["inference_count"]
            runs = stats_end["execution_count"] - stats["execution_count"]
            loop_us = 1e6 * (cpu_end[0] - cpu[0]) / done
            other_us = 1e6 * (cpu_end[1] - cpu[1]) / done
            print(
                f"| {count} | {result['per_s']:,.0f} | {result['per_s'] / best:.0%} "
                f"| {result['p50_ms']:.2f} | {result['p99_ms']:.2f} | {done / runs:.1f} "
                f"| {result['errors']} | {loop_us:.1f} | {other_us:.1f} |"
            )
        print(
            f"\nReady after {ready_s:.2f} s; RSS {ready_rss:.0f} MiB when ready, "
            f"{rss_mib(server.pid):.0f} MiB after the load."
        )
    finally:
        server.terminate()
        server.wait(30)
    print("\n| step, alone on one thread | µs per request |\n|---|--:|")
    for name, cost_us in steps.items():
        print(f"| {name} | {cost_us:.1f} |")
    print(f"| engine, batch {max_batch} | {engine_us / max_batch:.1f} |")


def images_per_s(engine, batch: int, seconds: float) -> float:
    """Closed loop in this process, one caller; the first tenth is warm-up."""
    from deploykit.core.tensors import concrete

    spec = engine.inputs[0]
    feeds = {
        spec.name: np.random.default_rng(0).random(
            concrete(spec, {spec.shape[0]: batch}), dtype=np.float32
        )
    }
    warm_s = time.perf_counter() + seconds / 10
    while time.perf_counter() < warm_s:
        engine(feeds)
    begin_s, runs = time.perf_counter(), 0
    while (now_s := time.perf_counter()) < begin_s + seconds:
        engine(feeds)
        runs += 1
    return runs * batch / (now_s - begin_s)


def step_costs_us(engine, rows: np.ndarray, max_batch: int) -> dict[str, float]:
    """The product's own functions, each timed alone: a request's cost without contention."""
    from deploykit.serving.batching.queue import Pending, stack
    from deploykit.serving.oip import json as oip
    from deploykit.serving.oip.request import signature

    raw = infer_request("127.0.0.1", 80, "m", engine.inputs[0].name, rows)
    body = raw[raw.index(b"\r\n\r\n") + 4 :]
    json_bytes = len(body) - rows.nbytes
    model = signature(engine.inputs, engine.outputs, max_batch, 64 << 20)
    request = oip.decode(body, json_bytes, model)
    outputs = engine(request.feeds)
    batch = [Pending(request.feeds, 1, request.key, print, 0, 0, 0) for _ in range(max_batch)]
    return {
        "decode": each_us(lambda: oip.decode(body, json_bytes, model)),
        f"stack, batch {max_batch}": each_us(lambda: stack(batch)) / max_batch,
        "encode": each_us(lambda: oip.encode("m", request, outputs, model)),
    }


def each_us(step, times: int = 5000) -> float:
    begin_s = time.perf_counter()
    for _ in range(times):
        step()
    return 1e6 * (time.perf_counter() - begin_s) / times


def statistics(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/m/stats") as answer:
        return json.load(answer)["model_stats"][0]


def rss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def thread_cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds of the main thread (the event loop), and of all others (engine, ONNX Runtime)."""
    main = other = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        used_s = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
        if task.name == str(pid):
            main += used_s
        else:
            other += used_s
    return main, other


if __name__ == "__main__":
    main()
