"""Whatever calls do at one moment, all of them together stop the event loop for one turn only."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deploykit
from deploykit.serving.grpc.call import GrpcCall, Method
from deploykit.serving.http2.connection import (
    DATA,
    HEADERS,
    PREFACE,
    READ_BYTES,
    RST_STREAM,
    SETTINGS,
    Http2Connection,
    Http2Limits,
    frame,
)
from deploykit.serving.transport import turns
from tests.support.serving import wired
from tests.support.serving.grpc_cases import CALM, STREAM, Answer, frames, infer_bytes, serving
from tests.support.serving.running import WAIT_S, GatedEngine
from tests.support.serving.wired import Wire, Wired, block

STEP_S = 0.001  # that each step of the work seems to take
IN_A_TURN = round(turns.TURN_S / STEP_S)
NO_WINDOW = b"\0\4\0\0\0\0"


class Counted(Wired):
    """Many connections; counts the steps of each turn, which make the clock go on."""

    def __init__(self, connections: int, settings: bytes = b"") -> None:
        super().__init__()
        self.turn_number = 0
        self.steps: Counter[int] = Counter()
        begin = self.shared.turns._begin

        def begun() -> None:
            self.turn_number += 1
            begin()

        self.shared.turns._begin = begun  # type: ignore[method-assign]
        self.links = [Http2Connection(self.shared) for _ in range(connections)]
        for link in self.links:
            self.turn(link.connection_made, Wire())
            self.turn(link.data_received, PREFACE + frame(SETTINGS, 0, 0, settings))

    def step(self, *_: Any) -> None:
        self.now_s += STEP_S
        self.steps[self.turn_number] += 1

    def close(self) -> None:
        for link in self.links:
            self.turn(link.connection_lost, None)
        super().close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Counted]]:
    made: list[Counted] = []

    def make(connections: int, settings: bytes = b"") -> Counted:
        found = Counted(connections, settings)
        made.append(found)

        def message(call: GrpcCall, _data: bytes, _at: int) -> None:
            found.step()
            call.send_message([b"answer"])

        monkeypatch.setitem(wired.METHODS, "/stream", Method(message, GrpcCall.complete))
        return found

    yield make
    for each in made:
        each.close()


def opened(count: int, data: bytes = b"", **headers: str) -> bytes:
    """Streams that are not ended, each with a frame of data."""
    more = [(name.encode(), value.encode()) for name, value in headers.items()]
    head = block(*more, path="/stream")
    return b"".join(
        frame(HEADERS, 4, number, head) + (frame(DATA, 0, number, data) if data else b"")
        for number in range(1, 2 * count, 2)
    )


def test_messages_of_many_streams_share_a_turn(counted: Callable[..., Counted]) -> None:
    """16 connections with 500 streams of 60 empty messages stopped the loop for seconds."""
    wire = counted(2)
    for link in wire.links:
        wire.turn(link.data_received, opened(40, bytes(5) * 30))
    assert sum(wire.steps.values()) == 2 * 40 * 30
    assert max(wire.steps.values()) <= IN_A_TURN + 64  # one stream may begin at the end of a turn


def test_calls_that_arrive_in_one_piece_share_a_turn(
    counted: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 clients that asked 500 times for the statistics, which take long, stopped it for 1.3 s."""
    wire = counted(1)

    def message(call: GrpcCall, _data: bytes, _at: int) -> None:
        wire.step()
        call.reply([b"answer"])

    monkeypatch.setitem(wired.METHODS, "/echo", Method(message))
    head = block(path="/echo")
    calls = [
        frame(HEADERS, 4, number, head) + frame(DATA, 1, number, bytes(5))
        for number in range(1, 400, 2)
    ]
    wire.turn(wire.links[0].data_received, b"".join(calls))
    assert sum(wire.steps.values()) == 200
    assert max(wire.steps.values()) <= IN_A_TURN + 16  # calls, until the time is first checked


