"""What a gRPC client does not read is counted, bounded, and ends its connection in time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from deploykit.serving.http2.connection import Http2Limits
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    INFER,
    Answer,
    Frames,
    Serving,
    frames,
    infer_bytes,
    serving,
)

WIDTH = 1_000_000  # answers of 4 MB
ANSWER = 4 * WIDTH
NO_WINDOW = b"\0\4\0\0\0\0"
ALL_WINDOW = b"\0\4\x7f\xff\xff\xff"
STREAM = INFER.replace("ModelInfer", "ModelStreamInfer")
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


def test_answers_that_fit_the_limit_arrive_whole_after_they_have_waited(
    eventually: Eventually,
) -> None:
    with (
        serving({"wide": FakeEngine(width=WIDTH)}) as server,
        frames(server.port, settings=NO_WINDOW) as client,
    ):
        for stream in (1, 3, 5, 7, 9, 11):
            client.start(stream, wide())
        client.settle()
        client.open_windows()
        for stream in (1, 3, 5, 7, 9, 11):
            answer = client.answer(stream)
            assert answer.status == 0
            assert len(answer.data) > ANSWER
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


def trickle(client: Frames, server: Serving) -> None:
    """A byte of window at a time, as long as the server allows."""
    with contextlib.suppress(ConnectionError):
        for _ in range(10_000):
            client.send(8, 0, 1, b"\0\0\0\1")
            client.settle()
            if not connections(server):
                return


def test_a_client_that_reads_a_byte_at_a_time_is_disconnected(eventually: Eventually) -> None:
    limits = Http2Limits(write_s=0.3)
    models = {"m": FakeEngine(width=8000)}
    with serving(models, limits) as server, frames(server.port, settings=NO_WINDOW) as client:
        client.start(1, infer_bytes(width=8000))
        trickle(client, server)
        eventually(lambda: connections(server) == 0)
        assert held(server) == 0


def test_what_the_socket_does_not_take_is_counted_and_ends_the_connection(
    eventually: Eventually,
) -> None:
    engine = FakeEngine(width=WIDTH)
    with serving({"wide": engine}) as server:
        model = server.repository.models["wide"]
        with frames(server.port, settings=ALL_WINDOW) as client:
            client.send(8, 0, 0, (1 << 30).to_bytes(4, "big"))
            client.settle()
            (link,) = server.see(lambda: list(server.grpc.connections))
            for stream in (1, 3, 5, 7, 9, 11):  # until the buffers of both sockets are full
                client.open(stream)
                before = len(engine.batches)
                client.message(stream, wide())
                eventually(lambda n=before: len(engine.batches) > n)
                eventually(lambda: server.see(lambda: model.unanswered) == 0)
                if server.see(link._transport.get_write_buffer_size):
                    break
            eventually(lambda: 0 < link._buffered < 2 << 20)
            assert held(server) >= link._buffered
            for later_s in (20, 40):
                server.see(lambda s=later_s: link.check(server.grpc.clock_s() + s))
            assert connections(server) == 0
        eventually(lambda: held(server) == 0)


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
        eventually(lambda: server.see(lambda: (len(calls._watches), calls._watching)) == (0, {}))


def test_all_watch_calls_of_a_service_cost_one_look_at_its_health() -> None:
    with serving() as server, frames(server.port) as client:
        for stream in range(1, 32, 2):
            client.start(stream, b"", WATCH)
        client.settle()
        calls, asked = server.grpc, []

        def count() -> int:
            health = calls._health
            calls._health = lambda name: asked.append(name) or health(name)  # type: ignore[method-assign, func-returns-value]
            calls.tick(0.0)
            del calls._health  # type: ignore[method-assign]
            return len(asked)

        assert server.see(count) == 1


@pytest.mark.parametrize("size", [257, 70_000])
def test_a_long_name_is_not_kept_for_a_watch_call(size: int) -> None:
    with serving() as server, frames(server.port) as client:
        name = b"\n" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + b"x" * size
        assert client.call(1, name, WATCH).status == (3 if size < 1000 else 8)


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
