"""Cached request heads: a repeated head is not parsed again, nor mistaken for another."""

from __future__ import annotations

import pytest

from deploykit.serving.http.head import HeadReader, Limits
from deploykit.serving.transport.security import AccessControl, Guard
from tests.support.serving.running import Running, request

LIVE = request("GET", "/v2/health/live")


def reader() -> HeadReader:
    return HeadReader(Limits(), AccessControl(Guard(None), loopback=True), 1000)


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
    raw.send(inside)
    first = raw.reply()
    assert first is not None
    assert first.json == {"live": True}
    raw.send(inside)
    second = raw.reply()
    assert second is not None
    assert second.json[0]["name"] == "m"


def test_the_same_head_twice_gives_two_answers(server: Running) -> None:
    raw = server.connect()
    for _ in range(3):
        raw.send(LIVE + request("GET", "/v2/health/live", x="1") + LIVE)
        for _ in range(3):
            reply = raw.reply()
            assert reply is not None
            assert reply.json == {"live": True}


@pytest.mark.parametrize("empty", [b"\r\n", b"\r\n\r\n"])
def test_empty_lines_before_a_request_are_skipped(server: Running, empty: bytes) -> None:
    raw = server.connect()
    raw.send(empty + LIVE + empty + LIVE)
    for _ in range(2):
        reply = raw.reply()
        assert reply is not None
        assert reply.status == 200


def test_an_upgrade_header_is_ignored(server: Running) -> None:
    raw = server.connect()
    raw.send(request("GET", "/v2/health/live", Connection="Upgrade", Upgrade="h2c"))
    reply = raw.reply()
    assert reply is not None
    assert reply.status == 200
