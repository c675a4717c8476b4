"""A gRPC server in a thread, an engine that echoes, and a client that speaks frames."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from hpack import Decoder, Encoder

from deploykit.core.tensors import TensorSpec
from deploykit.engines.oip import MESSAGES
from deploykit.serving import server as server_module
from deploykit.serving.http2 import Http2Limits
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import WAIT_S, Running

INFER = "/inference.GRPCInferenceService/ModelInfer"
SERVICE = INFER.rpartition("/")[0]
STREAM = f"{SERVICE}/ModelStreamInfer"
LIVE = f"{SERVICE}/ServerLive"
INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 3, 4, 8, 12
FLOW_CONTROL_ERROR, CALM = 3, 11


class Echo(FakeEngine):
    """Gives back the rows it got, of any dtype."""

    def __init__(self, dtype: str, width: int | str = 3) -> None:
        super().__init__()
        self.inputs = (TensorSpec("x", dtype, ("N", width)),)
        self.outputs = (TensorSpec("y", dtype, ("N", width)),)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": feeds["x"].copy()}


class Serving(Running):
    """A server with a gRPC port, which is its `port` here."""

    def __init__(
        self, models: Mapping[str, Any], options: ServeOptions, limits: Http2Limits | None
    ) -> None:
        super().__init__(Server(models, options, grpc_limits=limits))
        assert self.server.grpc_port is not None
        self.port = self.server.grpc_port
        self.grpc = self.server._grpc
        self.repository = self.server.repository

    def see(self, what: Callable[[], Any]) -> Any:
        """Call a function on the loop."""

        async def call() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self.server._loop).result(WAIT_S)

    def stop(self, grace_s: float = WAIT_S) -> int | None:
        with (
            patch.object(server_module, "DRAIN_S", grace_s),
            patch.object(server_module, "CLOSE_S", min(grace_s, server_module.CLOSE_S)),
        ):
            return super().stop()


@contextmanager
def serving(
    models: Mapping[str, Any] | None = None, limits: Http2Limits | None = None, **options: Any
) -> Iterator[Serving]:
    """FakeEngine as `m`, unless other models are given."""
    chosen = ServeOptions(**{"http_port": 0, "grpc_port": 0, **options})
    running = Serving(models or {"m": FakeEngine()}, chosen, limits)
    try:
        yield running
    finally:
        running.stop(1)
        running.close()


@dataclass
class Answer:
    """What came on one stream. `status` is gRPC's, None while the stream is open."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int | None:
        return int(self.headers["grpc-status"]) if "grpc-status" in self.headers else None


