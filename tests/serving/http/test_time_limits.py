"""How long an HTTP client may take: an hour, which the tests let pass."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

import pytest

from deploykit.serving.http.connection import State
from deploykit.serving.http.head import HttpLimits
from tests.support.serving.running import (
    WAIT_S,
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
HOUR = HttpLimits(header_s=3600, body_s=3600, idle_s=3600)


def passed(server: Running, raw: Raw, reached: Callable[[], bool], eventually: Eventually) -> None:
    """An hour passes once the server has `reached` it; at first not quite."""
    eventually(reached)
    server.pass_time(3500)
    raw.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        raw.socket.recv(1, socket.MSG_PEEK)
    raw.socket.settimeout(WAIT_S)
    server.pass_time(3700)


@pytest.mark.parametrize(
    ("data", "state", "expected"),
    [
        (b"", State.IDLE, 0),
        (b"GET /v2 HTTP/1.1\r\nHo", State.HEAD, 408),
        (request("POST", INFER, Content_Length="10") + b"123", State.SIZED, 408),
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
        passed(server, raw, lambda: [each._state for each in clients] == [state], eventually)
        assert raw.status() == expected
        assert raw.ended()


@pytest.mark.parametrize(
    "start", [b"GET /v2 HTTP/1.1\r\nHost: ", request("POST", INFER, Content_Length="1000000")]
)
def test_a_byte_now_and_then_does_not_lengthen_the_time(
    start: bytes, eventually: Eventually
) -> None:
    with running(limits=HttpLimits(header_s=0.3, body_s=0.3)) as server:
        raw = server.connect()
        raw.send(start)

        def send() -> bool:
            raw.send(b"x")
            return bool(select.select([raw.socket], [], [], 0)[0])

        eventually(send)
        assert raw.status() == 408


def test_an_idle_connection_is_closed(eventually: Eventually) -> None:
    with running(limits=HOUR) as server:
        raw = server.connect()
        raw.ask(LIVE)
        passed(server, raw, lambda: True, eventually)
        assert raw.ended()


def test_a_connection_that_waits_for_the_engine_is_not_idle(eventually: Eventually) -> None:
    engine = GatedEngine()
    with running({"m": engine}, HOUR) as server:
        engine.warm = True
        patient = server.connect()
        patient.send(request("POST", INFER, infer_json([1] * 4, [1, 4])))
        assert engine.entered.acquire(timeout=WAIT_S)
        idle = server.connect()
        connections = server.server._listener.connections
        passed(server, idle, lambda: len(connections) == 2, eventually)
        assert idle.ended()
        engine.gate.set()
        reply = patient.reply()
        assert reply.status == 200


def test_a_client_that_does_not_read_its_answers_is_disconnected(eventually: Eventually) -> None:
    with running(limits=HttpLimits(write_s=0.01)) as server:
        raw = server.connect()
        requests = request("GET", "/metrics") * 100
        connections = server.server._listener.connections

        def push() -> bool:
            try:
                raw.socket.settimeout(0.01)
                raw.send(requests)
            except OSError:
                pass
            return not connections

        eventually(lambda: bool(connections))
        eventually(push)
