"""Ask a server for its health every 20 ms, in a process of its own, and sample its memory.

`HealthProbe` is a context; `seen` then has the longest answer and what it consisted of. Half of the
requests are on a connection that stays open, half on new ones.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.02
_LIMIT_S = 20.0
_HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Seen:
    """Of the slowest answer: how long it took, and how much of that the loop's thread computed.

    `no_core_ms`: that the server's loop or this client waited for a core, which others used.
    `kept_ms`: the longest answer on a connection that stays open, without that.
    """

    stall_ms: float
    computed_ms: float
    no_core_ms: float
    kept_ms: float
    answers: int
    failures: int
    ready_mib: float
    peak_mib: float

    @property
    def own_ms(self) -> float:
        """The stall without the time that other programs had the cores."""
        return self.stall_ms - self.no_core_ms


class HealthProbe:
    """Probes the server `pid` on `port` until the block ends."""

    def __init__(self, port: int, pid: int) -> None:
        self._command = [sys.executable, "-m", "benchmarks.serve.attack_http_probe", str(port)]
        self._command.append(str(pid))
        self.seen: Seen | None = None

    def __enter__(self) -> HealthProbe:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has asked once
        return self

    def __exit__(self, *_: object) -> None:
        found, _ = self._process.communicate(input="end\n", timeout=2 * _LIMIT_S)
        self.seen = Seen(**json.loads(found))


def rss_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def _cpu_ms(place: str) -> tuple[float, float]:
    """Time that a thread ran, and that it waited for a core."""
    ran, waited, _ = Path(place).read_text("ascii").split()
    return int(ran) / 1e6, int(waited) / 1e6


def _ask(client: socket.socket) -> bool:
    client.sendall(_HEALTH)
    return client.recv(4096).startswith(b"HTTP/1.1 200 ")


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S)


def main() -> None:
    port, pid = int(sys.argv[1]), int(sys.argv[2])
    thread = f"/proc/{pid}/task/{pid}/schedstat"
    longest, kept_ms, answers, failures = (0.0, 0.0, 0.0), 0.0, 0, 0
    ready_mib = peak_mib = rss_mib(pid)
    kept = _connect(port)
    os.set_blocking(0, False)
    while True:
        begun = time.perf_counter(), _cpu_ms(thread), _cpu_ms("/proc/self/schedstat")
        try:
            fresh = answers % 2 == 1
            client = _connect(port) if fresh else kept
            good = _ask(client)
            if client is not kept:
                client.close()
        except OSError:
            good = False
        if not good:
            failures += 1
            try:
                kept = _connect(port)
            except OSError:
                time.sleep(EVERY_S)
        answers += 1
        stall_ms = 1e3 * (time.perf_counter() - begun[0])
        ran, waited = _cpu_ms(thread)
        own_waited = _cpu_ms("/proc/self/schedstat")[1] - begun[2][1]
        no_core_ms = min(stall_ms, waited - begun[1][1] + own_waited)
        if not fresh:
            kept_ms = max(kept_ms, stall_ms - no_core_ms)
        longest = max(longest, (stall_ms, ran - begun[1][0], no_core_ms))
        peak_mib = max(peak_mib, rss_mib(pid))
        if answers == 1:
            print("ready", flush=True)
        elif sys.stdin.buffer.raw.read(1):  # type: ignore[attr-defined]
            break
        time.sleep(EVERY_S)
    times = [round(each, 1) for each in (*longest, kept_ms)]
    seen = Seen(*times, answers, failures, ready_mib, peak_mib)
    print(json.dumps(seen.__dict__))


if __name__ == "__main__":
    main()
