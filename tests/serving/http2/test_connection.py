"""What RFC 9113 asks of a server, section by section, and what bounds a connection."""

from __future__ import annotations

import contextlib
import logging
import random
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hpack
import pytest

from deploykit.serving import http2 as connection
from deploykit.serving.grpc import call
from deploykit.serving.http2 import CLOSED as IS_CLOSED
from deploykit.serving.http2 import IN_HEADERS, PREFACE, Http2Limits
from deploykit.serving.transport import connection as places
from tests.support.campaign import rounds
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    INFER,
    INVALID_ARGUMENT,
    LIVE,
    RESOURCE_EXHAUSTED,
    STREAM,
    UNIMPLEMENTED,
    Answer,
    Frames,
    Serving,
    first_value,
    frames,
    infer_bytes,
    packed,
    serving,
)
from tests.support.serving.wired import Wired, block

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
PROTOCOL, FLOW_CONTROL, FRAME_SIZE, COMPRESSION, CALM = 1, 3, 6, 9, 11
END_HEADERS, END, PADDED = 4, 1, 8
EMPTY = bytes(5)  # a whole gRPC message without content
WINDOW_MOST = b"\x7f\xff\xff\xff"
OPEN = (HEADERS, END_HEADERS, 1, block())
ASK = (HEADERS, END_HEADERS | END, 1, block())
WHOLE = [OPEN, (DATA, END, 1, EMPTY)]  # a call that is answered

