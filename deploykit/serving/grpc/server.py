"""The gRPC server: port, timers and shutdown, on the event loop of the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deploykit.serving.grpc.call import GrpcCall, HeadParser
from deploykit.serving.grpc.methods import Calls
from deploykit.serving.http2.connection import Http2Connection
from deploykit.serving.http2.flow import Http2Limits, Shared
from deploykit.serving.models.offload import Offload
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.listener import Acceptor
from deploykit.serving.transport.memory import MemoryBudget
from deploykit.serving.transport.security import Guard, tls_context
from deploykit.serving.workers.group import ServerGroup

log = logging.getLogger(__name__)

TICK_S = 0.1  # how late a deadline may be noticed
CLOSE_S = 5.0  # how long clients may take to read their last replies


class GrpcServer:
    """Serves a repository on `options.grpc_port`. Call all methods on the event loop's thread."""

    def __init__(
        self,
        repository: ModelRepository,
        options: ServeOptions,
        guard: Guard,
        memory: MemoryBudget,
        offload: Offload,
        limits: Http2Limits | None = None,
        group: ServerGroup | None = None,
    ) -> None:
        self._options = options
        self._group = group or ServerGroup()
        self._calls = Calls(repository, offload, self._group)
        limits = limits or Http2Limits()
        parse = HeadParser(self._calls.methods, guard.allows, limits.headers)
        large = partial(offload, large=True)
        self._shared = Shared(parse, GrpcCall, limits, options.max_body_bytes, memory, large)
        self._tls: ssl.SSLContext | None = None
        if options.tls_cert is not None and options.tls_key is not None:
            self._tls = tls_context(Path(options.tls_cert), Path(options.tls_key))
            self._tls.set_alpn_protocols(["h2"])

    @property
    def unanswered(self) -> int:
        """Complete calls whose replies have not been written."""
        return self._shared.unanswered

    async def start(self) -> int:
        """Listen; returns the port. Raises BadInput if it is not available."""
        self._loop = asyncio.get_running_loop()
        options = self._options
        listening = self._group.bind(options.host, options.grpc_port or 0, "`grpc_port`")
        port: int = listening.getsockname()[1]
        make = partial(Http2Connection, self._shared)
        self._socket = listening
        shared, limits = self._shared, self._shared.limits
        self._acceptor = Acceptor(
            self._loop, listening, make, self._tls,
            shared.connections, limits.connections, limits.header_s, shared.close_idle,
        )  # fmt: skip
        self._acceptor.open()
        self._ticking = asyncio.ensure_future(self._tick())
        return port

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for accepted calls, then close. Drain the repository first."""
        await self._until(lambda: not self._shared.unanswered, grace_s)
        self._acceptor.close()
        self._socket.close()
        for connection in list(self._shared.connections):
            connection.close()
        left, acceptor = self._shared.connections, self._acceptor
        await self._until(lambda: not (left or acceptor.handshakes), min(grace_s, CLOSE_S))
        self._ticking.cancel()
        for connection in list(self._shared.connections):
            connection.abort()

    async def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        end_s = self._loop.time() + limit_s
        while not reached() and self._loop.time() < end_s:
            await asyncio.sleep(TICK_S / 5)

    async def _tick(self) -> None:
        while True:
            self._calls.tick()
            self._shared.tick()
            await asyncio.sleep(TICK_S)
