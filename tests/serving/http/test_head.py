"""HTTP/1.1: order, limits, malformed messages, and heads that are found in the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from deploykit.serving.http.head import HttpLimits
from tests.support.serving.running import (
    WAIT_S,
    GatedEngine,
    Running,
    infer_json,
    request,
    running,
)

INFER = "/v2/models/m/infer"
Gated = tuple[Running, GatedEngine]
LIVE = request("GET", "/v2/health/live")
CHUNKED = request("POST", INFER, Transfer_Encoding="chunked")


def numbered(value: float) -> bytes:
    return request("POST", INFER, infer_json([value] * 4, [1, 4]))


@pytest.fixture
def gated() -> Iterator[tuple[Running, GatedEngine]]:
    engine = GatedEngine()
    with running({"m": engine}, queue=4) as server:
        engine.warm = True
        try:
            yield server, engine
        finally:
            engine.gate.set()


def chunks(body: bytes) -> bytes:
    pieces = [body[at : at + 9] for at in range(0, len(body), 9)]
    return b"".join(b"%x;a=b\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


OLD = b"GET /v2/health/live HTTP/1.0\r\n"
CLOSED = {"connection": "close"}
REPEATED = [  # two headers, status of the reply
    ("Accept: a/b", "Accept: c/d", 200),
    ("Content-Encoding: identity", "Content-Encoding: identity", 200),
    ("Content-Type: application/json", "Content-Type: application/json", 200),
    ("Content-Type: application/json", "Content-Type: text/plain", 400),
    ("Authorization: Bearer a", "Authorization: Bearer a", 200),
    ("Authorization: Bearer a", "Authorization: Bearer b", 400),
    ("Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",) * 2 + (200,),
    ("Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Traceparent: x", 200),
    ("Origin: http://localhost", "Origin: http://localhost", 200),
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
    ("ftp://localhost/v2/health/live", "localhost", 404),
    ("http://localhost/%2e%2e/v2", "localhost", 404),
    ("http://localhost\\@evil.example/v2/health/live", "localhost", 400),
    ("/v2/%68ealth/live", "localhost", 200),
    ("/v2/models/%6d%2Fconfig", "localhost", 404),
]
BLANKS = [  # at the end of a header's value, which do not count
    ("Origin: http://localhost", 200),
    ("Content-Length: 0", 200),
    ("Inference-Header-Content-Length: 0", 200),
    ("Origin: http://evil.example", 403),
]


def headed(*fields: str) -> bytes:
    body = infer_json([1, 2, 3, 4], [1, 4])
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
    "chunks": (CHUNKED + chunks(infer_json([1, 2, 3, 4], [1, 4])) + LIVE, 200, 200),
    "trailers": (CHUNKED + b"0\r\nDigest: x\r\n\r\n" + LIVE, 400, 200),
    "a body of GET": (request("GET", "/v2/health/live", b"abc") + LIVE, 200, 200),
    "an empty line": (b"\r\n" + LIVE + b"\r\n" + LIVE, 200, 200),
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


def test_pipelined_requests_are_answered_in_order(gated: Gated) -> None:
    server, engine = gated
    raw = server.connect()
    raw.send(numbered(1) + LIVE + numbered(2) + request("GET", "/nope"))
    assert engine.entered.acquire(timeout=WAIT_S)  # all but the last could be answered by now
    engine.gate.set()
    replies = [raw.reply() for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 200, 404]
    assert replies[0].json["outputs"][0]["data"][0] == 3
    assert replies[1].json == {"live": True}
    assert replies[2].json["outputs"][0]["data"][0] == 5


def test_expect_100_continue_is_answered_before_the_body(server: Running) -> None:
    body = infer_json([1, 2, 3, 4], [1, 4])
    raw = server.connect()
    raw.send(request("POST", INFER, Content_Length=str(len(body)), Expect="100-continue"))
    assert raw.status() == 100
    raw.send(body)
    assert raw.status() == 200


@pytest.mark.parametrize(
    ("options", "pieces", "expected"),
    [
        ({}, (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nlong: ", b"a" * 100_000), 431),
        ({"limits": HttpLimits(chunks=100)}, (CHUNKED + b"1\r\na\r\n" * 101,), 413),
        ({"limits": HttpLimits(header_bytes=1000)}, (CHUNKED + b"0\r\nx: ", b"a" * 5000), 413),
    ],
    ids=["an endless header", "too many chunks", "an endless trailer"],
)
def test_a_malformed_message_is_refused_and_its_connection_closed(
    options: dict[str, HttpLimits], pieces: tuple[bytes, ...], expected: int
) -> None:
    with running(**options) as server:
        raw = server.connect()
        for piece in pieces:
            raw.send(piece)
        reply = raw.reply()
        assert (reply.status, reply.headers["connection"]) == (expected, "close")
        assert raw.ended()
        assert server.ask("POST", INFER, infer_json([1, 2, 3, 4], [1, 4])).status == 200


def test_a_body_of_exactly_the_limit_is_read(server: Running) -> None:
    reply = server.ask("POST", INFER, b" " * 100_000)
    assert reply.status == 400
    assert "not valid JSON" in reply.json["error"]


def test_a_full_queue_gets_503_at_once(
    gated: Gated, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    server, engine = gated
    raws = [server.connect() for _ in range(6)]
    raws[0].send(numbered(0))
    assert engine.entered.acquire(timeout=WAIT_S)
    for raw in raws[1:5]:
        raw.send(numbered(1))
    eventually(lambda: server.server.repository.models["m"].waiting == 4)
    reply = raws[5].ask(numbered(2))
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    assert "queue of model 'm' is full" in reply.json["error"]
    engine.gate.set()
    assert [raw.status() for raw in raws[:5]] == [200] * 5


def test_a_request_that_times_out_gets_504_while_the_engine_is_busy(gated: Gated) -> None:
    server, engine = gated
    busy, late = server.connect(), server.connect()
    busy.send(numbered(0))
    assert engine.entered.acquire(timeout=WAIT_S)
    late.send(request("POST", INFER, infer_json([7] * 4, [1, 4], parameters={"timeout": 1000})))
    assert late.status() == 504
    engine.gate.set()
    assert busy.status() == 200
    assert 7 not in engine.fed


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
