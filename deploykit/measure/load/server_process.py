"""Find the processes of a server on this machine, whose work is no outside load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploykit.measure.load.target import RemoteModel

_LISTENS = "0A"  # of a socket, in /proc/net/tcp


def server_processes(remote: RemoteModel, proc: Path | None = None) -> tuple[int, ...]:
    """Those that listen at its port; none for a server elsewhere, or of another user."""
    proc = proc or Path(os.environ.get("HOST_PROC", "/proc"))
    sockets = set(_listening(proc, remote.port)) if remote.loopback else set[str]()
    return tuple(_owners(proc, sockets)) if sockets else ()


def _listening(proc: Path, port: int) -> Iterator[str]:
    """The links that a process has to sockets that listen at `port`."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError, UnicodeError):
            for line in (proc / "net" / name).read_text(encoding="utf-8").splitlines()[1:]:
                fields = line.split()
                listens = len(fields) > 9 and fields[3] == _LISTENS
                if listens and fields[1].rpartition(":")[2] == f"{port:04X}":
                    yield f"socket:[{fields[9]}]"


def _owners(proc: Path, sockets: set[str]) -> Iterator[int]:
    for process in proc.iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it has ended, or is another user's
                if any(_link(each) in sockets for each in (process / "fd").iterdir()):
                    yield int(process.name)


def _link(path: Path) -> str:
    with suppress(OSError):
        return str(path.readlink())
    return ""
