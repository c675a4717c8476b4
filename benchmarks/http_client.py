"""A small closed-loop HTTP client for the serving benchmarks, in a process of its own.

In: an address, a number of connections, seconds, and a file with the request's bytes. Out: one
JSON line with requests, errors, requests/s and latency percentiles in ms. It does as little per
answer as can be done and still check the status and read the body whole: it shares the server's
cores.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import uvloop

WARM_UP_S = 0.5


class _Client(asyncio.Protocol):
    """One connection: send, wait for the whole answer, send again until `end`."""

    def __init__(self, request: bytes, times_s: list[tuple[float, float]], end_s: float) -> None:
        self._request = request
        self._times_s = times_s
        self._end_s = end_s
        self._got = b""
        self.errors = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        got = self._got + data if self._got else data
        head = got.find(b"\r\n\r\n")
        at = got.lower().find(b"content-length:", 0, head) if head > 0 else -1
        if at < 0 or len(got) < head + 4 + int(got[at + 15 : got.find(b"\r\n", at)]):
            self._got = got
            return
        self._got = b""
        now_s = time.perf_counter()
        if got[9:12] == b"200":
            self._times_s.append((now_s, now_s - self._sent_s))
        else:
            self.errors += 1
        if now_s < self._end_s:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if time.perf_counter() < self._end_s:
            self.errors += 1
        self.done.set_result(None)


async def _load(host: str, port: int, connections: int, seconds: float, request: bytes) -> dict:
    loop = asyncio.get_running_loop()
    begin_s = time.perf_counter() + WARM_UP_S
    end_s = begin_s + seconds
    times_s: list[tuple[float, float]] = []
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(
            lambda: _Client(request, times_s, end_s), host, port
        )
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    latencies_ms = [took * 1e3 for now, took in times_s if begin_s <= now <= end_s]
    p50_ms, p99_ms = np.percentile(latencies_ms, [50, 99]) if latencies_ms else (0.0, 0.0)
    return {
        "requests": len(latencies_ms),
        "errors": sum(client.errors for client in clients),
        "per_s": len(latencies_ms) / seconds,
        "p50_ms": float(p50_ms),
        "p99_ms": float(p99_ms),
    }


def infer_request(host: str, port: int, model: str, name: str, rows: np.ndarray) -> bytes:
    """The bytes of one binary inference request with one float32 input."""
    item = {
        "name": name,
        "datatype": "FP32",
        "shape": list(rows.shape),
        "parameters": {"binary_data_size": rows.nbytes},
    }
    document = {"inputs": [item], "parameters": {"binary_data_output": True}}
    head = json.dumps(document).encode()
    body = head + rows.astype("<f4").tobytes()
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def load(host: str, port: int, connections: int, seconds: float, request: Path) -> dict:
    """Run the client in another process; raises CalledProcessError when it fails."""
    command = [sys.executable, __file__, host, str(port), str(connections), str(seconds)]
    answer = subprocess.run([*command, str(request)], check=True, capture_output=True, text=True)
    return json.loads(answer.stdout)


def main() -> None:
    host, port, connections, seconds, request = sys.argv[1:]
    uvloop.install()
    result = asyncio.run(
        _load(host, int(port), int(connections), float(seconds), Path(request).read_bytes())
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
