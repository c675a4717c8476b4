"""The processes of a server with several, and connections that the kernel divides among them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.serving.faults import LIMIT_S, Process, until

MANY = 24  # connections, of which each of two workers gets some: all but 1 in 8 million times


def workers(server: Process) -> list[int]:
    """The pids of the processes that serve."""
    pid = server.popen.pid
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def sockets(pid: int) -> int:
    count = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += str(each.readlink()).startswith("socket:")
    return count


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(server: Process, worker: int) -> None:
    """Returns when its parent has noticed; until then the kernel may still give it connections."""
    count = len(server.log_lines())
    os.kill(worker, signal.SIGKILL)
    until(lambda: any("ended by SIGKILL" in line for line in server.log_lines()[count:]))


@contextmanager
def connections(server: Process, count: int = MANY) -> Iterator[list[http.client.HTTPConnection]]:
    """Open connections, which the kernel has divided among the workers."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S))
            stack.callback(found[-1].close)
        yield found


def ask(
    connection: http.client.HTTPConnection, method: str, target: str, body: bytes = b""
) -> tuple[int, Any]:
    connection.request(method, target, body)
    reply = connection.getresponse()
    text = reply.read()
    return reply.status, json.loads(text) if text.startswith((b"{", b"[")) else text
