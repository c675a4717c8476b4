"""Attacks on the gRPC port of a real server: how long its event loop stands still, and its memory.

    python benchmarks/serve/attacks.py [--only NAME] [--seconds 3]

Prints a Markdown table. The server is `deploykit serve` with `--max-held-bytes 419430400`; each
attack gets a fresh one and runs in a process of its own (`attack_frames.py`, `attack_messages.py`).
A health check over HTTP is sent every 20 ms; the row has the longest one, without the time that the
loop's thread waited for a core, as other programs may run; then what that thread and the whole
process computed meanwhile: a thread that holds Python's lock shows only in the process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import attack_frames
import attack_messages
import numpy as np
import onnx
from child import header
from onnx import TensorProto, helper, numpy_helper
from processes import free_port, started

PAUSE_S = 0.02
SETTLE_S = 0.5
HELD_BYTES = 419430400
WIDE = 1 << 21  # numbers in an answer of `wide`
ATTACKS = {"frames": attack_frames.ATTACKS, "messages": attack_messages.ATTACKS}
CHECK = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Stall:
    """One health check, in seconds: how long it took, and what the server did meanwhile."""

    took_s: float = 0.0
    waited_s: float = 0.0  # the loop's thread, for a core
    loop_s: float = 0.0  # that thread computed
    process_s: float = 0.0  # all threads computed

    @property
    def own_s(self) -> float:
        """Without the time that other programs had the core."""
        return self.took_s - self.waited_s

    def __str__(self) -> str:
        own = f"{self.own_s * 1e3:.0f} ({self.loop_s * 1e3:.0f}, {self.process_s * 1e3:.0f})"
        return f"{self.took_s * 1e3:.0f} | {own}"


class Probe:
    """Asks for the server's health every 20 ms, and reads its memory, until the block ends."""

    def __init__(self, pid: int, port: int) -> None:
        self.longest = Stall()
        self.most_mib = 0.0
        self.checks = 0
        self.failed = 0
        self._pid = pid
        self._port = port
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(PermissionError):  # else other programs delay the checks
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        with socket.create_connection(("127.0.0.1", self._port), 30) as client:
            while not self._ended.wait(PAUSE_S):
                begin, begin_s = _times_s(self._pid), time.perf_counter()
                client.sendall(CHECK)
                if b" 200 " not in client.recv(4096):
                    self.failed += 1
                took_s, end = time.perf_counter() - begin_s, _times_s(self._pid)
                spent = [after - before for before, after in zip(begin, end, strict=True)]
                stall = Stall(took_s, *spent)
                self.longest = max(self.longest, stall, key=lambda each: each.own_s)
                self.most_mib = max(self.most_mib, resident_mib(self._pid))
                self.checks += 1


def _times_s(pid: int) -> tuple[float, float, float]:
    """How long the loop's thread, the first, waited for a core; how long it and all computed."""
    threads = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda each: int(each.name)):
        try:
            threads.append([int(part) / 1e9 for part in (task / "schedstat").read_text().split()])
        except OSError:  # it has ended
            continue
    return threads[0][1], threads[0][0], sum(computed_s for computed_s, *_ in threads)


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / (1 << 20)


def write_models(folder: Path) -> list[str]:
    """One small model of each type; `wide` answers 8 MiB for a row of one number."""
    arguments = []
    kinds = {"m": "FLOAT", "i64": "INT64", "f64": "DOUBLE", "flag": "BOOL", "text": "STRING"}
    for name, kind in kinds.items():
        dtype = getattr(TensorProto, kind)
        nodes = [helper.make_node("Identity", ["x"], ["y"])]
        arguments.append(_save(folder / f"{name}.onnx", nodes, dtype, "W", "W", []))
    ones = numpy_helper.from_array(np.ones((1, WIDE), np.float32), "w")
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    arguments.append(_save(folder / "wide.onnx", nodes, TensorProto.FLOAT, 1, WIDE, [ones]))
    return arguments


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    dtype: int,
    width: int | str,
    answer: int | str,
    weights: list[onnx.TensorProto],
) -> str:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info("x", dtype, ["N", width])],
        [helper.make_tensor_value_info("y", dtype, ["N", answer])],
        weights,
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return f"{path.stem}={path}"


def measure(name: str, kind: str, models: list[str], seconds: float) -> str:
    """The row of one attack."""
    http, grpc = free_port(), free_port()
    command = [sys.executable, "-m", "deploykit", "serve", *models, "--http-port", str(http)]
    command += ["--grpc-port", str(grpc), "--max-held-bytes", str(HELD_BYTES)]
    with started(command, lambda: _ready(http)) as server:
        time.sleep(SETTLE_S)
        first_mib = resident_mib(server.pid)
        with Probe(server.pid, http) as probe:
            child = [sys.executable, __file__, "--attack", kind, name, str(grpc), str(seconds)]
            done = subprocess.run(child, capture_output=True, text=True, timeout=120, check=False)
            time.sleep(SETTLE_S)
        answer = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
        last_mib = resident_mib(server.pid)
    lost = f", {probe.failed} checks failed" if probe.failed else ""
    return (
        f"| {name} | {probe.longest} | "
        f"{first_mib:.0f}, {probe.most_mib:.0f}, {last_mib:.0f} | {answer}{lost} |"
    )


def _ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as client:
            client.sendall(CHECK.replace(b"live", b"ready"))
            return b" 200 " in client.recv(4096)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        kind, name, port, seconds = options.attack
        asyncio.run(ATTACKS[kind][name](int(port), float(seconds)))
        return
    print(header("Attacks on the gRPC port"))
    print(
        "| attack | check, ms | own (loop, process computed), ms | memory, MiB | answers |\n"
        "| --- | --: | --: | --: | --- |"
    )
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        for kind, attacks in ATTACKS.items():
            for name in attacks:
                if not options.only or any(each in name for each in options.only):
                    print(measure(name, kind, models, options.seconds), flush=True)


if __name__ == "__main__":
    main()
