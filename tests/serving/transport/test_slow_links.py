"""Slow links: a client may take any time that moves bytes, over HTTP and gRPC, up and down.

A download at 150 kB/s was cut after 30 s as a truncated 200, and an upload answered 408.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from deploykit.serving.http.connection import HttpConnection
from deploykit.serving.http.head import HttpLimits
from deploykit.serving.http2.connection import DATA, HEADERS, PREFACE, SETTINGS, frame
from deploykit.serving.server import Server
from deploykit.serving.transport.listener import LEAST_BYTES_S
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import Frames, infer_bytes
from tests.support.serving.running import binary_request, request, running
from tests.support.serving.wired import Wire, Wired, block

SIZE = 4 << 20
STEP_S = 10.0
STEADY, SLOW = 2 * LEAST_BYTES_S, LEAST_BYTES_S // 8  # bytes/s


class Link:
    """A client whose bytes move at `bytes_s`. `ended`: the server has given it up."""

    ended = False

    def move(self, size: int) -> None:
        """Let so many bytes pass, and so much time that they need at the rate in use."""


class HttpLink(Link):
    def __init__(self, server: Server) -> None:
        self.listener, self.wire = server._listener, Wire()
        self.listener.turns._scheduled, self.listener.turns.clock_s = True, lambda: 0.0
        self.connection = HttpConnection(self.listener)
        self.connection.connection_made(self.wire)

    def feed(self, data: bytes) -> None:
        while data:
            into = self.connection.get_buffer(-1)
            into[: len(data)] = data[: len(into)]
            self.connection.buffer_updated(min(len(into), len(data)))
            data = data[len(into) :]

    def tick(self) -> None:
        self.listener.tick(self.listener.now_s + STEP_S)

    @property
    def ended(self) -> bool:  # type: ignore[override]
        return self.wire.closed or b" 408 " in self.wire.out


class Upload(HttpLink):
    def __init__(self, server: Server, head: bytes) -> None:
        super().__init__(server)
        self.feed(head)

    def move(self, size: int) -> None:
        self.feed(b" " * size)
        self.tick()


class Chunks(Upload):
    def move(self, size: int) -> None:
        self.feed(b"%x\r\n%s\r\n" % (size, b" " * size) if size else b"")
        self.tick()


class Download(HttpLink):
    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.left = SIZE
        self.wire.get_write_buffer_size = lambda: self.left  # type: ignore[method-assign]
        self.connection.pause_writing()

    def move(self, size: int) -> None:
        self.left -= size
        self.tick()


class GrpcUpload(Link):
    def __init__(self) -> None:
        self.wired = Wired(max_bytes=SIZE)
        self.wired.feed(PREFACE + frame(SETTINGS, 0, 0))
        self.wired.feed(frame(HEADERS, 4, 1, block(path="/echo")))
        self.wired.feed(frame(DATA, 0, 1, b"\0" + SIZE.to_bytes(4, "big")))

    def move(self, size: int) -> None:
        self.wired.feed(frame(DATA, 0, 1, bytes(size)[: 1 << 14]))
        for at in range(1 << 14, size, 1 << 14):
            self.wired.feed(frame(DATA, 0, 1, bytes(min(1 << 14, size - at))))
        self.wired.tick(STEP_S)

    @property
    def ended(self) -> bool:  # type: ignore[override]
        return b"came too slowly" in self.wired.wire.out


class GrpcDownload(Link):
    """Two answers: the second one has to wait for the first."""

    def __init__(self) -> None:
        self.wired = Wired(max_bytes=SIZE)
        self.left = SIZE
        self.wired.wire.get_write_buffer_size = lambda: self.left  # type: ignore[method-assign]
        self.wired.feed(PREFACE + frame(SETTINGS, 0, 0))
        message = b"\0" + (100_000).to_bytes(4, "big") + bytes(100_000)
        for number in (1, 3):
            self.wired.feed(frame(HEADERS, 4, number, block(path="/echo")))
            for at in range(0, len(message), 1 << 14):
                piece = message[at : at + (1 << 14)]
                self.wired.feed(frame(DATA, len(piece) < 1 << 14, number, piece))
        self.wired.connection.pause_writing()

    def move(self, size: int) -> None:
        self.left -= size
        self.wired.tick(STEP_S)

    @property
    def ended(self) -> bool:  # type: ignore[override]
        return self.wired.wire.closed


@pytest.fixture(params=["upload", "chunks", "download", "gRPC upload", "gRPC download"])
def link(request: pytest.FixtureRequest, idle: Server) -> Iterator[Callable[[], Link]]:
    sized = f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SIZE}\r\n\r\n".encode()
    chunked = sized.replace(f"Content-Length: {SIZE}".encode(), b"Transfer-Encoding: chunked")
    opened: list[Link] = []
    kinds: dict[str, Callable[[], Link]] = {
        "upload": lambda: Upload(idle, sized),
        "chunks": lambda: Chunks(idle, chunked),
        "download": lambda: Download(idle),
        "gRPC upload": GrpcUpload,
        "gRPC download": GrpcDownload,
    }

    def make() -> Link:
        opened.append(kinds[request.param]())
        return opened[-1]

    yield make
    for each in opened:
        if isinstance(each, (GrpcUpload, GrpcDownload)):
            each.wired.close()


def test_a_steady_link_is_not_cut_and_one_that_pauses_or_drips_is(link: Callable[[], Link]) -> None:
    steady = link()
    for _ in range(20):  # 200 s
        steady.move(int(STEADY * STEP_S))
        assert not steady.ended
    pauses = 0
    while not steady.ended:
        steady.move(0)
        pauses += 1
    assert 3 <= pauses <= 4  # 30 s
    dripping = link()
    for _ in range(5):
        dripping.move(int(SLOW * STEP_S))
    assert dripping.ended


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
def test_what_the_system_holds_counts_as_unread(protocol: str) -> None:
    """It takes more only once a third of its buffer is free: 870 kB, for longer than a pause."""
    width, stall_s, bytes_s = 1_500_000, 1.5, 400_000
    with running(
        {"m": FakeEngine(width=width)}, HttpLimits(stall_s=stall_s), grpc_port=0, stall_s=stall_s
    ) as server:
        if protocol == "HTTP":
            client = server.connect(receive_buffer=32 << 10).socket
            client.sendall(binary_request(np.zeros((1, width), np.float32)))
        else:
            frames = Frames(server.server.grpc_port or 0)
            client = frames.socket
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
            frames.open_windows()
            frames.start(1, infer_bytes(width=width))
        seen, end_s = 0, time.monotonic() + 2 * stall_s
        while time.monotonic() < end_s:
            time.sleep(0.05)
            seen += len(client.recv(bytes_s // 20, socket.MSG_WAITALL))
        while seen < 4 * width:
            piece = client.recv(1 << 20)
            assert piece, f"cut after {seen} bytes"
            seen += len(piece)
        client.close()


class Unread(Wire):
    """A transport whose client takes nothing."""

    ended = ""

    def get_write_buffer_size(self) -> int:
        return 1

    def close(self) -> None:
        self.ended += "closed "

    def abort(self) -> None:
        self.ended += "aborted "


@pytest.mark.parametrize("keeps", [True, False], ids=["idle", "last"])
def test_a_closed_connection_whose_client_reads_nothing_is_ended(idle: Server, keeps: bool) -> None:
    """Answers below the transport's limit of 64 KiB do not count as stalled: it stayed for ever."""
    listener, transport = idle._listener, Unread()
    listener.turns._scheduled, listener.turns.clock_s = True, lambda: 0.0
    connection = HttpConnection(listener)
    connection.connection_made(transport)
    data = request("GET", "/v2", Connection="keep-alive" if keeps else "close")
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))
    idle_s = listener.limits.idle_s if keeps else 0.0
    listener.tick(listener.now_s + idle_s + 1)
    assert transport.ended == "closed "
    listener.tick(listener.now_s + listener.limits.stall_s - 2)
    assert transport.ended == "closed "
    listener.tick(listener.now_s + 3)
    assert transport.ended == "closed aborted "


def test_the_pause_is_an_option(idle: Server) -> None:
    for limits in (idle._listener.limits, idle._grpc.limits):
        assert (limits.stall_s, limits.idle_s) == (32, 74)
