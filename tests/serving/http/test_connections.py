"""Too many connections: idle ones make room, so that clients with a request get in."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from deploykit.serving.http import listener as listener_module
from deploykit.serving.http.listener import Listener
from deploykit.serving.server import HttpLimits, ServeOptions, Server
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import request, running

LIMIT = 100
LIVE = request("GET", "/v2/health/live")


class Client:
    """A connection that is idle since then; None: it has a request."""

    def __init__(self, idle_since_s: float | None) -> None:
        self.idle_since_s = idle_since_s
        self.aborted = False
        self.unanswered = 0

    def check(self, now_s: float) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def listener() -> Iterator[Listener]:
    server = Server({"m": FakeEngine()}, ServeOptions(http_port=0), HttpLimits(connections=LIMIT))
    yield server._listener
    server.repository.close(drain=False)
    server._offload.close()
    server._release()


def test_the_connections_that_are_idle_for_longest_make_room(listener: Listener) -> None:
    now_s = listener.now_s
    clients = [Client(now_s - 100 + number) for number in range(LIMIT)]
    listener.connections.update(clients)
    assert listener.make_room()
    assert not any(client.aborted for client in clients)
    clients.append(Client(now_s))
    listener.connections.add(clients[-1])
    for _ in range(1 + listener_module._CLOSED_AT_ONCE):  # they are still there in this turn
        assert listener.make_room()
        aborted = [client.aborted for client in clients]
        assert aborted == [number < listener_module._CLOSED_AT_ONCE for number in range(LIMIT + 1)]


def test_connections_with_requests_and_new_ones_stay(listener: Listener) -> None:
    clients = [Client(None if number % 2 else listener.now_s) for number in range(LIMIT + 1)]
    listener.connections.update(clients)
    assert not listener.make_room()
    assert not any(client.aborted for client in clients)


def test_without_file_descriptors_idle_connections_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 clients that had asked once and kept their connections locked others out for 75 s."""
    with running() as server:
        idle = [server.connect() for _ in range(2)]
        for raw in idle:
            raw.send(LIVE)
            assert raw.reply()
        listener, acceptor = server.server._listener, server.server._acceptor
        with monkeypatch.context() as patch:
            patch.setattr(listener, "tick", lambda *_: None)
            patch.setattr(listener, "now_s", listener.now_s + 6)
            server.server._loop.call_soon_threadsafe(acceptor._pause, OSError(errno.EMFILE, ""))
            assert all(raw.ended() for raw in idle)
        assert server.ask("GET", "/v2/health/live").status == 200


def test_a_health_check_gets_through_despite_any_number_of_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5,000 connections that sent nothing had each new client refused, for 10 s."""
    monkeypatch.setattr(listener_module, "_IDLE_S", 0.05)
    with running(limits=HttpLimits(connections=4)) as server:
        idle = [server.connect() for _ in range(2)]
        half = [server.connect() for _ in range(2)]
        for raw in half:
            raw.send(b"GET /v2")
        while len(server.server._listener.connections) < 4:
            pass
        listener = server.server._listener
        before_s = listener.now_s
        while listener.now_s == before_s:  # a new one is never the longest idle
            pass
        raw = server.connect()
        raw.send(LIVE)
        reply = raw.reply()
        assert reply is not None
        assert reply.status == 200
        assert all(each.ended() for each in (*idle, *half))
