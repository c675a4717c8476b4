"""Slow links: a client may take any time that moves bytes, over HTTP and gRPC, up and down.

A download at 150 kB/s was cut after 30 s as a truncated 200, and an upload answered 408.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from deploykit.serving.http.connection import HttpConnection
from deploykit.serving.http2.connection import DATA, HEADERS, PREFACE, SETTINGS, frame
from deploykit.serving.server import Server
from deploykit.serving.transport.listener import LEAST_BYTES_S, unread_bytes
from tests.support.serving.running import request
from tests.support.serving.wired import Wire, Wired, block

SIZE = 4 << 20
STEP_S = 10.0
STEADY, SLOW = 2 * LEAST_BYTES_S, LEAST_BYTES_S // 8  # bytes/s


def head(more: str) -> bytes:
    return f"POST / HTTP/1.1\r\nHost: localhost\r\n{more}\r\n\r\n".encode()


def data_frames(number: int, data: bytes, *, end: bool = False) -> bytes:
    pieces = [data[at : at + (1 << 14)] for at in range(0, len(data), 1 << 14)] or [b""]
    return b"".join(frame(DATA, end and piece is pieces[-1], number, piece) for piece in pieces)


MESSAGE = b"\0" + (100_000).to_bytes(4, "big") + bytes(100_000)
BEGINS = {
    "upload": head(f"Content-Length: {SIZE}"),
    "chunks": head("Transfer-Encoding: chunked"),
    "download": b"",
    "gRPC upload": frame(HEADERS, 4, 1, block(path="/echo"))
    + frame(DATA, 0, 1, b"\0" + SIZE.to_bytes(4, "big")),
    # two answers: the second one has to wait for the first
    "gRPC download": frame(HEADERS, 4, 1, block(path="/echo"))
    + data_frames(1, MESSAGE, end=True)
    + frame(HEADERS, 4, 3, block(path="/echo"))
    + data_frames(3, MESSAGE, end=True),
}


class Link:
    """A client; in each step of ten seconds so many of its bytes move."""

    def __init__(self, idle: Server, kind: str) -> None:
        self.kind, self.listener, self.left = kind, idle._listener, SIZE
        if kind.startswith("gRPC"):
            self.wired = Wired(max_bytes=SIZE)
            self.wire = self.wired.wire
            self.connection: Any = self.wired.connection
            self.feed(PREFACE + frame(SETTINGS, 0, 0))
        else:
            self.wire = Wire()
            self.listener.turns._scheduled, self.listener.turns.clock_s = True, lambda: 0.0
            self.connection = HttpConnection(self.listener)
            self.connection.connection_made(self.wire)
        self.feed(BEGINS[kind])
        if "download" in kind:
            self.wire.get_write_buffer_size = lambda: self.left  # type: ignore[method-assign]
            self.connection.pause_writing()

    def feed(self, data: bytes) -> None:
        while data:
            into = self.connection.get_buffer(-1)
            into[: len(data)] = data[: len(into)]
            size = min(len(into), len(data))
            if self.kind.startswith("gRPC"):
                self.wired.turn(self.connection.buffer_updated, size)
            else:
                self.connection.buffer_updated(size)
            data = data[size:]

    def move(self, size: int) -> None:
        self.left -= size
        if self.kind == "chunks" and size:
            self.feed(b"%x\r\n%s\r\n" % (size, bytes(size)))
        elif self.kind == "upload":
            self.feed(bytes(size))
        elif self.kind == "gRPC upload":
            self.feed(data_frames(1, bytes(size)))
        if self.kind.startswith("gRPC"):
            self.wired.tick(STEP_S)
        else:
            self.listener.tick(self.listener.now_s + STEP_S)

    @property
    def ended(self) -> bool:
        out = self.wire.out
        return self.wire.closed or b" 408 " in out or b"came too slowly" in out


@pytest.mark.parametrize("kind", BEGINS)
def test_a_steady_link_is_not_cut_and_one_that_pauses_or_drips_is(idle: Server, kind: str) -> None:
    steady = Link(idle, kind)
    for _ in range(20):  # 200 s
        steady.move(int(STEADY * STEP_S))
        assert not steady.ended
    pauses = 0
    while not steady.ended:
        steady.move(0)
        pauses += 1
    assert 3 <= pauses <= 4  # 32 s
    dripping = Link(idle, kind)
    for _ in range(5):
        dripping.move(int(SLOW * STEP_S))
    assert dripping.ended
    for each in (steady, dripping):
        if kind.startswith("gRPC"):
            each.wired.close()


def test_what_the_system_holds_counts_as_unread() -> None:
    """It takes more only once a third of its buffer is free: 870 kB, for longer than a pause."""
    wire = Wire()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        wire.get_extra_info = lambda *_: client  # type: ignore[method-assign]
        client.setblocking(False)
        sent = client.send(bytes(8 << 20))  # nobody accepts it
        assert 0 < unread_bytes(wire) <= sent
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
