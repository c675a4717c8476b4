"""Batches that run inline, on the event loop's thread that submitted them, and their races."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from deploykit.core.errors import DeviceLost, Overloaded
from deploykit.serving import server as http
from deploykit.serving.batching import batcher as batching
from deploykit.serving.batching.batcher import (
    GATHER_US,
    PAUSE_US,
    SLOW_US,
    Batcher,
    deliver_inline,
)
from deploykit.serving.batching.queue import BatchPolicy, Pending, Watcher
from deploykit.serving.models.model import ServedModel
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from tests.support.fake_engine import FakeEngine
from tests.support.serving.loops import KEY, Answers, Clock, asleep, row, submit
from tests.support.serving.running import WAIT_S, infer_json, running


class Loop:
    """The part of an event loop that matters: it runs what is asked for when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []

    def call_soon(self, function: Callable[[], None]) -> None:
        self.asked.append(function)

    def turn(self) -> int:
        """One iteration; returns how many functions it ran."""
        asked, self.asked = self.asked, []
        for function in asked:
            function()
        return len(asked)


class Threads(FakeEngine):
    """Remembers which thread called it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.threads.append(threading.get_ident())
        return super().__call__(feeds)


class Turned(Threads):
    """An engine whose batcher runs its batches on the thread that turns the loop.

    Each run takes `us` of a clock that else stands still.
    """

    def __init__(self, spin_us: int = 0) -> None:
        super().__init__()
        self.loop, self.clock, self.answers, self.us = Loop(), Clock(), Answers(), 0
        policy = BatchPolicy(max_batch=4)
        loop = batching.Loop(clock_us=self.clock, call_soon=self.loop.call_soon, spin_us=spin_us)
        self.batcher = Batcher([self], policy, loop)
        self.batcher.inline_max_rows = math.inf
        asleep(self.batcher)

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.clock.us += self.us
        return super().__call__(feeds)

    def send(self, *sizes: int) -> list[Pending]:
        first = len(self.answers.order)
        return [
            submit(self.batcher, row(first + n, size), size, KEY, self.answers.done)
            for n, size in enumerate(sizes)
        ]

    def turn(self, *sizes: int) -> int:
        """Send these, and turn the loop once; returns how many functions it ran."""
        self.send(*sizes)
        return self.loop.turn()

    @property
    def here(self) -> list[bool]:
        """Whether each batch ran on this thread."""
        return [thread == threading.get_ident() for thread in self.threads]


@pytest.fixture
def turned() -> Iterator[Turned]:
    engine = Turned()
    with engine.batcher:
        yield engine


def test_requests_read_in_one_loop_iteration_run_inline_as_one_batch(turned: Turned) -> None:
    sent = turned.send(1, 1, 1, 1, 1, 1)
    assert turned.batches == []
    assert turned.turn() == 1
    assert turned.batches == [4]
    assert [turned.turn(1), turned.turn()] == [1, 0]
    assert turned.batches == [4, 3]
    assert turned.answers.order == [0, 1, 2, 3, 4, 5, 4]
    assert {*turned.threads, *turned.answers.threads} == {threading.get_ident()}
    for each in sent:
        np.testing.assert_array_equal(each.outputs["y"], each.feeds["x"] * 2 + 1)


@pytest.mark.parametrize(
    ("most", "sizes", "batches", "here"),
    [
        (2, [1, 2], [3], [False]),
        (2, [2], [2], [True]),
        (4, [1] * 12, [4, 4, 4], [True] * 3),  # by their own rows, however many wait
        (0, [1], [1], [False]),
    ],
    ids=str,
)
def test_a_batch_above_inline_max_rows_runs_on_the_engines_thread(
    turned: Turned, most: int, sizes: list[int], batches: list[int], here: list[bool]
) -> None:
    turned.batcher.inline_max_rows = most
    turned.send(*sizes)
    while turned.turn():
        pass
    turned.answers.wait(len(sizes))
    assert (turned.batches, turned.here) == (batches, here)


def test_a_server_runs_small_batches_on_its_event_loop_thread() -> None:
    engine = Threads()
    with running({"m": engine}) as served:
        batcher = served.server.repository.find("m").batcher
        for inline_max_rows in (0, math.inf):
            asleep(batcher)
            batcher.inline_max_rows = inline_max_rows
            body = infer_json([1, 2, 3, 4], [1, 4])
            assert served.ask("POST", "/v2/models/m/infer", body).status == 200
        here = [thread == served.thread_id for thread in engine.threads[-2:]]
        assert here == [False, True]


def test_a_server_restores_the_garbage_collector_and_signal_handlers() -> None:
    """While it serves, the collector skips the objects made before, and runs for few requests."""
    seen: list[tuple[int, int]] = []

    def ready(*_: object) -> None:
        seen.append((gc.get_freeze_count(), gc.get_threshold()[0]))
        server.stop()

    def state() -> object:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return handlers, gc.get_threshold()

    server, before = Server({"m": FakeEngine()}, ServeOptions(http_port=0)), state()
    assert http.run(server, ready) == 0
    ((frozen, young),) = seen
    assert frozen > 1000
    assert gc.get_freeze_count() == 0
    assert young >= 128 * 10  # objects that the collector counts for each of 128 clients' requests
    assert state() == before


def test_the_loop_spins_for_spin_us_while_requests_come_one_at_a_time() -> None:
    engine = Turned(spin_us=100)
    with engine.batcher:
        for _ in range(6):
            assert [engine.turn(1), engine.turn()] == [1, 0]
        engine.turn(1)
        engine.clock.us = 99
        assert [engine.turn(), engine.turn()] == [1, 1]
        assert engine.turn(1) == 2  # the last iteration of the spin, and the batch
        assert engine.answers.order == list(range(8))
        engine.clock.us += 100
        assert [engine.turn(), engine.turn()] == [1, 0]


def test_after_a_batch_of_several_the_next_one_waits_while_more_requests_come(
    turned: Turned,
) -> None:
    for count, us, batches in [
        (1, 0, [1]),
        (1, 0, [1, 1]),  # one request at a time never waits
        (2, 0, [1, 1, 2]),
        (1, 0, [1, 1, 2]),
        (1, 0, [1, 1, 2]),
        (0, 0, [1, 1, 2, 2]),
        (4, 0, [1, 1, 2, 2, 4]),  # a full batch does not wait
        (1, 0, [1, 1, 2, 2, 4]),
        (1, GATHER_US - 1, [1, 1, 2, 2, 4]),
        (1, GATHER_US, [1, 1, 2, 2, 4, 3]),  # nor does any for longer
    ]:
        turned.clock.us = us
        turned.turn(*[1] * count)
        assert turned.batches == batches
    assert turned.turn() == 0


# -- A slow batch keeps the event loop from running the next ones


def runs_inline(engine: Turned, us: int) -> bool:
    """Whether the next batch, which takes `us`, runs on the loop's thread."""
    engine.us = us
    asleep(engine.batcher)
    engine.turn(1)
    engine.answers.wait(1)
    return engine.here[-1]


