"""Malformed and hostile HTTP/2: each gets the error that the standard names."""

from __future__ import annotations

import contextlib
import zlib

import pytest

from deploykit.serving.http2.connection import Http2Limits
from deploykit.serving.transport import listener as places
from tests.support.serving.grpc_cases import (
    CALM,
    INVALID_ARGUMENT,
    LIVE,
    PROTOCOL_ERROR,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    Answer,
    Frames,
    Serving,
    first_value,
    frames,
    infer_bytes,
    serving,
)


def test_a_message_of_exactly_the_size_limit_is_accepted() -> None:
    size = len(infer_bytes())
    with serving(max_body_bytes=size) as running, frames(running.port) as client:
        assert client.call(1, infer_bytes(value=2)).status == 0
        refused = client.call(3, infer_bytes(value=2, id="a"))  # three bytes more
        assert refused.status == RESOURCE_EXHAUSTED
        assert "`max_body_bytes`" in refused.headers["grpc-message"]


def test_a_message_above_the_limit_is_refused_before_it_arrives(client: Frames) -> None:
    client.open(1)
    client.send(0, 0, 1, b"\0" + (1 << 31).to_bytes(4, "big"))
    refused = client.answer(1)
    assert refused.status == RESOURCE_EXHAUSTED
    client.until(lambda: refused.reset is not None)
    assert refused.reset == 0
    client.send(0, 1, 1, b"late data")  # it was already under way
    assert client.call(3, infer_bytes()).status == 0


def test_unknown_methods_are_unimplemented(client: Frames) -> None:
    for stream, path in enumerate(("/inference.GRPCInferenceService/Nothing", "/", "x" * 9000)):
        answer = client.call(2 * stream + 1, b"", path)
        assert answer.status == UNIMPLEMENTED
    client.open(7, **{":method": "GET"}, flags=5)
    assert client.answer(7).status == UNIMPLEMENTED
    assert client.call(9, b"\xff", LIVE).status == INVALID_ARGUMENT


def test_unary_calls_need_exactly_one_whole_message(client: Frames) -> None:
    client.open(1, flags=5)
    assert "no message" in client.answer(1).headers["grpc-message"]
    client.open(3)
    client.send(0, 1, 3, b"\0\0\0\0\7abc")
    assert "ends after 8 of 12 bytes" in client.answer(3).headers["grpc-message"]
    client.start(5, infer_bytes(), end=False)
    client.message(5, infer_bytes())
    assert "more than one message" in client.answer(5).headers["grpc-message"]
    assert [client.answers[n].status for n in (1, 3, 5)] == [INVALID_ARGUMENT] * 3


def test_a_message_in_padded_frames_of_one_byte_is_read(client: Frames) -> None:
    data = infer_bytes(value=5)
    data = b"\0" + len(data).to_bytes(4, "big") + data
    client.open(1)
    for at in range(len(data)):
        client.send(0, 8 | (at == len(data) - 1), 1, b"\3" + data[at : at + 1] + b"\0\0\0")
    assert first_value(client.answer(1)) == 11


def test_equal_header_blocks_are_decoded_with_the_current_dynamic_table(client: Frames) -> None:
    """`be` is the first entry of the dynamic table; a new entry moves it."""
    start = client.encoder.encode([(":method", "POST"), (":scheme", "http")])
    grpc = b"\x0f\x10\x10application/grpc"  # content-type, not added to the table

    def ask(stream: int, block: bytes) -> int | None:
        client.send(1, 4, stream, block)
        client.message(stream, b"")
        return client.answer(stream).status

    def newest(path: str) -> bytes:
        return b"\x44" + bytes([len(path)]) + path.encode()  # :path, added to the table

    assert ask(1, start + newest(LIVE) + grpc) == 0
    plain = b"\x83\x86\xbe" + grpc
    assert ask(3, plain) == 0
    assert ask(5, plain) == 0
    assert ask(7, b"\x83\x86" + newest("/no/such") + grpc) == UNIMPLEMENTED
    assert ask(9, plain) == UNIMPLEMENTED
    assert ask(11, b"\x83\x86\xbf" + grpc) == 0


def test_too_many_headers_and_a_malformed_timeout_are_refused(client: Frames) -> None:
    refused = client.call(1, infer_bytes(), **{f"h{n}": "x" for n in range(120)})
    assert refused.status == RESOURCE_EXHAUSTED
    assert "more than 100 headers" in refused.headers["grpc-message"]
    refused = client.call(3, infer_bytes(), grpc_timeout="1x")
    assert refused.status == INVALID_ARGUMENT
    assert "'1x'" in refused.headers["grpc-message"]


def test_rapid_reset_closes_the_connection_and_empties_the_queue() -> None:
    """CVE-2023-44487."""
    data = infer_bytes()
    limits = Http2Limits(empty_frames=100)
    with serving(limits=limits) as running, frames(running.port) as client:
        with contextlib.suppress(ConnectionError):
            for stream in range(1, 20_001, 2):
                client.start(stream, data)
                client.cancel(stream)
        assert client.closed()
        assert client.goaway == CALM
        assert running.see(lambda: running.grpc.unanswered) == 0


def test_a_stream_above_the_limit_is_refused() -> None:
    with serving(limits=Http2Limits(streams=3)) as running, frames(running.port) as client:
        for stream in (1, 3, 5, 7):
            client.open(stream)
        client.until(lambda: 7 in client.answers)
        assert client.answers[7].reset == 7  # REFUSED_STREAM: it may be tried again
        client.message(1, infer_bytes())
        assert client.answer(1).status == 0
        assert client.call(9, infer_bytes()).status == 0


def compressed(client: Frames, stream: int, data: bytes, encoding: str) -> Answer:
    client.start(stream, data, compressed=1, grpc_encoding=encoding)
    return client.answer(stream)


def test_a_compressed_message_above_the_limit_is_refused() -> None:
    with serving(max_body_bytes=100_000) as running, frames(running.port) as client:
        bomb = zlib.compress(bytes(50_000_000), 9)
        refused = compressed(client, 1, bomb, "deflate")
        assert refused.status == RESOURCE_EXHAUSTED
        good = compressed(client, 3, zlib.compress(infer_bytes(value=4)), "deflate")
        assert first_value(good) == 9
        assert compressed(client, 5, b"abc", "deflate").status == INVALID_ARGUMENT
        assert compressed(client, 7, b"abc", "zstd").status == UNIMPLEMENTED
        assert compressed(client, 9, b"abc", "identity").status == INVALID_ARGUMENT


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" + bytes(40),
        b"PRI * HTTP/3",
    ],
)
def test_a_client_that_does_not_speak_http2_is_disconnected(served: Serving, hello: bytes) -> None:
    with frames(served.port, greet=False) as client:
        client.socket.sendall(hello)
        assert client.closed()
        assert client.goaway == PROTOCOL_ERROR


def test_a_connection_above_the_limit_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_IDLE_S", 1e9)
    limits = Http2Limits(connections=2)
    with serving(limits=limits) as running, frames(running.port) as a, frames(running.port) as b:
        assert a.call(1, infer_bytes()).status == 0
        assert b.call(1, infer_bytes()).status == 0
        with frames(running.port, greet=False) as c:
            assert c.closed()
            assert c.goaway == CALM
            assert "2 connections" in c.about
        assert a.call(3, infer_bytes()).status == 0
