"""Clients that end their side after the request (`nc -N`, old scripts) get their answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from deploykit.serving.http.connection import HttpConnection
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from tests.support.fake_engine import FakeEngine
from tests.support.serving.memory import held_bytes, raw_infer
from tests.support.serving.running import (
    GatedEngine,
    Raw,
    Running,
    infer_json,
    request,
    running,
)

INFER = "/v2/models/m/infer"
LIVE = request("GET", "/v2/health/live")
Eventually = Callable[[Callable[[], bool]], None]


def good(value: float) -> bytes:
    return request("POST", INFER, infer_json([value, 2, 3, 4], [1, 4]))


def half_closed(server: Running, data: bytes) -> Raw:
    raw = server.connect()
    raw.send(data)
    raw.socket.shutdown(socket.SHUT_WR)
    return raw


@pytest.fixture
def gated() -> Iterator[tuple[Running, GatedEngine]]:
    engine = GatedEngine(max_batch=1)
    with running({"m": engine}, max_batch=1, queue=64) as server:
        engine.warm = True
        try:
            yield server, engine
        finally:
            engine.gate.set()


def all_ended(server: Running, count: int) -> bool:
    connections = server.server._listener.connections
    return sum(each._ended for each in connections) == count  # type: ignore[attr-defined]


def test_an_answer_comes_after_the_client_has_ended_its_side(
    gated: tuple[Running, GatedEngine], eventually: Eventually
) -> None:
    server, engine = gated
    raws = [half_closed(server, good(number)) for number in range(3)]
    raws.append(half_closed(server, good(3) + LIVE + good(4)))
    raws.append(half_closed(server, good(5) + LIVE + good(6)[:-1]))  # the last is not whole
    raws.append(half_closed(server, good(7).replace(b"HTTP/1.1", b"HTTP/1.0")))
    eventually(lambda: all_ended(server, len(raws)))
    engine.gate.set()
    for raw, count in zip(raws, [1, 1, 1, 3, 2, 1], strict=True):
        replies = [raw.reply() for _ in range(count)]
        assert [reply.status for reply in replies] == [200] * count
        last = replies[-1]  # one that had been written before the client ended says nothing
        assert last is not None
        assert last.json == {"live": True} or last.headers["connection"] == "close"
        assert raw.ended()
    eventually(lambda: not server.server._listener.connections)
    eventually(lambda: held_bytes(server) == 0)


def test_a_request_that_is_answered_at_once_is_answered() -> None:
    with running() as server:
        for data, count in ((LIVE, 1), (LIVE * 40, 40), (good(1) * 20, 20), (LIVE + b"GET /", 1)):
            raw = half_closed(server, data)
            assert [raw.status() for _ in range(count)] == [200] * count
            assert raw.ended()


def test_large_answers_come_whole(eventually: Eventually) -> None:
    with running({"m": FakeEngine(width=1 << 20)}, max_batch=1) as server:
        values = np.ones((1, 1 << 20), np.float32)
        raw = half_closed(server, raw_infer(values) + LIVE)
        first, second = raw.reply(), raw.reply()
        assert len(first.body) > 4 << 20
        assert second.json == {"live": True}
        assert raw.ended()
        eventually(lambda: held_bytes(server) == 0)


@pytest.mark.parametrize("data", [b"", b"GET /", good(1)[:-1], LIVE])
def test_a_half_closed_connection_without_a_request_is_closed(data: bytes) -> None:
    with running() as server:
        raw = server.connect()
        if data == LIVE:
            raw.ask(LIVE)
        else:
            raw.send(data)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.ended()


def test_requests_of_clients_that_have_left_are_cancelled(
    gated: tuple[Running, GatedEngine], eventually: Eventually
) -> None:
    """What they are sent is refused by their machine: they do not read, other than these."""
    server, engine = gated
    model = server.server.repository.models["m"]
    first = server.connect()
    first.send(good(0))
    assert engine.entered.acquire(timeout=20)
    with ExitStack() as stack:
        for number in range(1, 40):
            raw = Raw(server.port)
            stack.callback(raw.close)
            raw.send(good(number))
        eventually(lambda: model.waiting == 39)
    eventually(lambda: len(server.server._listener.connections) == 1)
    assert model.waiting == 0
    engine.gate.set()
    assert first.reply()
    assert engine.fed == [0]


class Unread(asyncio.Transport):
    """A transport whose client takes nothing."""

    ended = ""

    def write(self, data: object) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> object:  # noqa: ARG002
        return default

    def get_write_buffer_size(self) -> int:
        return 1

    def close(self) -> None:
        self.ended += "closed "

    def abort(self) -> None:
        self.ended += "aborted "


@pytest.mark.parametrize("keeps", [True, False], ids=["idle", "last"])
def test_a_closed_connection_whose_client_reads_nothing_is_ended(keeps: bool) -> None:
    """Answers below the transport's limit of 64 KiB do not count as stalled: it stayed for ever."""
    server = Server({"m": FakeEngine()}, ServeOptions(http_port=0))
    try:
        listener, transport = server._listener, Unread()
        listener.turns._scheduled, listener.turns.clock_s = True, lambda: 0.0
        connection = HttpConnection(listener)
        connection.connection_made(transport)
        data = LIVE if keeps else request("GET", "/v2", Connection="close")
        connection.get_buffer(-1)[: len(data)] = data
        connection.buffer_updated(len(data))
        idle_s = listener.limits.idle_s if keeps else 0.0
        listener.tick(listener.now_s + idle_s + 1)
        assert transport.ended == "closed "
        listener.tick(listener.now_s + listener.limits.write_s - 2)
        assert transport.ended == "closed "
        listener.tick(listener.now_s + 3)
        assert transport.ended == "closed aborted "
    finally:
        server.repository.close(drain=False)
        server._offload.close()
        server._release()