def test_a_batch_that_other_programs_held_up_is_not_slow(
    monkeypatch: pytest.MonkeyPatch, turned: Turned
) -> None:
    computed_ns = iter(range(0, 10_000 * SLOW_US, 1000 * SLOW_US))
    monkeypatch.setattr(batching, "thread_time_ns", lambda: next(computed_ns))
    assert all(runs_inline(turned, 100 * SLOW_US) for _ in range(3))


def test_after_a_slow_batch_the_engines_thread_runs_the_next_ones_for_a_while(
    monkeypatch: pytest.MonkeyPatch, turned: Turned
) -> None:
    monkeypatch.setattr(batching, "thread_time_ns", lambda: 1000 * turned.clock.us)
    for pause_us, us, inline in [
        (0, SLOW_US, True),
        (0, SLOW_US + 1, True),
        (0, 100, False),
        (PAUSE_US - 200, 100, False),
        (PAUSE_US, 100, True),
    ]:
        turned.clock.us += pause_us
        assert runs_inline(turned, us) is inline


def test_a_thread_that_wakes_during_an_inline_run_of_its_engine_keeps_no_lock() -> None:
    """The policy had a delay when the thread began to wait, and has none now."""

    class Long(Threads):
        def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            if threading.current_thread() is thread:
                threading.Event().wait(0.05)
            return super().__call__(feeds)

    clock, loop, answers, engine = Clock(), Loop(), Answers(), Long()
    clock.us = 1_000_000  # stands still: a millisecond of delay is always left
    slow = BatchPolicy(max_batch=4, max_delay_us=1000)
    batcher = Batcher([engine], slow, batching.Loop(clock_us=clock, call_soon=loop.call_soon))
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


