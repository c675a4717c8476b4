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
from typing import TYPE_CHECKING

import uvloop

from deploykit.core.errors import DeviceLost
from deploykit.engines.engine import Engine
from deploykit.serving.batching.batcher import Loop, deliver_inline
from deploykit.serving.batching.queue import Pending
from deploykit.serving.http.connection import Listener
from deploykit.serving.http.routes import Routes
from deploykit.serving.models.offload import ThreadOffload
from deploykit.serving.models.pipelines import PipelineGraph
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.metrics import Sample
from deploykit.serving.options import ServeOptions, read_token
from deploykit.serving.transport.connection import Connection, Limits, MemoryBudget, Port, Turns
from deploykit.serving.transport.listener import (
    UNIX,
    Acceptor,
    address_of,
    is_loopback,
    remove_path,
)
from deploykit.serving.transport.security import AccessControl, Watched, tls_context
from deploykit.serving.web.page import FILES
from deploykit.serving.workers.group import OnReady, ServerGroup
from deploykit.serving.workers.signals import Signals

if TYPE_CHECKING:
    from deploykit.serving.http2 import Http2Limits

log = logging.getLogger(__name__)

__all__ = ["Limits", "ServeOptions", "Server", "run"]

TICK_S = 0.1  # how late a deadline may be noticed
DRAIN_S = 30.0  # time limit for an engine during a shutdown
SOON_S = 5.0  # of it in which the clients of open connections may still send requests
LINGER_S = 0.05  # how long idle connections stay open once the ports are closed: a request may
MOST_LINGER_S = 1.0  # be on its way; as long as `drain_s`, up to this
CLOSE_S = 5.0  # time limit for clients to read their replies after that
FATAL_S = 1.0  # replaces both limits once the device is lost: a supervisor should restart us
_PROTOCOLS = ("http/1.1", "h2")  # of the ports
_OPEN_FILES = 1 << 14  # for the connections of both ports, and more
_YOUNG = 5000  # new objects that start a collection, 700 by default; a request in flight has 10
_SWITCH_S = 0.0005  # how long another thread may hold the GIL; 5 ms by default


