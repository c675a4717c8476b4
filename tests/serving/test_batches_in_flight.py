"""The server with two batches in flight: its memory budget, and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.serving.faults import until
from tests.support.serving.memory import held_bytes, raw_infer
from tests.support.serving.overlapping import OverlappingEngine
from tests.support.serving.running import WAIT_S, Raw, Running, running

WIDTH = 100_000
BYTES = 4 * WIDTH
LEAST = BYTES - (70 << 10)  # what is counted of a request at least: not its first read


def sent(server: Running, n: int) -> Raw:
    raw = server.connect()
    raw.send(raw_infer(np.full(WIDTH, n, np.float32)))
    return raw


@contextmanager
def filled(
    engine: OverlappingEngine, count: int, **options: int
) -> Iterator[tuple[Running, list[Raw]]]:
    """`count` requests: the first in the engine, which waits for it; the others came then."""
    with running({"m": engine}, max_batch=1, **options) as server:
        first = sent(server, 0)
        assert engine.waiting.acquire(timeout=WAIT_S)
        raws = [first, *(sent(server, n) for n in range(1, count))]
        until(lambda: held_bytes(server) >= count * LEAST)  # all are there
        engine.end_one()
        answered(first, 0)
        until(lambda: len(engine.calls) == min(2, count - 1))
        try:
            yield server, raws
        finally:
            engine.end_all()


def answered(raw: Raw, n: int) -> None:
    reply = raw.reply()
    assert reply.status == 200, reply.body
    assert (np.frombuffer(reply.body[-BYTES:], np.float32) == 2 * n + 1).all()


def test_batches_in_flight_are_in_the_memory_budget() -> None:
    engine = OverlappingEngine(width=WIDTH)
    with filled(engine, 3, max_held_bytes=BYTES * 33 // 10) as (server, raws):
        until(lambda: 2 * LEAST <= held_bytes(server) <= 2 * BYTES)
        raws.append(sent(server, 3))
        until(lambda: held_bytes(server) >= 3 * LEAST)
        assert sent(server, 1).reply().status == 503
        engine.end_all()
        for n, raw in enumerate(raws[1:], 1):
            answered(raw, n)
        until(lambda: held_bytes(server) == 0)


@pytest.mark.parametrize("count", [2, 4])
def test_the_end_of_the_server_answers_what_is_in_flight(count: int) -> None:
    engine = OverlappingEngine(width=WIDTH)
    with filled(engine, count) as (server, raws):
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        until(lambda: server.server.repository.leaving)
        engine.end_all()
        for n, raw in enumerate(raws[1:], 1):
            answered(raw, n)
        stopping.join(WAIT_S)
        assert server.dropped == 0
    assert not engine.calls
