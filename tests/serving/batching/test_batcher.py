"""The batcher: grouping, limits, deadlines, several engines, and those that fail or hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, Expired, OutOfMemory, Overloaded
from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.serving.batching.batcher import Batcher
from deploykit.serving.batching.queue import BatchPolicy, BatchRun, Pending, Watcher
from deploykit.serving.batching.runner import EngineFailed, stack
from deploykit.serving.batching.slo import Steering
from tests.support.fake_engine import FakeEngine
from tests.support.serving.loops import KEY, Answers, Clock, asleep, row, submit
from tests.support.serving.overlapping import OverlappingEngine
from tests.support.serving.running import WAIT_S, GatedEngine


def rows(first: float, count: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.arange(first, first + count, dtype=np.float32)[:, None].repeat(4, axis=1)}


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine(warm=True)


def busy(batcher: Batcher, engine: GatedEngine, answers: Answers) -> None:
    """Put one request into the engine, where it stays until the gate opens."""
    submit(batcher, rows(-1), 1, KEY, answers.done)
    assert engine.entered.acquire(timeout=WAIT_S)


@pytest.mark.parametrize("sizes", [[1], [3, 1], [2, 2, 4], [1] * 20], ids=str)
def test_every_request_gets_its_own_rows(
    engine: GatedEngine, answers: Answers, sizes: list[int]
) -> None:
    with Batcher([engine], BatchPolicy(max_batch=8)) as batcher:
        busy(batcher, engine, answers)
        sent = [
            submit(batcher, rows(i * 100, n), n, KEY, answers.done) for i, n in enumerate(sizes)
        ]
        engine.gate.set()
        answers.wait(len(sizes) + 1)
    for request in sent:
        np.testing.assert_array_equal(request.outputs["y"], request.feeds["x"] * 2 + 1)


def test_requests_queued_while_the_engine_is_busy_run_as_one_batch(
    engine: GatedEngine, answers: Answers
) -> None:
    with Batcher([engine], BatchPolicy(max_batch=4)) as batcher:
        busy(batcher, engine, answers)
        for i in range(6):
            submit(batcher, rows(i), 1, KEY, answers.done)
        engine.gate.set()
        answers.wait(7)
    assert engine.batches == [1, 4, 2]
    assert answers.order == [-1, 0, 1, 2, 3, 4, 5]


def test_answers_are_delivered_once_per_batch(engine: GatedEngine, answers: Answers) -> None:
    with Batcher([engine], BatchPolicy(max_batch=8), deliver=answers.deliver) as batcher:
        busy(batcher, engine, answers)
        for i in range(5):
            submit(batcher, rows(i), 1, KEY, answers.done)
        engine.gate.set()
        answers.wait(6)
    assert [len(group) for group in answers.groups] == [1, 5]


def test_received_bytes_that_begin_anywhere_reach_an_engine_aligned() -> None:
    """Native libraries may require it; joined requests are copied anyway."""
    received = bytes(range(33))
    requests = [
        Pending({"x": np.ndarray((1, 4), np.float32, received, at)}, 1, (), print, 0, 0, 0)
        for at in (1, 17)
    ]
    for count in (1, 2):
        x = stack(requests[:count])["x"]
        assert x.flags.aligned
        assert x.tobytes() == received[1 : 1 + 16 * count]


def test_requests_of_different_shapes_are_not_batched_together(answers: Answers) -> None:
    class AnyWidth(GatedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = (TensorSpec("x", "float32", ("N", "W")),)
            self.outputs = (TensorSpec("y", "float32", ("N", "W")),)
            self.warm = True

    engine = AnyWidth()
    with Batcher([engine], BatchPolicy(max_batch=8)) as batcher:
        busy(batcher, engine, answers)
        for width in (2, 2, 3, 2):
            feeds = {"x": np.ones((1, width), np.float32)}
            submit(batcher, feeds, 1, (("x", "FP32", (width,)),), answers.done)
        engine.gate.set()
        answers.wait(5)
    assert engine.batches == [1, 3, 1]  # nor do they break up a batch of others


def test_a_full_queue_refuses_at_once(engine: GatedEngine, answers: Answers) -> None:
    with Batcher([engine], BatchPolicy(queue=2), name="m") as batcher:
        busy(batcher, engine, answers)
        for i in range(2):
            submit(batcher, rows(i), 1, KEY, answers.done)
        with pytest.raises(Overloaded, match="queue of model 'm' is full") as caught:
            submit(batcher, rows(9), 1, KEY, answers.done)
        assert "`queue`" in (caught.value.hint or "")
        engine.gate.set()
        answers.wait(3)
    assert 9 not in answers.order


def test_an_expired_request_never_reaches_the_engine(engine: GatedEngine, answers: Answers) -> None:
    clock = Clock()
    with Batcher([engine], BatchPolicy(), clock_us=clock) as batcher:
        busy(batcher, engine, answers)
        late = submit(batcher, rows(7), 1, KEY, answers.done, wait_us=1000)
        good = submit(batcher, rows(8), 1, KEY, answers.done, wait_us=5000)
        clock.us = 1000
        engine.gate.set()
        answers.wait(3)
    assert isinstance(late.error, Expired)
    assert good.error is None
    assert engine.fed == [-1, 8]


def test_an_expired_request_is_answered_while_the_engine_is_busy(
    engine: GatedEngine, answers: Answers
) -> None:
    clock = Clock()
    with Batcher([engine], BatchPolicy(), clock_us=clock) as batcher:
        busy(batcher, engine, answers)
        late = submit(batcher, rows(7), 1, KEY, answers.done, wait_us=1000)
        clock.us = 1000
        batcher.expire()
        assert isinstance(late.error, Expired)
        assert answers.order == [7]
        engine.gate.set()
        answers.wait(2)


def test_a_request_in_a_hung_engine_is_answered_once(engine: GatedEngine, answers: Answers) -> None:
    clock = Clock()
    with Batcher([engine], BatchPolicy(), clock_us=clock) as batcher:
        stuck = submit(batcher, rows(3), 1, KEY, answers.done, give_up_us=1000)
        assert engine.entered.acquire(timeout=WAIT_S)
        clock.us = 1000
        batcher.expire()
        assert isinstance(stuck.error, Expired)
        engine.gate.set()
    assert answers.order == [3]


def test_a_cancelled_request_never_reaches_the_engine(
    engine: GatedEngine, answers: Answers
) -> None:
    with Batcher([engine], BatchPolicy()) as batcher:
        busy(batcher, engine, answers)
        gone = submit(batcher, rows(7), 1, KEY, answers.done)
        submit(batcher, rows(8), 1, KEY, answers.done)
        assert batcher.cancel(gone)
        assert not batcher.cancel(gone)
        engine.gate.set()
        answers.wait(2)
    assert engine.fed == [-1, 8]
    assert answers.order == [-1, 8]


class Fragile(GatedEngine):
    """Fails any batch that holds the value 13."""

    def __call__(self, feeds):
        outputs = super().__call__(feeds)
        if (feeds["x"] == 13).any():
            raise RuntimeError("/home/me/model.onnx: boom")
        return outputs


def test_a_failing_request_does_not_fail_other_requests_of_its_batch(answers: Answers) -> None:
    engine = Fragile(warm=True)
    with Batcher([engine], BatchPolicy(max_batch=8), name="m") as batcher:
        busy(batcher, engine, answers)
        sent = [submit(batcher, rows(i), 1, KEY, answers.done) for i in (12, 13, 14)]
        engine.gate.set()
        answers.wait(4)
    assert isinstance(sent[1].error, EngineFailed)
    assert [request.error for request in (sent[0], sent[2])] == [None, None]
    assert sent[2].outputs["y"][0, 0] == 29


class Short(GatedEngine):
    """Returns one row less than it got, unless it got one only."""

    def __call__(self, feeds):
        outputs = super().__call__(feeds)
        return {"y": outputs["y"][: max(1, len(feeds["x"]) - 1)]}


def test_missing_output_rows_are_never_taken_from_another_request(answers: Answers) -> None:
    engine = Short(warm=True)
    with Batcher([engine], BatchPolicy(max_batch=8)) as batcher:
        busy(batcher, engine, answers)
        two = submit(batcher, rows(0, 2), 2, KEY, answers.done)
        one = submit(batcher, rows(50), 1, KEY, answers.done)
        engine.gate.set()
        answers.wait(3)
    assert isinstance(two.error, EngineFailed)
    assert "2 rows were expected" in two.error.message
    assert one.error is None
    assert one.outputs["y"][0, 0] == 101


def test_close_answers_all_queued_requests(engine: GatedEngine, answers: Answers) -> None:
    batcher = Batcher([engine], BatchPolicy(max_batch=2, max_delay_us=10**9))
    for i in range(2):
        submit(batcher, rows(i), 1, KEY, answers.done)
    assert engine.entered.acquire(timeout=WAIT_S)
    for i in range(2, 7):
        submit(batcher, rows(i), 1, KEY, answers.done)
    engine.gate.set()
    assert batcher.close() == 0
    assert sorted(answers.order) == list(range(7))
    with pytest.raises(Overloaded, match="shutting down"):
        submit(batcher, rows(9), 1, KEY, answers.done)


def test_close_without_drain_refuses_queued_requests(engine: GatedEngine, answers: Answers) -> None:
    batcher = Batcher([engine], BatchPolicy())
    busy(batcher, engine, answers)
    waiting = submit(batcher, rows(1), 1, KEY, answers.done)
    assert batcher.close(drain=False, timeout_s=0) == 1  # the one in the engine
    assert isinstance(waiting.error, Overloaded)
    engine.gate.set()
    assert batcher.close() == 0
    assert engine.fed == [-1]


# -- Several engines, and engines that fail, hang or are lost


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

    engine = Lost(warm=True)
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
        *((np.zeros(n, np.float32), str(list(n))) for n in ((2, 4), ())),
        (np.zeros((1, 4), np.float64), "float64"),
        (None, "nothing"),
    ],
    ids=["more rows", "a scalar", "another dtype", "none"],
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


# -- Several batches in flight on one engine: their order, errors, deadlines, and the end


class Runs(Watcher):
    def __init__(self) -> None:
        self.runs: list[BatchRun] = []

    def record_run(self, run: BatchRun) -> None:
        self.runs.append(run)


class Case:
    """A batcher of one overlapping engine; requests are joined to batches of two."""

    def __init__(self) -> None:
        self.engine = OverlappingEngine()
        self.answers, self.clock, self.runs = Answers(), Clock(), Runs()
        self.batcher = Batcher(
            [self.engine], BatchPolicy(max_batch=2), clock_us=self.clock, watchers=[self.runs]
        )
        asleep(self.batcher)

    def send(self, value: float, **times: int) -> Pending:
        return submit(self.batcher, row(value), 1, KEY, self.answers.done, **times)

    def two_in_flight(self) -> list[Pending]:
        """0 alone, then 1 and 2 together behind it."""
        sent = [self.send(0)]
        self.await_submit()
        self.engine.waiting.acquire(timeout=WAIT_S)  # the thread waits for 0
        return [*sent, self.send(1), self.send(2)]

    def await_submit(self) -> None:
        assert self.engine.submitted.acquire(timeout=WAIT_S)

    def fill(self) -> list[Pending]:
        """Both slots: 1 and 2 run, 3 and 4 are submitted behind them, 5 waits."""
        sent = self.two_in_flight()
        sent += [self.send(value) for value in (3, 4, 5)]
        self.engine.end_one()
        self.await_submit()
        self.await_submit()
        assert self.engine.waiting.acquire(timeout=WAIT_S)
        self.answers.wait(1)
        return sent

    def finish(self) -> None:
        self.engine.end_all()
        self.batcher.close()


@pytest.fixture
def case() -> Iterator[Case]:
    found = Case()
    yield found
    found.finish()
    assert found.batcher.ended


def right(request: Pending) -> bool:
    return request.error is None and np.array_equal(
        request.outputs["y"], request.feeds["x"] * 2 + 1
    )


def test_the_next_batch_is_submitted_before_the_last_is_waited_for(case: Case) -> None:
    sent = case.fill()
    assert case.engine.events == [
        ("submit", 0), ("wait", 0), ("submit", 1), ("submit", 3), ("wait", 1)
    ]  # fmt: skip
    case.finish()
    assert case.answers.order == [0, 1, 2, 3, 4, 5]
    assert all(map(right, sent))
    assert case.engine.most == 2


def test_a_lone_request_is_answered_without_another(case: Case) -> None:
    case.send(0)
    case.await_submit()
    case.engine.end_one()
    case.answers.wait(1)
    asleep(case.batcher)
    assert case.batcher.unanswered == 0


def test_requests_in_flight_are_unanswered_until_they_are_delivered(case: Case) -> None:
    case.fill()
    assert case.batcher.unanswered == 5
    assert case.batcher.waiting == 1
    case.finish()
    assert case.batcher.unanswered == 0


@pytest.mark.parametrize("when", ["start", "end"])
def test_a_failed_batch_does_not_affect_the_next_one(case: Case, when: str) -> None:
    """Of the failed one, the good request is answered in another run, before the next batch."""
    (case.engine.refuse if when == "start" else case.engine.fail)[2] = BadInput("it is bad")
    sent = case.fill()
    case.finish()
    assert case.answers.order == [0, 1, 2, 3, 4, 5]
    assert [right(request) for request in sent] == [True, True, False, True, True, True]
    assert isinstance(sent[2].error, BadInput)


@pytest.mark.parametrize("when", ["start", "end"])
def test_a_failure_of_the_next_batch_does_not_affect_the_one_before(case: Case, when: str) -> None:
    (case.engine.refuse if when == "start" else case.engine.fail)[3] = RuntimeError("boom")
    sent = case.fill()
    case.finish()
    assert case.answers.order == [0, 1, 2, 3, 4, 5]
    assert [right(request) for request in sent] == [True, True, True, False, True, True]
    assert isinstance(sent[3].error, EngineFailed)


def test_out_of_memory_of_the_next_batch_fails_that_one_alone(case: Case) -> None:
    case.engine.refuse[3] = OutOfMemory("full")
    sent = case.fill()
    case.finish()
    assert [right(request) for request in sent] == [True, True, True, False, False, True]
    assert isinstance(sent[4].error, Overloaded)
    assert ("call", 4) not in case.engine.events


def test_a_lost_device_answers_both_batches_and_the_queue(case: Case) -> None:
    case.engine.fail |= {1: DeviceLost("gone"), 3: DeviceLost("gone")}
    sent = case.fill()
    case.finish()
    assert case.batcher.lost
    assert right(sent[0])
    assert all(isinstance(request.error, Overloaded) for request in sent[1:])
    with pytest.raises(Overloaded, match="GPU is lost"):
        case.send(9)


def test_requests_in_flight_are_given_up_at_their_limit(case: Case) -> None:
    sent = case.two_in_flight()
    sent += [case.send(3, give_up_us=1000), case.send(4)]
    case.engine.end_one()
    case.await_submit()
    case.await_submit()
    case.clock.us = 1000
    case.batcher.expire()
    case.answers.wait(2)
    assert isinstance(sent[3].error, Expired)
    case.finish()
    assert [right(request) for request in sent] == [True, True, True, False, True]
    assert case.answers.order == [0, 3, 1, 2, 4]


def test_a_request_past_its_deadline_is_not_submitted(case: Case) -> None:
    sent = [case.send(0), case.send(1, wait_us=1000)]
    case.clock.us = 1000
    case.finish()
    assert right(sent[0])
    assert isinstance(sent[1].error, Expired) or right(sent[1])


@pytest.mark.parametrize("retired", [False, True])
def test_the_end_answers_all_and_closes_the_engine_after_them(case: Case, retired: bool) -> None:
    sent = case.fill()
    if retired:
        case.batcher.retire()
    case.finish()
    assert all(map(right, sent))
    assert case.engine.closed is retired


def test_without_draining_the_batches_in_flight_are_answered(case: Case) -> None:
    sent = case.fill()
    case.engine.end_all()
    case.batcher.close(drain=False)
    assert all(map(right, sent[:5]))
    assert right(sent[5]) or isinstance(sent[5].error, Overloaded)


def test_an_engine_that_hangs_with_two_calls_in_flight_is_counted(case: Case) -> None:
    case.fill()
    case.batcher._hung_us = 1000
    case.clock.us = 5000
    assert case.batcher.hung == 1
    case.finish()
    assert case.batcher.hung == 0


def test_a_free_engine_gets_the_next_batch_rather_than_a_busy_one() -> None:
    """The second request comes while the first is submitted, when the other engine is asleep."""
    engines, answers = [OverlappingEngine(), OverlappingEngine()], Answers()
    batcher = Batcher(engines, BatchPolicy(max_batch=1))
    asleep(batcher)

    def once_more() -> None:
        for engine in engines:
            engine.on_submit = lambda: None
        submit(batcher, row(1), 1, KEY, answers.done)

    for engine in engines:
        engine.on_submit = once_more
    submit(batcher, row(0), 1, KEY, answers.done)
    for engine in engines:
        assert engine.waiting.acquire(timeout=WAIT_S)
    for engine in engines:
        engine.end_one()
    batcher.close()
    assert sorted(answers.order) == [0, 1]
    assert [engine.most for engine in engines] == [1, 1]


def test_with_an_slo_one_batch_is_in_flight() -> None:
    """Its policy expects a request to wait for one running batch at most."""
    engine, answers = OverlappingEngine(free=True), Answers()
    policy = BatchPolicy(max_batch=1)
    steering = Steering(1_000_000, policy)
    with Batcher([engine], policy, steering=steering) as batcher:
        for value in range(5):
            submit(batcher, row(value), 1, KEY, answers.done)
        answers.wait(5)
    assert {kind for kind, _ in engine.events} == {"call"}


def test_the_wait_for_the_batch_before_is_queueing_not_compute(case: Case) -> None:
    """Both batches are submitted at 0; the first ends at 500, the second at 800."""
    case.two_in_flight()
    case.send(3)
    case.send(4)
    case.engine.end_one()
    case.await_submit()
    case.await_submit()
    assert case.engine.waiting.acquire(timeout=WAIT_S)
    case.clock.us = 500
    case.engine.end_one()
    assert case.engine.waiting.acquire(timeout=WAIT_S)
    case.clock.us = 800
    case.finish()
    runs = {float(run.requests[0].feeds["x"][0, 0]): run for run in case.runs.runs}
    assert [runs[n].engine_us for n in (1, 3)] == [500, 300]
    assert [runs[n].started_us for n in (1, 3)] == [0, 500]
