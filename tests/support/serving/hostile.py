"""What must hold after every hostile message, whatever it was: seven checks in one function."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
import time
from pathlib import Path

from tests.support.serving.memory import held_bytes
from tests.support.serving.running import Raw, Reply, Running, infer_json, request

INFER = "/v2/models/m/infer"
GOOD = request("POST", INFER, infer_json([1, 2, 3, 4], [1, 4]))
REPEATS = 100
CPU_LIMIT_S = 10.0  # of one message, and generous: 0.1 is much
SLACK_BYTES = 32 << 20  # growth of the memory over the repeats, if a body is read; 1 MiB if not
_ROUNDS = 5  # until nothing grows
_LEAKS = re.compile(r"Traceback|\.py\b|/tmp/|/home/|/root/|0x[0-9a-f]{6,}|Thread|object at")


class Lines(logging.Handler):
    """What the server writes to its log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage() + (record.exc_text or ""))

    def __enter__(self) -> Lines:
        logger = logging.getLogger("deploykit")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("deploykit").removeHandler(self)
        logging.getLogger("deploykit").setLevel(self._level)


def survives(
    server: Running,
    data: bytes,
    status: int | tuple[int, ...],
    *,
    says: str = "",
    repeats: int = REPEATS,
    slack_bytes: int = SLACK_BYTES,
) -> Reply:
    """Send `data` again and again, each time on a connection of its own; returns the first reply.

    With `says`, a text that the error must hold.
    """
    wanted = (status,) if isinstance(status, int) else status
    good = _good(server)
    with Lines() as log:
        first = _one(server, data)
    # 1: the status, and one sentence
    assert first.status in wanted, first
    if first.status != 200:
        assert list(first.json) == ["error"]
        text = first.json["error"]
        assert isinstance(text, str)
        assert says in text, text
        # 2: nothing of our insides
        assert not _LEAKS.search(text), text
        # 7: one line, printable
        assert len(log.lines) == 1, log.lines
        assert log.lines[0].isprintable()
    # 3: alive, and the same answer, bit for bit
    assert server.ask("GET", "/v2/health/live").status == 200
    assert _good(server) == good
    # 5: nothing grows; 6 is the CPU time of each
    grown: list[tuple[int, int]] = []  # threads and bytes
    # a leak grows again; what allocators keep does not, nor do the few threads that read bodies
    while not grown or grown[-1][0] > 0 or grown[-1][1] >= slack_bytes:
        assert len(grown) < _ROUNDS, grown
        before = _settled(server)
        for _ in range(repeats):
            assert _one(server, data).status in wanted
        assert _good(server) == good
        after = _settled(server, before)
        assert after["files"] <= before["files"]
        assert after["held_bytes"] == 0  # as the server counts them
        grown.append(
            (after["threads"] - before["threads"], after["rss_bytes"] - before["rss_bytes"])
        )
    return first


def _one(server: Running, data: bytes) -> Reply:
    raw = Raw(server.port)
    begin_s = time.process_time()
    with contextlib.suppress(OSError):  # refused before it was read: the answer is there
        raw.send(data)
    reply = raw.reply(body=not data.startswith(b"HEAD"))
    assert reply is not None, "no answer"
    assert time.process_time() - begin_s < CPU_LIMIT_S
    raw.close()
    return reply


def _good(server: Running) -> bytes:
    raw = Raw(server.port)
    reply = raw.ask(GOOD)
    raw.close()
    assert reply.status == 200
    return reply.body


def _resources(server: Running) -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": threading.active_count(),
        "held_bytes": held_bytes(server),
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def _settled(server: Running, before: dict[str, int] | None = None) -> dict[str, int]:
    """What is held once the server has seen that its clients left; `before`: as much as then."""
    pause = threading.Event()
    for _ in range(6000):
        after = _resources(server)
        if after["files"] <= (before or after)["files"] and not after["held_bytes"]:
            break
        pause.wait(0.01)
    ctypes.CDLL(None).malloc_trim(0)
    return {**after, "rss_bytes": _resources(server)["rss_bytes"]}