ENDS_THE_CONNECTION: dict[str, tuple[Any, int]] = {
    **{
        f"3.4 {hello[:14]!r}": (hello, PROTOCOL)
        for hello in (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01" + bytes(40),
            b"PRI * HTTP/3",
        )
    },
    "4.2 DATA above the frame size": ([OPEN, (DATA, 0, 1, bytes(16385))], FRAME_SIZE),
    "4.2 HEADERS above the frame size": ([(HEADERS, 4, 1, bytes(16385))], FRAME_SIZE),
    "4.3 a header block that is not HPACK": ([(HEADERS, 4, 1, b"\x80")], COMPRESSION),
    "4.3 PRIORITY within a block": ([(HEADERS, 0, 1, b""), (PRIORITY, 0, 1, EMPTY)], PROTOCOL),
    "4.3 an unknown type within a block": ([(HEADERS, 0, 1, b""), (99, 0, 0, b"")], PROTOCOL),
    "5.1 DATA on an idle stream": ([(DATA, END, 1, EMPTY)], PROTOCOL),
    "5.1 DATA on an idle stream of the server": ([(DATA, END, 2, EMPTY)], PROTOCOL),
    "5.1 RST_STREAM on an idle stream": ([(RST_STREAM, 0, 1, bytes(4))], PROTOCOL),
    "5.1 RST_STREAM on a stream of the server": ([*WHOLE, (RST_STREAM, 0, 0, EMPTY[:4])], PROTOCOL),
    "5.1 WINDOW_UPDATE on an idle stream": ([(WINDOW_UPDATE, 0, 1, b"\0\0\0\1")], PROTOCOL),
    "5.1.1 a stream with an even number": ([(HEADERS, 5, 2, block())], PROTOCOL),
    "6.1 padding as long as the frame": ([OPEN, (DATA, PADDED, 1, b"\5" + EMPTY[:4])], PROTOCOL),
    "6.2 padding above the frame": ([(HEADERS, 4 | PADDED, 1, b"\x7f" + block()[:90])], PROTOCOL),
    **{
        f"6 a frame {kind} of {size} bytes": ([OPEN, (kind, 0, number, bytes(size))], FRAME_SIZE)
        for kind, number, size in (
            *((PRIORITY, 1, 4), (RST_STREAM, 1, 3), (SETTINGS, 0, 5), (PING, 0, 9)),
            (WINDOW_UPDATE, 0, 3),
        )
    },
    **{
        f"6 a frame {kind} on stream {number}": ([(kind, 4, number, bytes(size))], PROTOCOL)
        for number, frames in ((0, ((DATA, 5), (HEADERS, 9), (RST_STREAM, 4))),)
        for kind, size in frames
    },
    "6.5.2 a window above the maximum": ([(SETTINGS, 0, 0, b"\0\4\x80\0\0\0")], FLOW_CONTROL),
    "6.5.2 a frame size below the minimum": ([(SETTINGS, 0, 0, b"\0\5\0\0\x3f\xff")], PROTOCOL),
    "6.9.1 too large a window": ([(WINDOW_UPDATE, 0, 0, WINDOW_MOST)], FLOW_CONTROL),
    "6.9.1 too large a window of a stream": (
        [OPEN, (WINDOW_UPDATE, 0, 1, WINDOW_MOST)],
        FLOW_CONTROL,
    ),
    "6.9.2 SETTINGS that make a window too large": (
        [OPEN, (WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), (SETTINGS, 0, 0, b"\0\4" + WINDOW_MOST)],
        FLOW_CONTROL,
    ),
    "6.10 CONTINUATION on stream 0": ([(HEADERS, 0, 1, b""), (CONTINUATION, 4, 0, b"")], PROTOCOL),
    "6.10 CONTINUATION after END_HEADERS": ([OPEN, (CONTINUATION, 4, 1, b"")], PROTOCOL),
    "8.1 second HEADERS that end nothing": ([OPEN, (HEADERS, 4, 1, block())], PROTOCOL),
    "HPACK 2.3.3 an index beyond the table": ([(HEADERS, 4, 1, b"\xff\x20")], COMPRESSION),
    **{
        f"HPACK 5.1 {data.hex()}": ([(HEADERS, 4, 1, data)], COMPRESSION)
        for data in (b"\xff" * 6, b"\xc5", b"\x40", b"\x3f\xff\x7f")
    },
    # one large entry of the dynamic table, then one byte for each reference to it
    "HPACK 7.3 megabytes when decompressed": (
        [(HEADERS, 4, 1, b"\x40\x01a\x7f\x81\x1e" + b"x" * 4000 + b"\xbe" * 10_000)],
        COMPRESSION,
    ),
    "HPACK 4.2 many table sizes": ([(HEADERS, 4, 1, b"\x20" * 3 + block())], COMPRESSION),
    "HPACK 5.2 a string with wrong padding": (
        [(HEADERS, 4, 1, b"\0\x81\x1f\x84\xff\xff\xff\xff")],
        COMPRESSION,
    ),
    "HPACK 6.3 a table above the limit": ([(HEADERS, 4, 1, b"\x3f\xe2\x1f")], COMPRESSION),
    "10.5 many settings in a frame": ([(SETTINGS, 0, 0, b"\0\4\0\0\0\1" * 2500)], CALM),
    "10.5 a megabyte in a header block": (
        [
            (HEADERS, 0, 1, b"\x00\x01a" + b"\x7f" * 16000),
            *[(CONTINUATION, 0, 1, bytes(16000))] * 64,
        ],
        CALM,
    ),
    **{
        f"10.5 many {name}": ([*first, *[frame] * 8000], CALM)
        for name, first, frame in (
            ("SETTINGS", [], (SETTINGS, 0, 0, b"\0\4\0\0\0\1")),
            ("PING", [], (PING, 0, 0, bytes(8))),
            ("PRIORITY", [], (PRIORITY, 0, 1, bytes(5))),
            ("CONTINUATION", [(HEADERS, 0, 1, b"")], (CONTINUATION, 0, 1, b"\x82")),
            ("empty CONTINUATION", [(HEADERS, 0, 1, b"\x82")], (CONTINUATION, 0, 1, b"")),
            ("SETTINGS with ACK", [], (SETTINGS, 1, 0, b"")),
            ("GOAWAY", [], (GOAWAY, 0, 0, bytes(8))),
            ("unknown frames", [], (99, 0, 0, b"")),
            ("small windows", [], (WINDOW_UPDATE, 0, 0, b"\0\0\0\1")),
            ("empty DATA after the end", WHOLE, (DATA, END, 1, b"")),
            ("HEADERS after the end", WHOLE, ASK),
        )
    },
    "10.5 many refused calls": (
        [(HEADERS, 5, n, block(path="/none")) for n in range(1, 16000, 2)],
        CALM,
    ),
}

