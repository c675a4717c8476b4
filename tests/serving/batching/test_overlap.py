"""Several batches in flight on one engine: their order, errors, deadlines, and the end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from deploykit.core.errors import BadInput, Expired, OutOfMemory, Overloaded
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.serving.batching.batcher import Batcher
from deploykit.serving.batching.queue import BatchPolicy, BatchRun, Pending, Watcher
from deploykit.serving.batching.runner import EngineFailed
from deploykit.serving.batching.slo import Steering
from tests.support.serving.loops import KEY, Answers, Clock, asleep, row, submit
from tests.support.serving.overlapping import OverlappingEngine
from tests.support.serving.running import WAIT_S


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
