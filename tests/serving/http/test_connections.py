"""Too many connections: idle ones make room, so that clients with a request get in."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from deploykit.serving.http import connection as http_listener
from deploykit.serving.http.connection import Listener
from deploykit.serving.http.head import HttpLimits
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from deploykit.serving.transport import listener as places
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import Raw, infer_json, request, running

LIMIT = 100
LIVE = request("GET", "/v2/health/live")
INFER = request("POST", "/v2/models/m/infer", infer_json([1, 2, 3, 4], [1, 4]))


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

    def refuse_spare(self) -> None:
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
    assert listener.make_room(clients[-1])
    assert not any(client.aborted for client in clients)
    clients.append(Client(now_s))
    listener.connections.add(clients[-1])
    for _ in range(1 + places._CLOSED_AT_ONCE):  # they are still there in this turn
        assert listener.make_room(clients[-1])
        aborted = [client.aborted for client in clients]
        assert aborted == [number < places._CLOSED_AT_ONCE for number in range(LIMIT + 1)]


def test_connections_with_requests_and_new_ones_stay(listener: Listener) -> None:
    clients = [Client(None if number % 2 else listener.now_s) for number in range(LIMIT + 1)]
    listener.connections.update(clients)
    assert not listener.make_room(clients[-1])
    assert not any(client.aborted for client in clients)


def test_without_file_descriptors_idle_connections_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 clients that had asked once and kept their connections locked others out for 75 s."""
    with running() as server:
        idle = [server.connect() for _ in range(2)]
        for raw in idle:
            raw.ask(LIVE)
        listener, acceptor = server.server._listener, server.server._acceptors[0]
        with monkeypatch.context() as patch:

            def later() -> None:
                patch.setattr(listener, "tick", lambda *_: None)
                patch.setattr(listener, "now_s", listener.now_s + 6)
                acceptor._pause(OSError(errno.EMFILE, ""))

            server.server._loop.call_soon_threadsafe(later)
            assert all(raw.ended() for raw in idle)
        assert server.ask("GET", "/v2/health/live").status == 200


def test_a_health_check_gets_through_despite_any_number_of_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5,000 connections that sent nothing had each new client refused, for 10 s."""
    monkeypatch.setattr(places, "_IDLE_S", 0.05)
    with running(limits=HttpLimits(connections=4, header_s=600)) as server:
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
        reply = raw.ask(LIVE)
        assert reply.status == 200
        assert all(each.ended() for each in (*idle, *half))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Raw]]:
    """Connects to a server with as many connections as it allows, none of them idle for long."""
    monkeypatch.setattr(places, "_IDLE_S", 1e9)
    with running(limits=HttpLimits(connections=4, header_s=600)) as server:
        for _ in range(4):
            server.connect()
        while len(server.server._listener.connections) < 4:
            pass
        yield server.connect


def test_a_health_check_gets_through_where_no_connection_is_idle_yet(
    full: Callable[[], Raw],
) -> None:
    """Half of a load balancer's checks got 503 in the first second of 5,000 new connections."""
    check = full()
    assert [check.ask(LIVE).status for _ in range(3)] == [200] * 3
    assert check.ask(LIVE.replace(b"live", b"ready")).status == 200
    for other in (INFER, LIVE + INFER, b"GET /v2/health/live HTTP/1.1\r\n"):
        raw = full()
        assert raw.ask(other).status == 503
        assert raw.ended()
    assert check.ask(INFER).status == 503


def test_of_too_many_clients_above_the_limit_the_oldest_leave(
    full: Callable[[], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "SPARE_CLIENTS", 2)
    spare = [full() for _ in range(3)]
    assert spare[0].status() == 503
    assert spare[0].ended()
    assert [raw.ask(LIVE).status for raw in spare[1:]] == [200, 200]
