"""The server that `dk.serve` returns: it runs in a separate thread until it is closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from html import escape
from socket import SHUT_RDWR, socket, socketpair
from typing import TYPE_CHECKING

from deploykit.core.errors import DeploykitError, Unsupported
from deploykit.engines.engine import Closing
from deploykit.serving.options import ServeOptions, addresses

if TYPE_CHECKING:
    from deploykit.serving.server import Server

    # the server (None with several processes), host, HTTP port, gRPC port, the models' names
    OnStart = Callable[[Server | None, str, int, int | None, list[str]], None]


class RunningServer(Closing):
    """A server in a separate thread; a context manager that closes it.

    `url`: the address for HTTP. `grpc_url`: host:port, None without gRPC. `models`: their names.
    """

    def __init__(self, run: Callable[[OnStart, socket], int], settings: ServeOptions) -> None:
        """Start `run`; it ends once its socket's other end is shut down, or its server stops."""
        self._process = os.getpid()
        self._ready = threading.Event()
        self._stopping = False
        self._server: Server | None = None
        self._failure: BaseException | None = None
        self._unanswered = 0
        self._scheme = "https" if settings.tls_cert else "http"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(run,), name="deploykit serve")
        self._stop, self._stopped = socketpair()
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C
            self._begin_stop()
            raise
        if self._failure is not None:
            raise self._failure

    def _serve(self, run: Callable[[OnStart, socket], int]) -> None:
        try:
            with self._stop, self._stopped:
                self._unanswered = run(self._on_start, self._stopped)
            if not hasattr(self, "url"):
                raise DeploykitError("the server was stopped before it was ready")
        except BaseException as exc:  # noqa: BLE001 - `wait` raises it again
            self._failure = exc
        finally:
            self._ready.set()
            self._ended.set()

    def _on_start(
        self, server: Server | None, host: str, port: int, grpc_port: int | None, names: list[str]
    ) -> None:
        self._server = server
        self.models = tuple(names)
        place, self.grpc_url = addresses(host, port, grpc_port)
        self.url = place if place.startswith("unix:") else f"{self._scheme}://{place}"
        self._ready.set()
        if self._stopping:
            self._begin_stop()

    def _begin_stop(self) -> None:
        self._stopping = True
        with suppress(OSError):  # the server has ended on its own
            self._stop.shutdown(SHUT_RDWR)
        if self._server is not None:
            with suppress(RuntimeError):  # the same
                self._server.stop()

    def wait(self) -> int:
        """Block until the server has ended; return the number of unanswered accepted requests.

        Raises the error that ended the server, if any, and Unsupported in a forked process.
        """
        if os.getpid() != self._process:
            raise Unsupported("the server belongs to the process that started it, not to its fork")
        self._ended.wait()  # after Ctrl-C in `join`, Python before 3.12 takes it for ended
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._unanswered

    def close(self) -> int:
        """Answer the accepted requests, then end; return as `wait`. Does nothing in a fork."""
        if os.getpid() != self._process:
            return 0
        self._begin_stop()
        return self.wait()

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "closed"
        if os.getpid() != self._process:
            state = "of the parent process"
        return f"RunningServer({self.url!r}, models={list(self.models)}, {state})"

    def _repr_html_(self) -> str:
        return f'<a href="{escape(self.url)}">{escape(repr(self))}</a>'
