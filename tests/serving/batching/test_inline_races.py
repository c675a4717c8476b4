"""Random races between inline batches and the batches of the engines' threads.

Each accepted request is answered exactly once or cancelled, and all threads end.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from deploykit.core.errors import Overloaded
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.serving.batching.batcher import Batcher, deliver_inline, monotonic_us
from deploykit.serving.batching.queue import BatchPolicy, Pending, Watcher
from deploykit.serving.models.model import ServedModel
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions
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
from tests.support.serving.running import WAIT_S, request, running

Eventually = Callable[[Callable[[], bool]], None]
WIDER = (("x", "FP32", (4,)), ("z", "FP32", (1,)))  # another key, of the same arrays


class LoopThread:
    """An event loop: `call_soon` for its own thread alone, `soon` for the others."""

    def __init__(self) -> None:
        self._todo: deque[Callable[[], object]] = deque()
        self._came = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.failed: list[Exception] = []
        self.thread.start()

    def _run(self) -> None:
        while self._came.acquire():
            what = self._todo.popleft()
            try:
                what()
            except SystemExit:
                return
            except Exception as exc:  # noqa: BLE001 - the test asserts that there is none
                self.failed.append(exc)

    def soon(self, what: Callable[[], object]) -> None:
        self._todo.append(what)
        self._came.release()

    def call_soon(self, what: Callable[[], None]) -> None:
        assert threading.current_thread() is self.thread
        self.soon(what)

    def deliver(self, requests: Sequence[Pending]) -> None:
        self.soon(lambda: deliver_inline(requests))

    def do(self, what: Callable[[], object]) -> None:
        """Run it there and wait for it."""
        done = threading.Event()
        self.soon(lambda: (what(), done.set()))
        assert done.wait(WAIT_S), "the event loop hangs"

    def stop(self) -> None:
        self.soon(sys.exit)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


class Moody(FakeEngine):
    """Fails at times; never called by two threads at once."""

    def __init__(self, chance: random.Random, *, lost_at: int = 0) -> None:
        super().__init__()
        self._chance = chance
        self._calls = 0
        self._lost_at = lost_at
        self._within = threading.Lock()
        self.calm = True
        self.overlapped = False

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not self._within.acquire(blocking=False):
            self.overlapped = True
        try:
            if self.calm:
                return super().__call__(feeds)
            self._calls += 1
            if self._calls == self._lost_at:
                raise DeviceLost("the GPU is lost")
            luck = self._chance.random()
            if luck < 0.05:
                raise ValueError("not today")
            if luck < 0.3:
                threading.Event().wait(luck / 1000)
            return super().__call__(feeds)
        finally:
            self._within.release()


class Rude(Watcher):
    def record_failure(self, *_: object) -> None:
        raise RuntimeError("a watcher's own trouble")


class Run:
    """One served model under random requests, cancellations and replacements."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.loop = LoopThread()
        self.answers: Counter[Pending] = Counter()
        self.sent: list[Pending] = []
        self.cancelled: set[Pending] = set()
        self.engines: list[Moody] = []
        options = ServeOptions(
            max_batch=chance.choice([1, 4, 8]),
            max_delay_us=chance.choice([0, 0, 0, 300]),
            queue=chance.choice([4, 64]),
        )
        self.model = ServedModel(
            "m", self.make(), options, self.loop.deliver, monotonic_us, self.loop.call_soon
        )
        self.model.watch(Rude())
        self.start_failing(self.engines)
        self.switch_inline_max_rows()

    def make(self) -> list[Moody]:
        chance = self.chance
        lost_at = chance.choice([0, 0, 0, 0, 20])
        made = [Moody(random.Random(chance.random())) for _ in range(chance.choice([1, 1, 2, 3]))]
        made[0]._lost_at = lost_at
        self.engines += made
        return made

    def replace(self) -> None:
        engines = self.make()
        self.model.replace(engines)
        self.start_failing(engines)

    def start_failing(self, engines: list[Moody]) -> None:
        """After the warm-up: from now on the engines fail at random."""
        for engine in engines:
            engine.calm = False

    def switch_inline_max_rows(self) -> None:
        self.model.batcher.inline_max_rows = self.chance.choice([0, 2, math.inf, math.inf])

    def done(self, request: Pending) -> None:
        self.answers[request] += 1
        if request.error is None and request.rows:
            np.testing.assert_array_equal(request.outputs["y"], request.feeds["x"] * 2 + 1)
        luck = self.chance.random()
        if luck < 0.1:
            self.submit()  # a client that sends its next request at once
        elif luck < 0.15:
            raise ValueError("an answer that cannot be sent")

    def submit(self) -> None:
        chance = self.chance
        rows = min(chance.choice([0, 1, 1, 1, 2, 3]), self.model.max_batch)
        sent = Request(
            feeds=row(chance.random(), rows),
            rows=rows,
            key=chance.choice([KEY, KEY, WIDER]),
            outputs=(),
            id=None,
            timeout_us=chance.choice([None, None, 1, 200]),
            priority=chance.choice([0, 1, 3]),
        )
        with contextlib.suppress(Overloaded):
            self.sent.append(self.model.submit(sent, self.done))

    def cancel(self) -> None:
        if self.sent:
            victim = self.chance.choice(self.sent[-5:])
            if self.model.cancel(victim):
                self.cancelled.add(victim)

    def random_requests(self) -> None:
        """What one iteration of the loop reads from its clients."""
        chance = self.chance
        for _ in range(chance.randrange(6)):
            self.submit()
        luck = chance.random()
        if luck < 0.2:
            self.cancel()
        elif luck < 0.4:
            self.model.expire()
        elif luck < 0.5:
            self.switch_inline_max_rows()

    def check(self, *, drained: bool) -> None:
        self.loop.do(lambda: None)  # what was delivered
        self.loop.stop()
        for sent in self.sent:
            assert self.answers[sent] == (0 if sent in self.cancelled else 1), sent
        assert all(batcher.ended for batcher in (self.model.batcher, *self.model._replaced))
        assert not any(engine.overlapped for engine in self.engines)
        assert self.model.waiting == self.model.unanswered == 0
        if drained:
            refused = [r for r in self.sent if "shutting down" in str(r.error)]
            assert refused == []


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Make the interpreter switch threads every 10 µs."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("frequent_thread_switches")
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", range(40))
def test_every_accepted_request_is_answered_once_or_cancelled(
    seed: int, eventually: Eventually
) -> None:
    run = Run(seed)
    for _ in range(run.chance.randrange(3, 40)):
        run.loop.soon(run.random_requests)
        luck = run.chance.random()
        if luck < 0.1:
            run.replace()
        elif luck < 0.3:
            threading.Event().wait(luck / 1000)
    drain = run.chance.random() < 0.7
    if run.chance.random() < 0.5:  # else some are still to come
        run.loop.do(lambda: None)
        eventually(lambda: not run.model.unanswered)
    assert run.model.close(drain=drain, timeout_s=WAIT_S) == 0
    run.check(drained=drain)
    assert run.loop.failed == []


