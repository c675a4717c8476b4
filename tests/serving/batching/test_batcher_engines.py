"""Several engines behind one queue, and engines that fail, hang or are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, Expired, OutOfMemory, Overloaded
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.serving.batching.batcher import Batcher
from deploykit.serving.batching.queue import BatchPolicy, BatchRun, Pending, Watcher
from deploykit.serving.batching.runner import EngineFailed
from tests.support.fake_engine import FakeEngine
from tests.support.serving.loops import KEY, Answers, Clock, submit
from tests.support.serving.running import WAIT_S, GatedEngine


class Notes(Watcher):
    def __init__(self) -> None:
        self.runs: list[BatchRun] = []

    def record_run(self, run: BatchRun) -> None:
        self.runs.append(run)


class Raising(FakeEngine):
    """Raises `problem` while it is set, on calls of more than `least` rows."""

    def __init__(self, problem: Exception | None, least: int = 0) -> None:
        super().__init__()
        self.problem = problem
        self.least = least
        self.calls = 0

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        self.calls += 1
        if self.problem is not None and len(feeds["x"]) > self.least:
            raise self.problem
        return super().__call__(feeds)


def rows(first: float, count: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.arange(first, first + count, dtype=np.float32)[:, None].repeat(4, axis=1)}


def gated(count: int) -> list[GatedEngine]:
    """Engines that share one semaphore, which is released each time a request enters one."""
    engines = [GatedEngine() for _ in range(count)]
    for engine in engines:
        engine.warm = True
        engine.entered = engines[0].entered
    return engines


def entered(engines: Sequence[GatedEngine]) -> None:
    for _ in engines:
        assert engines[0].entered.acquire(timeout=WAIT_S)


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.mark.parametrize("count", [2, 3])
def test_no_request_waits_while_an_engine_is_idle(answers: Answers, count: int) -> None:
    engines = gated(count)
    with Batcher(engines, BatchPolicy(max_batch=8)) as batcher:
        for n in range(count):
            submit(batcher, rows(n), 1, KEY, answers.done)
            entered(engines[:1])  # each starts while the earlier ones are still inside an engine
        for engine in engines:
            engine.gate.set()
        answers.wait(count)
    assert sorted(engine.batches for engine in engines) == [[1]] * count


def test_requests_beyond_one_full_batch_go_to_the_other_engine(answers: Answers) -> None:
    engines = gated(2)
    with Batcher(engines, BatchPolicy(max_batch=4, max_delay_us=10**9)) as batcher:
        for n in range(8):
            submit(batcher, rows(n), 1, KEY, answers.done)
        entered(engines)
        assert batcher.waiting == 0
        for engine in engines:
            engine.gate.set()
        answers.wait(8)
    assert [engine.batches for engine in engines] == [[4], [4]]


def test_two_batches_due_at_the_same_time_run_on_two_engines(
    answers: Answers, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    """Two shapes whose delay ends together; the thread with the timer takes only one batch."""
    clock, engines = Clock(), gated(2)
    policy = BatchPolicy(max_batch=4, max_delay_us=1000)
    with Batcher(engines, policy, clock_us=clock) as batcher:
        for n, kind in enumerate(("one", "other")):
            eventually(lambda: len(batcher._idle) == 2)
            submit(batcher, rows(n), 1, (("x", kind, (4,)),), answers.done)
        eventually(lambda: len(batcher._idle) == 2)
        clock.us = 1000
        entered(engines)
        for engine in engines:
            engine.gate.set()
        answers.wait(2)
    assert [len(engine.fed) for engine in engines] == [1, 1]


def test_a_hung_engine_does_not_stop_the_other_engine(answers: Answers) -> None:
    clock, engines = Clock(), gated(2)
    with Batcher(engines, BatchPolicy(), clock_us=clock, hung_us=2000) as batcher:
        stuck = submit(batcher, rows(0), 1, KEY, answers.done, give_up_us=1000)
        entered(engines[:1])
        (hung,) = [engine for engine in engines if engine.fed]
        other = engines[1 - engines.index(hung)]
        other.gate.set()
        clock.us = 2000
        batcher.expire()
        answers.wait(1)
        assert isinstance(stuck.error, Expired)
        assert batcher.hung == 1
        for n in range(1, 6):
            submit(batcher, rows(n), 1, KEY, answers.done)
            answers.wait(1)
        hung.gate.set()
    assert answers.order == [0, 1, 2, 3, 4, 5]
    assert hung.fed == [0]


def test_an_engine_that_returns_late_is_no_longer_counted_as_hung(answers: Answers) -> None:
    clock, (engine,) = Clock(), gated(1)
    with Batcher([engine], BatchPolicy(), clock_us=clock, hung_us=2000) as batcher:
        submit(batcher, rows(0), 1, KEY, answers.done)
        entered([engine])
        clock.us = 1999
        assert batcher.hung == 0
        clock.us = 2000
        assert batcher.hung == 1
        engine.gate.set()
        answers.wait(1)
        assert batcher.hung == 0
        good = submit(batcher, rows(1), 1, KEY, answers.done)
        answers.wait(1)
        assert good.error is None


@pytest.mark.parametrize("problem", [OutOfMemory("/home/me/m.trt: cuda:0"), MemoryError()])
def test_out_of_memory_fails_one_batch_and_the_next_succeeds(
    answers: Answers, problem: Exception
) -> None:
    engine = Raising(problem)
    with Batcher([engine], BatchPolicy(), name="m") as batcher:
        bad = submit(batcher, rows(0, 2), 2, KEY, answers.done)
        answers.wait(1)
        engine.problem = None
        good = submit(batcher, rows(3), 1, KEY, answers.done)
        answers.wait(1)
    assert isinstance(bad.error, Overloaded)
    assert "out of memory" in bad.error.message
    assert "/home" not in bad.error.message
    np.testing.assert_array_equal(good.outputs["y"], rows(3)["x"] * 2 + 1)


def test_a_batch_that_ran_out_of_memory_is_not_retried(answers: Answers) -> None:
    blocked, failing = gated(1)[0], Raising(OutOfMemory("no"))

    class Both(FakeEngine):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            return failing(feeds) if blocked.gate.is_set() else blocked(feeds)

    with Batcher([Both()], BatchPolicy(max_batch=8)) as batcher:
        submit(batcher, rows(0), 1, KEY, answers.done)
        entered([blocked])
        sent = [submit(batcher, rows(n), 1, KEY, answers.done) for n in (1, 2, 3)]
        blocked.gate.set()
        answers.wait(4)
    assert failing.calls == 1
    assert {type(request.error) for request in sent} == {Overloaded}


def test_a_lost_device_refuses_queued_and_new_requests(answers: Answers) -> None:
    class Lost(GatedEngine):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            super().__call__(feeds)
            raise DeviceLost("cuda:0: the GPU is lost", hint="/proc")

    engine = Lost()
    engine.warm = True
    with Batcher([engine], BatchPolicy(max_batch=2), name="m") as batcher:
        sent = [submit(batcher, rows(0), 1, KEY, answers.done)]
        entered([engine])
        sent += [submit(batcher, rows(n), 1, KEY, answers.done) for n in range(1, 6)]
        engine.gate.set()
        answers.wait(6)
        assert batcher.lost
        assert batcher.unanswered == 0
        with pytest.raises(Overloaded, match="GPU is lost"):
            submit(batcher, rows(9), 1, KEY, answers.done)
    assert engine.fed == [0]  # it was not called again
    assert {type(request.error) for request in sent} == {Overloaded}
    assert {request.error.http_status for request in sent} == {503}


def test_bad_input_raised_by_the_engine_is_reported_to_the_client_as_bad_input(
    answers: Answers,
) -> None:
    with Batcher([Raising(BadInput("/home/m.onnx: axis T is 9"))], BatchPolicy()) as batcher:
        request = submit(batcher, rows(0), 1, KEY, answers.done)
        answers.wait(1)
    assert isinstance(request.error, BadInput)
    assert "/home" not in request.error.message


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        *((np.zeros(n, np.float32), str(list(n))) for n in ((1, 5), (1,), (), (1, 4, 1))),
        (np.zeros((1, 4), np.float64), "float64"),
        (None, "nothing"),
    ],
    ids=["wider", "flatter", "a scalar", "deeper", "another dtype", "none"],
)
def test_an_output_that_does_not_match_its_spec_is_an_error_that_says_how(
    answers: Answers, wrong: np.ndarray | None, reason: str
) -> None:
    class Wrong(FakeEngine):
        def __call__(self, _feeds: Any) -> dict[str, np.ndarray]:
            return {} if wrong is None else {"y": wrong}

    with Batcher([Wrong()], BatchPolicy()) as batcher:
        request = submit(batcher, rows(0), 1, KEY, answers.done)
        answers.wait(1)
    assert isinstance(request.error, EngineFailed)
    assert reason in request.error.message


def test_retired_engines_finish_their_requests_and_are_closed(answers: Answers) -> None:
    (engine,) = gated(1)
    batcher = Batcher([engine], BatchPolicy(max_batch=2))
    for n in range(5):
        submit(batcher, rows(n), 1, KEY, answers.done)
    entered([engine])
    batcher.retire()
    assert not engine.closed
    engine.gate.set()
    answers.wait(5)
    assert batcher.close() == 0
    assert batcher.ended
    assert engine.closed
    assert answers.order == [0, 1, 2, 3, 4]


def test_an_exception_in_a_watcher_or_callback_ends_no_thread(answers: Answers) -> None:
    class Broken(Watcher):
        def record_run(self, _run: BatchRun) -> None:
            raise RuntimeError("a watcher's trouble")

    def fails(_: Pending) -> None:
        raise RuntimeError("an answer's trouble")

    with Batcher([FakeEngine()], BatchPolicy(), watchers=[Broken()]) as batcher:
        submit(batcher, rows(0), 1, KEY, fails)
        for n in (1, 2):
            submit(batcher, rows(n), 1, KEY, answers.done)
        answers.wait(2)
    assert answers.order == [1, 2]


def test_copy_times_of_the_engine_are_reported_separately(answers: Answers) -> None:
    clock, notes = Clock(), Notes()

    class Copying(FakeEngine):
        last_copies_us = (0, 0)

        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            clock.us += 100
            self.last_copies_us = (20, 30)
            return super().__call__(feeds)

    with Batcher([Copying()], BatchPolicy(), clock_us=clock, watchers=[notes]) as batcher:
        submit(batcher, rows(0), 1, KEY, answers.done)
        answers.wait(1)
    (run,) = notes.runs
    assert (run.copy_in_us, run.engine_us, run.copy_out_us, run.busy_us) == (20, 50, 30, 100)


def test_idle_time_is_how_long_an_idle_engine_delayed_a_batch(
    answers: Answers, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    """A batch of two rows: the first row waits 300 µs for the second while the engine is idle."""
    clock, notes, (engine,) = Clock(), Notes(), gated(1)
    policy = BatchPolicy(max_batch=2, max_delay_us=10**9)
    with Batcher([engine], policy, clock_us=clock, watchers=[notes]) as batcher:
        eventually(lambda: bool(batcher._idle))
        clock.us = 1000
        submit(batcher, rows(0), 1, KEY, answers.done)
        clock.us = 1300
        submit(batcher, rows(1), 1, KEY, answers.done)
        entered([engine])
        for n in (2, 3):  # these wait for a busy engine, which is not idle time
            submit(batcher, rows(n), 1, KEY, answers.done)
        clock.us = 5000
        engine.gate.set()
        answers.wait(4)
    assert [run.idle_us for run in notes.runs] == [300, 0]
