"""Requests of many clients share the turns of the event loop: none stops the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deploykit.serving.http.connection import Exchange, HttpConnection
from deploykit.serving.http.head import ChunkedBody, HeadReader
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from deploykit.serving.transport import turns
from deploykit.serving.transport.turns import Turns
from tests.support.fake_engine import FakeEngine
from tests.support.serving.faults import until
from tests.support.serving.grpc_cases import frames, infer_bytes, serving
from tests.support.serving.memory import held_bytes
from tests.support.serving.running import Raw, Running, infer_json, request, running

Eventually = Callable[[Callable[[], bool]], None]


class Now:
    s = 0.0

    def __call__(self) -> float:
        return self.s


def test_a_turn_that_is_used_up_leaves_the_rest_to_the_next_ones() -> None:
    now, done = Now(), list[int]()
    shared = Turns(now)

    def work() -> None:
        begun_s = now.s
        now.s += 0.6 * turns.TURN_S
        shared.spend(begun_s)
        done.append(1)

    async def main() -> None:
        assert not shared.busy
        work()
        assert not shared.busy
        work()
        assert shared.busy
        for _ in range(5):
            shared.wait(work)
        assert len(done) == 2
        for count in range(3, 8):  # in half a turn, what has just come gets the other half
            await asyncio.sleep(0)
            assert len(done) == count
            assert not shared.busy
        await asyncio.sleep(0)
        assert not shared.waiting

    asyncio.run(main())


def test_a_turn_that_is_counted_counts_all_that_the_loop_does_in_it() -> None:
    """Reading 60 MB from sockets takes the loop longer than the requests in it."""
    now = Now()
    shared = Turns(now)

    async def main() -> None:
        now.s = 0.2 * turns.TURN_S
        shared.spend(0.0)
        now.s += turns.TURN_S  # in the system
        shared.spend(now.s)
        assert shared.busy
        assert shared.late()
        await asyncio.sleep(0)
        assert not shared.busy
        now.s += turns.TURN_S  # nobody has asked anything
        shared.spend(now.s)
        assert not shared.busy

    asyncio.run(main())


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
            self.now.s += 2 * turns.TURN_S
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


def test_slow_requests_of_many_clients_are_one_in_each_turn(
    server: Running, eventually: Eventually
) -> None:
    """200 clients that pipelined scrapes of /metrics stopped the loop for 10.7 s."""
    slow = Slow(server)
    raws = [server.connect() for _ in range(6)]
    for raw in raws:
        raw.send(request("GET", "/metrics") * 5 + request("GET", "/v2/health/live"))
    for raw in raws:
        replies = [raw.reply() for _ in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        last = replies[-1]
        assert last is not None
        assert last.json == {"live": True}
    assert sum(slow.turns) == 36
    assert max(slow.turns) <= 2  # of the work that waited, and of what was just received
    eventually(lambda: held_bytes(server) == 0)


def test_whole_bodies_wait_for_their_turn(server: Running, eventually: Eventually) -> None:
    slow = Slow(server)
    body = infer_json([1] * 30_000, [1, 30_000])
    asked = request("POST", "/v2/models/m/infer", body)
    raws = [server.connect() for _ in range(6)]
    for raw in raws:
        raw.send(asked[:-1])
    for raw in raws:
        raw.send(asked[-1:] + request("GET", "/v2/health/live") + asked)
    for raw in raws:
        first, second, third = raw.reply(), raw.reply(), raw.reply()
        assert json.loads(first.body)["outputs"][0]["data"][0] == 3
        assert second.json == {"live": True}
        assert json.loads(third.body)["outputs"][0]["data"][0] == 3
    assert sum(slow.turns) == 18
    assert max(slow.turns) <= 2
    eventually(lambda: held_bytes(server) == 0)


def test_clients_that_leave_while_their_requests_wait_are_forgotten(
    server: Running, eventually: Eventually
) -> None:
    Slow(server)
    body = infer_json([1] * 30_000, [1, 30_000])
    asked = request("POST", "/v2/models/m/infer", body)
    raws = [Raw(server.port) for _ in range(8)]
    for number, raw in enumerate(raws):
        raw.send(asked if number % 2 else request("GET", "/metrics") * 9)
        raw.close()
    eventually(lambda: not server.server._listener.connections)
    eventually(lambda: held_bytes(server) == 0)
    assert server.ask("GET", "/v2/health/ready").status == 200


def test_requests_over_grpc_wait_for_their_turn_too() -> None:
    with serving({"m": FakeEngine()}) as server:
        shared = server.grpc
        now, begun = Now(), list[int]()
        shared.turns.clock_s = now
        spend, begin = shared.turns.spend, shared.turns._begin

        def spent(since_s: float) -> None:
            now.s = since_s + 2 * turns.TURN_S
            begun[-1] += 1
            spend(since_s)

        def counted() -> None:
            begun.append(0)
            begin()

        begun.append(0)
        shared.turns.spend, shared.turns._begin = spent, counted  # type: ignore[method-assign]
        clients = [frames(server.port) for _ in range(4)]
        opened = [each.__enter__() for each in clients]
        for client in opened:
            client.start(1, infer_bytes())
        assert [client.answer(1).status for client in opened] == [0] * 4
        assert max(begun) <= 2
        for each in clients:
            each.__exit__(None, None, None)


def test_an_idle_server_takes_no_turns(server: Running, eventually: Eventually) -> None:
    assert server.ask("GET", "/v2/health/live").status == 200
    listener = server.server._listener
    (connection,) = listener.connections
    assert isinstance(connection, HttpConnection)
    assert not listener.turns.waiting
    eventually(lambda: not listener.turns._scheduled)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    written = b""
    closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002
        return default

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def idle() -> Iterator[Server]:
    """A server whose loop does not run."""
    found = Server({"m": FakeEngine()}, ServeOptions(http_port=0))
    yield found
    found.repository.close(drain=False)
    found._offload.close()
    found._release()


def feed(connection: HttpConnection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def received(server: Server, data: bytes) -> bytes:
    """What a new connection answers at once, in a turn of the loop of its own."""
    wire = Wire()

    async def receive() -> None:
        connection = HttpConnection(server._listener)
        connection.connection_made(wire)
        feed(connection, data)

    asyncio.run(receive())
    return wire.written


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/health/none"])
def test_a_health_check_does_not_wait_for_its_turn(idle: Server, method: str, path: str) -> None:
    """It waited for 5 s behind 200 clients that asked for pages."""
    turns = idle._listener.turns
    turns.busy = turns._scheduled = True  # the turn does not end
    asked = request(method, path)
    assert received(idle, asked).startswith((b"HTTP/1.1 200", b"HTTP/1.1 404"))
    for other in (request("GET", "/docs"), asked[:-1], asked + asked, b"X" + asked):
        turns.busy = True
        assert received(idle, other) == b""
    turns.overdrawn = True
    assert received(idle, asked) == b""
    assert len(turns._urgent) == 1  # but it is the first of the next turn


def test_health_checks_are_counted_in_the_turn_too(idle: Server) -> None:
    shared = idle._listener.turns
    shared.clock_s = now = Now()
    shared.busy = shared._scheduled = True
    handle = idle._listener.handle

    def slow(exchange: Exchange) -> None:
        now.s += turns.TURN_S
        handle(exchange)

    idle._listener.handle = slow
    asked = request("GET", "/v2/health/live")
    assert [bool(received(idle, asked)) for _ in range(5)] == [True, True, True, False, False]


def test_the_time_for_new_heads_is_counted_in_the_turn(
    idle: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 clients that send 16 heads of 100 headers at once would stop the loop for seconds."""
    shared, feed = idle._listener.turns, HeadReader.feed
    shared.clock_s = now = Now()

    def slow(self: HeadReader, data: bytes) -> tuple[int, Any]:
        now.s += 0.4 * turns.TURN_S
        return feed(self, data)

    monkeypatch.setattr(HeadReader, "feed", slow)
    shared._scheduled = True
    heads = [request("GET", "/v2/health/live", Number=str(number)) for number in range(9)]
    assert received(idle, b"".join(heads)).count(b"HTTP/1.1 200") == 3


