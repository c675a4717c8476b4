"""A listening socket and the connections it accepts, their TLS handshake included.

While the process has no file descriptors left, clients wait in the backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, first_line, os_reason
from deploykit.serving.transport.connection import CLOSED_AT_ONCE, EXHAUSTED, SPARE, Port

log = logging.getLogger(__name__)

BACKLOG = 1024
UNIX = "unix:"  # before the path of a socket, in place of a host
PAUSE_S = 0.2  # pause after running out of file descriptors
_EXHAUSTED_IDLE_S = 5.0  # then a connection is closed where file descriptors lack
_BURST = 200  # connections accepted per turn of the event loop: about 20 ms
_HANDSHAKES = 8  # started per turn of the event loop: each takes a millisecond of it


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
    family, kind, protocol, _, address = min(found, key=lambda item: item[0])  # IPv4 before IPv6
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # now, as only this detects a port in use
    except OSError as exc:
        listening.close()
        if exc.errno == errno.EADDRINUSE:
            hint = f"stop its program, or choose another with {parameter} (0 picks a free one)"
            raise BadInput(f"{parameter} {port}: already in use on {host}", hint=hint) from exc
        raise BadInput(f"`host` {host}, {parameter} {port}: {os_reason(exc)}") from exc
    listening.setblocking(False)
    return listening


def _bind_unix(host: str, parameter: str) -> socket.socket:
    """Return a socket at this path, in place of that of a server that has ended."""
    path = Path(host.removeprefix(UNIX) + (".grpc" if "grpc" in parameter else ""))
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            if listening.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "already in use")
            path.unlink()
        elif path.exists():
            raise OSError(errno.EEXIST, "is not a socket; name a path that does not exist")
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
    with contextlib.suppress(OSError):  # the last server's connections are still closing
        return _shared(alone.family, address, refuse_others=True)
    return _shared(alone.family, address)


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
        self._handshake_s = port.limits.header_s if tls else None
        self._starts = asyncio.Semaphore(_HANDSHAKES)
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first
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
            for task in self._handshakes.values() if self.tls else ():
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
            count = len(self._handshakes) + len(self.port.connections)
            most = self.port.limits.connections + 2 * SPARE
            if self.tls and count >= most and not self._drop_oldest(1):
                client.close()  # with fewer a client gets a protocol, which replies with the reason
                log.info("a connection was closed: there are %d already", count)
                continue
            task = self._handshakes[client] = self._loop.create_task(self._handshake(client))
            task.add_done_callback(partial(self._end_handshake, client))

    def _pause(self, exc: OSError) -> None:
        log.warning("connections cannot be accepted for now: %s", os_reason(exc))
        if self._open:
            self.port.close_idle(_EXHAUSTED_IDLE_S)
            self._drop_oldest(CLOSED_AT_ONCE)
            self._loop.remove_reader(self._socket)
            self._paused = self._loop.call_later(PAUSE_S, self.open)

    def _drop_oldest(self, most: int) -> bool:
        """Close clients whose TLS handshake takes longest; return whether there was one."""
        chosen = list(islice(self._handshakes, most if self.tls else 0))
        for client in chosen:
            self._handshakes.pop(client).cancel()
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
        self._handshakes.pop(client, None)
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
        async with self._starts:
            await asyncio.sleep(0)


def reason_of(exc: Exception) -> str:
    """Return why a handshake or the reading of a certificate failed."""
    if isinstance(exc, ssl.SSLError) and exc.reason:
        return exc.reason.replace("_", " ").lower()
    if isinstance(exc, asyncio.TimeoutError):
        return "the client sent nothing"
    return os_reason(exc) if isinstance(exc, OSError) and exc.errno else first_line(exc)
