"""Cached request heads: a repeated head is not parsed again, nor mistaken for another."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from deploykit.serving.http.head import HeadReader, HttpLimits
from deploykit.serving.transport.security import AccessControl, Guard
from tests.support.serving.running import Running, infer_json, request, running

LIVE = request("GET", "/v2/health/live")


def reader() -> HeadReader:
    return HeadReader(HttpLimits(), AccessControl(Guard(None), loopback=True), 1000)


def test_a_head_split_at_any_byte_is_parsed() -> None:
    for cut in range(len(LIVE) + 1):
        found = reader()
        used, head = found.feed(LIVE[:cut]) if cut else (0, None)
        if cut < len(LIVE):
            assert (used, head) == (cut, None)
            used, head = found.feed(LIVE[cut:] + b"the body")
            assert used == len(LIVE) - cut
        assert head is not None
        assert (head.method, head.path, head.refusal) == ("GET", "/v2/health/live", None)


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


def test_the_same_head_twice_gives_two_answers(server: Running) -> None:
    raw = server.connect()
    for _ in range(3):
        raw.send(LIVE + request("GET", "/v2/health/live", x="1") + LIVE)
        for _ in range(3):
            reply = raw.reply()
            assert reply.json == {"live": True}


@pytest.mark.parametrize("empty", [b"\r\n", b"\r\n\r\n"])
def test_empty_lines_before_a_request_are_skipped(server: Running, empty: bytes) -> None:
    raw = server.connect()
    raw.send(empty + LIVE + empty + LIVE)
    for _ in range(2):
        reply = raw.reply()
        assert reply.status == 200


def test_an_upgrade_header_is_ignored(server: Running) -> None:
    raw = server.connect()
    reply = raw.ask(request("GET", "/v2/health/live", Connection="Upgrade", Upgrade="h2c"))
    assert reply.status == 200


@pytest.mark.parametrize("blanks", [b" ", b"\t", b" \t  "])
@pytest.mark.parametrize(
    ("field", "status"),
    [
        (b"Host: localhost", 200),
        (b"Host: localhost\r\nOrigin: http://localhost", 200),
        (b"Host: localhost\r\nContent-Length: 0", 200),
        (b"Host: localhost\r\nAccept-Encoding: gzip", 200),
        (b"Host: localhost\r\nExpect: 100-continue", 200),
        (b"Host: localhost\r\nInference-Header-Content-Length: 0", 200),
        (b"Host: evil.example", 403),
    ],
)
def test_blanks_at_the_end_of_a_headers_value_do_not_count(
    server: Running, field: bytes, status: int, blanks: bytes
) -> None:
    raw = server.connect()
    reply = raw.ask(b"GET /v2/health/live HTTP/1.1\r\n" + field + blanks + b"\r\n\r\n")
    assert reply.status == status


@pytest.mark.parametrize("end", ["", " ", "\t"])
def test_blanks_after_the_fields_of_an_inference_do_not_count(server: Running, end: str) -> None:
    packed = gzip.compress(infer_json([1, 2, 3, 4], [1, 4]))
    fields = {"Content_Encoding": "gzip", "Accept_Encoding": "gzip", "Accept": "*/*"}
    sent = {name: value + end for name, value in fields.items()}
    reply = server.ask("POST", "/v2/models/m/infer", packed, **sent)
    assert reply.status == 200
    assert reply.headers["content-encoding"] == "gzip"
    raw = np.ones(4, np.float32).tobytes()
    length = {"Inference-Header-Content-Length": "0" + end}
    assert server.ask("POST", "/v2/models/m/infer", raw, **length).status == 200


@pytest.mark.parametrize(
    ("target", "host", "status", "path"),
    [
        ("http://localhost/v2/health/live", "localhost", 200, "/v2/health/live"),
        ("HTTP://LOCALHOST:8000/v2/health/live", "localhost", 200, "/v2/health/live"),
        ("https://127.0.0.1/v2/health/live?x=http://a/b", "", 200, "/v2/health/live"),
        ("http://localhost/v2/health/live", "evil.example", 200, "/v2/health/live"),
        ("http://evil.example/v2/health/live", "localhost", 403, "/v2/health/live"),
        ("http://localhost", "localhost", 200, "/"),
        ("http://localhost?/v2/health/live", "localhost", 200, "/"),
        ("http://me@localhost/v2/health/live", "localhost", 404, ""),
        ("http:///v2/health/live", "localhost", 404, ""),
        ("ftp://localhost/v2/health/live", "localhost", 404, ""),
        ("http://localhost//v2/health/live", "localhost", 404, "//v2/health/live"),
        ("http://localhost/%2e%2e/v2", "localhost", 404, "/%2e%2e/v2"),
        ("http://localhost\\@evil.example/v2/health/live", "localhost", 404, ""),
    ],
)
def test_a_target_may_be_a_url_whose_host_counts(
    server: Running, target: str, host: str, status: int, path: str
) -> None:
    """RFC 9112, 3.2.2."""
    assert server.ask("GET", target, Host=host).status in (status, 400 if status == 404 else status)
    _, head = reader().feed(request("GET", target, Host=host))
    assert head is not None
    if path and head.refusal is None:
        assert head.path == path


def test_a_request_that_is_not_http_1_0_needs_a_host_even_with_a_url(server: Running) -> None:
    for version, status in (("1.1", 400), ("1.0", 200)):
        raw = server.connect()
        reply = raw.ask(f"GET http://localhost/v2/health/live HTTP/{version}\r\n\r\n".encode())
        assert reply.status == status


def test_a_url_as_the_target_does_not_get_around_the_token() -> None:
    with running(token="0123456789abcdef") as server:
        assert server.ask("GET", "http://localhost/v2").status == 401
        assert server.ask("GET", "http://localhost/v2/health/live").status == 200
        assert server.ask("GET", "http://localhost?/v2/health/../../v2").status == 200  # the page
