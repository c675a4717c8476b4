"""The batcher: grouping, limits, deadlines, several engines, and those that fail or hang."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeviceLost, Expired, OutOfMemory, Overloaded
from deploykit.core.tensors import InputKey
from deploykit.engines.engine import Arrays
from deploykit.serving.batching.batcher import Batcher, EngineFailed, Loop, deliver_inline
from deploykit.serving.batching.queue import BatchPolicy, BatchRun, Pending, Watcher, stack
from deploykit.serving.batching.slo import Steering
from tests.support.fake_engine import FakeEngine
from tests.support.serving.loops import KEY, Answers, Clock, asleep, submit
from tests.support.serving.running import WAIT_S, GatedEngine

Eventually = Callable[[Callable[[], bool]], None]


def rows(first: float, count: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.arange(first, first + count, dtype=np.float32)[:, None].repeat(4, axis=1)}


def right(request: Pending) -> bool:
    return request.error is None and np.array_equal(
        request.outputs["y"], request.feeds["x"] * 2 + 1
    )


class Notes(Watcher):
    def __init__(self) -> None:
        self.runs: list[BatchRun] = []

    def record_run(self, run: BatchRun) -> None:
        self.runs.append(run)


class Held:
    """A batcher whose engines keep what they got until `release`; its clock stands still."""

    def __init__(self, *engines: GatedEngine, **options: Any) -> None:
        self.engines = engines or (GatedEngine(),)
        for engine in self.engines:
            engine.warm = True
            engine.entered = self.engines[0].entered
        self.answers, self.clock = Answers(), Clock()
        policy = options.pop("policy", BatchPolicy(max_batch=8))
        loop = Loop(options.pop("deliver", deliver_inline), self.clock)
        self.batcher = Batcher(self.engines, policy, loop, **options)

    def send(self, value: float, count: int = 1, key: InputKey = KEY, **times: int) -> Pending:
        return submit(self.batcher, rows(value, count), count, key, self.answers.done, **times)

    def enter(self, value: float = -1, **times: int) -> Pending:
        """Send a request that an engine has when this returns."""
        sent = self.send(value, **times)
        assert self.engines[0].entered.acquire(timeout=WAIT_S)
        return sent

    def release(self, answers: int = 0) -> None:
        for engine in self.engines:
            engine.gate.set()
        self.answers.wait(answers)


@contextmanager
def held(*engines: GatedEngine, **options: Any) -> Iterator[Held]:
    found = Held(*engines, **options)
    with found.batcher:
        yield found
        found.release()


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [([1], [1]), ([3, 1], [4]), ([2, 2, 4], [4, 4]), ([1] * 6, [4, 2])],
    ids=str,
)
def test_requests_queued_while_the_engine_is_busy_run_in_full_batches_and_get_their_own_rows(
    sizes: list[int], batches: list[int]
) -> None:
    answers = Answers()
    with held(policy=BatchPolicy(max_batch=4), deliver=answers.deliver) as case:
        sent = [case.enter(), *(case.send(100 * n, size) for n, size in enumerate(sizes))]
    assert case.engines[0].batches == [1, *batches]
    assert all(map(right, sent))
    assert case.answers.order == [-1, *(100 * n for n in range(len(sizes)))]
    delivered = [sum(request.rows for request in group) for group in answers.groups]
    assert delivered == [1, *batches]  # once per batch


def test_received_bytes_that_begin_anywhere_reach_an_engine_aligned() -> None:
    received = bytes(range(33))
    requests = [
        Pending({"x": np.ndarray((1, 4), np.float32, received, at)}, 1, (), print, 0, 0, 0)
        for at in (1, 17)
    ]
    for count in (1, 2):
        x = stack(requests[:count])["x"]
        assert x.flags.aligned
        assert x.tobytes() == received[1 : 1 + 16 * count]


def test_a_cancelled_or_expired_request_never_reaches_the_engine() -> None:
    with held() as case:
        case.enter()
        gone, late, unseen = case.send(6), case.send(7, wait_us=1000), case.send(8, wait_us=2000)
        case.send(9, wait_us=5000)
        assert case.batcher.cancel(gone)
        assert not case.batcher.cancel(gone)
        case.clock.us = 1000
        case.batcher.expire()  # while the engine is busy
        assert case.answers.order == [7]
        case.clock.us = 2000
    assert isinstance(late.error, Expired)
    assert isinstance(unseen.error, Expired)
    assert case.engines[0].fed == [-1, 9]


class Failing(GatedEngine):
    """Raises `problem` in any batch that holds the value 13."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__()
        self.problem = problem

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        outputs = super().__call__(feeds)
        if (feeds["x"] == 13).any():
            raise self.problem
        return outputs


