"""Serve models over HTTP/1.1: one process, one event loop, no task or thread per request.

In: engines by name and `ServeOptions`. Out: a listening server, until SIGTERM or SIGINT; then every
request taken is answered and `run` returns. `benchmarks/http_stacks.py` holds the measurement that
chose uvloop with a parser of our own wiring; the limits that such a parser lacks are in wire.py.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import uvloop

from deploykit.core.errors import BadInput, os_reason
from deploykit.runtimes.engine import Engine
from deploykit.serving.batcher import deliver_here
from deploykit.serving.options import ServeOptions
from deploykit.serving.policy import Pending
from deploykit.serving.routes import Routes
from deploykit.serving.service import Service
from deploykit.serving.wire import Connection, Limits, Listener

log = logging.getLogger(__name__)

__all__ = ["Limits", "ServeOptions", "Server", "run"]

BACKLOG = 1024
TICK_S = 0.1  # how late a deadline may be noticed
DRAIN_S = 30.0  # how long a shutdown waits for an engine
CLOSE_S = 5.0  # how long it then waits for clients to read their answers


def run(
    models: Mapping[str, Engine],
    options: ServeOptions,
    on_ready: Callable[[str, int], None],
    *,
    limits: Limits | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; call `on_ready(host, port)` when requests can come.

    Returns how many accepted requests were not answered: 0 unless an engine hangs. A second signal
    raises KeyboardInterrupt at once. Raises BadInput when the host or the port cannot be had.
    """
    return Server(models, options, limits).run(on_ready)


class Server:
    """A server that has its address already; `run` blocks, `stop` may be called from any thread."""

    def __init__(
        self, models: Mapping[str, Engine], options: ServeOptions, limits: Limits | None = None
    ) -> None:
        self._socket = _bind(options.host, options.http_port)
        self._loop = uvloop.new_event_loop()
        try:
            self.service = Service(models, options, deliver=self._deliver)
        except BaseException:
            self._release()
            raise
        self.host, self.port = self._socket.getsockname()[:2]
        self._listener = Listener(
            Routes(self.service),
            limits or Limits(),
            max_body_bytes=options.max_body_bytes,
            loopback=_is_loopback(self.host),
        )
        self._stopped = asyncio.Event()
        self._signals = 0
        self._interrupted = False

    def run(self, on_ready: Callable[[str, int], None]) -> int:
        """As the function `run`; outside the main thread signals are left alone."""
        aborted = True
        try:
            self.service.warm_up()
            dropped = self._loop.run_until_complete(self._serve(on_ready))
            aborted = False
        finally:
            self.service.close(drain=False, timeout_s=0 if aborted else CLOSE_S)
            self._release()
        return dropped

    def stop(self) -> None:
        """Begin the shutdown that a first signal begins."""
        self._loop.call_soon_threadsafe(self._begin_drain)

    async def _serve(self, on_ready: Callable[[str, int], None]) -> int:
        loop = self._loop
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, number)
        server = await loop.create_server(
            partial(Connection, self._listener), sock=self._socket, backlog=BACKLOG
        )
        if not _is_loopback(self.host):
            log.warning("listening on %s: whoever reaches it may use the models", self.host)
        ticking = asyncio.ensure_future(self._tick())
        try:
            on_ready(self.host, self.port)
            await self._stopped.wait()
            await self._until(lambda: self._signals > 1 or not self._listener.unanswered, DRAIN_S)
            dropped = self._listener.unanswered
            server.close()
            self._listener.close_all()
            await self._until(lambda: self._signals > 1 or not self._listener.connections, CLOSE_S)
        finally:
            ticking.cancel()
            server.close()
            for connection in list(self._listener.connections):
                connection.abort()
        if self._signals > 1 or self._interrupted:
            if dropped:
                log.warning("%d accepted requests were not answered", dropped)
            raise KeyboardInterrupt
        return dropped

    async def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        end_s = self._loop.time() + limit_s
        while not reached() and self._loop.time() < end_s:
            await asyncio.sleep(TICK_S / 5)

    async def _tick(self) -> None:
        while True:
            self.service.expire()
            self._listener.tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    def _deliver(self, requests: Sequence[Pending]) -> None:
        """Called on an engine's thread: one wake-up of the loop for the whole batch."""
        try:
            self._loop.call_soon_threadsafe(deliver_here, requests)
        except RuntimeError:  # the loop is closed: the engine hung past the shutdown
            log.error("%d requests finished after the shutdown", len(requests))

    def _signalled(self, number: int) -> None:
        self._signals += 1
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._begin_drain()

    def _begin_drain(self) -> None:
        self.service.drain()
        self._listener.draining = True
        self._stopped.set()

    def _release(self) -> None:
        self._socket.close()
        self._loop.close()


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket; who connects early waits. Raises BadInput naming host or port."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        reason = os_reason(exc) if isinstance(exc, OSError) else "not a host name"
        raise BadInput(f"--host {host}: {reason}") from exc
    problem: OSError | None = None
    for family, kind, protocol, _, address in sorted(found, key=lambda item: item[0]):
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)  # now: only this finds a port that another server has
        except OSError as exc:
            listening.close()
            problem = exc
        else:
            return listening
    reason = os_reason(problem) if problem else "no address"
    if problem is not None and problem.errno == errno.EADDRINUSE:
        hint = "stop what uses it, or choose another with --http-port (0 picks a free one)"
        raise BadInput(f"--http-port {port}: already in use on {host}", hint=hint) from problem
    raise BadInput(f"--host {host}, --http-port {port}: {reason}") from problem


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
