"""Servers on a free port, and a bare HTTP client that shows the bytes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from deploykit.serving.transport.connection import Limits
from tests.support.fake_engine import FakeEngine

WAIT_S = 60  # a limit against hanging, not a measure


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Raw:
    """One TCP connection to a server: any bytes out, replies in."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(WAIT_S)
        if receive_buffer:  # bytes; the system lets the buffer of a reader grow to megabytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))
        self._stream = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, data: bytes) -> Reply:
        """Send a request; returns its reply."""
        self.send(data)
        return self.reply()

    def status(self) -> int:
        """The status of the next reply; 0 once the server has closed the connection."""
        return self.reply().status if self._stream.peek(1) else 0

    def reply(self, *, body: bool = True) -> Reply:
        """The next reply; `body`: not that to HEAD."""
        line = self._stream.readline()
        if not line:
            raise ConnectionAbortedError("the server has closed the connection")
        headers = {}
        while (header := self._stream.readline().strip()) != b"":
            name, _, value = header.decode().partition(":")
            headers[name.lower()] = value.strip()
        size = int(headers.get("content-length", 0)) if body else 0
        return Reply(int(line.split()[1]), headers, self._stream.read(size))

    def ended(self) -> bool:
        """Waits for the server to close; False when it sends something instead."""
        return self._stream.read(1) == b""

    def close(self) -> None:
        self._stream.close()
        self.socket.close()


class Running:
    """A server in a thread, with FakeEngine or others behind it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = server.port
        self.dropped: int | None = None
        self._stack = ExitStack()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,))
        self._thread.start()
        assert ready.wait(WAIT_S)

    @property
    def thread_id(self) -> int | None:
        """Of the thread that runs the event loop."""
        return self._thread.ident

    def _run(self, ready: threading.Event) -> None:
        self.dropped = self.server.run(lambda *_: ready.set())

    def connect(self, receive_buffer: int = 0) -> Raw:
        raw = Raw(self.port, receive_buffer)
        self._stack.callback(raw.close)
        return raw

    def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> Reply:
        """One request on a connection of its own."""
        raw = self.connect()
        raw.send(request(method, target, body, **headers))
        return raw.reply(body=method != "HEAD")

    def pass_time(self, seconds: float) -> None:
        """Let the server check its connections as if it were so much later."""
        listener, checked = self.server._listener, threading.Event()

        def check() -> None:
            listener.tick(listener.now_s + seconds)
            checked.set()

        self.server._loop.call_soon_threadsafe(check)
        assert checked.wait(WAIT_S)

    def stop(self) -> int | None:
        """Shut down and wait for it; returns what `run` returned."""
        if self._thread.is_alive():
            self.server.stop()
            self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.dropped

    def close(self) -> None:
        self.stop()
        self._stack.close()


def request(method: str, target: str, body: bytes = b"", **headers: str) -> bytes:
    lines = {"Host": "localhost", **{k.replace("_", "-"): v for k, v in headers.items()}}
    if body:
        lines.setdefault("Content-Length", str(len(body)))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body


def infer_json(data: object, shape: list[int], **more: object) -> bytes:
    """The body of a JSON request for FakeEngine."""
    item = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    return json.dumps({"inputs": [item], **more}).encode()


def binary_request(rows: np.ndarray, **more: object) -> bytes:
    """A request for FakeEngine as `m`, with binary tensors in and out."""
    item = {"name": "x", "datatype": "FP32", "shape": list(rows.shape)}
    inputs = [{**item, "parameters": {"binary_data_size": rows.nbytes}}]
    document = {"inputs": inputs, "parameters": {"binary_data_output": True}, **more}
    head = json.dumps(document).encode()
    length = {"Inference_Header_Content_Length": str(len(head))}
    return request("POST", "/v2/models/m/infer", head + rows.tobytes(), **length)


@contextmanager
def running(
    models: dict[str, Any] | None = None, limits: Limits | None = None, **options: Any
) -> Iterator[Running]:
    chosen = ServeOptions(**{"http_port": 0, **options})
    running = Running(Server(models or {"m": FakeEngine()}, chosen, limits))
    try:
        yield running
    finally:
        running.close()


class GatedEngine(FakeEngine):
    """A FakeEngine that waits in each call until the gate is opened; it warms up freely."""

    def __init__(self, *, warm: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.warm = warm
        self.fed: list[float] = []  # the first value of every row that reached it

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        if self.warm:
            self.fed += [float(row[0]) for row in feeds["x"]]
            self.entered.release()
            assert self.gate.wait(WAIT_S)
        return super().__call__(feeds)
