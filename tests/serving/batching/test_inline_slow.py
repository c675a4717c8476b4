"""A slow batch keeps the event loop from running the next ones."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

from deploykit.serving.batching import batcher as inline_executor
from deploykit.serving.batching.batcher import PAUSE_US, SLOW_US, Batcher
from deploykit.serving.batching.queue import BatchPolicy
from tests.support.serving.loops import KEY, Answers, Clock, Loop, Threads, asleep, row, submit


class Timed(Threads):
    """Each run takes `us` of `clock`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.us = clock, 100

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        self.clock.us += self.us
        return super().__call__(feeds)


def test_a_batch_that_other_programs_held_up_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, answers = Loop(), Answers()
    clock, computed_ns = Clock(), iter(range(0, 10_000 * SLOW_US, 1000 * SLOW_US))
    monkeypatch.setattr(inline_executor, "thread_time_ns", lambda: next(computed_ns))
    engine = Timed(clock)
    engine.us = 100 * SLOW_US
    with Batcher([engine], BatchPolicy(), call_soon=loop.call_soon, clock_us=clock) as batcher:
        batcher.inline_max_rows = math.inf
        for number in range(3):
            asleep(batcher)
            submit(batcher, row(number), 1, KEY, answers.done)
            loop.turn()
            answers.wait(1)
        assert set(engine.threads) == {threading.get_ident()}


def test_after_a_slow_batch_the_engines_thread_runs_the_next_ones_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, answers, clock = Loop(), Answers(), Clock()
    monkeypatch.setattr(inline_executor, "thread_time_ns", lambda: 1000 * clock.us)
    engine, here, sent = Timed(clock), threading.get_ident(), 0
    with Batcher([engine], BatchPolicy(), call_soon=loop.call_soon, clock_us=clock) as batcher:
        batcher.inline_max_rows = math.inf

        def inline(us: int) -> bool:
            nonlocal sent
            asleep(batcher)
            engine.us = us
            submit(batcher, row(sent), 1, KEY, answers.done)
            loop.turn()
            sent += 1
            answers.wait(1)
            return engine.threads[-1] == here

        assert inline(SLOW_US)
        assert inline(SLOW_US + 1)
        assert not inline(100)
        clock.us += PAUSE_US
        assert inline(SLOW_US + 1)  # soon again: the pause is twice as long
        clock.us += PAUSE_US
        assert not inline(100)
        clock.us += PAUSE_US
        assert inline(100)
        clock.us += 10 * PAUSE_US
        assert inline(SLOW_US + 1)
        clock.us += PAUSE_US
        assert inline(100)
