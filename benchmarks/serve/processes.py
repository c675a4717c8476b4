"""A server as a process of its own, with all that it starts: ready, memory, end.

In: a command, and a question that only a ready server answers. Out: `Running`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memory import held_mib
from reasons import NotMeasuredError

MARK = "DK_BENCH_SERVER"  # in the environment of a server and so of all its descendants
READY_LIMIT_S = 90.0
END_LIMIT_S = 20.0
PROC = Path("/proc")


@dataclass(frozen=True)
class Running:
    """A ready server. `ready_s`: from the start of its process to its first right answer."""

    pid: int
    ready_s: float
    mark: str

    def held_mib(self) -> float:
        """Memory of all its processes."""
        return held_mib(tree(self.pid, self.mark))

    def cpu_s(self) -> float:
        """Processor time, user and system, of all its processes."""
        ticks = 0
        for pid in tree(self.pid, self.mark):
            with contextlib.suppress(OSError):
                fields = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def started(
    command: Sequence[str],
    ready: Callable[[], bool],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[Running]:
    """Run `command` until the block ends; `ready` is asked until it is true.

    Raises NotMeasuredError when the process ends first or takes too long.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as own:
        begin_s = time.perf_counter()
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            env={
                **os.environ,
                **(environment or {}),
                "TMPDIR": own,
                "RAY_TMPDIR": own,
                MARK: mark,
            },
            start_new_session=True,
        )
        try:
            while not ready():
                if server.poll() is not None:
                    raise NotMeasuredError(f"ended with {server.returncode}: {_last_line(log)}")
                if time.perf_counter() - begin_s > READY_LIMIT_S:
                    raise NotMeasuredError(
                        f"not ready after {READY_LIMIT_S:g} s: {_last_line(log)}"
                    )
                time.sleep(0.02)
            yield Running(server.pid, time.perf_counter() - begin_s, mark)
        finally:
            _end(server, mark)


def free_port() -> int:
    """Below the range that outgoing connections take theirs from: a load opens hundreds of them."""
    for port in random.sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise NotMeasuredError("none of 100 ports is free")


def tree(pid: int, mark: str) -> dict[int, str]:
    """The process, its descendants and what bears its mark; each with its start time.

    A title that a process gives itself may lie over its environment, and a daemon leaves its
    parent: hence both.
    """
    found = {other: stat for other in _pids() if (stat := _stat(other))}
    members = {pid} if pid in found else set()
    members |= {other for other in found if _marked(other, mark)}
    while more := {o for o, (parent, _) in found.items() if parent in members} - members:
        members |= more
    return {member: found[member][1] for member in members}


def _end(server: subprocess.Popen[bytes], mark: str) -> None:
    members = tree(server.pid, mark)
    if server.poll() is None:
        server.send_signal(signal.SIGINT)  # what a person types; more clean up on it than on TERM
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(END_LIMIT_S)
    left = {**members, **tree(server.pid, mark)}
    for pid, started_at in left.items():
        stat = _stat(pid)
        if stat is not None and stat[1] == started_at:  # still the same process
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    server.wait()
    limit_s = time.monotonic() + END_LIMIT_S
    while any(_stat(pid) for pid in left) and time.monotonic() < limit_s:
        time.sleep(0.01)  # whoever starts next has the cores to itself


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> tuple[int, str] | None:
    """A process' parent and start time; None: it is gone or a zombie."""
    try:
        fields = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), fields[19])


def _marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in (PROC / f"{pid}/environ").read_bytes()
    except OSError:
        return False


def _last_line(log: object) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1][:200]
