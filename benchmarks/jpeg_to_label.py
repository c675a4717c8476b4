"""From a JPEG to its label over HTTP, next to decoding and running in a bare loop.

    python benchmarks/jpeg_to_label.py MODEL.onnx [--connections 16] [--batch 8] [--rounds 3]

MODEL has a task that takes images. Both use the same threads; rounds alternate. The clients run on
the same cores: "CPU ms" is of the server's process alone.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image

from deploykit.api.open import open_proven
from deploykit.core.artefact import Artefact
from deploykit.runtimes.tasks.engine import TaskEngine, TaskSteps

SECONDS = 5.0
Round = tuple[float, float]  # images per second, CPU ms per image


def jpeg(height: int, width: int) -> bytes:
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    data = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(data, "JPEG", quality=85)
    return data.getvalue()


def bare(engine: TaskEngine, image: bytes, batch: int) -> Round:
    """Decode `batch` images, one after the other, run them and read the answers."""
    count, begin_s, cpu_s = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begin_s < SECONDS:
        engine.predict([image] * batch)
        count += batch
    return count / (time.perf_counter() - begin_s), (time.process_time() - cpu_s) / count * 1e3


def served(pid: int, port: int, image: bytes, connections: int) -> Round:
    counts, end_s = [0] * connections, time.perf_counter() + SECONDS

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while time.perf_counter() < end_s:
            connection.request(
                "POST", "/v2/models/m/predict", image, {"Content-Type": "image/jpeg"}
            )
            reply = connection.getresponse()
            body = reply.read()
            assert reply.status == 200, body
            counts[number] += 1
        connection.close()

    cpu_s = process_s(pid)
    threads = [threading.Thread(target=client, args=(n,)) for n in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / SECONDS, (process_s(pid) - cpu_s) / sum(counts) * 1e3


def process_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    artefact = Artefact.open(given.model)
    task = artefact.manifest.task if artefact.manifest else None
    if task is None or task.image is None:
        parser.error("MODEL needs a task that takes images")
    (opened,) = open_proven(artefact)
    steps = TaskSteps(task, opened.inputs, opened.outputs, given.model.parent)
    image = jpeg(task.image.height, task.image.width)
    begin_s = time.thread_time()
    for _ in range(50):
        steps.read(image)
    decode_ms = (time.thread_time() - begin_s) * 1e3 / 50
    engine = TaskEngine(opened, task)
    command = ["-m", "deploykit", "serve", f"m={given.model}", "--http-port", "0", "--no-grpc"]
    with subprocess.Popen(
        [sys.executable, *command, "--log", "json"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["http"].rpartition(":")[2])
        rows: dict[str, list[Round]] = {"bare loop": [], "HTTP": []}
        for _ in range(given.rounds):
            rows["bare loop"].append(bare(engine, image, given.batch))
            rows["HTTP"].append(served(server.pid, port, image, given.connections))
        server.terminate()
    print(f"{given.model.name}, JPEG {task.image.width}x{task.image.height}, {len(image)} bytes")
    print(f"decoding and resizing: {decode_ms:.2f} ms of CPU\n")
    print("| | images/s, each round | median | CPU ms, median |\n| --- | --- | --: | --: |")
    for name, found in rows.items():
        rates = ", ".join(f"{rate:.0f}" for rate, _ in found)
        rate, cpu_ms = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"| {name} | {rates} | {rate:.0f} | {cpu_ms:.2f} |")


if __name__ == "__main__":
    main()