def packed(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


class Frames:
    """One HTTP/2 connection, frame by frame."""

    def __init__(self, port: int, *, greet: bool = True, settings: bytes = b"") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.encoder = Encoder()
        self._decoder = Decoder()
        self._stream = self.socket.makefile("rb")
        self.answers: dict[int, Answer] = {}
        self.goaway: int | None = None
        self.about = ""
        self.updates: dict[int, int] = {}
        self.pongs: list[bytes] = []
        if greet:
            self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            self.send(4, 0, 0, settings)

    def send(self, *frame: Any) -> None:
        """One frame: kind, flags, stream, payload."""
        self.socket.sendall(packed(*frame))

    def open(self, stream: int, path: str = INFER, flags: int = 4, **headers: str) -> None:
        """Headers of a call; flag 1 ends it."""
        pairs = {":method": "POST", ":scheme": "http", ":path": path, "te": "trailers"}
        pairs["content-type"] = "application/grpc"
        pairs.update({name.replace("_", "-"): value for name, value in headers.items()})
        self.send(1, flags, stream, self.encoder.encode(list(pairs.items())))

    def message(self, stream: int, data: bytes, *, end: bool = True, compressed: int = 0) -> None:
        """One message in as many frames as it takes."""
        data = bytes([compressed]) + len(data).to_bytes(4, "big") + data
        for at in range(0, len(data), 16384):
            last = at + 16384 >= len(data)
            self.send(0, 1 if end and last else 0, stream, data[at : at + 16384])

    def start(
        self,
        stream: int,
        data: bytes,
        path: str = INFER,
        *,
        end: bool = True,
        compressed: int = 0,
        **headers: str,
    ) -> None:
        """Open a call and send its first message."""
        self.open(stream, path, **headers)
        self.message(stream, data, end=end, compressed=compressed)

    def call(self, stream: int, data: bytes, path: str = INFER, **headers: Any) -> Answer:
        self.start(stream, data, path, **headers)
        return self.answer(stream)

    def cancel(self, stream: int) -> None:
        self.send(3, 0, stream, (8).to_bytes(4, "big"))

    def open_windows(self) -> None:
        """Let the server send all of every answer."""
        self.send(4, 0, 0, b"\0\4\x7f\xff\xff\xff")
        self.send(8, 0, 0, (1 << 30).to_bytes(4, "big"))

    def answer(self, stream: int) -> Answer:
        """Wait for the end of a stream, or of the connection."""
        return self.until(lambda: self.answers.get(stream, Answer()).ended, stream)

    def until(self, reached: Callable[[], bool], stream: int = 0) -> Answer:
        """Read frames until then; True is also the end of the connection."""
        while not reached() and self.read():
            pass
        return self.answers.get(stream, Answer())

    def read(self) -> bool:
        """One frame; False at the end of the connection."""
        try:
            head = self._stream.read(9)
        except ConnectionError:
            return False
        if len(head) < 9:
            return False
        high, low, kind, flags, stream = struct.unpack(">BHBBI", head)
        payload = self._stream.read(high << 16 | low)
        answer = self.answers.setdefault(stream, Answer()) if stream else Answer()
        if kind == 0:
            answer.data += payload
        elif kind == 1:
            answer.headers.update(self._decoder.decode(payload))
        elif kind == 3:
            answer.reset = int.from_bytes(payload, "big")
        elif kind == 6 and flags & 1:
            self.pongs.append(payload)
        elif kind == 7:
            self.goaway = int.from_bytes(payload[4:8], "big")
            self.about = payload[8:].decode()
        elif kind == 8:
            more = int.from_bytes(payload, "big")
            self.updates[stream] = self.updates.get(stream, 0) + more
        answer.ended |= kind in (0, 1) and bool(flags & 1)
        return True

    def settle(self) -> None:
        """Wait until the server has read everything sent so far."""
        count = len(self.pongs)
        self.send(6, 0, 0, b"12345678")
        self.until(lambda: len(self.pongs) > count)

    def closed(self) -> bool:
        """Whether the server ends the connection, after whatever it still says."""
        while self.read():
            pass
        return True

    def close(self) -> None:
        self._stream.close()
        self.socket.close()


@contextmanager
def frames(port: int, **options: Any) -> Iterator[Frames]:
    client = Frames(port, **options)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def unlimited_window(port: int) -> Iterator[Frames]:
    """A client whose flow-control windows have room for every answer."""
    with frames(port) as client:
        client.open_windows()
        yield client


def infer_bytes(rows: int = 1, value: float = 1.0, width: int = 4, **fields: Any) -> bytes:
    """A ModelInferRequest for FakeEngine, by our own messages."""
    request = MESSAGES["ModelInferRequest"](**{"model_name": "m", **fields})
    request.inputs.add(name="x", datatype="FP32", shape=[rows, width])
    request.raw_input_contents.append(np.full((rows, width), value, np.float32).tobytes())
    data: bytes = request.SerializeToString()
    return data


def first_value(answer: Answer) -> float:
    """The first number of the first output."""
    response = MESSAGES["ModelInferResponse"].FromString(answer.data[5:])
    return float(np.frombuffer(response.raw_output_contents[0], np.float32)[0])
