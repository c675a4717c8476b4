"""HTTP/2 flow control: windows, slow clients, and clients that do not read."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from deploykit.serving.http2.connection import IN_HEADERS, Http2Limits
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    DEADLINE_EXCEEDED,
    FLOW_CONTROL_ERROR,
    STREAM,
    Answer,
    Frames,
    Serving,
    first_value,
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


def test_answers_wait_for_the_clients_window(served: Serving) -> None:
    no_window = b"\0\4\0\0\0\0"
    with frames(served.port, settings=no_window) as client:
        client.start(1, infer_bytes(value=3))
        client.until(lambda: 1 in client.answers)
        client.settle()
        assert client.answers[1].data == b""
        assert served.see(lambda: served.grpc.unanswered) == 1
        client.send(8, 0, 1, b"\0\0\0\7")
        client.until(lambda: len(client.answers[1].data) >= 7)
        client.settle()
        assert len(client.answers[1].data) == 7
        client.send(4, 0, 0, b"\0\4\0\0\xff\xff")
        answer = client.answer(1)
        assert (answer.status, first_value(answer)) == (0, 7)


def test_a_large_answer_is_sent_as_the_connection_window_allows(served: Serving) -> None:
    """4 MB through the first 65535 bytes of window, which is then extended step by step."""
    request = infer_bytes(value=3, width=1_000_000, model_name="wide")
    with frames(served.port, settings=b"\0\4\x7f\xff\xff\xff") as client:
        client.start(1, request)
        client.until(lambda: len(client.answers.get(1, Answer()).data) == 65535)
        while not client.answers[1].ended:
            client.send(8, 0, 0, (300_000).to_bytes(4, "big"))
            client.settle()
        data = client.answers[1].data
    assert np.frombuffer(data[-4_000_000:], np.float32).tolist()[::999_999] == [7, 7]


def test_clients_that_exceed_a_time_limit_are_disconnected(eventually: Any) -> None:
    """All have hours, which pass when the server has seen what they do."""
    hours = Http2Limits(header_s=3600, body_s=3600, write_s=3600, idle_s=7200)
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


def test_a_client_that_does_not_read_is_disconnected(eventually: Any) -> None:
    models = {"wide": FakeEngine(width=1_000_000)}
    request = infer_bytes(width=1_000_000, model_name="wide")
    window = b"\0\4\x7f\xff\xff\xff"
    with (
        serving(models, Http2Limits(write_s=0.3)) as running,
        frames(running.port, settings=window) as client,
    ):
        client.send(8, 0, 0, (1 << 30).to_bytes(4, "big"))
        with contextlib.suppress(
            ConnectionError
        ):  # the server may disconnect it before it has sent everything
            for stream in (1, 3, 5, 7):
                client.start(stream, request)
        eventually(lambda: not running.see(lambda: running.grpc.connections))


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
