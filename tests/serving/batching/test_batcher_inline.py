"""Batches that run inline, on the event loop's thread that submitted them."""

from __future__ import annotations

import gc
import math
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import Expired
from deploykit.serving import server as http
from deploykit.serving.batching import batcher as batching
from deploykit.serving.batching.batcher import GATHER_US, PAUSE_US, SLOW_US, Batcher
from deploykit.serving.batching.queue import BatchPolicy, BatchRun, Watcher
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from tests.support.fake_engine import FakeEngine
from tests.support.serving.loops import (
    KEY,
    Answers,
    Clock,
    Loop,
    Threads,
    asleep,
    inline,
    row,
    submit,
)
from tests.support.serving.running import WAIT_S, GatedEngine, Running, infer_json


@pytest.fixture
def engine() -> Threads:
    return Threads()


@pytest.fixture
def batcher(engine: Threads, loop: Loop) -> Iterator[Batcher]:
    """Its clock stands still."""
    with inline([engine], loop, Clock(), BatchPolicy(max_batch=4)) as batcher:
        yield batcher


def test_requests_read_in_one_loop_iteration_run_inline_as_one_batch(
    batcher: Batcher, engine: Threads, loop: Loop, answers: Answers
) -> None:
    sent = [submit(batcher, row(i), 1, KEY, answers.done) for i in range(3)]
    assert engine.batches == []
    assert loop.turn() == 1
    assert engine.batches == [3]
    assert answers.order == [0, 1, 2]
    here = threading.get_ident()
    assert engine.threads == [here]
    assert answers.threads == [here] * 3
    for request in sent:
        np.testing.assert_array_equal(request.outputs["y"], request.feeds["x"] * 2 + 1)
    assert loop.turn() == 0


def test_the_loop_runs_one_inline_batch_per_iteration(
    batcher: Batcher, engine: Threads, loop: Loop, answers: Answers
) -> None:
    for i in range(6):
        submit(batcher, row(i), 1, KEY, answers.done)
    loop.turn()
    assert engine.batches == [4]
    submit(batcher, row(6), 1, KEY, answers.done)
    assert loop.turn() == 1
    assert engine.batches == [4, 3]
    assert loop.turn() == 0


def test_a_batch_above_inline_max_rows_runs_on_the_engines_thread(
    batcher: Batcher, engine: Threads, loop: Loop, answers: Answers
) -> None:
    batcher.inline_max_rows = 2
    submit(batcher, row(0), 1, KEY, answers.done)
    submit(batcher, row(1, 2), 2, KEY, answers.done)
    assert loop.turn() == 1
    answers.wait(2)
    assert engine.batches == [3]
    assert threading.get_ident() not in engine.threads
    asleep(batcher)
    submit(batcher, row(2, 2), 2, KEY, answers.done)
    loop.turn()
    assert engine.threads[1] == threading.get_ident()


def test_batches_run_inline_by_their_own_rows_however_many_wait(
    batcher: Batcher, engine: Threads, loop: Loop, answers: Answers
) -> None:
    """128 clients of a model whose batches of 32 are short are served as 32 clients are."""
    batcher.inline_max_rows = 4
    for i in range(12):
        submit(batcher, row(i), 1, KEY, answers.done)
    assert [loop.turn(), loop.turn(), loop.turn()] == [1, 1, 1]
    assert engine.batches == [4, 4, 4]
    assert engine.threads == [threading.get_ident()] * 3


def test_a_request_that_expires_before_its_inline_run_is_not_run(
    engine: Threads, loop: Loop, answers: Answers
) -> None:
    clock = Clock()
    with inline([engine], loop, clock) as batcher:
        late = submit(batcher, row(0), 1, KEY, answers.done, wait_us=10)
        kept = submit(batcher, row(1), 1, KEY, answers.done)
        clock.us = 11
        loop.turn()
        assert isinstance(late.error, Expired)
        answers.wait(2)
    assert kept.error is None
    assert engine.batches == [1]


def test_close_answers_requests_that_the_loop_has_not_run_yet(
    batcher: Batcher, engine: Threads, loop: Loop, answers: Answers
) -> None:
    submit(batcher, row(0), 1, KEY, answers.done)
    assert batcher.close() == 0
    assert engine.batches == [1]
    assert threading.get_ident() not in engine.threads
    assert loop.turn() == 1  # the scheduled call finds an empty queue


