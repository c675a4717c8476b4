"""HTTP/1.1: messages good and hostile, connections that wait or leave, and bodies."""

from __future__ import annotations

import contextlib
import errno
import gzip
import itertools
import logging
import os
import re
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.json_value import MOST_JSON_VALUES, ONE_JSON
from deploykit.serving.http import connection as http_listener
from deploykit.serving.http.connection import State
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server, run
from deploykit.serving.transport import connection as places
from deploykit.serving.transport.connection import Limits
from deploykit.serving.transport.encodings import choose_encoding, decompress
from tests.support.fake_engine import FakeEngine
from tests.support.serving.faults import Process, leaves_nothing, until
from tests.support.serving.memory import held_bytes
from tests.support.serving.requests import values
from tests.support.serving.running import (
    WAIT_S,
    GatedEngine,
    Raw,
    Reply,
    Running,
    binary_request,
    infer_json,
    request,
    running,
)
from tests.support.serving.warming import Lengths

INFER = "/v2/models/m/infer"
LIVE = request("GET", "/v2/health/live")
CHUNKED = request("POST", INFER, Transfer_Encoding="chunked")
SMALL = "/v2/models/small/infer"
ROW = infer_json([1, 2, 3, 4], [1, 4])
GOOD = request("POST", INFER, ROW)
LIMIT = 1 << 20
Eventually = Callable[[Callable[[], bool]], None]