PROBLEMS: dict[str, tuple[Exception, type[Exception], str, int]] = {
    "a bug": (RuntimeError("/home/m.onnx: boom"), EngineFailed, "the engine failed", 5),
    "bad input": (BadInput("/home/m.onnx: T is 9"), BadInput, "the engine refused", 5),
    "no GPU memory": (OutOfMemory("/home/m.trt: cuda:0"), Overloaded, "out of memory", 2),
    "no memory": (MemoryError(), Overloaded, "out of memory", 2),  # more runs would keep it full
}


@pytest.mark.parametrize(("problem", "kind", "words", "calls"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_failing_request_fails_alone_and_says_nothing_of_the_server(
    problem: Exception, kind: type[Exception], words: str, calls: int
) -> None:
    engine = Failing(problem)
    with held(engine, name="m") as case:
        case.enter()
        good, bad, last = (case.send(value) for value in (12, 13, 14))
        case.release(4)
        next_one = case.send(20)
    assert right(next_one)
    assert isinstance(bad.error, kind)
    assert f"model 'm': {words}" in bad.error.message
    assert "/home" not in bad.error.message
    alone = calls > 2
    assert (right(good), right(last)) == (alone, alone)
    assert len(engine.batches) == calls + 1


@pytest.mark.parametrize("how", ["drained", "refused", "replaced"])
def test_the_end_answers_all_requests(how: str) -> None:
    with held(policy=BatchPolicy(max_batch=2, max_delay_us=0)) as case:
        sent = [case.enter(), *(case.send(n) for n in range(4))]
        new = GatedEngine(warm=True)
        new.gate.set()
        if how == "replaced":
            case.batcher.replace([new], None, 0)
        if how == "refused":
            assert case.batcher.close(drain=False, timeout_s=0) == 1  # the one in the engine
        case.release()
        assert case.batcher.close() == 0
        assert not any(thread.is_alive() for thread in case.batcher._threads)
        with pytest.raises(Overloaded, match="shutting down"):
            case.send(9)
    (engine,) = case.engines
    assert engine.fed == ([-1] if how == "refused" else [-1, 0, 1, 2, 3])
    assert not new.fed
    assert {type(request.error) for request in sent[1:]} == {
        Overloaded if how == "refused" else type(None)
    }
    assert engine.closed is new.closed is (how == "replaced")


def test_engines_take_no_request_before_all_have_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their owner closes them at once; a request that woke the old engine must not wait for it."""
    start, new = threading.Thread.start, GatedEngine(warm=True)

    def start_one(thread: threading.Thread) -> None:
        if thread.name.endswith(" 1"):
            assert not new.entered.acquire(timeout=0.1)
            raise RuntimeError("can't start new thread")
        start(thread)

    with held() as case:
        sent = [case.enter(), case.send(0)]
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_one)
            with pytest.raises(RuntimeError):
                case.batcher.replace([new, GatedEngine()], None, 0)
        case.release(2)
    assert all(map(right, sent))
    assert not new.fed


# -- Several engines


def test_no_request_waits_while_an_engine_is_idle() -> None:
    with held(*(GatedEngine() for _ in range(3))) as case:
        for n in range(3):
            case.enter(n)  # each starts while the earlier ones are still inside an engine
    assert [engine.batches for engine in case.engines] == [[1]] * 3


def test_requests_beyond_one_full_batch_go_to_the_other_engine() -> None:
    policy = BatchPolicy(max_batch=4, max_delay_us=10**9)
    with held(GatedEngine(), GatedEngine(), policy=policy) as case:
        for n in range(8):
            case.send(n)
        for _ in case.engines:
            assert case.engines[0].entered.acquire(timeout=WAIT_S)
    assert [engine.batches for engine in case.engines] == [[4], [4]]


# -- What a run reports


def test_idle_time_is_how_long_an_idle_engine_delayed_a_batch(eventually: Eventually) -> None:
    """A batch of two rows: the first row waits 300 µs for the second while the engine is idle."""
    notes = Notes()
    with held(policy=BatchPolicy(max_batch=2, max_delay_us=10**9), watchers=[notes]) as case:
        eventually(lambda: bool(case.batcher._idle))
        case.clock.us = 1000
        case.send(0)
        case.clock.us = 1300
        case.enter(1)
        for n in (2, 3):  # these wait for a busy engine, which is not idle time
            case.send(n)
        case.clock.us = 5000
    assert [run.idle_us for run in notes.runs] == [300, 0]


# -- Several batches in flight on one engine: their order, errors, deadlines, and the end


class Call:
    """A call in flight; it ends when the test lets it."""

    def __init__(self, engine: OverlappingEngine, feeds: Arrays) -> None:
        self.engine, self.feeds = engine, {name: x.copy() for name, x in feeds.items()}
        self.may_end = threading.Event()

    @property
    def first(self) -> float:
        return float(self.feeds["x"][0, 0])

    def result(self) -> dict[str, np.ndarray]:
        engine = self.engine
        assert engine.calls[0] is self, "answers are waited for in the order of their calls"
        engine.events.append(("wait", self.first))
        engine.waiting.release()
        if not engine.free:
            assert self.may_end.wait(WAIT_S)
        engine.calls.popleft()
        return engine.compute(self.feeds)


def raise_one(errors: Mapping[float, Exception], feeds: Arrays) -> None:
    """Raise the error of a row, if there is one."""
    for value in feeds["x"][:, 0]:
        if float(value) in errors:
            raise errors[float(value)]


class OverlappingEngine(FakeEngine):
    """y = 2x + 1. `free`: calls end by themselves. `fail`: first values whose call fails, and how.

    `refuse`: the same of calls that do not even start.
    """

    slots = 2

    def __init__(self, *, free: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.free = free
        self.calls: deque[Call] = deque()
        self.events: list[tuple[str, float]] = []
        self.submitted, self.waiting = threading.Semaphore(0), threading.Semaphore(0)
        self.fail: dict[float, Exception] = {}
        self.refuse: dict[float, Exception] = {}
        self.most = 0  # calls in flight at once
        self.on_submit: Callable[[], None] = lambda: None

    def submit(self, feeds: Arrays) -> Call:
        assert not self.closed
        assert len(self.calls) < self.slots
        call = Call(self, feeds)
        self.events.append(("submit", call.first))
        try:
            raise_one(self.refuse, feeds)
            self.calls.append(call)
            self.most = max(self.most, len(self.calls))
            self.on_submit()
        finally:
            self.submitted.release()
        return call

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        assert len(self.calls) < self.slots, "no slot is free for it"
        self.events.append(("call", float(feeds["x"][0, 0])))
        raise_one(self.refuse, feeds)
        return self.compute(feeds)

    def compute(self, feeds: Arrays) -> dict[str, np.ndarray]:
        raise_one(self.fail, feeds)
        return super().__call__(feeds)

    def end_one(self) -> None:
        self.calls[0].may_end.set()

    def end_all(self) -> None:
        """From now on calls end by themselves."""
        self.free = True
        for call in list(self.calls):
            call.may_end.set()

    def close(self) -> None:
        assert not self.calls, "closed with a call in flight"
        super().close()


class Case:
    """A batcher of one overlapping engine; requests are joined to batches of two."""

    def __init__(self) -> None:
        self.engine = OverlappingEngine()
        self.answers, self.clock, self.notes = Answers(), Clock(), Notes()
        self.batcher = Batcher(
            [self.engine],
            BatchPolicy(max_batch=2, hung_us=4000),
            Loop(clock_us=self.clock),
            watchers=[self.notes],
        )
        asleep(self.batcher)

    def send(self, value: float, **times: int) -> Pending:
        return submit(self.batcher, rows(value), 1, KEY, self.answers.done, **times)

    def await_submit(self) -> None:
        assert self.engine.submitted.acquire(timeout=WAIT_S)

    def await_wait(self) -> None:
        assert self.engine.waiting.acquire(timeout=WAIT_S)

    def fill(self, **times: int) -> list[Pending]:
        """Both slots: 0 ends, 1 and 2 run, 3 (with `times`) and 4 follow, and 5 waits."""
        sent = [self.send(0)]
        self.await_submit()
        self.await_wait()
        sent += [self.send(1), self.send(2), self.send(3, **times), self.send(4), self.send(5)]
        self.engine.end_one()
        self.await_submit()
        self.await_submit()
        self.await_wait()
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
    assert not any(thread.is_alive() for thread in found.batcher._threads)


def test_the_next_batch_is_submitted_before_the_last_is_waited_for(case: Case) -> None:
    sent = case.fill()
    assert [f"{kind} {value:g}" for kind, value in case.engine.events] == [
        *("submit 0", "wait 0", "submit 1", "submit 3", "wait 1")
    ]
    assert (case.batcher.unanswered, case.batcher.waiting) == (5, 1)
    case.clock.us = 5000
    assert case.batcher.hung == 1
    case.finish()
    assert (case.batcher.unanswered, case.batcher.hung) == (0, 0)
    assert case.answers.order == [0, 1, 2, 3, 4, 5]
    assert all(map(right, sent))
    assert case.engine.most == 2


@pytest.mark.parametrize(
    ("when", "problems", "error", "fails"),
    [
        ("refuse", {2: BadInput("it is bad")}, BadInput, [2]),
        ("fail", {2: BadInput("it is bad")}, BadInput, [2]),
        ("refuse", {3: RuntimeError("boom")}, EngineFailed, [3]),
        ("fail", {3: RuntimeError("boom")}, EngineFailed, [3]),
        ("refuse", {3: OutOfMemory("full")}, Overloaded, [3, 4]),
        ("fail", {n: DeviceLost("gone") for n in (1, 3)}, Overloaded, [1, 2, 3, 4, 5]),
    ],
)
def test_a_failure_affects_no_other_batch_in_flight(
    case: Case, when: str, problems: dict[float, Exception], error: type, fails: list[int]
) -> None:
    getattr(case.engine, when).update(problems)
    sent = case.fill()
    case.finish()
    assert [n for n, request in enumerate(sent) if not right(request)] == fails
    assert all(isinstance(sent[n].error, error) for n in fails)
    assert case.batcher.lost is (1 in fails)
    if case.batcher.lost:
        with pytest.raises(Overloaded, match="is lost"):
            case.send(6)
    else:
        assert case.answers.order == [0, 1, 2, 3, 4, 5]


def test_a_request_in_flight_is_given_up_at_its_limit(case: Case) -> None:
    sent = case.fill(give_up_us=1000)
    case.clock.us = 1000
    case.batcher.expire()
    case.answers.wait(1)
    assert isinstance(sent[3].error, Expired)
    case.finish()
    assert [right(request) for request in sent] == [n != 3 for n in range(6)]
    assert case.answers.order == [0, 3, 1, 2, 4, 5]


@pytest.mark.parametrize("how", ["closed", "replaced", "not drained"])
def test_the_end_answers_the_batches_in_flight_and_closes_the_engine_after_them(
    case: Case, how: str
) -> None:
    sent = case.fill()
    if how == "replaced":
        case.batcher.replace([OverlappingEngine(free=True)], None, 0)
    case.engine.end_all()
    case.batcher.close(drain=how != "not drained")
    assert all(map(right, sent[:5]))
    assert right(sent[5]) or (how == "not drained" and isinstance(sent[5].error, Overloaded))
    assert case.engine.closed is (how == "replaced")


def test_a_free_engine_gets_the_next_batch_rather_than_a_busy_one() -> None:
    """The second request comes while the first is submitted, when the other engine is asleep."""
    engines, answers = [OverlappingEngine(), OverlappingEngine()], Answers()
    batcher = Batcher(engines, BatchPolicy(max_batch=1))
    asleep(batcher)

    def once_more() -> None:
        for engine in engines:
            engine.on_submit = lambda: None
        submit(batcher, rows(1), 1, KEY, answers.done)

    for engine in engines:
        engine.on_submit = once_more
    submit(batcher, rows(0), 1, KEY, answers.done)
    for engine in engines:
        assert engine.waiting.acquire(timeout=WAIT_S)
    for engine in engines:
        engine.end_one()
    batcher.close()
    assert sorted(answers.order) == [0, 1]
    assert [engine.most for engine in engines] == [1, 1]


def test_with_an_slo_one_batch_is_in_flight() -> None:
    """Its policy expects a request to wait for one running batch at most."""
    engine, answers, policy = OverlappingEngine(free=True), Answers(), BatchPolicy(max_batch=1)
    with Batcher([engine], policy, steering=Steering(1_000_000, policy)) as batcher:
        for value in range(5):
            submit(batcher, rows(value), 1, KEY, answers.done)
    assert {kind for kind, _ in engine.events} == {"call"}


def test_the_wait_for_the_batch_before_is_queueing_not_compute(case: Case) -> None:
    """Both batches are submitted at 0; the first ends at 500, the second at 800."""
    case.fill()
    case.clock.us = 500
    case.engine.end_one()
    case.await_wait()
    case.clock.us = 800
    case.finish()
    runs = {float(run.requests[0].feeds["x"][0, 0]): run for run in case.notes.runs}
    assert [runs[n].engine_us for n in (1, 3)] == [500, 300]
    assert [runs[n].started_us for n in (1, 3)] == [0, 500]
