"""Idle connections make room, slow clients are ended, half-closed ones answered."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Callable, Iterator

import pytest

from deploykit.serving.http import connection as http_listener
from deploykit.serving.http.connection import State
from deploykit.serving.http.head import HttpLimits
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server, run
from deploykit.serving.transport import listener as places
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import (
    WAIT_S,
    GatedEngine,
    Raw,
    Running,
    infer_json,
    request,
    running,
)

LIMIT = 100
LIVE = request("GET", "/v2/health/live")
INFER = request("POST", "/v2/models/m/infer", infer_json([1, 2, 3, 4], [1, 4]))


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
        idle = [server.connect() for _ in range(4)]
        for raw in idle[:2]:
            raw.send(b"GET /v2")
        listener = server.server._listener
        while len(listener.connections) < 4:
            pass
        before_s = listener.now_s
        while listener.now_s == before_s:  # a new one is never the longest idle
            pass
        assert server.ask("GET", "/v2/health/live").status == 200
        assert all(each.ended() for each in idle)


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


def test_a_server_may_open_as_many_files_as_the_system_allows() -> None:
    """A soft limit of 1024, as many systems have, was the limit of connections."""

    def ready(*_: object) -> None:
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        raise KeyboardInterrupt

    found: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        with pytest.raises(KeyboardInterrupt):
            run(Server({"m": FakeEngine()}, ServeOptions(http_port=0)), ready)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found == [min(before[1], 1 << 14)]


def test_what_needs_a_file_descriptor_can_be_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was a 500, with a traceback in the log."""
    with running() as server:
        raw = server.connect()
        raw.ask(LIVE)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        try:
            refused = raw.ask(request("GET", "/docs"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert "Too many open files" in refused.json["error"]
        assert "Traceback" not in caplog.text
        assert server.ask("GET", "/docs").status == 200


# -- Clients that leave


PATH = "/v2/models/m/infer"
Eventually = Callable[[Callable[[], bool]], None]


def good(value: float) -> bytes:
    return request("POST", PATH, infer_json([value, 2, 3, 4], [1, 4]))


@pytest.fixture
def gated() -> Iterator[tuple[Running, GatedEngine]]:
    engine = GatedEngine(max_batch=1)
    with running({"m": engine}, max_batch=1, queue=64) as server:
        engine.warm = True
        try:
            yield server, engine
        finally:
            engine.gate.set()


@pytest.mark.parametrize(
    ("data", "count"),
    [(LIVE, 1), (LIVE * 9 + b"GET /", 9), (b"", 0), (good(1)[:-1], 0)],
)
def test_a_client_that_ends_its_side_gets_what_was_written(data: bytes, count: int) -> None:
    with running() as server:
        raw = server.connect()
        raw.send(data)
        raw.socket.shutdown(socket.SHUT_WR)
        assert [raw.status() for _ in range(count)] == [200] * count
        assert raw.ended()


@pytest.mark.parametrize("leave", [Raw.close, lambda raw: raw.socket.shutdown(socket.SHUT_WR)])
def test_requests_of_clients_that_have_left_are_cancelled(
    gated: tuple[Running, GatedEngine], eventually: Eventually, leave: Callable[[Raw], None]
) -> None:
    server, engine = gated
    model = server.server.repository.models["m"]
    first = server.connect()
    first.send(good(0))
    assert engine.entered.acquire(timeout=20)
    raws = [server.connect() for _ in range(1, 40)]
    for number, raw in enumerate(raws, 1):
        raw.send(good(number))
    eventually(lambda: model.waiting == 39)
    for raw in raws:
        leave(raw)
    eventually(lambda: len(server.server._listener.connections) == 1)
    assert model.waiting == 0
    engine.gate.set()
    assert first.reply()
    assert engine.fed == [0]


# -- How long an HTTP client may take: an hour, which the tests let pass


HOUR = HttpLimits(header_s=3600, stall_s=3600, idle_s=3600)


@pytest.mark.parametrize(
    ("data", "state", "expected"),
    [
        (b"", State.NEW, 0),
        (b"GET /v2 HTTP/1.1\r\nHo", State.HEAD, 408),
        (request("POST", PATH, Content_Length="10") + b"123", State.SIZED, 408),
    ],
    ids=["nothing", "half a header", "half a body"],
)
def test_a_client_that_stops_sending_is_disconnected(
    data: bytes, state: State, expected: int, eventually: Eventually
) -> None:
    with running(limits=HOUR) as server:
        raw = server.connect()
        raw.send(data)
        clients = server.server._listener.connections
        eventually(lambda: [each._state for each in clients] == [state])
        server.pass_time(3500)
        raw.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            raw.socket.recv(1, socket.MSG_PEEK)
        raw.socket.settimeout(WAIT_S)
        server.pass_time(3700)
        assert raw.status() == expected
        assert raw.ended()


def test_a_connection_that_waits_for_the_engine_is_not_idle(eventually: Eventually) -> None:
    engine = GatedEngine()
    with running({"m": engine}, HOUR) as server:
        engine.warm = True
        patient = server.connect()
        patient.send(good(1))
        assert engine.entered.acquire(timeout=WAIT_S)
        idle = server.connect()
        eventually(lambda: len(server.server._listener.connections) == 2)
        server.pass_time(3700)
        assert idle.ended()
        engine.gate.set()
        reply = patient.reply()
        assert reply.status == 200