def chunks(body: bytes) -> bytes:
    pieces = [body[at : at + 9] for at in range(0, len(body), 9)]
    return b"".join(b"%x;a=b\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


OLD = b"GET /v2/health/live HTTP/1.0\r\n"
CLOSED = {"connection": "close"}
REPEATED = [  # two headers, status of the reply
    ("Accept: a/b", "Accept: c/d", 200),
    ("Content-Type: application/json", "Content-Type: application/json", 200),
    ("Authorization: Bearer a", "Authorization: Bearer b", 400),
    ("Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Traceparent: x", 200),
    ("Origin: http://localhost", "Origin: https://evil.example", 400),
    ("Host: localhost", "Host: localhost", 400),
]
TARGETS = [  # RFC 9112, 3.2.2, and RFC 3986, 6.2.2.2
    ("http://localhost/v2/health/live", "localhost", 200),
    ("HTTP://LOCALHOST:8000/v2/health/live", "localhost", 200),
    ("http://localhost/v2/health/live", "evil.example", 200),
    ("http://evil.example/v2/health/live", "localhost", 403),
    ("http://localhost?/v2/health/live", "localhost", 200),
    ("http://me@localhost/v2/health/live", "localhost", 404),
    ("http://localhost/%2e%2e/v2", "localhost", 404),
    ("http://localhost\\@evil.example/v2/health/live", "localhost", 400),
    ("/v2/%68ealth/live", "localhost", 200),
    ("/v2/models/%6d%2Fconfig", "localhost", 404),
]
BLANKS = [  # at the end of a header's value, which do not count
    ("Origin: http://localhost", 200),
    ("Inference-Header-Content-Length: 0", 200),
    ("Origin: http://evil.example", 403),
]


def headed(*fields: str) -> bytes:
    body = ROW
    lines = (f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *fields)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


EXCHANGES = {  # sent, then for each answer its status or headers; 0: the connection is closed
    "several": (LIVE * 40, *[200] * 40),
    "close": (request("GET", "/v2/health/live", Connection="close") + LIVE, CLOSED, 0),
    "close in a list": (request("GET", "/v2/health/live", Connection="TE, Close"), CLOSED, 0),
    "HTTP/1.0": (OLD + b"\r\n", CLOSED, 0),
    "HTTP/1.0, kept": (
        OLD + b"Connection: keep-alive\r\n\r\n" + OLD + b"\r\n",
        {"connection": "keep-alive"},
        CLOSED,
        0,
    ),
    "chunks": (CHUNKED + chunks(ROW) + LIVE, 200, 200),
    "a malformed one": (headed("Content-Length: 6"), CLOSED, 0),
    "trailers": (CHUNKED + b"0\r\nDigest: x\r\n\r\n" + LIVE, 400, 200),
    "a body of GET": (request("GET", "/v2/health/live", b"abc") + LIVE, 200, 200),
    "two empty lines": (b"\r\n\r\n" + LIVE + b"\r\n\r\n" + LIVE, 200, 200),
    "Upgrade": (request("GET", "/v2/health/live", Connection="Upgrade", Upgrade="h2c"), 200),
    "an unknown expectation": (request("GET", "/v2/health/live", Expect="a miracle"), 200),
    "any Accept": (request("GET", "/v2/health/live", Accept=";;,a/b;q=0"), 200),
    "no length of JSON": (headed("Inference-Header-Content-Length: 123456789012345678x"), 400),
    **{f"{one} and {two}": (headed(one, two), status) for one, two, status in REPEATED},
    **{f"{of} at {host}": (request("GET", of, Host=host), code) for of, host, code in TARGETS},
    **{
        f"{field}{blanks!r}": (LIVE[:-2] + f"{field}{blanks}\r\n\r\n".encode(), status)
        for blanks in (" ", " \t  ")
        for field, status in BLANKS
    },
    "a blank after the host": (LIVE.replace(b"localhost", b"localhost \t "), 200),
}


@pytest.mark.parametrize("in_bytes", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_message_gets_its_answers(server: Running, name: str, in_bytes: bool) -> None:
    data, *wanted = EXCHANGES[name]
    assert isinstance(data, bytes)
    if in_bytes and name == "close":
        data = data.removesuffix(LIVE)  # it may come when the connection is closed
    raw = server.connect()
    with contextlib.suppress(OSError):  # a refused one is not read to its end
        for at in range(0, len(data), 1 if in_bytes else len(data)):
            raw.send(data[at : at + (1 if in_bytes else len(data))])
    for each in wanted:
        if each == 0:
            assert raw.ended()
            continue
        reply = raw.reply()
        assert isinstance(each, dict) or reply.status == each
        assert reply.headers.items() >= (each if isinstance(each, dict) else {}).items()


def test_expect_100_continue_is_answered_before_the_body(server: Running) -> None:
    body = ROW
    raw = server.connect()
    raw.send(request("POST", INFER, Content_Length=str(len(body)), Expect="100-continue"))
    assert raw.status() == 100
    raw.send(body)
    assert raw.status() == 200


def test_a_body_of_exactly_the_limit_is_read(server: Running) -> None:
    reply = server.ask("POST", INFER, b" " * 100_000)
    assert reply.status == 400
    assert "not valid JSON" in reply.json["error"]


def test_a_packet_inside_a_header_is_not_cached_as_a_head(server: Running) -> None:
    """The second packet looks like a whole request but is the end of the first one's header."""
    inside = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    raw = server.connect()
    raw.send(b"GET /v2/health/live HTTP/1.1\r\nx: ")
    assert server.ask("GET", "/v2").status == 200  # the first packet has been read by now
    first = raw.ask(inside)
    assert first.json == {"live": True}
    second = raw.ask(inside)
    assert second.json[0]["name"] == "m"


def test_a_url_as_the_target_does_not_get_around_the_token() -> None:
    with running(token="0123456789abcdef") as server:
        assert server.ask("GET", "http://localhost/v2").status == 401
        assert server.ask("GET", "http://localhost/v2/health/live").status == 200
        page = server.ask("GET", "http://localhost?/v2/health/../../v2")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


PACKED = gzip.compress(ROW)
_LEAKS = re.compile(r"Traceback|\.py\b|/tmp/|/home/|/root/|0x[0-9a-f]{6,}|Thread|object at")
Message = bytes | Callable[[], bytes]


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with running(max_body_bytes=LIMIT) as server:
        yield server


def send(port: int, data: bytes) -> Reply:
    with contextlib.closing(Raw(port)) as raw:
        with contextlib.suppress(OSError):  # refused before it was read: the answer is there
            raw.send(data)
        return raw.reply(body=not data.startswith(b"HEAD"))


def survives(
    server: Running, data: bytes, wanted: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> str:
    """Returns the error: one line of the log, without anything of our insides."""
    good = send(server.port, GOOD)
    caplog.clear()
    with caplog.at_level(logging.INFO, "deploykit"):
        reply = send(server.port, data)
    assert reply.status in wanted, reply
    assert send(server.port, GOOD).body == good.body
    if reply.status == 200:
        return ""
    assert list(reply.json) == ["error"]
    error: str = reply.json["error"]
    assert not _LEAKS.search(error), error
    (line,) = [each for each in caplog.records if each.name.startswith("deploykit")]
    assert line.getMessage().isprintable()
    assert line.exc_info is None
    return error


def encoded(body: bytes, encoding: str, **headers: str) -> bytes:
    return request("POST", INFER, body, Content_Encoding=encoding, **headers)


def json_size(value: str, body: bytes = ROW) -> bytes:
    return request("POST", INFER, body, Inference_Header_Content_Length=value)


NAMES = [
    *("../etc", "a/../b", "../../etc/passwd", "/etc/passwd", "model/..", "..", "model/"),
    *("%20..", "..%20", "%20", "%09", "%0a", "", "%2e%2e%2fetc", "m%00", "A" * 256, "<img>"),
    *("model.version1", "..my_model", "model..1", "model....1", "m\\x", "a%0aERROR\x1b[2J"),
]
WRONG_END = b"%x\r\n%bXX" % (len(ROW), ROW)
ATTACKS: dict[str, tuple[Message, int | tuple[int, ...]]] = {
    "length and chunks": (
        request("POST", "/v2", Content_Length="6", Transfer_Encoding="chunked") + b"0\r\n\r\nX",
        400,
    ),
    "two lengths": (request("POST", INFER, Content_Length="5\r\nContent-Length: 6"), 400),
    "two hosts": (request("GET", "/v2", Host="localhost\r\nHost: localhost"), 400),
    **{
        f"a length of {length}": (request("POST", INFER, Content_Length=length), (400, 413))
        for length in ("+5", "-1", "1e3", "9" * 23)
    },
    **{
        f"the coding {coding}": (request("POST", INFER, Transfer_Encoding=coding), 400)
        for coding in ("xchunked", "gzip, chunked")
    },
    "chunks in HTTP/1.0": (
        b"POST /v2/repository/index HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    **{
        f"a chunk {chunk!r}": (CHUNKED + chunk + b"0\r\n\r\n", 400)
        for chunk in (b"0x5\r\nabcde\r\n", b"-5\r\nabcde\r\n", b"5\nabcde\r\n", WRONG_END)
    },
    "a bare LF after the chunks": (CHUNKED + b"0\r\nx: y\n\r\n", 400),
    "a chunk's size of 17 digits": (CHUNKED + b"0" * 16 + b"5\r\nabcde\r\n0\r\n\r\n", 400),
    "an endless header": (lambda: request("GET", "/v2", long="a" * 20_000_000), 431),
    "large headers": (request("GET", "/v2", **{f"h{i}": "a" * 1000 for i in range(70)}), 431),
    "101 headers": (request("GET", "/v2", **{f"h{i}": "1" for i in range(101)}), 431),
    "a target of 9 kB": (request("GET", "/" + "a" * 9000), 414),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no host": (b"GET /v2/health/live HTTP/1.1\r\n\r\n", 400),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), 400),
    "a large chunk": (lambda: CHUNKED + b"ffffff\r\n" + bytes(LIMIT), 413),
    "one byte over": (request("POST", INFER, Content_Length=str(LIMIT + 1)), 413),
    "an endless trailer": (lambda: CHUNKED + b"0\r\nx: " + b"a" * 1_000_000, 413),
    "endless trailers": (lambda: CHUNKED + b"0\r\n" + b"x: a\r\n" * 50_000, 413),
    "a million chunks": (lambda: CHUNKED + b"1\r\na\r\n" * 1_000_000, (400, 413)),
    "OPTIONS": (request("OPTIONS", INFER), 405),
    "HEAD": (request("HEAD", "/v2/health/live"), 200),
    "a setting of another server": (request("POST", "/v2/models/m/trace/setting", b"{}"), 501),
    **{
        f"a JSON part of {value[:11]!r} bytes": (json_size(value), 400)
        for value in ("99999999999", "-1", "abc", "", "1e3", "+5", "\xb2", "9" * 30, "9999999")
    },
    "a JSON part beyond a compressed body": (
        encoded(PACKED, "gzip", Inference_Header_Content_Length="9999999"),
        400,
    ),
    **{
        f"the version {version!r}": (
            request("POST", f"/v2/models/m/versions/{version}/infer", ROW),
            (404, 400),
        )
        for version in ("2", "-1", "1e3", "../1", "01", "9" * 20, "", "%2f1")
    },
    "a gzip bomb": (lambda: encoded(gzip.compress(bytes(100 << 20), 9), "gzip"), 413),
    "a deflate bomb": (lambda: encoded(zlib.compress(bytes(100 << 20), 9), "deflate"), 413),
    **{
        f"the encoding {name}": (encoded(PACKED, name), 415)
        for name in ("br", "zstd", "gzip, gzip")
    },
    "an encoding of escapes": (encoded(PACKED, "\x7f" * 20), 400),
    **{
        f"the model {name!r:.20} {end}": (request(method, f"/v2/models/{name}{end}"), (404, 400))
        for name in NAMES
        for method, end in (("POST", "/infer"), ("GET", ""), ("GET", "/config"))
    },
}


@pytest.mark.parametrize(("message", "status"), ATTACKS.values(), ids=ATTACKS)
def test_malformed_and_forbidden_requests_are_refused(
    small: Running,
    caplog: pytest.LogCaptureFixture,
    message: Message,
    status: int | tuple[int, ...],
) -> None:
    data = message if isinstance(message, bytes) else message()
    survives(small, data, (status,) if isinstance(status, int) else status, caplog)


def test_no_attack_leaves_files_threads_or_memory_behind(tmp_path: Path) -> None:
    messages = [data for data, _ in ATTACKS.values() if isinstance(data, bytes)]
    with Process(tmp_path, "--max-body-bytes", str(LIMIT)) as server:

        def attack() -> None:
            for data in messages * 10:
                send(server.port, data)

        leaves_nothing(server, attack, 4 << 20)
        until(lambda: server.gauge("deploykit_held_bytes") == 0)


def test_unknown_model_names_add_no_metrics(small: Running) -> None:
    raw = small.connect()
    before = small.ask("GET", "/metrics").body.count(b"\ndeploykit_")
    for start in range(0, 500, 10):
        raw.send(b"".join(request("POST", f"/v2/models/x{start + i}/infer") for i in range(10)))
        assert [raw.reply().status for _ in range(10)] == [404] * 10
    metrics = small.ask("GET", "/metrics").body.decode()
    assert set(re.findall(r'model="([^"]*)"', metrics)) == {"m"}
    assert metrics.count("\ndeploykit_") - before < 10  # of 500: a status or two are new


def test_json_that_decodes_above_the_body_limit_gets_413() -> None:
    """200,000 zeros are below the limit as JSON and above it as FP32."""
    with running({"m": Lengths()}, max_body_bytes=700_000) as server:
        reply = server.ask("POST", INFER, infer_json([0] * 200_000, [1, 200_000]))
        assert reply.status == 413
        assert "`max_body_bytes`" in reply.json["error"]


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


def test_a_client_gets_through_despite_any_number_of_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5,000 connections that sent nothing had each new client refused, for 10 s."""
    monkeypatch.setattr(places, "_IDLE_S", 0.05)
    with running(limits=Limits(connections=4, header_s=600)) as server:
        idle = [server.connect() for _ in range(4)]
        for raw in idle[:2]:
            raw.send(b"GET /v2")
        listener = server.server._listener
        while len(listener.connections) < 4:
            pass
        before_s = listener.now_s
        while listener.now_s == before_s:  # a new one is never the longest idle
            pass
        assert server.ask("GET", "/v2").status == 200
        assert all(each.ended() for each in idle)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Raw]]:
    """Connects to a server with as many connections as it allows, none of them idle for long."""
    monkeypatch.setattr(places, "_IDLE_S", 1e9)
    with running(limits=Limits(connections=4, header_s=600)) as server:
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
    for other in (GOOD, request("GET", "/v2/health/live", b"a body")):
        raw = full()
        assert raw.ask(other).status == 503
        assert raw.ended()
    assert check.ask(GOOD).status == 503


def test_of_too_many_clients_above_the_limit_the_oldest_leave(
    full: Callable[[], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "SPARE", 2)
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


def good(value: float) -> bytes:
    return request("POST", INFER, infer_json([value, 2, 3, 4], [1, 4]))


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
def test_a_full_queue_is_a_503_and_clients_that_have_left_make_room(
    eventually: Eventually, leave: Callable[[Raw], None]
) -> None:
    engine = GatedEngine(max_batch=1)
    with running({"m": engine}, max_batch=1, queue=39) as server:
        engine.warm = True
        model = server.server.repository.models["m"]
        first = server.connect()
        first.send(good(0))
        assert engine.entered.acquire(timeout=20)
        raws = [server.connect() for _ in range(1, 40)]
        for number, raw in enumerate(raws, 1):
            raw.send(good(number))
        eventually(lambda: model.batcher.waiting == 39)
        raws.append(server.connect())
        refused = raws[-1].ask(good(40))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "queue of model 'm' is full" in refused.json["error"]
        for raw in raws:
            leave(raw)
        eventually(lambda: len(server.server._listener.connections) == 1)
        assert model.batcher.waiting == 0
        engine.gate.set()
        assert first.reply()
        assert engine.fed == [0]


# -- How long an HTTP client may take: an hour, which the tests let pass


HOUR = Limits(header_s=3600, stall_s=3600, idle_s=3600)


@pytest.mark.parametrize(
    ("data", "state", "expected"),
    [
        (b"", State.NEW, 0),
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


WIDTH = 100_000  # as JSON above 256 KiB, which another thread reads
BIG = infer_json([0.123456] * WIDTH, [1, WIDTH])


@contextmanager
def serving(**options: Any) -> Iterator[Running]:
    """`m` takes rows of any length, `small` of four."""
    with running({"small": FakeEngine(), "m": Lengths()}, **options) as server:
        yield server


# -- in pieces, and without a copy


@pytest.mark.parametrize("count", [1, 15_000, 16_384, 500_000])
def test_a_body_of_any_size_split_anywhere_arrives_whole(count: int) -> None:
    """From one packet to many; a body after its head is received directly into its buffer."""
    rows = np.random.default_rng(count).random((1, count), dtype=np.float32)
    data = binary_request(rows)
    with running({"m": Lengths()}, Limits(stall_s=600)) as server:
        raw = server.connect()
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cuts = [0, 7, 150, len(data) // 2, len(data) - 1, len(data)]
        for begin, end in itertools.pairwise(sorted(cuts)):
            raw.send(data[begin:end])
        sender = threading.Thread(target=raw.send, args=(data + GOOD + data,))
        sender.start()
        for expected in (rows, rows, None, rows):
            reply = raw.reply()
            assert reply.status == 200
            if expected is not None:
                size = int(reply.headers["inference-header-content-length"])
                found = np.frombuffer(reply.body[size:], np.float32)
                np.testing.assert_array_equal(found, expected[0] * 2 + 1)
        sender.join()


def test_a_large_body_reaches_the_engine_without_a_copy() -> None:
    """The engine gets an aligned view of the received buffer, not a joined copy."""
    seen: list[np.ndarray] = []

    class Seeing(FakeEngine):
        def __call__(self, feeds):
            seen.append(feeds["x"])
            return super().__call__(feeds)

    rows = np.random.default_rng(0).random((1, 500_000), dtype=np.float32)
    with running({"m": Seeing(width=500_000)}, max_batch=1) as server:
        raw = server.connect()
        for name in ("", "a", "bb", "ccc"):  # the values then begin at any byte of the body
            assert raw.ask(binary_request(rows, id=name)).status == 200
            assert seen[-1].flags.aligned
            np.testing.assert_array_equal(seen[-1], rows)
            owner: Any = seen[-1]
            while getattr(owner, "base", None) is not None or isinstance(owner, memoryview):
                owner = owner.obj if isinstance(owner, memoryview) else owner.base
            assert owner.nbytes > rows.nbytes  # the buffer holds the JSON part too


def test_a_content_length_without_a_body_allocates_nothing() -> None:
    def rss_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    with running(max_body_bytes=1 << 30) as server:
        before = rss_bytes()
        for raw in [server.connect() for _ in range(20)]:
            raw.send(request("POST", INFER, Content_Length=str(1 << 30)) + b"{")
        assert server.ask("POST", INFER, ROW).status == 200
        assert rss_bytes() - before < 64 << 20


# -- large JSON: limited, read one at a time, and no delay for other clients


def in_work(server: Running, count: int, **headers: str) -> list[Raw]:
    """Clients whose large requests wait for a parser."""
    raws = [server.connect() for _ in range(count)]
    for raw in raws:
        raw.send(request("POST", INFER, gzip.compress(BIG, 1) if headers else BIG, **headers))
    return raws


@pytest.mark.parametrize("headers", [{}, {"Content_Encoding": "gzip"}], ids=["plain", "gzip"])
def test_small_requests_are_answered_while_large_ones_wait(headers: dict[str, str]) -> None:
    with serving() as server:
        with ONE_JSON:
            raws = in_work(server, 6, **headers)
            for accept in ("gzip, deflate, br", "identity", "*", "gzip;q=0"):
                assert server.ask("POST", SMALL, ROW, Accept_Encoding=accept).status == 200
            small = gzip.compress(ROW)
            assert server.ask("POST", SMALL, small, Content_Encoding="gzip").status == 200
            assert server.ask("GET", "/metrics").status == 200
            raws[0].send(GOOD + request("GET", "/v2/health/live"))
        assert [raw.status() for raw in raws] == [200] * 6
        assert raws[0].reply().json["outputs"][0]["data"] == [3, 5, 7, 9]  # in their order
        assert raws[0].reply().json == {"live": True}


def test_a_large_request_waits_for_its_time_limit_at_most(eventually: Eventually) -> None:
    with serving(timeout_ms=500) as server:
        with ONE_JSON:
            replies = [raw.reply() for raw in in_work(server, 4)]
        assert [reply.status for reply in replies] == [504] * 4
        assert "time limit" in replies[0].json["error"]
        eventually(lambda: held_bytes(server) == 0)


def test_the_clients_own_time_limit_includes_the_decoding() -> None:
    with serving() as server:
        body = infer_json([0.5] * WIDTH, [1, WIDTH], parameters={"timeout": 1})
        assert server.ask("POST", INFER, body).status == 504


def test_a_thread_that_cannot_start_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving() as server:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        packed = gzip.compress(ROW)
        assert server.ask("POST", INFER, BIG).status == 503
        assert server.ask("POST", SMALL, packed, Content_Encoding="gzip").status == 503
        assert server.ask("GET", "/metrics").status == 503
        assert server.ask("POST", SMALL, ROW).status == 200
        monkeypatch.undo()


@pytest.mark.parametrize("count", [1000, 150_000])
def test_an_answer_is_the_same_wherever_its_json_is_decoded(count: int) -> None:
    """On the event loop or in a thread, written in one part or in several."""
    body = infer_json([0.5] * count, [1, count])
    with serving() as server:
        plain = server.ask("POST", INFER, body)
        packed = {"Content_Encoding": "gzip", "Accept_Encoding": "gzip"}
        small = server.ask("POST", INFER, gzip.compress(body), **packed)
        wrong = server.ask("POST", INFER, infer_json([0.5] * count, [1, count + 1]))
    assert plain.status == 200
    assert plain.json["outputs"][0]["data"] == [2.0] * count
    assert gzip.decompress(small.body) == plain.body
    assert (wrong.status, f"'data' has {count}" in wrong.json["error"]) == (400, True)


@pytest.mark.parametrize("text", ["1", '{"a":1}'])
def test_json_of_more_values_than_a_parser_may_hold_is_refused(text: str) -> None:
    data = ",".join([text] * MOST_JSON_VALUES)
    body = infer_json("data", [1, 1]).replace(b'"data"}', b"[%s]}" % data.encode())
    with serving() as server:
        refused = server.ask("POST", INFER, body)
        packed = server.ask("POST", INFER, gzip.compress(body), Content_Encoding="gzip")
        values = np.ones((1, 2 * MOST_JSON_VALUES), np.float32)
        assert server.connect().ask(binary_request(values)).status == 200  # which have no limit
    assert (refused.status, packed.status) == (413, 413)
    assert f"more than {MOST_JSON_VALUES} values" in refused.json["error"]
    assert "binary_data_size" in refused.json["error"]


def test_a_body_being_decoded_at_shutdown_is_answered(eventually: Eventually) -> None:
    with serving() as server:
        with ONE_JSON:
            (raw,) = in_work(server, 1)
            eventually(lambda: server.server._listener.unanswered == 1)
            server.server.stop()
            eventually(lambda: server.server.repository.leaving)
        assert raw.status() == 200
        assert raw.ended()
        assert server.stop() == 0


# -- Compressed bodies, and content negotiation


PACK = {b"gzip": gzip.compress, b"deflate": zlib.compress}


@pytest.mark.parametrize("encoding", PACK, ids=str)
@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, LIMIT])
@pytest.mark.parametrize("noise", [False, True], ids=["zeros", "noise"])
def test_data_are_decompressed_unchanged_up_to_the_limit(
    encoding: bytes, size: int, noise: bool
) -> None:
    data = values("uint8", size).tobytes() if noise else bytes(size)
    packed = PACK[encoding](data)
    assert decompress(packed, encoding, size) == data
    assert decompress(memoryview(packed), encoding.upper(), LIMIT) == data
    with pytest.raises(TooLarge, match=f"above {size} bytes when decompressed") as caught:
        decompress(PACK[encoding](data + b"x"), encoding, size)
    assert "`max_body_bytes`" in (caught.value.hint or "")


def test_a_gzip_body_of_several_members_is_joined() -> None:
    body = b"".join(gzip.compress(part) for part in (b"ab", b"", b"c" * 70_000))
    assert decompress(body, b"gzip", LIMIT) == b"ab" + b"c" * 70_000
    with pytest.raises(TooLarge):
        decompress(body, b"gzip", 70_001)


def test_a_gzip_body_of_too_many_members_is_refused() -> None:
    with pytest.raises(BadInput, match="more than 256 parts"):
        decompress(gzip.compress(b"") * 100_000, b"gzip", LIMIT)


WHOLE, DEFLATED = gzip.compress(b"abc" * 1000), zlib.compress(b"abc")
BROKEN = {
    "empty": (b"", b"gzip"),
    "the last byte missing": (WHOLE[:-1], b"gzip"),
    "a wrong checksum": (WHOLE[:-8] + b"\0\0\0\0" + WHOLE[-4:], b"gzip"),
    "trailing bytes": (WHOLE + b"x", b"gzip"),
    "a second, cut member": (WHOLE + WHOLE[:-1], b"gzip"),
    "deflate called gzip": (DEFLATED, b"gzip"),
    "gzip called deflate": (WHOLE, b"deflate"),
    "deflate without zlib around it": (DEFLATED[2:-4], b"deflate"),
    "deflate twice": (DEFLATED * 2, b"deflate"),
}


@pytest.mark.parametrize(("body", "encoding"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_body_is_refused(body: bytes, encoding: bytes) -> None:
    with pytest.raises(BadInput, match=r"the body|bytes follow") as caught:
        decompress(body, encoding, LIMIT)
    assert caught.value.http_status == 400
    assert "Error -" not in caught.value.message


ACCEPTED = {
    b"gzip": (
        *(b"gzip", b"gzip, deflate, br, zstd", b"GZIP ; Q=1.000", b"br, gzip;q=0.001"),
        *(b"identity;q=0.5, gzip;q=0.5", b"identity;q=0, gzip;q=0.1"),
    ),
    b"deflate": (b"deflate", b"deflate, gzip;q=0.5"),
    None: (
        *(b"gzip;q=0", b"gzip;q=0.000, deflate;q=0", b"gzip;q=abc"),
        *(b"gzip;q=1.0001", b"gzip;q=-1", b"gzip;q=nan", b"gzip;q=\xb2", b"gzip;q=", b"*"),
        *(b"*;q=0", b"identity", b"br", b"", b",,;;=,q=1", b"\xff\0"),
    ),
}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [(accept, expected) for expected, each in ACCEPTED.items() for accept in each],
)
def test_the_answers_encoding_follows_accept_encoding(
    accept: bytes, expected: bytes | None
) -> None:
    assert choose_encoding(accept) == expected


@pytest.mark.parametrize("text", [b"gzip%bx", b"gzip;q=0.%bx"])
def test_a_long_accept_encoding_is_read_in_linear_time(text: bytes) -> None:
    """It is read on the event loop, before the token is checked."""
    started_s = time.process_time()
    for filling in (b" ", b"0", b"1"):
        assert choose_encoding(text % (filling * 20_000)) is None
    assert time.process_time() - started_s < 0.5