def test_an_engine_retired_during_an_inline_run_is_closed(loop: Loop, answers: Answers) -> None:
    class Closer(Threads):
        def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            batcher.retire()
            return super().__call__(feeds)

    engine = Closer()
    batcher = Batcher([engine], BatchPolicy(), call_soon=loop.call_soon)
    batcher.inline_max_rows = math.inf
    asleep(batcher)
    submit(batcher, row(0), 1, KEY, answers.done)
    loop.turn()
    assert answers.order == [0]
    batcher.close()
    assert batcher.ended
    assert engine.closed


def test_the_loop_runs_a_second_engine_while_the_first_is_busy(
    loop: Loop, answers: Answers
) -> None:
    slow, quick = GatedEngine(), Threads()
    slow.warm = True
    with Batcher([slow, quick], BatchPolicy(max_batch=4), call_soon=loop.call_soon) as batcher:
        asleep(batcher)
        batcher._idle.sort(key=lambda worker: worker.engine is slow)  # the last is next
        submit(batcher, row(0), 1, KEY, answers.done)
        loop.turn()
        assert slow.entered.acquire(timeout=WAIT_S)
        batcher.inline_max_rows = math.inf
        submit(batcher, row(1), 1, KEY, answers.done)
        loop.turn()
        assert answers.order == [1]
        assert quick.threads == [threading.get_ident()]
        slow.gate.set()
        answers.wait(2)


def test_idle_time_includes_waiting_for_the_loop(
    engine: Threads, loop: Loop, answers: Answers
) -> None:
    class Notes(Watcher):
        def __init__(self) -> None:
            self.runs: list[BatchRun] = []

        def record_run(self, run: BatchRun) -> None:
            self.runs.append(run)

    clock, notes = Clock(), Notes()
    with inline([engine], loop, clock, watchers=[notes]) as batcher:
        for begin_us in (100, 200):
            clock.us = begin_us
            submit(batcher, row(0), 1, KEY, answers.done)
            clock.us += 7
            loop.turn()
    assert [run.idle_us for run in notes.runs] == [7, 7]


def test_a_server_runs_small_batches_on_its_event_loop_thread(engine: Threads) -> None:
    server = Server({"m": engine}, ServeOptions(http_port=0))
    served = Running(server)
    try:
        body = infer_json([1, 2, 3, 4], [1, 4])
        for inline_max_rows in (0, math.inf):
            batcher = server.repository.find("m").batcher
            asleep(batcher)
            batcher.inline_max_rows = inline_max_rows
            assert served.ask("POST", "/v2/models/m/infer", body).status == 200
        assert engine.threads[-2] != served.thread_id
        assert engine.threads[-1] == served.thread_id
    finally:
        served.close()


def test_a_server_restores_the_garbage_collector_and_signal_handlers() -> None:
    """While it serves, the collector skips the objects made before it was ready.

    Nor does it run because of the requests that 128 clients have in flight.
    """
    frozen: list[int] = []
    young: list[int] = []

    def ready(*_: object) -> None:
        frozen.append(gc.get_freeze_count())
        young.append(gc.get_threshold()[0])
        server.stop()

    server = Server({"m": FakeEngine()}, ServeOptions(http_port=0))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    collection = gc.get_threshold()
    assert http.run(server, ready) == 0
    assert frozen[0] > 1000
    assert gc.get_freeze_count() == 0
    assert young[0] >= 128 * 10  # objects that the collector counts for each request
    assert gc.get_threshold() == collection
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert after == handlers


def test_the_loop_spins_for_spin_us_after_a_batch(
    engine: Threads, loop: Loop, answers: Answers
) -> None:
    clock = Clock()
    with inline([engine], loop, clock, spin_us=100) as batcher:
        submit(batcher, row(0), 1, KEY, answers.done)
        loop.turn()
        clock.us = 99
        assert [loop.turn(), loop.turn()] == [1, 1]
        submit(batcher, row(1), 1, KEY, answers.done)
        assert loop.turn() == 2  # the last iteration of the spin, and the batch
        assert answers.order == [0, 1]
        clock.us += 100
        assert [loop.turn(), loop.turn()] == [1, 0]