class Brief(Clock):
    """Stands still, so that an engine's thread always has a millisecond of delay left."""

    us = 1_000_000


def test_a_thread_that_wakes_during_an_inline_run_of_its_engine_keeps_no_lock() -> None:
    """The policy had a delay when the thread began to wait, and has none now."""

    class Long(Threads):
        def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            if threading.current_thread() is thread:
                threading.Event().wait(0.05)
            return super().__call__(feeds)

    clock, loop, answers, engine = Brief(), Loop(), Answers(), Long()
    slow = BatchPolicy(max_batch=4, max_delay_us=1000)
    batcher = Batcher([engine], slow, clock_us=clock, call_soon=loop.call_soon)
    asleep(batcher)

    def run() -> None:
        batcher.inline_max_rows = math.inf
        submit(batcher, row(0), 1, KEY, answers.done)
        with batcher._lock:
            batcher._idle.pop().wake.release()
        asleep(batcher)  # in waits of a millisecond, as the clock stands still
        with batcher._lock:
            batcher._queue.policy = BatchPolicy(max_batch=4)
        loop.turn()
        submit(batcher, row(1), 1, KEY, answers.done)
        loop.turn()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "the batcher hangs"
    answers.wait(2)
    assert batcher.close(timeout_s=WAIT_S) == 0
    assert sorted(answers.order) == [0, 1]


def test_a_batch_that_is_still_delayed_is_left_to_the_engines_thread(
    loop: Loop, answers: Answers
) -> None:
    """Otherwise the loop would reschedule itself until the delay has passed."""
    policy = BatchPolicy(max_batch=4, max_delay_us=60_000_000)
    with inline([Threads()], loop, Clock(), policy) as batcher:
        submit(batcher, row(0), 1, KEY, answers.done)
        assert [loop.turn(), loop.turn()] == [1, 0]
    assert answers.order == [0]


def test_a_request_without_rows_does_not_run_inline_when_inline_is_off() -> None:
    loop, engine = Loop(), Threads()
    came = threading.Semaphore(0)
    with Batcher([engine], BatchPolicy(max_batch=4), call_soon=loop.call_soon) as batcher:
        assert batcher.inline_max_rows == 0
        asleep(batcher)
        submit(batcher, row(0, 0), 0, KEY, lambda _: came.release())
        loop.turn()
        assert came.acquire(timeout=WAIT_S)
    assert threading.get_ident() not in engine.threads


def test_requests_submitted_in_a_callback_schedule_one_loop_iteration() -> None:
    loop, answers = Loop(), Answers()

    def again(request: Pending) -> None:
        answers.done(request)
        if len(answers.order) == 1:
            for value in (2, 3):
                submit(batcher, row(value), 1, KEY, answers.done)

    with Batcher(
        [Threads(), Threads()], BatchPolicy(max_batch=1), call_soon=loop.call_soon
    ) as batcher:
        batcher.inline_max_rows = math.inf
        asleep(batcher)
        submit(batcher, row(1), 1, KEY, again)
        loop.turn()
        assert len(loop.asked) == 1
        while loop.turn():
            pass
        answers.wait(3)


def test_a_server_with_a_batch_delay_answers_requests_without_rows() -> None:
    with running(max_delay_us=2000) as server:
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[0,4],"data":[]}]}'
        raws = [server.connect() for _ in range(8)]
        for _ in range(20):
            for raw in raws:
                raw.send(request("POST", "/v2/models/m/infer", body))
            for raw in raws:
                reply = raw.reply()
                assert reply.status == 200