def test_deadlines_that_pass_at_one_moment_share_a_turn(
    counted: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = counted(10)
    for link in wire.links:
        wire.turn(link.data_received, opened(20, **{"grpc-timeout": "1S"}))
    fail = GrpcCall.fail
    monkeypatch.setattr(GrpcCall, "fail", lambda *args: (wire.step(), fail(*args)))
    wire.tick(2.0)
    assert sum(wire.steps.values()) == 10 * 20
    assert max(wire.steps.values()) <= IN_A_TURN + 20  # those of one connection
    assert wire.shared.open_streams == 0


def test_a_tick_waits_until_the_last_one_has_seen_all_connections(
    counted: Callable[..., Counted],
) -> None:
    wire, seen = counted(3), list[float]()
    wire.shared.turns.busy = True

    def two_ticks() -> None:
        for _ in range(2):
            wire.now_s += 0.1
            wire.shared.tick(wire.now_s)

    for link in wire.links:
        link.check = seen.append  # type: ignore[method-assign]
    wire.turn(two_ticks)
    assert len(seen) == 3
    wire.tick()
    assert len(seen) == 6
    assert wire.shared.tick_s == pytest.approx(0.2)


def test_connections_that_are_lost_at_one_moment_share_a_turn(
    counted: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = counted(10)
    for link in wire.links:
        wire.turn(link.data_received, opened(20))
    finish = GrpcCall.finish
    monkeypatch.setattr(GrpcCall, "finish", lambda call: (wire.step(), finish(call)))

    def lose_all() -> None:
        for link in wire.links:
            link.connection_lost(None)

    wire.turn(lose_all)
    assert sum(wire.steps.values()) == 10 * 20
    assert max(wire.steps.values()) <= IN_A_TURN + 20
    assert wire.shared.open_streams == 0


def test_answers_that_windows_let_out_at_one_moment_share_a_turn(
    counted: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = counted(10, NO_WINDOW)
    for link in wire.links:
        wire.turn(link.data_received, opened(20, bytes(5)))
    wire.steps.clear()
    push = GrpcCall.push
    monkeypatch.setattr(GrpcCall, "push", lambda call: (wire.step(), push(call)))

    def open_windows() -> None:
        for link in wire.links:
            link.data_received(frame(SETTINGS, 0, 0, b"\0\4\0\0\xff\xff"))

    wire.turn(open_windows)
    assert sum(wire.steps.values()) == 10 * 20
    assert max(wire.steps.values()) <= IN_A_TURN + 20
    assert not any(call.unsent for link in wire.links for call in link.streams.values())


def test_all_work_of_connections_is_done_in_turns() -> None:
    """But for the output of a turn, which is written at its end."""
    package = Path(deploykit.__file__).parent / "serving"
    found = [
        line.strip()
        for folder in ("http2", "grpc")
        for path in (package / folder).glob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"call_soon|call_later|call_at\(", line)
    ]
    assert found == ["asyncio.get_running_loop().call_soon(self._flush)"]


@pytest.mark.parametrize("how", ["content-length", "RST_STREAM"])
def test_requests_of_a_stream_that_was_reset_leave_the_queue(
    how: str, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    """Else a client has any number of them run, whose bytes are no longer counted."""
    engine = GatedEngine()
    with serving({"m": engine}, max_batch=1) as server, frames(server.port) as client:
        engine.warm = True
        model = server.repository.models["m"]
        client.start(1, infer_bytes())
        assert engine.entered.acquire(timeout=WAIT_S)  # the engine is busy
        size = 5 + len(infer_bytes())
        client.start(
            3,
            infer_bytes(),
            STREAM,
            end=False,
            **{"content-length": str(size)} if how[0] == "c" else {},
        )
        eventually(lambda: server.see(lambda: model.waiting) == 1)
        if how == "content-length":
            client.send(DATA, 0, 3, b"x")
            client.until(lambda: client.answers.get(3, Answer()).reset is not None)
        else:
            client.send(RST_STREAM, 0, 3, (8).to_bytes(4, "big"))
        eventually(lambda: server.see(lambda: model.waiting) == 0)
        engine.gate.set()
        assert client.answer(1).status == 0


def test_resets_that_a_client_provokes_count_as_frames_without_content() -> None:
    with (
        serving(limits=Http2Limits(empty_frames=40)) as server,
        frames(server.port) as client,
        contextlib.suppress(ConnectionError),
    ):
        for stream in range(1, 200, 2):
            client.open(stream, **{"content-length": "1"})
            client.send(DATA, 0, stream, b"xy")
        assert client.closed()
        assert client.goaway == CALM


@pytest.mark.parametrize("tls", [False, True])
def test_little_is_received_in_a_busy_turn(counted: Callable[..., Counted], tls: bool) -> None:
    """1,000 connections with 240 kB each took 76 ms of one turn, before any frame was read."""
    wire, sizes = counted(2), list[int]()
    first, second = wire.links

    def both() -> None:
        for link in wire.links:
            link._tls = tls
        sizes.append(len(first.get_buffer(-1)))
        wire.now_s += 2 * turns.TURN_S
        wire.shared.turns.busy = not tls  # without TLS reading counts when it is processed
        sizes.append(len(second.get_buffer(-1)))

    wire.turn(both)
    assert sizes == [READ_BYTES, turns.BUSY_BYTES[tls]]
