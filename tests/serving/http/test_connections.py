"""Idle connections make room, slow clients are ended, half-closed ones answered."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from deploykit.serving.http import connection as http_listener
from deploykit.serving.http.connection import State
from deploykit.serving.http.head import HttpLimits
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server, run
from deploykit.serving.transport import listener as places
from tests.support.fake_engine import FakeEngine
from tests.support.serving.memory import held_bytes, raw_infer
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


# -- file descriptors


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


# -- Clients that end their side after the request (`nc -N`, old scripts) get their answers


PATH = "/v2/models/m/infer"
Eventually = Callable[[Callable[[], bool]], None]


def good(value: float) -> bytes:
    return request("POST", PATH, infer_json([value, 2, 3, 4], [1, 4]))


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


def test_an_answer_comes_after_the_client_has_ended_its_side(
    gated: tuple[Running, GatedEngine], eventually: Eventually
) -> None:
    server, engine = gated
    raws = [half_closed(server, good(number)) for number in range(3)]
    raws.append(half_closed(server, good(3) + LIVE + good(4)))
    raws.append(half_closed(server, good(5) + LIVE + good(6)[:-1]))  # the last is not whole
    raws.append(half_closed(server, good(7).replace(b"HTTP/1.1", b"HTTP/1.0")))
    links = server.server._listener.connections
    eventually(lambda: sum(each._ended for each in links) == len(raws))
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


WIDE = raw_infer(np.ones((1, 1 << 20), np.float32)).replace(b"/m/", b"/wide/")
HALF_CLOSED = {  # what is sent before the end, and the number of answers
    "asked": (LIVE, 1),
    "pipelined": (LIVE * 40, 40),
    "computed": (good(1) * 20, 20),
    "large": (WIDE + LIVE, 2),
    "one and a half": (LIVE + b"GET /", 1),
    **{f"no request {len(data)}": (data, 0) for data in (b"", b"GET /", good(1)[:-1])},
}


@pytest.mark.parametrize(("data", "count"), HALF_CLOSED.values(), ids=HALF_CLOSED)
def test_a_half_closed_connection_is_closed_after_its_answers(
    eventually: Eventually, data: bytes, count: int
) -> None:
    with running({"m": FakeEngine(), "wide": FakeEngine(width=1 << 20)}, max_batch=1) as server:
        raw = half_closed(server, data)
        replies = [raw.reply() for _ in range(count)]
        assert [reply.status for reply in replies] == [200] * count
        assert not data.startswith(WIDE) or len(replies[0].body) > 4 << 20
        assert raw.ended()
        eventually(lambda: held_bytes(server) == 0)


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
