"""Many clients at one moment take many turns of the event loop; slow links may take their time."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from deploykit.serving.grpc.call import GrpcCall, Method
from deploykit.serving.http.connection import ChunkedBody, Exchange, HttpConnection
from deploykit.serving.http2 import DATA, HEADERS, PREFACE, SETTINGS, Http2Connection, frame
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from deploykit.serving.transport.connection import (
    BUSY_BYTES,
    LEAST_BYTES_S,
    TURN_S,
    Turns,
    unread_bytes,
)
from tests.support.fake_engine import FakeEngine
from tests.support.serving import wired
from tests.support.serving.faults import until
from tests.support.serving.grpc_cases import STREAM, Answer, frames, infer_bytes, serving
from tests.support.serving.memory import held_bytes
from tests.support.serving.running import (
    WAIT_S,
    GatedEngine,
    Running,
    infer_json,
    request,
    running,
)
from tests.support.serving.wired import Wire, Wired, block

Eventually = Callable[[Callable[[], bool]], None]


class Now:
    s = 0.0

    def __call__(self) -> float:
        return self.s


def test_work_that_fails_does_not_stop_what_waits_for_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done, shared = list[int](), Turns(Now())

    async def main() -> None:
        shared.busy = True
        shared.run(lambda: done.append(1 // 0))
        shared.run(lambda: done.append(1))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text


class Slow:
    """Makes each request that the server handles look as if it took a whole turn of the loop."""

    def __init__(self, server: Running) -> None:
        self.now = Now()
        listener = server.server._listener
        listener.turns.clock_s = self.now
        self.turns: list[int] = []  # requests in each of them
        handle = listener.handle
        begin = listener.turns._begin

        def slow(exchange: Exchange) -> None:
            self.now.s += 2 * TURN_S
            self.turns[-1] += 1
            handle(exchange)

        def begun() -> None:
            self.turns.append(0)
            begin()

        listener.handle = slow
        listener.turns._begin = begun  # type: ignore[method-assign]
        self.turns.append(0)


@pytest.fixture
def server() -> Iterator[Running]:
    with running({"m": FakeEngine(width=30_000)}, max_batch=1) as found:
        yield found


BODY = infer_json([1] * 30_000, [1, 30_000])
ASKED = request("POST", "/v2/models/m/infer", BODY)
SCRAPE, LIVE = request("GET", "/metrics"), request("GET", "/v2/health/live")
PIPELINED = {  # 200 clients that pipelined scrapes of /metrics stopped the loop for 10.7 s
    "scrapes": (SCRAPE * 5 + LIVE, 6),
    "bodies": (ASKED + LIVE + ASKED, 3),
}


@pytest.mark.parametrize(("data", "count"), PIPELINED.values(), ids=PIPELINED)
def test_slow_requests_of_many_clients_are_one_in_each_turn(
    server: Running, eventually: Eventually, data: bytes, count: int
) -> None:
    slow = Slow(server)
    raws = [server.connect() for _ in range(6)]
    for raw in raws:
        raw.send(data[: len(ASKED) - 1])
    for raw in raws:
        raw.send(data[len(ASKED) - 1 :])
    for raw in raws:
        replies = [raw.reply() for _ in range(count)]
        assert [reply.status for reply in replies] == [200] * count
        if count == 3:
            assert replies[1].json == {"live": True}
            assert replies[2].json["outputs"][0]["data"][0] == 3
    assert sum(slow.turns) == 6 * count
    assert max(slow.turns) <= 2  # of the work that waited, and of what was just received
    eventually(lambda: held_bytes(server) == 0)


def test_clients_that_leave_while_their_requests_wait_are_forgotten(
    server: Running, eventually: Eventually
) -> None:
    Slow(server)
    for number in range(8):
        raw = server.connect()
        raw.send(ASKED if number % 2 else SCRAPE * 9)
        raw.close()
    eventually(lambda: not server.server._listener.connections)
    eventually(lambda: held_bytes(server) == 0)
    assert server.ask("GET", "/v2/health/ready").status == 200


def feed(connection: HttpConnection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/health/none"])
def test_a_health_check_is_the_first_of_the_next_turn(idle: Server, method: str, path: str) -> None:
    """It waited for 5 s behind 200 clients that asked for pages."""
    listener, asked = idle._listener, request(method, path)
    order, handle = list[str](), listener.handle

    def handled(exchange: Exchange) -> None:
        order.append(exchange.head.path)
        handle(exchange)

    async def receive() -> None:
        listener.turns.busy = listener.turns._scheduled = True
        for data in (request("GET", "/docs"), request("GET", "/v2"), asked + asked, asked):
            connection = HttpConnection(listener)
            connection.connection_made(Wire())
            feed(connection, data)
        assert order == []
        listener.turns._begin()

    listener.handle, listener.turns.clock_s = handled, Now()
    asyncio.run(receive())
    assert order[:3] == [path, "/docs", "/v2"]


def test_many_small_chunks_are_many_turns(server: Running) -> None:
    """64 clients that sent chunks of one byte stopped the loop for seconds: 11,000 are a read."""
    slow, read = Slow(server), HttpConnection._read_chunks
    lines: list[int] = []

    def counted(self: HttpConnection, chunks: ChunkedBody, data: bytes, at: int) -> int:
        before = chunks._lines
        end = read(self, chunks, data, at)
        lines.append(chunks._lines - before)
        slow.now.s += 2 * TURN_S
        return end

    raw = server.connect()
    count = 20_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpConnection, "_read_chunks", counted)
        head = "POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked"
        reply = raw.ask(head.encode() + b"\r\n\r\n" + b"1\r\n \r\n" * count + b"0\r\n\r\n")
    assert reply.status == 400  # it is only blanks
    # some come in two pieces; the last are counted after the reply
    until(lambda: sum(lines) >= count + 2)
    assert max(lines) <= 500


@pytest.mark.parametrize("first", [0, 500], ids=["head", "body"])
def test_a_request_that_waits_for_its_turn_is_not_timed_out(idle: Server, first: int) -> None:
    """Behind 2,000 clients it waited for longer than `header_s`, and was closed as if idle."""
    listener, wire = idle._listener, Wire()
    listener.turns._scheduled = True
    asked = request("POST", "/v2/models/m/infer", b" " * 1000)
    connection = HttpConnection(listener)
    connection.connection_made(wire)
    if first:
        feed(connection, asked[:first])
    listener.turns.busy = True
    feed(connection, asked[first:])
    assert connection.idle_since_s is None
    connection.check(listener.now_s + 100)
    assert not wire.closed
    assert not wire.out


def test_nothing_is_answered_while_the_client_does_not_read(idle: Server) -> None:
    """TLS hands over what it has decrypted although reading is paused."""
    turns, wire = idle._listener.turns, Wire()
    connection, turns._scheduled = HttpConnection(idle._listener), True
    connection.connection_made(wire)
    connection.pause_writing()
    feed(connection, LIVE)
    assert not wire.out
    assert not turns.waiting
    connection.resume_writing()
    turns.waiting.popleft()()
    assert wire.out.startswith(b"HTTP/1.1 200")


# -- Whatever calls do at one moment, all of them together stop the event loop for one turn onl


STEP_S = 0.001  # that each step of the work seems to take
IN_A_TURN = round(TURN_S / STEP_S)
NO_WINDOW = b"\0\4\0\0\0\0"
ALL_WINDOW = frame(SETTINGS, 0, 0, b"\0\4\0\0\xff\xff")


class Counted(Wired):
    """Many connections; counts the steps of each turn, which make the clock go on."""

    def __init__(self, connections: int, settings: bytes = b"") -> None:
        super().__init__()
        self.turn_number = 0
        self.steps: Counter[int] = Counter()
        begin = self.shared.turns._begin

        def begun() -> None:
            self.turn_number += 1
            begin()

        def message(call: GrpcCall, _data: bytes, _at: int) -> None:
            self.step()
            call.send_message([b"answer"])

        self.shared.turns._begin = begun  # type: ignore[method-assign]
        self.methods = patch.dict(wired.METHODS, {"/stream": Method(message, GrpcCall.complete)})
        self.methods.start()
        self.links = [Http2Connection(self.shared) for _ in range(connections)]
        for link in self.links:
            self.turn(link.connection_made, Wire())
            self.turn(link.data_received, PREFACE + frame(SETTINGS, 0, 0, settings))

    def step(self) -> None:
        self.now_s += STEP_S
        self.steps[self.turn_number] += 1

    def close(self) -> None:
        self.methods.stop()
        for link in self.links:
            self.turn(link.connection_lost, None)
        super().close()


def opened(count: int, data: bytes = b"", **headers: str) -> bytes:
    """Streams that are not ended, each with a frame of data."""
    more = [(name.encode(), value.encode()) for name, value in headers.items()]
    head = block(*more, path="/stream")
    return b"".join(
        frame(HEADERS, 4, number, head) + (frame(DATA, 0, number, data) if data else b"")
        for number in range(1, 2 * count, 2)
    )


@pytest.mark.parametrize("in_streams", [True, False])
def test_messages_that_arrive_in_one_piece_share_a_turn(
    in_streams: bool,
) -> None:
    """16 connections with 500 streams of 60 empty messages stopped the loop for seconds."""
    wire = Counted(2)
    for link in wire.links:
        data = opened(40, bytes(5) * 30) if in_streams else opened(480, bytes(5))
        wire.turn(link.data_received, data)
    assert sum(wire.steps.values()) == 2 * (1200 if in_streams else 480)
    assert max(wire.steps.values()) <= IN_A_TURN + 64  # one stream may begin at the end of a turn
    wire.close()


MOMENTS: dict[str, tuple[str, bytes, Callable[[Counted], object]]] = {  # the step that is counted
    "deadlines that pass": ("fail", b"", lambda wire: wire.shared.tick(wire.now_s + 2.0)),
    "connections that are lost": (
        "finish",
        b"",
        lambda wire: [link.connection_lost(None) for link in wire.links],
    ),
    "answers that windows let out": (
        "push",
        NO_WINDOW,
        lambda wire: [link.data_received(ALL_WINDOW) for link in wire.links],
    ),
}


@pytest.mark.parametrize(("step", "settings", "happen"), MOMENTS.values(), ids=MOMENTS)
def test_what_happens_to_many_calls_at_one_moment_takes_many_turns(
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    settings: bytes,
    happen: Callable[[Counted], object],
) -> None:
    wire = Counted(10, settings)
    for link in wire.links:
        data = bytes(5) if settings else b""
        wire.turn(link.data_received, opened(20, data, **{"grpc-timeout": "1S"}))
    wire.steps.clear()
    real = getattr(GrpcCall, step)
    monkeypatch.setattr(GrpcCall, step, lambda *args: (wire.step(), real(*args)))
    wire.turn(lambda: happen(wire))
    assert sum(wire.steps.values()) == 10 * 20
    assert max(wire.steps.values()) <= IN_A_TURN + 20  # those of one connection
    assert not any(call.unsent for link in wire.links for call in link.streams.values())
    wire.close()


def test_requests_of_a_stream_that_was_reset_leave_the_queue(eventually: Eventually) -> None:
    """Else a client has any number of them run, whose bytes are no longer counted."""
    engine, message = GatedEngine(), infer_bytes()
    with serving({"m": engine}, max_batch=1) as server, frames(server.port) as client:
        engine.warm = True
        model = server.repository.models["m"]
        client.start(1, message)
        assert engine.entered.acquire(timeout=WAIT_S)  # the engine is busy
        client.start(3, message, STREAM, end=False)
        eventually(lambda: server.see(lambda: model.batcher.waiting) == 1)
        client.message(3, b"x", compressed=1, end=False)  # without grpc-encoding
        client.until(lambda: client.answers.get(3, Answer()).reset is not None)
        eventually(lambda: server.see(lambda: model.batcher.waiting) == 0)
        engine.gate.set()
        assert client.answer(1).status == 0


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
def test_little_is_received_in_a_busy_turn(idle: Server, protocol: str, tls: bool) -> None:
    """64 TLS clients with records of one byte stopped the loop for 283 ms, all in decryption."""
    wire, now, sizes = Counted(2), Now(), list[int]()
    idle._listener.turns.clock_s = now
    turns = wire.shared.turns if protocol == "gRPC" else idle._listener.turns
    first, second = wire.links if protocol == "gRPC" else [HttpConnection(idle._listener)] * 2

    def both() -> None:
        first.tls = second.tls = tls
        sizes.append(len(first.get_buffer(-1)))
        now.s += 2 * TURN_S
        wire.now_s += 2 * TURN_S
        turns.busy = not tls  # without TLS reading counts when it is processed
        sizes.append(len(second.get_buffer(-1)))

    if protocol == "HTTP":
        first.connection_made(Wire())
    wire.turn(both)
    assert sizes[0] > 4096
    assert sizes[1] == BUSY_BYTES[tls]
    wire.close()


SIZE = 4 << 20
PAUSE_S = 10.0
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
            self.wired.tick(PAUSE_S)
        else:
            self.listener.tick(self.listener.now_s + PAUSE_S)

    @property
    def ended(self) -> bool:
        out = self.wire.out
        return self.wire.closed or b" 408 " in out or b"came too slowly" in out


@pytest.mark.parametrize("kind", BEGINS)
def test_a_steady_link_is_not_cut_and_one_that_pauses_or_drips_is(idle: Server, kind: str) -> None:
    steady = Link(idle, kind)
    for _ in range(20):  # 200 s
        steady.move(int(STEADY * PAUSE_S))
        assert not steady.ended
    pauses = 0
    while not steady.ended:
        steady.move(0)
        pauses += 1
    assert 3 <= pauses <= 4  # 32 s
    dripping = Link(idle, kind)
    for _ in range(5):
        dripping.move(int(SLOW * PAUSE_S))
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


@pytest.fixture
def idle() -> Iterator[Server]:
    options = ServeOptions(http_port=0, grpc_port=0, max_held_bytes=1 << 40, stall_s=32, idle_s=74)
    found = Server({"m": FakeEngine()}, options)
    yield found
    found.repository.close(drain=False)
    found._offload.close()
    found._release()