def run(server: Server, on_ready: OnReady) -> int:
    """Serve until SIGTERM, SIGHUP or SIGINT, in a process that does nothing else.

    Calls `on_ready(host, http_port, grpc_port)`. Returns how many accepted requests were not
    answered: 0 unless an engine hangs. A second signal raises KeyboardInterrupt at once, except a
    SIGTERM within a second of another. Raises DeviceLost if only a new process can use the device.
    """
    _allow_open_files()

    def ready(host: str, port: int, grpc_port: int | None) -> None:
        gc.collect()
        gc.freeze()  # otherwise a full collection scans all modules: 20 ms without a reply
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
        limits: Limits | None = None,
        group: ServerGroup | None = None,
        pipelines: Mapping[str, PipelineGraph] | None = None,
        grpc_limits: Http2Limits | None = None,
    ) -> None:
        """Bind the ports. Raises BadInput for one that is taken, and for a wrong certificate."""
        group = group or ServerGroup()
        options = group.share_of(options)
        limits = limits or Limits(stall_s=options.stall_s, idle_s=options.idle_s)
        limits = replace(limits, connections=math.ceil(limits.connections / group.count))
        tls = tls_context(options, _PROTOCOLS[0])
        self._options = options
        self._group = group
        self._acceptors: list[Acceptor] = []
        self._sockets = [group.bind(options.host, options.http_port, "`http_port`")]
        self._loop = uvloop.new_event_loop()
        self._signals = Signals(self._loop, self._begin_drain)
        self._finished = Turns()  # continuations of work on other threads
        try:
            self.host, self.port = address_of(self._sockets[0])
            access = AccessControl(options, loopback=is_loopback(self.host), public=FILES)
            loop = Loop(self._deliver, call_soon=self._loop.call_soon)
            make_model = group.make_model
            self.repository = ModelRepository(models, options, loop, make_model=make_model)
            self.repository.add_pipelines(pipelines or {}, self._loop, group.count)
            self.grpc_port: int | None = None
            if options.grpc_port is not None and not group.runs_engines:
                self._sockets.append(group.bind(options.host, options.grpc_port, "`grpc_port`"))
                self.grpc_port = address_of(self._sockets[1])[1]
        except BaseException:
            self._release()
            raise
        self._offload = ThreadOffload(self._loop, threads=2, run=self._finished.run)
        self._routes = Routes(
            self.repository,
            self._offload,
            scheme="https" if tls else "http",
            group=group,
            grpc_port=self.grpc_port,
        )
        memory = MemoryBudget(options.max_held_bytes, options.max_body_bytes, group.count)
        self.repository.add_metrics(partial(self._samples, memory))
        self._listener = Listener(
            self._routes.handle, limits, access, options.max_body_bytes, memory
        )
        accept = partial(Acceptor, self._loop, owned=not group.ends_process)
        self._acceptors.append(accept(self._sockets[0], self._listener, tls))
        if self.grpc_port is not None:
            from deploykit.serving.grpc.methods import GrpcPort
            from deploykit.serving.http2 import Http2Limits

            grpc_limits = grpc_limits or Http2Limits(
                stall_s=options.stall_s,
                idle_s=options.idle_s,
                max_age_s=options.max_connection_age_s or math.inf,
            )
            places = math.ceil(grpc_limits.connections / group.count)
            streams = math.ceil(grpc_limits.all_streams / group.count)
            grpc_limits = replace(grpc_limits, connections=places, all_streams=streams)
            self._grpc = GrpcPort(
                self.repository, access, memory, self._offload, grpc_limits, group
            )
            tls = tls_context(options, _PROTOCOLS[1])
            self._acceptors.append(accept(self._sockets[1], self._grpc, tls))
        self._access = access
        for port in self._ports:
            port.records = port.logs_access = options.access_log
        pem = options.tls_cert, options.tls_key, options.tls_client_ca
        self._watched = [
            Watched(self._use_token, options.token_file),
            Watched(self._use_certificates, *pem),
        ]
        self._use_token()  # it may have changed while the models were opened
        self._stopped = asyncio.Event()

    def run(self, on_ready: OnReady) -> int:
        """Serve as the function `run` does; outside the main thread, install no signal handlers."""
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

    def trace_failures(self, add: Callable[[str, str, float, str | None], None]) -> None:
        """Give `add` each request that fails before a model has it; see `Port.record`."""
        for port in self._ports:
            port.trace_failure, port.records = add, True

    def stop(self) -> None:
        """Start a graceful shutdown, as the first signal does."""
        self._loop.call_soon_threadsafe(self._begin_drain)

    @property
    def _ports(self) -> list[Port]:
        return [acceptor.port for acceptor in self._acceptors]

    @property
    def _unanswered(self) -> int:
        return sum(port.unanswered for port in self._ports)

    @property
    def _connections(self) -> list[Connection]:
        return [connection for port in self._ports for connection in port.connections]

    @property
    def _busy(self) -> bool:
        return any(acceptor.busy for acceptor in self._acceptors)

    def _limit_s(self, usual_s: float) -> float:
        return FATAL_S if self.repository.fatal else usual_s

    async def _serve(self, on_ready: OnReady) -> int:
        if threading.current_thread() is threading.main_thread():
            # not the loop's handlers: at its end they restore the default, which ends the process
            self._signals.handle(self._group.signals)
        await self._group.join(self.repository, self._begin_drain, self._abort)
        if not self._group.runs_engines:
            for acceptor in self._acceptors:
                acceptor.open()
            self._warn()
        ticking = asyncio.ensure_future(self._tick())
        try:
            on_ready(self.host, self.port, self.grpc_port)
            self._group.listening()
            await self._stopped.wait()
            drain_s = 0.0 if self._signals.interrupted else self._options.drain_s  # Ctrl-C
            await self._until(lambda: False, drain_s)  # balancers look for other servers
            for acceptor in self._acceptors:
                acceptor.close()
            for port in self._ports:
                port.retire()
            linger_s = max(LINGER_S, min(MOST_LINGER_S, drain_s))
            await self._until(lambda: not self._busy, linger_s)
            for connection in self._connections:
                if connection.idle_since_s is not None:  # what it sent later would be refused
                    connection.close()
            await self._until(lambda: not self._unanswered, SOON_S)
            self.repository.drain()
            may_close = self._group.may_close
            await self._until(lambda: not self._unanswered and may_close(), DRAIN_S)
            dropped = self._unanswered
            for connection in self._connections:
                connection.close()
            await self._until(lambda: not self._busy, CLOSE_S)
        finally:
            ticking.cancel()
            for connection in self._connections:
                connection.transport.abort()
        if self._signals.count > 1 or self._signals.interrupted:
            if dropped:
                log.warning("%d accepted requests were not answered", dropped)
            raise KeyboardInterrupt
        return dropped

    def _warn(self) -> None:
        reason = "a token: anyone who can connect may use the models"
        if self._options.token is not None:
            reason = "TLS: the token is sent in clear text" if not self._options.tls_cert else ""
        if reason and not (is_loopback(self.host) or self.host.startswith(UNIX)):
            log.warning("listening on %s without %s", self.host, reason)

    async def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        """Wait until `reached()`; stops early after a second signal or once the device is lost."""
        begin_s = self._loop.time()
        while not reached() and self._signals.count < 2:
            if self._loop.time() - begin_s > self._limit_s(limit_s):
                return
            await asyncio.sleep(TICK_S / 5)

    def _samples(self, memory: MemoryBudget) -> list[Sample]:
        names = ("deploykit_http_responses_total", "deploykit_grpc_responses_total")
        return [
            Sample("deploykit_held_bytes", {}, memory.bytes),
            Sample("deploykit_held_limit_bytes", {}, memory.limit),
            *(
                Sample(name, {"code": str(status)}, count)
                for name, port in zip(names, self._ports, strict=False)
                for status, count in port.replies.items()
            ),
        ]

    def _use_token(self) -> None:
        if self._options.token_file is not None:
            self._access.set_token(read_token(self._options.token_file))
            self._listener.forget_heads()

    def _use_certificates(self) -> None:
        for acceptor, protocol in zip(self._acceptors, _PROTOCOLS, strict=False):
            acceptor.tls = tls_context(self._options, protocol)

    async def _tick(self) -> None:
        while True:
            for watched in self._watched:
                watched.check()
            self.repository.expire()
            for port in self._ports:
                port.tick(time.monotonic())
            self._group.report_state(self.repository.own_problem())
            if self.repository.fatal and not self._stopped.is_set():
                log.error("%s; the server ends", self.repository.fatal)
                self._begin_drain()
            await asyncio.sleep(TICK_S)

    def _deliver(self, requests: Sequence[Pending]) -> None:
        """Deliver answers from an engine's thread: wake the loop once per batch."""
        try:
            self._loop.call_soon_threadsafe(self._deliver_in_turns, requests)
        except RuntimeError:  # the loop is closed: the engine hung past the shutdown
            log.error("%d requests finished after the shutdown", len(requests))

    def _deliver_in_turns(self, requests: Sequence[Pending]) -> None:
        """Deliver in turns: answers may be large, and several batches may end in one turn."""
        for request in requests:
            self._finished.run(partial(deliver_inline, (request,)))

    def _begin_drain(self) -> None:
        self.repository.leaving = True
        for port in self._ports:
            port.retire()
        self._stopped.set()

    def _abort(self) -> None:
        """End at once, as a second signal does."""
        self._signals.count = 2
        self._begin_drain()

    def _release(self) -> None:
        for listening in self._sockets:
            if not self._group.ends_process:
                remove_path(listening)
            listening.close()
        self._signals.restore(self._group.ends_process)
        self._loop.close()


def _allow_open_files() -> None:
    """Raise the soft limit, often 1024: each connection is a file. `select` is not used here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # the system allows fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