def test_without_a_spare_core_the_loop_spins_only_while_requests_come_one_at_a_time(
    engine: Threads, loop: Loop, answers: Answers
) -> None:
    def spins_after(requests: int) -> bool:
        for _ in range(requests):
            submit(batcher, row(0), 1, KEY, answers.done)
        while batcher.unanswered:
            loop.turn()
        clock.us += 1
        again = loop.turn() == 1
        clock.us += 100
        while loop.turn():
            pass
        return again

    clock = Clock()
    with inline([engine], loop, clock, spin_us=100, spare_core=False) as batcher:
        assert [spins_after(1) for _ in range(9)] == [False] * 6 + [True] * 3
        assert not spins_after(2)
        assert not spins_after(1)


def test_after_a_batch_of_several_the_next_one_waits_while_more_requests_come(
    batcher: Batcher, engine: Threads, loop: Loop, answers: Answers
) -> None:
    def arrive(requests: int) -> None:
        for _ in range(requests):
            submit(batcher, row(0), 1, KEY, answers.done)

    arrive(1)
    loop.turn()
    assert engine.batches == [1]
    arrive(1)  # one request at a time never waits
    loop.turn()
    assert engine.batches == [1, 1]
    arrive(2)
    loop.turn()
    arrive(1)
    loop.turn()
    arrive(1)
    loop.turn()
    assert engine.batches == [1, 1, 2]
    loop.turn()
    assert engine.batches == [1, 1, 2, 2]
    arrive(4)  # a full batch does not wait
    loop.turn()
    assert engine.batches == [1, 1, 2, 2, 4]
    arrive(1)
    assert [loop.turn(), loop.turn(), loop.turn()] == [1, 1, 0]
    assert engine.batches == [1, 1, 2, 2, 4, 1]


def test_requests_that_keep_coming_hold_up_a_batch_for_a_limited_time(
    engine: Threads, loop: Loop, answers: Answers
) -> None:
    clock = Clock()
    with inline([engine], loop, clock) as batcher:
        for _ in range(2):
            submit(batcher, row(0), 1, KEY, answers.done)
        loop.turn()
        for us in (0, GATHER_US - 1, GATHER_US):
            clock.us = us
            assert engine.batches == [2]
            submit(batcher, row(0), 1, KEY, answers.done)
            loop.turn()
        assert engine.batches == [2, 3]


# -- A slow batch keeps the event loop from running the next ones


class Timed(Threads):
    """Each run takes `us` of `clock`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.us = clock, 100

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        self.clock.us += self.us
        return super().__call__(feeds)


def test_a_batch_that_other_programs_held_up_is_not_slow(
    monkeypatch: pytest.MonkeyPatch, loop: Loop, answers: Answers
) -> None:
    clock, computed_ns = Clock(), iter(range(0, 10_000 * SLOW_US, 1000 * SLOW_US))
    monkeypatch.setattr(batching, "thread_time_ns", lambda: next(computed_ns))
    engine = Timed(clock)
    engine.us = 100 * SLOW_US
    with inline([engine], loop, clock) as batcher:
        for number in range(3):
            asleep(batcher)
            submit(batcher, row(number), 1, KEY, answers.done)
            loop.turn()
            answers.wait(1)
        assert set(engine.threads) == {threading.get_ident()}


def test_after_a_slow_batch_the_engines_thread_runs_the_next_ones_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch, loop: Loop, answers: Answers
) -> None:
    clock = Clock()
    monkeypatch.setattr(batching, "thread_time_ns", lambda: 1000 * clock.us)
    engine, here, sent = Timed(clock), threading.get_ident(), 0
    with inline([engine], loop, clock) as batcher:

        def is_inline(us: int) -> bool:
            nonlocal sent
            asleep(batcher)
            engine.us = us
            submit(batcher, row(sent), 1, KEY, answers.done)
            loop.turn()
            sent += 1
            answers.wait(1)
            return engine.threads[-1] == here

        assert is_inline(SLOW_US)
        assert is_inline(SLOW_US + 1)
        assert not is_inline(100)
        clock.us += PAUSE_US
        assert is_inline(SLOW_US + 1)  # soon again: the pause is twice as long
        clock.us += PAUSE_US
        assert not is_inline(100)
        clock.us += PAUSE_US
        assert is_inline(100)
        clock.us += 10 * PAUSE_US
        assert is_inline(SLOW_US + 1)
        clock.us += PAUSE_US
        assert is_inline(100)
