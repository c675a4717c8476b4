"""A server in a process of its own, for the fault tests: what it says, holds, and answers."""

from __future__ import annotations

import http.client
import json
import operator
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

BROKEN, REFUSED = 0, 1
LIMIT_S = 60.0  # against hanging, not a measure
STAND_IN = [sys.executable, str(Path(__file__).with_name("serve_faulty.py"))]
REAL = [sys.executable, "-m", "deploykit"]
ROOT = Path(__file__).resolve().parents[3]


def until(reached: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Wait for another process's doing; returns what `reached` did."""
    end = time.monotonic() + limit_s
    while not (found := reached()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
    return found


def start(
    folder: Path,
    *options: str,
    command: Sequence[str] = STAND_IN,
    engine: str = "m=stand-in",
    env: Mapping[str, str] | None = None,
    before: Callable[[], object] | None = None,
    stderr: int | IO[bytes] = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start `deploykit serve`; `before` runs in its process."""
    ports = ("--http-port=0", "--grpc-port=none")
    return subprocess.Popen(
        [*command, "serve", "--engine", engine, *ports, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        preexec_fn=before,
    )


def refused(folder: Path, *options: str, **how: Any) -> tuple[int, str]:
    """The exit code and standard error of a server that cannot start; `how`: see `start`."""
    with start(folder, *options, **how) as process:
        out, errors = process.communicate(timeout=LIMIT_S)
    assert out == b""
    return process.returncode, errors.decode()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Process:
    """`deploykit serve`, ready; its standard error goes to a file in `folder`, or to `stderr`."""

    shared_engines = False

    def __init__(self, folder: Path, *options: str, stderr: int | None = None, **how: Any) -> None:
        self.log = folder / "stderr.txt"
        with self.log.open("ab") as stream:
            errors = stream if stderr is None else stderr
            self.popen = start(folder, *options, stderr=errors, **how)
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        ready = json.loads(line)
        self.port = int(ready["http"].rpartition(":")[2])
        self.grpc = ready["grpc"]  # HOST:PORT; None without `--grpc`

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()

    def ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)) as to:
            to.request(method, target, body)
            reply = to.getresponse()
            return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()

    def status(self, target: str) -> int:
        return self.ask("GET", target)[0]

    def infer(self, *values: float) -> tuple[int, Any]:
        """One request, a row a value: the status, and the first output of each row or the error."""
        status, _, body = self.ask("POST", "/v2/models/m/infer", request(*values))
        return status, answer(status, body)

    def gauge(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.ask("GET", "/metrics")[2].decode().splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert found, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def holds(self) -> tuple[int, int]:
        """How many file descriptors and threads it has."""
        place = Path(f"/proc/{self.popen.pid}")
        return len(list((place / "fd").iterdir())), len(list((place / "task").iterdir()))

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def log_lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait(self) -> int:
        return self.popen.wait(LIMIT_S)

    def hold(self) -> None:
        """From now on no call of the stand-in returns."""
        self.log.with_name("hold").touch()

    def release(self) -> None:
        self.log.with_name("hold").unlink()

    def in_engine(self) -> bool:
        """Whether one request is in the engine, and no other waits."""
        in_flight = self.gauge("deploykit_requests_in_flight")
        return in_flight == 1 and self.gauge("deploykit_queue_depth") == 0


def leaves_nothing(server: Process, act: Callable[[], object], slack_bytes: int) -> None:
    """`act` leaves files, threads and memory as they were, at least the second or third time.

    A leak grows each time; what allocators keep, and a thread that is started when it is first
    needed, does not.
    """
    grown: list[str] = []
    for limit_s in (5.0, 5.0, LIMIT_S):
        held, rss_bytes = server.holds(), server.rss_bytes()
        act()
        with suppress(AssertionError):
            until(lambda held=held: all(map(operator.le, server.holds(), held)), limit_s)  # type: ignore[misc]
            if server.rss_bytes() - rss_bytes < slack_bytes:
                return
        grown.append(f"{held} to {server.holds()}, {server.rss_bytes() - rss_bytes} bytes")
    raise AssertionError(grown)


def quiet_port() -> int:
    """A free port that the system gives to no other program meanwhile, as it does with port 0."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(min(10_000, first - 1), first)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def request(*values: float, width: int = 4) -> bytes:
    """A row of `width` equal values for each of `values`."""
    item = {"name": "x", "datatype": "FP32", "shape": [len(values), width]}
    data = [[value] * width for value in values]
    return json.dumps({"inputs": [{**item, "data": data}]}).encode()


def answer(status: int, body: bytes) -> Any:
    """The first number of each row of a success, else the error's text."""
    found = json.loads(body)
    if status != 200:
        assert list(found) == ["error"], found
        return found["error"]
    (output,) = found["outputs"]
    return output["data"][:: output["shape"][1]]


class Clients:
    """Threads that ask one row again and again, each on a connection of its own.

    `outcomes`: the status of each request, and the number of its client. Status BROKEN: the
    connection ended before the answer; REFUSED: there was none.
    """

    def __init__(self, port: int, count: int) -> None:
        self.outcomes: list[tuple[int, int]] = []
        self._port = port
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._clients = [self._pool.submit(self._ask_on, number) for number in range(count)]

    def _ask_on(self, number: int) -> None:
        value = float(number)
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)) as to:
            while not self._ended.is_set():
                value += 100
                try:
                    to.request("POST", "/v2/models/m/infer", request(value))
                    reply = to.getresponse()
                    status, body = reply.status, reply.read()
                    assert status != 200 or answer(status, body) == [2 * value + 1]
                except (OSError, http.client.HTTPException) as exc:
                    to.close()
                    status = REFUSED if isinstance(exc, ConnectionRefusedError) else BROKEN
                self.outcomes.append((status, number))
                if status != 200:
                    time.sleep(0.01)

    def all_wait(self, server: Process) -> int:
        """Wait until each has a request in a server that is on hold; how many were answered."""
        until(lambda: server.gauge("deploykit_requests_in_flight") == len(self._clients))
        return len(self.outcomes)

    def next_after(self, answered: int) -> list[int]:
        """The status of each client's first request after that."""
        later = reversed(self.outcomes[answered:])
        return list({client: status for status, client in later}.values())

    def stop(self) -> dict[int, int]:
        """How many outcomes of each status; raises if a 200 was not right."""
        self._ended.set()
        for client in self._clients:
            client.result()
        return Counter(status for status, _ in self.outcomes)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown()
