"""The server with two batches in flight: its memory budget, and its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.serving.memory import held_bytes, raw_infer
from tests.support.serving.overlapping import OverlappingEngine
from tests.support.serving.running import WAIT_S, Raw, Running, running

WIDTH = 100_000
BYTES = 4 * WIDTH
LEAST = BYTES - (70 << 10)  # what is counted of a request at least: not its first read
Eventually = Callable[[Callable[[], object]], object]


@contextmanager
def filled(
    engine: OverlappingEngine, count: int, **options: int
) -> Iterator[tuple[Running, list[Raw]]]:
    """`count` requests: the first in the engine, which waits for it; the others came then."""
    with running({"m": engine}, max_batch=1, **options) as server:
        raws = [server.connect() for _ in range(count)]
        raws[0].send(raw_infer(np.full(WIDTH, 0, np.float32)))
        assert engine.waiting.acquire(timeout=WAIT_S)
        for n, raw in enumerate(raws[1:], 1):
            raw.send(raw_infer(np.full(WIDTH, n, np.float32)))
        try:
            yield server, raws
        finally:
            engine.end_all()


def answered(raw: Raw, n: int) -> None:
    reply = raw.reply()
    assert reply.status == 200, reply.body
    assert (np.frombuffer(reply.body[-BYTES:], np.float32) == 2 * n + 1).all()


def test_batches_in_flight_are_in_the_memory_budget(eventually: Eventually) -> None:
    engine = OverlappingEngine(width=WIDTH)
    with filled(engine, 3, max_held_bytes=BYTES * 33 // 10) as (server, raws):
        eventually(lambda: held_bytes(server) >= 3 * LEAST)
        engine.end_one()
        answered(raws[0], 0)
        eventually(lambda: len(engine.calls) == 2)
        eventually(lambda: 2 * LEAST <= held_bytes(server) <= 2 * BYTES)
        raws.append(server.connect())
        raws[-1].send(raw_infer(np.full(WIDTH, 3, np.float32)))
        eventually(lambda: held_bytes(server) >= 3 * LEAST)
        above = server.connect()
        refused = above.ask(raw_infer(np.ones(WIDTH, np.float32)))
        assert refused.status == 503
        engine.end_all()
        for n, raw in enumerate(raws[1:], 1):
            answered(raw, n)
        eventually(lambda: held_bytes(server) == 0)


@pytest.mark.parametrize("count", [2, 4])
def test_the_end_of_the_server_answers_what_is_in_flight(
    count: int, eventually: Eventually
) -> None:
    engine = OverlappingEngine(width=WIDTH)
    with filled(engine, count) as (server, raws):
        eventually(lambda: held_bytes(server) >= count * LEAST)  # all are there
        engine.end_one()
        answered(raws[0], 0)
        eventually(lambda: len(engine.calls) == min(2, count - 1))
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        eventually(lambda: server.server.repository.leaving)
        engine.end_all()
        for n, raw in enumerate(raws[1:], 1):
            answered(raw, n)
        stopping.join(WAIT_S)
        assert server.dropped == 0
    assert not engine.calls
