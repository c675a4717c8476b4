"""HTTP/2 flow control: windows, slow clients, and clients that do not read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from deploykit.serving.http2.connection import IN_HEADERS, Http2Limits
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    DEADLINE_EXCEEDED,
    FLOW_CONTROL_ERROR,
    INFER,
    STREAM,
    Answer,
    Frames,
    Serving,
    frames,
    infer_bytes,
    serving,
)


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
    assert client.goaway == FLOW_CONTROL_ERROR


def test_a_connection_gives_windows_to_four_large_messages_at_a_time() -> None:
    """A connection buffers four of the largest messages; the fifth waits until one has ended."""
    size = 8 << 20
    prefix = b"\0" + size.to_bytes(4, "big")
    with serving(max_body_bytes=size) as running, frames(running.port) as client:
        for stream in (1, 3, 5, 7, 9):
            client.open(stream)
            client.send(0, 0, stream, prefix)
        client.settle()
        granted = [stream for stream in (1, 3, 5, 7, 9) if stream in client.updates]
        assert granted == [1, 3, 5, 7]
        client.cancel(3)
        client.settle()
        assert 9 in client.updates


def test_clients_that_exceed_a_time_limit_are_disconnected(eventually: Any) -> None:
    """All have hours, which pass when the server has seen what they do."""
    hours = Http2Limits(header_s=3600, stall_s=3600, idle_s=7200)
    with serving(limits=hours) as running:
        shared = running.grpc

        def pass_time(seconds: float = 4000) -> None:
            clock_s, tick = shared.clock_s, shared.tick
            shared.clock_s = lambda: clock_s() + seconds
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
        with frames(running.port) as body:
            body.open(1)
            body.send(0, 0, 1, b"\0\0")
            body.settle()
            pass_time()
            assert body.answer(1).status == DEADLINE_EXCEEDED
            assert body.call(3, infer_bytes()).status == 0
        with frames(running.port, settings=b"\0\4\0\0\0\0") as no_window:
            no_window.start(1, infer_bytes())
            no_window.until(lambda: 1 in no_window.answers)
            pass_time()
            assert no_window.closed()
        with frames(running.port) as idle:
            assert idle.call(1, infer_bytes()).status == 0
            pass_time(8000)
            assert idle.closed()
            assert idle.goaway == 0
        with frames(running.port) as stream:
            stream.start(1, infer_bytes(), STREAM, end=False)
            stream.until(lambda: bool(stream.answers.get(1, Answer()).data))
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
ALL_WINDOW = b"\0\4\x7f\xff\xff\xff"
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
        assert len(link._parked) > 8
        client.open_windows()
        assert [client.answer(stream).status for stream in range(1, 32, 2)] == [0] * 16


def test_a_client_that_reads_a_byte_at_a_time_is_disconnected(eventually: Eventually) -> None:
    limits = Http2Limits(stall_s=0.3)
    models = {"m": FakeEngine(width=8000)}
    with serving(models, limits) as server, frames(server.port, settings=NO_WINDOW) as client:
        client.start(1, infer_bytes(width=8000))
        with contextlib.suppress(ConnectionError):
            while connections(server):
                client.send(8, 0, 1, b"\0\0\0\1")
                client.settle()
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


def test_the_streams_of_all_connections_are_bounded() -> None:
    limits = Http2Limits(all_streams=10)
    with serving(limits=limits) as server, frames(server.port) as a, frames(server.port) as b:
        for client, most in ((a, 9), (b, 1)):
            for stream in range(1, 18, 2):
                client.open(stream)
            client.settle()
            refused = [n for n, answer in client.answers.items() if answer.reset == 7]
            assert len(refused) == 9 - most
        b.cancel(1)
        assert b.call(21, infer_bytes()).status == 0
    assert server.grpc.open_streams == 0
