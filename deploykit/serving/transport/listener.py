"""A listening socket and the connections it accepts, their TLS handshake included.

While the process has no file descriptors left, clients wait in the backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import heapq
import logging
import math
import socket
import ssl
import sys
import termios
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from deploykit.core.errors import BadInput, first_line, os_reason, quote
from deploykit.serving.transport.call import EXHAUSTED, About, MemoryBudget
from deploykit.serving.transport.turns import BUSY_BYTES, Turns

log = logging.getLogger(__name__)
access_log = logging.getLogger("deploykit.access")

SPARE = 512  # clients above the limit that may ask for the server's health; 2 turns of accepting
BACKLOG = 1024
UNIX = "unix:"  # before the path of a socket, in place of a host
LEAST_BYTES_S = 4 << 10  # on average, of a client that sends a request or reads an answer
PAUSE_S = 0.2  # pause after running out of file descriptors
_IDLE_S = 1.0  # a connection idle for so long is closed if there are too many
_EXHAUSTED_IDLE_S = 5.0  # the same if the process has no file descriptor left
_CLOSED_AT_ONCE = 256  # in a tick, to make room
_BURST = 200  # connections accepted per turn of the event loop: about 20 ms
_HANDSHAKES = 8  # started per turn of the event loop: each takes a millisecond of it


def extend(by_s: float, size: int, now_s: float, stall_s: float) -> float:
    """Return by when a client, which has moved `size` bytes until now, must move more."""
    return min(now_s + stall_s, by_s + max(0, size) / LEAST_BYTES_S)


def unread_bytes(transport: asyncio.Transport) -> int:
    """Return how many written bytes the client has not received, in the system's buffer too.

    A third of that, often a megabyte, has to be free before the system takes more.
    """
    size, sending = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    if sending is not None and sending.fileno() >= 0:
        queued = fcntl.ioctl(sending.fileno(), termios.TIOCOUTQ, bytes(4))
        size += int.from_bytes(queued, sys.byteorder)
    return size


class Connection(asyncio.BufferedProtocol, ABC):
    """One client of a port: what it sends waits for its turn, and it has to read its answers."""

    transport: asyncio.Transport

    def __init__(self, port: Port, stall_s: float) -> None:
        self._port = port
        self._stall_s = stall_s
        self.kept = b""  # bytes received and not processed; counted in the memory budget
        self.whole = False  # all of a body was received elsewhere, and is not processed
        self.answering = False  # the next bytes wait for a reply
        self.queued = False  # what was received waits for a turn of the event loop
        self.paused = False  # nothing is received
        self.stalled = False  # the transport takes no more
        self.sent_bytes = 0  # written since the last check
        self.unsent_bytes = 0  # that the transport has not sent; counted in the memory budget
        self._unread = 0  # bytes that the client had not received at the last check
        self.read_by_s: float | None = None  # when the client must have read more

    @property
    @abstractmethod
    def idle_since_s(self) -> float | None: ...  # None while it has a request

    @property
    @abstractmethod
    def unanswered(self) -> int: ...  # complete requests whose replies have not been written

    @abstractmethod
    def process(self, data: bytes) -> None:
        """Process received bytes; `keep` those of an incomplete message."""

    @abstractmethod
    def check(self, now_s: float) -> None:
        """Close the connection if it is past a limit."""

    @abstractmethod
    def close(self) -> None:
        """Accept no more requests; close once all written data is sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.tls = transport.get_extra_info("sslcontext") is not None
        self._port.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._port.connections.discard(self)
        self._port.memory.release(self.unsent_bytes)
        self.unsent_bytes = 0
        self.take_kept()

    def part_of(self, buffer: memoryview) -> memoryview:
        """Return the part of a buffer that may be received into now."""
        turns = self._port.turns
        if turns.late() if self.tls else turns.busy:  # this turn is used up
            return buffer[: BUSY_BYTES[self.tls]]
        return buffer

    def data_received(self, data: bytes) -> None:
        """Process received bytes, now or in one of the next turns."""
        if self.kept:
            data = self.take_kept() + data
        turns = self._port.turns
        if turns.busy or self.paused or self.answering:
            self.keep(data)
            self.pause()
            self.go_on(urgent=self.is_urgent(data))
        else:
            begun_s = turns.clock_s()
            self.process(data)
            turns.spend(begun_s)

    def is_urgent(self, data: bytes) -> bool:  # noqa: ARG002 - for a subclass
        """Return whether these bytes are processed before those of other connections."""
        return False

    def go_on(self, *, urgent: bool = False) -> None:
        """Process what was received in one of the next turns, or receive more."""
        if self.queued or self.stalled or self.answering:
            return
        if self.kept or self.whole:
            self.queued = True
            self.pause()
            self._port.turns.wait(self._take_turn, urgent=urgent)
        else:
            self.resume()

    def _take_turn(self) -> None:
        self.queued = False
        self.process(self.take_kept())
        if not (self.queued or self.stalled or (self.kept and self.answering)):
            self.resume()

    def keep(self, data: bytes) -> None:
        self.kept = data
        self._port.memory.add(len(data), 0)

    def take_kept(self) -> bytes:
        data, self.kept = self.kept, b""
        self._port.memory.release(len(data))
        return data

    def pause(self) -> None:
        self.paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.stalled = True
        self.pause()
        self.count_unsent()

    def resume_writing(self) -> None:
        self.stalled = False
        self.go_on()

    def count_unsent(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._port.memory.add(size - self.unsent_bytes, 0)
        self.unsent_bytes = size

    def reads(self, now_s: float, *, waits: bool = False) -> bool:
        """Return whether the client reads fast enough; `waits`: more answers wait for it."""
        self.count_unsent()
        sent_bytes, self.sent_bytes = self.sent_bytes, 0
        if not (self.unsent_bytes or waits):
            self.read_by_s = None
            return True
        unread = unread_bytes(self.transport)
        size, self._unread = sent_bytes + self._unread - unread, unread
        by_s = now_s + self._stall_s
        if self.read_by_s is not None:
            by_s = extend(self.read_by_s, size, now_s, self._stall_s)
        self.read_by_s = by_s
        return now_s <= by_s


class Port(ABC):
    """State that one protocol's connections share: memory budget, turns of the event loop, time."""

    def __init__(
        self,
        places: int,
        handshake_s: float,
        memory: MemoryBudget,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.places = places  # the largest number of connections
        self.handshake_s = handshake_s  # time limit for the TLS handshake
        self.memory = memory
        self.replies: dict[Any, int] = defaultdict(int)  # by status
        self.records = self.logs_access = False  # whether `record` has a use for requests
        # takes a request that failed before a model had it: its line, status, begin and trace
        self.trace_failure: Callable[[str, str, float, str | None], None] | None = None
        self.turns = Turns(clock_s)
        self.connections: set[Connection] = set()
        self.draining = False
        self.now_s = clock_s()
        self.tick_s = 0.0  # time between the last two ticks
        self._unchecked: list[Connection] = []
        self._closing = 0  # connections that are being closed to make room
        self._searched_s = math.nan  # when: it takes a millisecond

    @abstractmethod
    def connect(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection."""

    def record(
        self, call: Any, asked: str, status: str, transport: asyncio.Transport, *, failed: bool
    ) -> None:
        """Log an answered call, and trace one that failed before a model had it.

        `call`: an Exchange or a GrpcCall, with `begun_s`, `about` and `head.trace`.
        """
        about: About | None = call.about
        if failed and about is None and self.trace_failure is not None:
            self.trace_failure(asked, status, call.begun_s, call.head.trace)
        if self.logs_access:
            client = transport.get_extra_info("peername")
            place = f"{client[0]}:{client[1]}" if isinstance(client, tuple) else "-"
            ms = 1000 * (self.turns.clock_s() - call.begun_s)
            name, rows = about or (None, 0)
            more = [f" rows={rows}"] if rows else []
            names = {"id": name, "trace": call.head.trace}
            more += [f" {key}={quote(value)}" for key, value in names.items() if value]
            access_log.info("%s %s %s %.1f ms%s", place, asked, status, ms, "".join(more))

    @property
    def unanswered(self) -> int:
        return sum(connection.unanswered for connection in self.connections)

    def retire(self) -> None:
        """End each connection with its next reply: the server is about to stop."""
        self.draining = True

    def tick(self, now_s: float) -> None:
        """Update the time and check all connections, unless a check is still running."""
        if not self._unchecked:
            self.tick_s, self.now_s = now_s - self.now_s, now_s
            self._closing = 0
            self._unchecked = list(self.connections)
            self.turns.run(self._check_all)

    def _check_all(self) -> None:
        """Check in as many turns as needed: all may reach a limit at one moment."""
        while self._unchecked:
            if self.turns.late():
                self.turns.wait(self._check_all)
                return
            self._unchecked.pop().check(self.now_s)

    def has_place(self) -> bool:
        """Return whether the newest connection may stay; idle ones may be closed to make room."""
        if len(self.connections) > self.places + self._closing and self._searched_s != self.now_s:
            self._searched_s = self.now_s
            self._closing = self.close_idle(_IDLE_S)
        return len(self.connections) <= self.places + self._closing

    def close_idle(self, least_s: float = _EXHAUSTED_IDLE_S) -> int:
        """Close connections idle for longest, for at least `least_s`; return how many."""
        last_s = self.now_s - least_s
        found = [(each.idle_since_s, each) for each in self.connections]
        idle = [(since_s, each) for since_s, each in found if since_s and since_s <= last_s]
        chosen = heapq.nsmallest(_CLOSED_AT_ONCE, idle, key=itemgetter(0))
        for _, connection in chosen:
            connection.transport.abort()
        return len(chosen)


def bind(host: str, port: int, parameter: str = "`http_port`") -> socket.socket:
    """Return a listening socket; early clients wait. BadInput names `host` or `parameter`."""
    if host.startswith(UNIX):
        listening = _bind_unix(host, parameter)
        listening.listen(BACKLOG)
        return listening
    if host[:1] == "[" and host[-1:] == "]":  # as in a URL
        host = host[1:-1]
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        reason = os_reason(exc) if isinstance(exc, OSError) else "not a host name"
        raise BadInput(f"`host` {host}: {reason}") from exc
    problem: OSError | None = None
    for family, kind, protocol, _, address in sorted(found, key=lambda item: item[0]):
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)  # now, as only this detects a port in use
        except OSError as exc:
            listening.close()
            problem = exc
        else:
            listening.setblocking(False)
            return listening
    reason = os_reason(problem) if problem else "no address"
    if problem is not None and problem.errno == errno.EADDRINUSE:
        hint = f"stop its program, or choose another with {parameter} (0 picks a free one)"
        raise BadInput(f"{parameter} {port}: already in use on {host}", hint=hint) from problem
    raise BadInput(f"`host` {host}, {parameter} {port}: {reason}") from problem


def _bind_unix(host: str, parameter: str) -> socket.socket:
    """Return a socket at this path, in place of that of a server that has ended."""
    path = Path(host.removeprefix(UNIX) + (".grpc" if "grpc" in parameter else ""))
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            if listening.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "already in use")
            path.unlink()
        listening.bind(str(path))
    except OSError as exc:
        listening.close()
        raise BadInput(f"`host` {UNIX}{path}: {os_reason(exc)}") from exc
    listening.setblocking(False)
    return listening


def reserve(host: str, port: int, parameter: str) -> socket.socket:
    """Return a bound socket that keeps the port from other servers, for `share_address`."""
    if host.startswith(UNIX):
        return _bind_unix(host, parameter)
    alone = bind(host, port, parameter)  # fails where another program listens, shared or not
    address = alone.getsockname()
    alone.close()
    try:
        with contextlib.suppress(OSError):  # the last server's connections are still closing
            return _shared(alone.family, address, refuse_others=True)
        return _shared(alone.family, address)
    except OSError as exc:
        raise BadInput(f"{parameter} {address[1]}: {os_reason(exc)}") from exc


def share_address(reserved: socket.socket) -> socket.socket:
    """Return another socket at the same address: the listening ones divide its connections."""
    if reserved.family == socket.AF_UNIX:
        return reserved.dup()
    return _shared(reserved.family, reserved.getsockname())


def _shared(family: int, address: tuple[Any, ...], *, refuse_others: bool = False) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not refuse_others)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    found.setblocking(False)
    return found


def remove_path(listening: socket.socket) -> None:
    """Remove the path of an open socket that has one: no client can come any more."""
    if listening.family == socket.AF_UNIX and listening.fileno() >= 0:
        Path(listening.getsockname()).unlink(missing_ok=True)


def is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def address_of(listening: socket.socket) -> tuple[str, int]:
    """Return host and port of a socket; of one at a path, unix:PATH and 0."""
    if listening.family == socket.AF_UNIX:
        return UNIX + listening.getsockname(), 0
    host, port = listening.getsockname()[:2]
    return host, port


class Acceptor:
    """Accepts the connections of a port from `open` until `close`.

    `owned`: no other process listens at the path of its socket.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        port: Port,
        tls: ssl.SSLContext | None,
        *,
        owned: bool = True,
    ) -> None:
        self.port = port
        self._owned = owned
        self._loop = loop
        self._socket = listening
        self.tls = tls
        self._handshake_s = port.handshake_s if tls else None
        self._silent: dict[socket.socket, asyncio.Task[None]] = {}  # have not sent their TLS hello
        self._starts = asyncio.Semaphore(_HANDSHAKES)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._open = False

    @property
    def busy(self) -> bool:
        """Return whether there are connections or handshakes."""
        return bool(self._handshakes or self.port.connections)

    def open(self) -> None:
        self._open, self._paused = True, None
        self._socket.listen(BACKLOG)  # a socket of a shared address does not listen yet
        # at a path all processes share one socket: one must not take the clients of others
        most = 1 if self._socket.family == socket.AF_UNIX else _BURST
        self._loop.add_reader(self._socket, self._accept, most)

    def close(self) -> None:
        """Accept the clients in the backlog, and none afterwards."""
        if self._owned:
            remove_path(self._socket)
        if self._open:
            self._open = False
            if self._paused is not None:
                self._paused.cancel()
            else:
                self._loop.remove_reader(self._socket)
                self._accept(BACKLOG)
            for task in self._handshakes if self.tls else ():
                task.cancel()
        self._socket.close()  # new clients are refused from now on instead of waiting

    def _accept(self, most: int) -> None:
        for _ in range(most):
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in EXHAUSTED:
                    raise
                self._pause(exc)
                return
            client.setblocking(False)
            count, most = len(self._handshakes) + len(self.port.connections), self.port.places
            if self.tls and count >= most + 2 * SPARE and not self._close_silent():
                client.close()  # with fewer a client gets a protocol, which replies with the reason
                log.info("a connection was closed: there are %d already", count)
                continue
            task = self._loop.create_task(self._handshake(client))
            self._handshakes.add(task)
            if self.tls:
                self._silent[client] = task
            task.add_done_callback(partial(self._end_handshake, client))

    def _pause(self, exc: OSError) -> None:
        log.warning("connections cannot be accepted for now: %s", os_reason(exc))
        if self._open:
            self.port.close_idle()
            self._close_silent(_CLOSED_AT_ONCE)
            self._loop.remove_reader(self._socket)
            self._paused = self._loop.call_later(PAUSE_S, self.open)

    def _close_silent(self, most: int = 1) -> bool:
        """Close clients that have waited longest with their hello; return whether there was one."""
        chosen = list(islice(self._silent, most))
        for client in chosen:
            self._silent.pop(client).cancel()
        return bool(chosen)

    async def _handshake(self, client: socket.socket) -> None:
        try:
            if self.tls:
                await asyncio.wait_for(self._hello(client), self._handshake_s)
            await self._loop.connect_accepted_socket(
                self.port.connect, client, ssl=self.tls, ssl_handshake_timeout=self._handshake_s
            )
        except (OSError, asyncio.TimeoutError) as exc:  # ssl.SSLError is an OSError
            client.close()
            if self.tls:
                log.info("a connection was closed in its TLS handshake: %s", reason_of(exc))

    def _end_handshake(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._silent.pop(client, None)
        if task.cancelled():  # perhaps before the task began
            client.close()

    async def _hello(self, client: socket.socket) -> None:
        """Wait for the client's first bytes, then until its handshake may begin."""
        hello = asyncio.Event()
        self._loop.add_reader(client, hello.set)
        try:
            await hello.wait()
        finally:
            self._loop.remove_reader(client)
        self._silent.pop(client, None)
        async with self._starts:
            await asyncio.sleep(0)


def reason_of(exc: Exception) -> str:
    """Return why a handshake or the reading of a certificate failed."""
    if isinstance(exc, ssl.SSLError) and exc.reason:
        return exc.reason.replace("_", " ").lower()
    if isinstance(exc, asyncio.TimeoutError):
        return "the client sent nothing"
    return os_reason(exc) if isinstance(exc, OSError) and exc.errno else first_line(exc)
