"""From a JPEG to its label over HTTP, next to decoding and running in a bare loop.

    python benchmarks/jpeg_to_label.py MODEL.onnx [--connections 16] [--batch 8] [--rounds 8]
        [--images 160] [--size 4000x3000]

MODEL has a task that takes images. Both use the same threads, in turn, each round the other one
first. The clients ask from the same cores, so that the rate of HTTP has less of them. "CPU ms" is
of the server's process alone, or of the loop's. A verdict is of the interval over all rounds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from decoders import jpeg

from deploykit.core.artefact import Artefact
from deploykit.engines.tasks.engine import TaskEngine, TaskSteps
from deploykit.evaluation.statistics import ratio
from deploykit.evaluation.verify import open_proven

BAR = 0.9  # of the bare loop
Round = tuple[float, float]  # images per second, CPU ms per image


def bare(engine: TaskEngine, image: bytes, batch: int, count: int) -> Round:
    """Decode `batch` images, one after the other, run them and read the answers."""
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(count // batch):
        engine.predict([image] * batch)
    seconds = time.perf_counter() - begin_s
    return count / seconds, (time.process_time() - cpu_s) / count * 1e3


def served(pid: int, port: int, image: bytes, connections: int, count: int) -> Round:
    """Ask `count` times: a fixed time would cut off what the server has begun to compute."""
    todo, left = iter(range(count)), threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while True:
            with left:
                if next(todo, None) is None:
                    break
            connection.request(
                "POST", "/v2/models/m/predict", image, {"Content-Type": "image/jpeg"}
            )
            reply = connection.getresponse()
            body = reply.read()
            assert reply.status == 200, body
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(connections)]
    begin_s, cpu_s = time.perf_counter(), process_s(pid)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin_s
    return count / seconds, (process_s(pid) - cpu_s) / count * 1e3


def process_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def decode_ms(steps: TaskSteps, image: bytes) -> float:
    """CPU of one decoding and resizing: the median of 30."""
    found = []
    for _ in range(30):
        begin_s = time.thread_time()
        steps.read(image)
        found.append((time.thread_time() - begin_s) * 1e3)
    return statistics.median(found)


def verdict(what: str, over: Sequence[float], under: Sequence[float]) -> str:
    """Whether the whole interval of `over` by `under` is above the bar, below it, or neither."""
    found = ratio(over, under)
    decided = "met" if found.low >= BAR else "not met" if found.high < BAR else "undecided"
    return (
        f"- {what}: {found.value:.1%} of the bare loop ({found.low:.1%} to {found.high:.1%}, "
        f"asked: {BAR:.0%}): {decided}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--images", type=int, default=160, help="in each round")
    parser.add_argument("--size", help="WIDTHxHEIGHT of the JPEG; that of the model's input")
    given = parser.parse_args()
    artefact = Artefact.open(given.model)
    task = artefact.manifest.task if artefact.manifest else None
    if task is None or task.image is None:
        parser.error("MODEL needs a task that takes images")
    count = max(1, given.images // given.batch) * given.batch
    (opened,) = open_proven(artefact)
    engine = TaskEngine(opened, task)
    size = given.size or f"{task.image.width}x{task.image.height}"
    width, height = map(int, size.split("x"))
    image = jpeg(height, width)
    command = [
        "-m",
        "deploykit",
        "serve",
        f"m={given.model}",
        "--http-port",
        "0",
        "--grpc-port=none",
    ]
    rows: dict[str, list[Round]] = {"bare loop": [], "HTTP": []}
    with subprocess.Popen(
        [sys.executable, *command, "--log", "json"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["http"].rpartition(":")[2])
        steps = {
            "bare loop": lambda: bare(engine, image, given.batch, count),
            "HTTP": lambda: served(server.pid, port, image, given.connections, count),
        }
        for turn in range(given.rounds + 1):
            for name in list(steps)[:: -1 if turn % 2 else 1]:
                found = steps[name]()
                if turn:  # the first one warms up
                    rows[name].append(found)
        server.terminate()
    print(f"{given.model.name}, JPEG {size}, {len(image)} bytes, load {os.getloadavg()[0]:.1f}")
    print(f"decoding and resizing: {decode_ms(engine.steps, image):.2f} ms of CPU\n")
    print("| | images/s, each round | median | CPU ms, median |\n| --- | --- | --: | --: |")
    for name, several in rows.items():
        rates = ", ".join(f"{rate:.0f}" for rate, _ in several)
        rate, cpu_ms = (statistics.median(each) for each in zip(*several, strict=True))
        print(f"| {name} | {rates} | {rate:.0f} | {cpu_ms:.2f} |")
    rates, times = ([[one[at] for one in rows[name]] for name in steps] for at in (0, 1))
    print("\n" + verdict("images for a second of CPU", times[0], times[1]))
    print(verdict("images/s", rates[1], rates[0]))


if __name__ == "__main__":
    main()
