"""A million requests, good and bad, and clients that leave or do not read: what stays behind?

    python -m benchmarks.serve.soak [--requests N] [--leavers N] [--readers N] [--kills N]

Out, as Markdown: latency, memory, file descriptors and threads of the real `deploykit serve` after
each tenth of the requests, and a line for each promise; ends with 1 if one is broken. After the
first tenth: memory grows by less than 10 MiB per million requests, file descriptors and threads not
at all; p99 of the last tenth is at most 1.1 times that of the second; what fails is just what was
bad. The client is closed-loop, 16 connections, and shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from tests.support.onnx_zoo import linear, save
from tests.support.serving.faults import (
    LIMIT_S,
    REAL,
    Clients,
    Process,
    request,
    until,
)
from tests.support.serving.running import binary_request

CONNECTIONS = 16


def sent(server: Process, data: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little fits in between
    client.settimeout(LIMIT_S)
    client.connect(("127.0.0.1", server.port))
    client.sendall(data)
    return client


def posted(body: bytes) -> bytes:
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


_WRONG = {"name": "x", "shape": [1, 5], "datatype": "FP32", "data": [1, 2, 3, 4, 5]}
BAD = [posted(body) for body in (b"", b"{", b'{"inputs": []}', b"[" * 300)] + [
    posted(json.dumps({"inputs": [_WRONG]}).encode()),
    posted(request(1).replace(b"FP32", b"INT8")),
    b"GET /v2/models/nobody HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


@dataclass
class Tenth:
    """What the server held at the end of a tenth, and how long its good requests took."""

    rss_mib: float
    files: int
    threads: int
    latencies_s: list[float] = field(default_factory=list)
    wrong: int = 0  # good ones that did not get 200, bad ones that did not get 400 or 404

    def ms(self, q: float) -> float:
        return float(np.percentile(self.latencies_s, q) * 1e3)


async def ask_on(port: int, good: bytes, share: int, tenth: Tenth, seed: int) -> None:
    """`share` requests on a connection, one in ten of them bad."""
    chance = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(share):
        bad = chance.random() < 0.1
        began_s = time.perf_counter()
        writer.write(chance.choice(BAD) if bad else good)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        status = int(head[9:12])
        if bad:
            tenth.wrong += status not in (400, 404)
        else:
            tenth.wrong += status != 200
            tenth.latencies_s.append(time.perf_counter() - began_s)
        if b"connection: close" in head.lower():
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()


async def one_tenth(server: Process, count: int, number: int) -> Tenth:
    tenth = Tenth(0, 0, 0)
    data = binary_request(np.ones((1, 4), np.float32))
    share = count // CONNECTIONS
    await asyncio.gather(
        *(
            ask_on(server.port, data, share, tenth, number * CONNECTIONS + each)
            for each in range(CONNECTIONS)
        )
    )
    return tenth


def soak(server: Process, requests: int) -> list[Tenth]:
    tenths = []
    for number in range(10):
        tenth = uvloop.run(one_tenth(server, requests // 10, number))
        until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
        time.sleep(0.5)  # its side of the connections closes
        tenth.files, tenth.threads = server.holds()
        tenth.rss_mib = server.rss_bytes() / 2**20
        tenths.append(tenth)
    return tenths


def table(tenths: list[Tenth]) -> str:
    lines = [
        "| tenth | p50 ms | p99 ms | memory MiB | files | threads | wrong |",
        *["|--:" * 7 + "|"],
    ]
    for number, each in enumerate(tenths, 1):
        lines.append(
            f"| {number} | {each.ms(50):.2f} | {each.ms(99):.2f} | {each.rss_mib:.1f} | "
            f"{each.files} | {each.threads} | {each.wrong} |"
        )
    return "\n".join(lines)


def promises(tenths: list[Tenth], requests: int) -> list[tuple[str, bool]]:
    later = tenths[1:]
    millions = np.arange(len(later)) * requests / 10 / 1e6
    slope = float(np.polyfit(millions, [each.rss_mib for each in later], 1)[0])
    drift = later[-1].ms(99) / later[0].ms(99)
    files, threads = {each.files for each in later}, {each.threads for each in later}
    wrong = sum(each.wrong for each in tenths)
    return [
        (f"memory grows by {slope:.1f} MiB per million requests (below 10)", slope < 10),
        (
            f"file descriptors {sorted(files)}, threads {sorted(threads)}: no growth",
            later[-1].files <= later[0].files and later[-1].threads <= later[0].threads,
        ),
        (f"p99 of the last tenth is {drift:.2f} times that of the second (1.1)", drift <= 1.1),
        (f"{wrong} requests ended otherwise than they should (0)", wrong == 0),
    ]


def leavers(server: Process, count: int) -> tuple[str, bool]:
    """F3: clients that send a request and close."""
    data = posted(request(1))
    for _ in range(500):
        sent(server, data).close()
    until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
    held, rss = server.holds(), server.rss_bytes()
    for _ in range(count):
        sent(server, data).close()
    until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
    until(lambda: server.holds() <= held)
    grown = (server.rss_bytes() - rss) / 2**20
    return f"{count} clients that left: memory {grown:+.1f} MiB (below 8)", grown < 8


def readers(folder: Path, count: int) -> tuple[str, bool]:
    """F13: clients that never read a large answer, with the server's own 30 s."""
    width = 1 << 20
    data = binary_request(np.ones((1, width), np.float32))
    with Process(folder, "--max-batch", "1", env={"FAULT_WIDTH": str(width)}) as server:
        before, rss = server.holds()[0], server.rss_bytes()
        waiting = [sent(server, data) for _ in range(count)]
        until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
        most = (server.rss_bytes() - rss) / 2**20
        began_s = time.monotonic()
        until(lambda: server.holds()[0] <= before + 1, 120)
        took_s = time.monotonic() - began_s
        for each in waiting:
            each.close()
    text = (
        f"{count} that do not read 4 MiB: {most:.0f} MiB held, dropped within {took_s:.0f} s (40)"
    )
    return text, took_s < 40 and most < 8 * count


def kills(folder: Path, count: int) -> tuple[str, bool]:
    """F1: kill -9 at random moments under load, and the same port again at once."""
    chance, port, slowest_s, shared = random.Random(0), 0, 0.0, 0
    env = {"FAULT_LATENCY_S": "0.05", "FAULT_ROWS": "8"}
    for _ in range(count):
        began_s = time.monotonic()
        with Process(folder, port=port, env=env) as server:
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            port = server.port
            with Clients(port, 8) as clients:
                until(lambda clients=clients: len(clients.outcomes) > 8)
                time.sleep(chance.random() * 0.3)
                shared += len(server.shared())
                server.popen.kill()
                server.wait()
                clients.stop()  # asserts that each 200 was right
    text = f"{count} kills under load: ready within {slowest_s:.1f} s each time"
    return text, not shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("requests", 1_000_000), ("leavers", 10_000), ("readers", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kills", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(linear(), folder / "m.onnx")
        with Process(folder, command=REAL, engine="m=m.onnx") as server:
            tenths = soak(server, asked.requests)
            print(table(tenths), end="\n\n")
            found = promises(tenths, asked.requests)
            found.append(leavers(server, asked.leavers))
        found.append(readers(folder, asked.readers))
        found.append(kills(folder, asked.kills))
    print("\n".join(f"- {'kept' if kept else 'BROKEN'}: {text}" for text, kept in found))
    return 0 if all(kept for _, kept in found) else 1


if __name__ == "__main__":
    sys.exit(main())
