"""Serve models over HTTP/1.1 and gRPC: one event loop, no task or thread per request.

`benchmarks/README.md` has the measurement that chose uvloop with our own use of httptools.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from deploykit.engines.cuda.memory import DeviceLost
from deploykit.engines.engine import Engine
from deploykit.serving.batching.batcher import deliver_inline
from deploykit.serving.batching.queue import Pending
from deploykit.serving.http.connection import HttpConnection, Listener
from deploykit.serving.http.head import HttpLimits
from deploykit.serving.http.routes import Routes
from deploykit.serving.models.offload import ThreadOffload
from deploykit.serving.models.pipelines import MakePipeline
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.listener import Acceptor, is_loopback
from deploykit.serving.transport.memory import MemoryBudget
from deploykit.serving.transport.security import AccessControl, Guard, tls_context
from deploykit.serving.transport.turns import DELIVERY_S, Turns
from deploykit.serving.web.page import FILES
from deploykit.serving.workers.group import Hooks, ServerGroup
from deploykit.serving.workers.signals import Signals

if TYPE_CHECKING:
    from deploykit.serving.grpc.server import GrpcServer

log = logging.getLogger(__name__)

__all__ = ["HttpLimits", "ServeOptions", "Server", "run"]

TICK_S = 0.1  # how late a deadline may be noticed
DRAIN_S = 30.0  # how long a shutdown waits for an engine
CLOSE_S = 5.0  # how long it then waits for clients to read their replies
FATAL_S = 1.0  # replaces these limits once the device is lost: a supervisor should restart us
OFFLOAD_THREADS = 2  # for large and compressed bodies
_OPEN_FILES = 1 << 14  # for the connections of both ports, and more
_YOUNG = 5000  # new objects start a collection, 700 by default; a request in flight has 10
_SWITCH_S = 0.0005  # how long another thread may keep the loop's from Python; 5 ms by default

OnReady = Callable[[str, int, "int | None"], None]  # host, HTTP port, gRPC port


def run(
    models: Mapping[str, Engine | Sequence[Engine]],
    options: ServeOptions,
    on_ready: OnReady,
    *,
    limits: HttpLimits | None = None,
) -> int:
    """Serve until SIGTERM, SIGHUP or SIGINT; call `on_ready(host, http_port, grpc_port)` if ready.

    Returns how many accepted requests were not answered: 0 unless an engine hangs. A second signal
    raises KeyboardInterrupt at once, except a SIGTERM within a second of another. Raises BadInput
    if the host or a port is not available or a certificate is invalid, DeviceLost if the device is
    lost and only a new process can use it.
    """
    return run_alone(Server(models, options, limits), on_ready)


def run_alone(server: Server, on_ready: OnReady) -> int:
    """As `run`, for a server that is all that its process does."""
    _allow_open_files()

    def ready(host: str, port: int, grpc_port: int | None) -> None:
        gc.collect()
        gc.freeze()  # else a full collection scans all modules: 20 ms without a reply
        on_ready(host, port, grpc_port)

    try:
        return server.run(ready)
    finally:
        gc.unfreeze()


class Server:
    """A server that is bound to its address. `run` blocks; any thread may call `stop`."""

    def __init__(
        self,
        models: Mapping[str, Engine | Sequence[Engine]],
        options: ServeOptions,
        limits: HttpLimits | None = None,
        group: ServerGroup | None = None,
        pipelines: Mapping[str, MakePipeline] | None = None,
    ) -> None:
        """`group`: the processes that share the address, and the limits, of this server."""
        group = group or ServerGroup()
        options, limits = group.share_of(options), limits or HttpLimits()
        limits = replace(limits, connections=math.ceil(limits.connections / group.count))
        guard, cert, key = Guard(options.token), options.tls_cert, options.tls_key
        tls = None if cert is None or key is None else tls_context(Path(cert), Path(key))
        self._options = options
        self._group = group
        self._socket = group.bind(options.host, options.http_port, "`http_port`")
        self._loop = uvloop.new_event_loop()
        self._signals = Signals(self._loop, self._begin_drain)
        self._finished = Turns(turn_s=DELIVERY_S)  # what other threads have finished
        try:
            self.host, self.port = self._socket.getsockname()[:2]
            loopback = is_loopback(self.host)
            access = AccessControl(guard, loopback=loopback, origins=options.origins, public=FILES)
            self.repository = ModelRepository(
                models, options, deliver=self._deliver, call_soon=self._loop.call_soon,
                processes=group.count, make_model=group.make_model,
            )  # fmt: skip
            self.repository.add_pipelines(pipelines or {}, self._loop, group.count)
        except BaseException:
            self._release()
            raise
        self._offload = ThreadOffload(self._loop, OFFLOAD_THREADS, self._finished.run)
        self._routes = Routes(
            self.repository, self._offload,
            scheme="https" if tls else "http", group=group,
        )  # fmt: skip
        memory = MemoryBudget(options.max_held_bytes, options.max_body_bytes, group.count)
        self.repository.add_metrics(partial(_held_samples, memory))
        self._listener = Listener(
            self._routes.handle, limits, access, options.max_body_bytes, memory
        )
        make = partial(HttpConnection, self._listener)
        self._acceptor = Acceptor(
            self._loop, self._socket, make, tls,
            self._listener.connections, limits.connections, limits.header_s,
            self._listener.close_idle,
        )  # fmt: skip
        self._grpc: GrpcServer | None = None
        if options.grpc_port is not None and not group.runs_engines:
            from deploykit.serving.grpc.server import GrpcServer
            from deploykit.serving.http2.flow import Http2Limits

            self._grpc = GrpcServer(
                self.repository, options, guard, memory, self._offload,
                Http2Limits.divided(group.count), group,
            )  # fmt: skip
        self._stopped = asyncio.Event()

    def run(self, on_ready: OnReady) -> int:
        """As the function `run`; outside the main thread it installs no signal handlers."""
        aborted, switch_s, collection = True, sys.getswitchinterval(), gc.get_threshold()
        sys.setswitchinterval(_SWITCH_S)
        gc.set_threshold(_YOUNG, *collection[1:])
        try:
            self.repository.warm_up()
            dropped = self._loop.run_until_complete(self._serve(on_ready))
            aborted = False
        finally:
            sys.setswitchinterval(switch_s)
            gc.set_threshold(*collection)
            self._offload.close()
            self.repository.close(drain=False, timeout_s=0 if aborted else self._limit_s(CLOSE_S))
            self._release()
        if self.repository.fatal:
            raise DeviceLost(self.repository.fatal, hint="start the server again")
        return dropped

    def stop(self) -> None:
        """Start a graceful shutdown, as the first signal does."""
        self._loop.call_soon_threadsafe(self._begin_drain)

    @property
    def _unanswered(self) -> int:
        return self._listener.unanswered + (self._grpc.unanswered if self._grpc else 0)

    def _limit_s(self, usual_s: float) -> float:
        return FATAL_S if self.repository.fatal else usual_s

    async def _serve(self, on_ready: OnReady) -> int:
        if threading.current_thread() is threading.main_thread():
            # not the loop's: on its end it puts the default back, which ends the process
            self._signals.handle(self._group.signals)
        hooks = Hooks(self.repository, self._begin_drain, self._abort, self._set_elsewhere)
        await self._group.join(hooks)
        grpc_port = await self._grpc.start() if self._grpc else None
        self._routes.grpc_port = grpc_port
        if not self._group.runs_engines:
            self._acceptor.open()
            self._warn()
        ticking = asyncio.ensure_future(self._tick())
        try:
            on_ready(self.host, self.port, grpc_port)
            self._group.listening()
            await self._stopped.wait()
            may_close = self._group.may_close
            await self._until(lambda: not self._unanswered and may_close(), DRAIN_S)
            if not self._group.runs_engines:
                self._acceptor.close()
            self._socket.close()  # new clients are refused from now on instead of waiting
            dropped = self._unanswered
            self._listener.close_all()
            if self._grpc:
                await self._grpc.stop(self._limit_s(CLOSE_S) if self._signals.count < 2 else 0.0)
            left, acceptor = self._listener.connections, self._acceptor
            await self._until(lambda: not (left or acceptor.handshakes), CLOSE_S)
        finally:
            ticking.cancel()
            for connection in list(self._listener.connections):
                connection.abort()
        if self._signals.count > 1 or self._signals.interrupted:
            if dropped:
                log.warning("%d accepted requests were not answered", dropped)
            raise KeyboardInterrupt
        return dropped

    def _warn(self) -> None:
        options = self._options
        if is_loopback(self.host):
            return
        if options.token is None:
            log.warning(
                "listening on %s without a token: anyone who can connect may use the models",
                self.host,
            )
        elif options.tls_cert is None:
            log.warning("listening on %s without TLS: the token is sent in clear text", self.host)

    async def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        """Wait until `reached()`; stops early after a second signal or once the device is lost."""
        begin_s = self._loop.time()
        while not reached() and self._signals.count < 2:
            if self._loop.time() - begin_s > self._limit_s(limit_s):
                return
            await asyncio.sleep(TICK_S / 5)

    async def _tick(self) -> None:
        while True:
            self.repository.expire()
            self._listener.tick(time.monotonic())
            self._group.report_state(self.repository.own_problem())
            if self._group.count == 1:
                self._routes.status.tick(time.monotonic_ns() // 1000)
            if self.repository.fatal and not self._stopped.is_set():
                log.error("%s; the server ends", self.repository.fatal)
                self._begin_drain()
            await asyncio.sleep(TICK_S)

    def _deliver(self, requests: Sequence[Pending]) -> None:
        """Called on an engine's thread: wakes the loop once per batch."""
        try:
            self._loop.call_soon_threadsafe(self._deliver_in_turns, requests)
        except RuntimeError:  # the loop is closed: the engine hung past the shutdown
            log.error("%d requests finished after the shutdown", len(requests))

    def _deliver_in_turns(self, requests: Sequence[Pending]) -> None:
        """Answers may be large, and several batches may end within one turn of the loop."""
        for request in requests:
            self._finished.run(partial(deliver_inline, (request,)))

    def _begin_drain(self) -> None:
        self.repository.drain()
        self._listener.draining = True
        self._stopped.set()

    def _abort(self) -> None:
        """End at once, as a second signal does."""
        self._signals.count = 2
        self._begin_drain()

    def _set_elsewhere(self, not_ready: str | None) -> None:
        self.repository.elsewhere = not_ready

    def _release(self) -> None:
        self._socket.close()
        self._signals.restore(self._group.ends_process)
        self._loop.close()


def _allow_open_files() -> None:
    """Raise the soft limit, often 1024, as each connection is a file; `select` is not used here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # the system allows fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _held_samples(memory: MemoryBudget) -> list[Sample]:
    return [
        Sample("deploykit_held_bytes", {}, memory.bytes),
        Sample("deploykit_held_limit_bytes", {}, memory.limit),
    ]