# -- Random races between inline batches and those of the engines' threads


class Moody(FakeEngine):
    """Fails at times; never called by two threads at once."""

    def __init__(self, seed: float, lost_at: int) -> None:
        super().__init__()
        self._chance, self._lost_at, self._calls = random.Random(seed), lost_at, 0
        self._within = threading.Lock()
        self.calm = True  # until it was warmed up
        self.overlapped = False

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.overlapped |= not self._within.acquire(blocking=False)
        try:
            if not self.calm:
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
        self.loop, self.failed = asyncio.new_event_loop(), list[object]()
        self.loop.set_exception_handler(lambda _loop, context: self.failed.append(context))
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.soon = self.loop.call_soon_threadsafe
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
            "m", self.make(), options, batching.Loop(self.deliver, call_soon=self.loop.call_soon)
        )
        self.model.watch(Rude())
        self.start_failing()
        self.switch_inline_max_rows()

    def deliver(self, requests: Sequence[Pending]) -> None:
        self.soon(deliver_inline, requests)

    def make(self) -> list[Moody]:
        chance = self.chance
        lost_at = chance.choice([0, 0, 0, 0, 20])
        count = chance.choice([1, 1, 2, 3])
        made = [Moody(chance.random(), 0 if n else lost_at) for n in range(count)]
        self.engines += made
        return made

    def start_failing(self) -> None:
        """After the warm-up."""
        for engine in self.engines:
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
        kind = chance.choice([KEY, KEY, (*KEY, ("z", "FP32", (1,)))])  # of the same arrays
        limit_us, priority = chance.choice([None, None, 1, 200]), chance.choice([0, 1, 3])
        sent = Request(row(chance.random(), rows), rows, kind, (), None, limit_us, priority)
        with contextlib.suppress(Overloaded):
            self.sent.append(self.model.submit(sent, self.done))

    def random_requests(self) -> None:
        """What one iteration of the loop reads from its clients."""
        chance = self.chance
        for _ in range(chance.randrange(6)):
            self.submit()
        luck = chance.random()
        if luck < 0.2 and self.sent:
            victim = chance.choice(self.sent[-5:])
            if self.model.batcher.cancel(victim):
                self.cancelled.add(victim)
        elif luck < 0.4:
            self.model.batcher.expire()
        elif luck < 0.5:
            self.switch_inline_max_rows()

    def wait(self) -> None:
        """Until the loop has run what it was given."""
        came = threading.Event()
        self.soon(came.set)
        assert came.wait(WAIT_S), "the event loop hangs"

    def stop(self) -> None:
        self.wait()
        self.soon(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


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
    seed: int, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    run = Run(seed)
    model = run.model
    for _ in range(run.chance.randrange(3, 40)):
        run.soon(run.random_requests)
        luck = run.chance.random()
        if luck < 0.1:
            with contextlib.suppress(Overloaded):  # a GPU was lost: the server ends
                model.replace(run.make())
            run.start_failing()
        elif luck < 0.3:
            threading.Event().wait(luck / 1000)
    drain = run.chance.random() < 0.7
    if run.chance.random() < 0.5:  # else some are still to come
        run.wait()
        eventually(lambda: not model.unanswered)
    assert model.batcher.close(drain=drain, timeout_s=WAIT_S) == 0
    run.stop()
    for sent in run.sent:
        assert run.answers[sent] == (0 if sent in run.cancelled else 1), sent
    assert not any(thread.is_alive() for thread in model.batcher._threads)
    assert not any(engine.overlapped for engine in run.engines)
    assert model.batcher.waiting == model.unanswered == 0
    assert not drain or not any("shutting down" in str(r.error) for r in run.sent)
    assert run.failed == []