def test_urgent_work_is_the_first_of_the_next_turn() -> None:
    now, done = Now(), list[str]()
    shared = Turns(now)

    def work(name: str) -> None:
        now.s += turns.TURN_S
        done.append(name)

    async def main() -> None:
        for name in "abc":
            shared.wait(lambda name=name: work(name))  # type: ignore[misc]
        for name in "xy":
            shared.wait(lambda name=name: work(name), urgent=True)  # type: ignore[misc]
        for _ in range(6):
            await asyncio.sleep(0)
        assert not shared._scheduled

    asyncio.run(main())
    assert done == list("xyabc")


def test_many_small_chunks_are_many_turns(server: Running) -> None:
    """64 clients that sent chunks of one byte stopped the loop for seconds: 11,000 are a read."""
    slow, read = Slow(server), HttpConnection._read_chunks
    lines: list[int] = []

    def counted(self: HttpConnection, chunks: ChunkedBody, at: int, end: int) -> int:
        before = chunks._lines
        used = read(self, chunks, at, end)
        lines.append(chunks._lines - before)
        slow.now.s += 2 * turns.TURN_S
        return used

    raw = server.connect()
    count = 20_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpConnection, "_read_chunks", counted)
        head = "POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked"
        reply = raw.ask(head.encode() + b"\r\n\r\n" + b"1\r\n \r\n" * count + b"0\r\n\r\n")
    assert reply.status == 400  # it is only blanks
    # some come in two pieces; the last are counted after the reply
    until(lambda: sum(lines) >= 2 * count + 2)
    assert max(lines) <= 1000


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
    assert wire.written == b""