RESETS_THE_STREAM: dict[str, Any] = {
    **{
        f"8.2 {name!r}: {value!r}": block((name, value))
        for name, value in (
            (b"X-Name", b"a"),
            (b"x name", b"a"),
            (b"x:name", b"a"),
            (b"", b"a"),
            (b"x-name", b"a\nb"),
            (b"x-name", b"a\0b"),
            (b"x-name", b" a"),
            (b"x-name", b"a\t"),
            (b"connection", b"keep-alive"),
            (b"transfer-encoding", b"chunked"),
            (b":authority", b"a"),  # after a header
        )
    },
    "8.2.2 te that is not trailers": block((b"te", b"gzip"), without=b"te"),
    "8.3 an unknown pseudo-header": b"\0\x05:test\1a" + block(),
    "8.3 a pseudo-header of a response": b"\0\x07:status\x03200" + block(),
    **{f"8.3.1 no {name!r}": block(without=name) for name in (b":method", b":scheme", b":path")},
    "8.3.1 an empty :path": block(path=""),
    "8.3.1 two :method": b"\x83" + block(),
    "8.3.1 two :scheme": b"\x86" + block(),
    "8.3.1 two :path": b"\x84" + block(),
}

IS_ANSWERED: dict[str, list[Any]] = {
    "4.1 an unknown type": [(99, 0, 0, b"x"), *WHOLE],
    "6.6 PUSH_PROMISE, which is ignored": [(PUSH_PROMISE, 4, 1, bytes(9)), *WHOLE],
    "4.1 an unknown flag": [(PING, 0xFE, 0, bytes(8)), (HEADERS, 0x54, 1, block()), WHOLE[1]],
    "4.1 the reserved bit": [(HEADERS, 4, 1 | 1 << 31, block()), (DATA, END, 1, EMPTY)],
    "4.2 DATA of the largest size": [OPEN, (DATA, END, 1, b"\0\0\0\x3f\xfb" + bytes(16379))],
    "5.1 PRIORITY on an idle stream": [(PRIORITY, 0, 7, EMPTY), *WHOLE],
    "5.1 WINDOW_UPDATE and RST_STREAM on an ended stream": [
        *WHOLE,
        (WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
        (RST_STREAM, 0, 1, bytes(4)),
    ],
    "5.1 DATA and HEADERS on an ended stream": [*WHOLE, (DATA, 0, 1, EMPTY), ASK],
    "6.5.2 unknown settings": [(SETTINGS, 0, 0, b"\0\x63\0\0\0\1"), *WHOLE],
    "6.5.3 several windows": [(SETTINGS, 0, 0, b"\0\4\0\0\0\0\0\4\0\0\xff\xff"), *WHOLE],
    "6.10 a block in many frames, padded and with a priority": [
        (HEADERS, PADDED | 32, 1, b"\2" + b"\0\0\0\0\7" + block()[:3] + b"\0\0"),
        *[(CONTINUATION, 0, 1, block()[at : at + 1]) for at in range(3, len(block()))],
        (CONTINUATION, END_HEADERS, 1, b""),
        WHOLE[1],
    ],
    "7 unknown error codes": [(GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff"), *WHOLE],
    "8.1 trailers": [OPEN, (DATA, 0, 1, EMPTY), (HEADERS, 5, 1, b"\0\1x\1y")],
    "8.3.1 an empty :authority": [(HEADERS, 4, 1, b"\0\x0a:authority\0" + block()), WHOLE[1]],
    "HPACK 4.2 two table sizes": [(HEADERS, 4, 1, b"\x20\x3f\xe1\x1f" + block()), WHOLE[1]],
}


def send(client: Frames, sent: list[Any]) -> None:
    with contextlib.suppress(ConnectionError):  # it need not read all of it
        client.socket.sendall(b"".join(packed(*frame) for frame in sent))


@pytest.mark.parametrize("name", ENDS_THE_CONNECTION)
def test_a_connection_error_ends_the_connection_with_its_code(served: Serving, name: str) -> None:
    sent, code = ENDS_THE_CONNECTION[name]
    with frames(served.port, greet=isinstance(sent, list)) as client:
        if isinstance(sent, bytes):
            client.socket.sendall(sent)
        else:
            send(client, sent)
        assert client.closed()
        assert client.goaway == code
        assert client.about


@pytest.mark.parametrize("name", RESETS_THE_STREAM)
def test_malformed_headers_reset_their_stream_only(client: Frames, name: str) -> None:
    send(client, [(HEADERS, END_HEADERS, 1, RESETS_THE_STREAM[name]), (DATA, END, 1, EMPTY)])
    client.until(lambda: 1 in client.answers)
    assert client.answers[1].reset == PROTOCOL
    assert client.call(3, b"", LIVE).status == 0


@pytest.mark.parametrize("name", IS_ANSWERED)
def test_what_the_standard_allows_is_answered(client: Frames, name: str) -> None:
    send(client, IS_ANSWERED[name])
    assert client.answer(1).ended
    assert client.call(9, b"", LIVE).status == 0


def test_a_ping_is_answered_with_its_content_and_its_answer_is_not(client: Frames) -> None:
    send(client, [(PING, 0, 0, b"abcdefgh"), (PING, 1, 0, b"an echo!")])
    client.settle()
    client.settle()
    assert client.pongs[:2] == [b"abcdefgh", b"12345678"]


def test_a_window_that_settings_make_negative_is_respected(client: Frames) -> None:
    """RFC 9113, section 6.9.2: nothing is sent until the window is above 0 again."""
    send(client, [(SETTINGS, 0, 0, b"\0\4\0\0\0\3"), *WHOLE])
    client.until(lambda: 1 in client.answers and len(client.answers[1].data) == 3)
    send(client, [(SETTINGS, 0, 0, b"\0\4\0\0\0\1"), (WINDOW_UPDATE, 0, 1, b"\0\0\0\2")])
    client.settle()
    assert len(client.answers[1].data) == 3
    send(client, [(WINDOW_UPDATE, 0, 1, b"\0\0\0\1")])
    client.settle()
    assert len(client.answers[1].data) == 4
    send(client, [(WINDOW_UPDATE, 0, 1, b"\0\0\1\0")])
    assert client.answer(1).status == 0


def test_data_sent_before_the_client_knows_of_a_refusal_are_ignored(client: Frames) -> None:
    client.open(1, content_type="text/html")
    send(client, [(DATA, 0, 1, bytes(16384))] * 64)  # all that the window allows
    client.send(HEADERS, END_HEADERS | END, 1, b"\0\1x\1y")
    assert client.answer(1).headers[":status"] == "415"
    assert client.call(3, b"", LIVE).status == 0


TAKEN = ("application/grpc", "application/grpc+proto", "Application/gRPC; charset=utf-8")
NOT_TAKEN = "foo -web -web+proto +json +proto2 ,application/grpc"  # after application/grpc


@pytest.mark.parametrize(
    "content_type", [*TAKEN, "", *(f"application/grpc{end}" for end in NOT_TAKEN.split())]
)
def test_only_protobuf_is_taken_for_protobuf(client: Frames, content_type: str) -> None:
    answer = client.call(1, b"", LIVE, content_type=content_type)
    assert answer.headers[":status"] == ("200" if content_type in TAKEN else "415")
    assert answer.status == (0 if content_type in TAKEN else 12)


@pytest.mark.parametrize("timeout", ["1u", "1n", "0u", "0H"])
@pytest.mark.parametrize("path", [LIVE, INFER])
def test_a_call_whose_deadline_has_passed_is_not_answered(
    client: Frames, timeout: str, path: str
) -> None:
    message = infer_bytes() if path == INFER else b""
    assert client.call(1, message, path, grpc_timeout=timeout).status == 4


def test_any_frames_are_answered_or_end_the_connection() -> None:
    """No error inside the server, nothing left behind: a million inputs in a campaign."""
    chance = random.Random(9113)
    ended = [row for row, _ in ENDS_THE_CONNECTION.values() if isinstance(row, list)]
    rows = [*ended, *IS_ANSWERED.values()]
    rows += [[(HEADERS, END_HEADERS, 1, headers)] for headers in RESETS_THE_STREAM.values()]
    echo = block(path="/echo")
    known = [each for row in rows for each in row[:9] if len(each[3]) < 200]
    known += [(HEADERS, flags, n, echo) for flags in (0, 1, 4, 5) for n in (1, 3, 5)]
    known += [(DATA, flags, n, b"\0\0\0\0\3abc") for flags in (0, END) for n in (1, 3, 5)]
    inputs, most = 0, rounds(3_000, 1_000_000)
    while inputs < most:
        wired = Wired()
        wired.feed(PREFACE + packed(SETTINGS, 0, 0))
        while wired.connection.phase is not IS_CLOSED and chance.random() < 0.99:
            data = bytearray(packed(*chance.choice(known)))
            while chance.random() < 0.15:
                data[chance.randrange(len(data))] = chance.choice(
                    (0, 1, 255, chance.randrange(256))
                )
            cut = chance.randrange(len(data) + 1) if chance.random() < 0.2 else 0
            wired.feed(bytes(data[:cut]))
            wired.feed(bytes(data[cut:]))
            inputs += 1
            if chance.random() < 0.05:
                wired.tick()
        assert b"an error inside the server" not in wired.wire.take()
        if wired.connection.phase is IS_CLOSED:
            assert wired.wire.closed
        wired.close()
        assert (wired.memory.bytes, wired.shared.open_streams) == (0, 0)


# -- what bounds a connection


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
    limits = Http2Limits(empty_frames=100)
    with serving(limits=limits) as running, frames(running.port) as client:
        with contextlib.suppress(ConnectionError):
            for stream in range(1, 20_001, 2):
                client.start(stream, infer_bytes())
                client.cancel(stream)
        assert client.closed()
        assert client.goaway == CALM
        assert running.see(lambda: running.grpc.unanswered) == 0


def test_a_compressed_message_above_the_limit_or_of_another_coding_is_refused() -> None:
    good = zlib.compress(infer_bytes(value=4))
    with serving(max_body_bytes=100_000) as running, frames(running.port) as client:
        for stream, data, encoding, status in (
            (1, zlib.compress(bytes(50_000_000), 9), "deflate", RESOURCE_EXHAUSTED),
            (3, b"abc", "deflate", INVALID_ARGUMENT),
            (5, b"abc", "zstd", UNIMPLEMENTED),
            (7, b"abc", "identity", INVALID_ARGUMENT),
        ):
            assert client.call(stream, data, compressed=1, grpc_encoding=encoding).status == status
        assert first_value(client.call(9, good, compressed=1, grpc_encoding="deflate")) == 9


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


def test_more_data_than_the_window_allows_closes_the_connection(client: Frames) -> None:
    client.open(1)
    client.send(0, 0, 1, b"\0" + (4 << 20).to_bytes(4, "big") + bytes(1000))
    client.until(lambda: 1 in client.updates)  # it may send the message, and no more
    left = (1 << 20) - 1005 + client.updates[1]
    assert left == (4 << 20) + 5 - 1005
    try:
        while left > -16000:
            client.send(0, 0, 1, bytes(16000))
            left -= 16000
    except ConnectionError:
        pass
    assert client.closed()
    assert client.goaway == FLOW_CONTROL


def test_clients_that_exceed_a_time_limit_are_disconnected(eventually: Any) -> None:
    """All have hours, which pass when the server has seen what they do."""
    hours = Http2Limits(header_s=3600, stall_s=3600, idle_s=7200)
    with serving(limits=hours) as running:
        shared = running.grpc

        def pass_time(seconds: float = 4000) -> None:
            clock_s, tick = shared.turns.clock_s, shared.tick
            shared.turns.clock_s = lambda: clock_s() + seconds
            shared.tick = lambda now_s: tick(now_s + seconds)

        def links() -> list[Any]:
            return running.see(lambda: list(shared.connections))

        with frames(running.port, greet=False) as silent:
            eventually(links)
            pass_time()
            assert silent.closed()
        with frames(running.port) as headers:
            headers.send(1, 0, 1, b"\x83")
            eventually(lambda: [each.phase for each in links()] == [IN_HEADERS])
            pass_time()
            assert headers.closed()
        with frames(running.port) as idle:
            assert idle.call(1, infer_bytes()).status == 0
            pass_time(8000)
            assert idle.closed()
            assert idle.goaway == 0
        assert running.see(lambda: running.grpc.unanswered) == 0


def test_unsent_error_answers_of_a_stream_are_bounded(served: Serving, client: Frames) -> None:
    """Each request is answered before the next is read, and none is read without a window."""
    client.open(1, STREAM)
    piece = b"\0" + (3).to_bytes(4, "big") + b"\xff\xff\xff"
    for _ in range(3):  # six times what the window of 65,535 bytes lets out
        client.send(0, 0, 1, piece * 2000)
    client.send(0, 1, 1, b"")
    client.until(lambda: len(client.answers.get(1, Answer()).data) == 65535)
    client.settle()
    (connection,) = served.see(lambda: [c for c in served.grpc.connections if c.streams])
    assert len(connection.streams[1].unsent) < 10
    client.send(8, 0, 1, (1 << 30).to_bytes(4, "big"))
    client.send(8, 0, 0, (1 << 30).to_bytes(4, "big"))
    answer = client.answer(1)
    assert answer.status == 0
    assert answer.data.count(b"not a valid ModelInferRequest") == 6_000


# -- What a gRPC client does not read is counted, bounded, and ends its connection in time


WIDTH = 1_000_000  # answers of 4 MB
ANSWER = 4 * WIDTH
NO_WINDOW = b"\0\4\0\0\0\0"
WATCH = "/grpc.health.v1.Health/Watch"
Eventually = Callable[[Callable[[], bool]], None]


def wide(value: float = 1.0) -> bytes:
    return infer_bytes(value=value, width=WIDTH, model_name="wide")


def held(server: Serving) -> int:
    return server.see(lambda: server.grpc.memory.bytes)


def connections(server: Serving) -> int:
    return server.see(lambda: len(server.grpc.connections))


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_answers_beyond_the_clients_window_are_counted_and_refused_above_the_limit(
    eventually: Eventually, path: str
) -> None:
    limit = 3 * ANSWER
    with serving({"wide": FakeEngine(width=WIDTH)}, max_held_bytes=limit) as server:
        model = server.repository.models["wide"]
        with frames(server.port, settings=NO_WINDOW) as client:
            refused = 0
            for stream in range(1, 16, 2):
                client.start(stream, wide(), path, end=path == INFER)
                eventually(lambda: server.see(lambda: model.unanswered) == 0)
                client.settle()
                assert held(server) <= limit + 1000
                answer = client.answers.get(stream, Answer())
                if answer.ended:
                    assert answer.status == 14
                    assert f"holds {limit} bytes" in answer.headers["grpc-message"]
                    refused += 1
            assert refused >= 5
        eventually(lambda: held(server) == 0)


def test_an_answer_above_the_memory_budget_ends_its_call() -> None:
    wired, message = Wired(), b"\0\0\0\3\xe8" + bytes(1000)
    wired.memory.limit = 2500  # there is room for the request, not for its second answer
    wired.feed(PREFACE + packed(SETTINGS, 0, 0, NO_WINDOW))
    for number, path in ((1, "/echo"), (3, "/stream")):
        head = packed(HEADERS, END_HEADERS, number, block(path=path))
        wired.feed(head + packed(DATA, END, number, message))
    for number in (0, 1, 3):
        wired.feed(packed(WINDOW_UPDATE, 0, number, (1 << 20).to_bytes(4, "big")))
    out = wired.wire.take()
    wired.close()
    assert (out.count(message), out.count(b"grpc-status\x0214"), wired.memory.bytes) == (2, 1, 0)


def test_a_connection_with_many_unread_answers_has_no_further_requests_run(
    eventually: Eventually,
) -> None:
    engine = FakeEngine(width=WIDTH)
    with (
        serving({"wide": engine}, max_held_bytes=1 << 30) as server,
        frames(server.port, settings=NO_WINDOW) as client,
    ):
        runs = server.repository.models["wide"]
        for stream in range(1, 32, 2):
            client.start(stream, wide())
            eventually(lambda: server.see(lambda: runs.unanswered) == 0)
        (link,) = server.see(lambda: list(server.grpc.connections))
        assert 16 << 20 < link.answer_bytes < 32 << 20
        client.open_windows()
        assert [client.answer(stream).status for stream in range(1, 32, 2)] == [0] * 16


def test_a_call_that_waits_for_unread_answers_goes_on_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (call, connection):
        monkeypatch.setattr(module, "WAITING_BYTES", 10)
    wired = Wired()
    wired.feed(PREFACE + packed(SETTINGS, 0, 0, NO_WINDOW))
    for stream in (1, 3):
        wired.feed(packed(HEADERS, END_HEADERS, stream, block(path="/echo")))
        wired.feed(packed(DATA, END, stream, b"\0\0\0\0\x08answer-%d" % stream))
    for stream in (3, 1):
        assert b"answer" not in wired.wire.out
        wired.feed(packed(WINDOW_UPDATE, 0, stream, b"\0\0\0\x20"))
    assert wired.wire.out.index(b"answer-1") < wired.wire.out.index(b"answer-3")
    wired.close()


def test_a_client_that_reads_a_byte_at_a_time_is_disconnected(eventually: Eventually) -> None:
    limits = Http2Limits(stall_s=0.3)
    models = {"m": FakeEngine(width=8000)}
    with serving(models, limits) as server, frames(server.port, settings=NO_WINDOW) as client:
        client.start(1, infer_bytes(width=8000))
        with contextlib.suppress(ConnectionError):
            while connections(server):
                client.send(8, 0, 1, b"\0\0\0\1")
                client.settle()
                time.sleep(0.002)  # below 500 bytes a second; 4,096 are enough
        eventually(lambda: connections(server) == 0)
        assert held(server) == 0


def test_watch_calls_are_bounded_per_client_and_in_all(
    monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr("deploykit.serving.grpc.methods._WATCHES", 20)
    with serving(token="a token of some length") as server:
        with frames(server.port) as first, frames(server.port) as second:
            for client, most in ((first, 16), (second, 4)):
                for stream in range(1, 36, 2):
                    client.start(stream, b"", WATCH)
                client.settle()
                ended = [n for n, answer in client.answers.items() if answer.ended]
                assert len(ended) == 18 - most
                assert {client.answers[n].status for n in ended} == {8}
            first.cancel(1)
            first.settle()
            second.start(51, b"", WATCH)
            second.until(lambda: bool(second.answers.get(51, Answer()).data))
        calls = server.grpc
        eventually(lambda: server.see(lambda: calls._watching) == {})


def test_a_long_name_is_not_kept_for_a_watch_call(client: Frames) -> None:
    for stream, size in ((1, 257), (3, 70_000)):
        name = b"\n" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + b"x" * size
        assert client.call(stream, name, WATCH).status == (3 if size < 1000 else 8)


def test_streams_above_the_limit_of_a_connection_or_of_all_are_refused() -> None:
    limits = Http2Limits(streams=7, all_streams=10)
    with serving(limits=limits) as server, frames(server.port) as a, frames(server.port) as b:
        for client, most in ((a, 7), (b, 3)):
            for stream in range(1, 18, 2):
                client.open(stream)
            client.settle()
            refused = [n for n, answer in client.answers.items() if answer.reset == 7]
            assert len(refused) == 9 - most  # REFUSED_STREAM: it may be tried again
        a.message(1, infer_bytes())
        assert a.answer(1).status == 0
        b.cancel(1)
        assert b.call(21, infer_bytes()).status == 0
    assert server.grpc.open_streams == 0


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    """One server for this file; after each test it must still answer."""
    with serving(max_body_bytes=8 << 20) as running:
        yield running


@pytest.fixture
def client(served: Serving) -> Iterator[Frames]:
    with frames(served.port) as client:
        yield client
    with frames(served.port) as after:
        assert first_value(after.call(1, infer_bytes(value=20))) == 41


def test_no_level_of_the_log_shows_the_headers_of_a_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG):
        hpack.Decoder().decode(hpack.Encoder().encode([("authorization", "Bearer secret")]))
    assert "secret" not in caplog.text
