"""Fork worker processes, connect them to the engines, and clean up at their end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from deploykit.core.errors import DeploykitError
from deploykit.serving.workers.engine import EngineMember
from deploykit.serving.workers.front import RemoteEngine
from deploykit.serving.workers.group import ENGINE, Member, WorkerLink
from deploykit.serving.workers.merge import Report

_PR_SET_PDEATHSIG = 1  # of prctl(2)

Serve = Callable[[Member], int]  # runs in a worker; returns the number of unanswered requests
Logging = Callable[["int | None"], AbstractContextManager[object]]  # of a worker, or of the parent


@dataclass(eq=False)
class Forked:
    """One process. `report`: its last figures; `missed`: samples since it last answered.

    `ready`, `serving`, `drained`: the states that it has reached.
    """

    number: int
    pid: int
    last: int  # a pipe for its result at its end
    control: socket.socket  # for connections to the engines
    begun_s: float
    link: WorkerLink | None = None
    ready: bool = False
    serving: bool = False
    drained: bool = False
    missed: int = 0
    report: Report | None = None
    not_ready: str | None = None
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)


def fork(
    number: int,
    count: int,
    http: socket.socket,
    grpc: socket.socket | None,
    serve: Serve,
    logging_of: Logging,
    engines: Mapping[str, RemoteEngine] | None = None,
) -> tuple[Forked, socket.socket]:
    """Start a worker that takes over the sockets; return it with our end of its link."""
    (ours, theirs), (control, taken) = socket.socketpair(), socket.socketpair()
    last, written = os.pipe()
    kind = EngineMember if number == ENGINE else Member
    member = kind(number, count, theirs, taken, http, grpc, written, engines)
    parent, taken_over = os.getpid(), [each for each in (theirs, taken, http, grpc) if each]
    try:
        pid = os.fork()
    except OSError:
        os.close(last)
        os.close(written)
        raise
    if pid == 0:
        keep = [written, *(each.fileno() for each in taken_over)]
        _become_worker(member, serve, logging_of, parent, keep)
    os.close(written)
    for each in taken_over:
        each.close()
    for each in (ours, control):
        each.setblocking(False)
    return Forked(number, pid, last, control, time.monotonic()), ours


def connect_engine(front: Forked, engine: Forked, share_bytes: int) -> None:
    """Give both processes their ends of a connection, and memory to share. Raises OSError."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(each) for each in socket.socketpair()]
        memory = os.memfd_create("deploykit")  # without a name, nothing of it remains
        stack.callback(os.close, memory)
        os.ftruncate(memory, share_bytes)
        for each, end in zip((front, engine), ends, strict=True):
            with contextlib.suppress(ConnectionError):  # the process has just ended
                socket.send_fds(each.control, [b"m"], [end.fileno(), memory])


def _become_worker(
    member: Member, serve: Serve, logging_of: Logging, parent: int, keep: Sequence[int]
) -> NoReturn:
    """Run a forked process, which keeps nothing of the parent but what they share."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, _end)
        for number in (signal.SIGINT, signal.SIGHUP):  # signals of the terminal: the parent drains
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(code)
        low = 3  # close what the parent had open, such as its ends of other workers' sockets
        for file in sorted(keep):
            os.closerange(low, file)
            low = file + 1
        os.closerange(low, max(low, os.sysconf("SC_OPEN_MAX")))
        os.register_at_fork(after_in_child=partial(_release, keep))
        with logging_of(member.number):
            member.report_end(serve(member))
        for each in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread has ended
                for pid in each.read_text().split():  # such as a pool's, which would never end
                    os.kill(int(pid), signal.SIGTERM)
        code = 0
    except (KeyboardInterrupt, SystemExit):
        pass
    except BaseException as exc:  # noqa: BLE001 - the parent raises it
        member.report_end(exc)
    finally:
        os._exit(code)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # no other signal may interrupt the end
    raise SystemExit(1)


def _release(files: Sequence[int]) -> None:
    """Close `files` in a process that a stage forks: it must not keep connections or links open."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in files:  # the numbers stay in use by the objects that this process inherits
        os.dup2(nothing, each, inheritable=False)
    os.close(nothing)


def last_words(pipe: int) -> object:
    """Return the result that a worker wrote at its end: a number, an error, or nothing."""
    with os.fdopen(pipe, "rb") as stream:
        data = stream.read()
    try:
        return pickle.loads(data) if data else None  # noqa: S301 - our own child wrote it
    except Exception as exc:  # noqa: BLE001 - an error of a library that is no value
        return DeploykitError(f"a worker's error could not be read: {exc}")


def how_it_ended(code: int) -> str:
    """Return the name of the signal, or the exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
