"""The batcher with one engine: grouping, the queue's limit, deadlines, errors and closing."""

from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.errors import Expired, Overloaded
from deploykit.core.tensors import TensorSpec
from deploykit.serving.batching.batcher import Batcher
from deploykit.serving.batching.queue import BatchPolicy, Pending
from deploykit.serving.batching.runner import EngineFailed, stack
from tests.support.serving.loops import KEY, Answers, Clock, submit
from tests.support.serving.running import WAIT_S, GatedEngine


def rows(first: float, count: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.arange(first, first + count, dtype=np.float32)[:, None].repeat(4, axis=1)}


@pytest.fixture
def engine() -> GatedEngine:
    engine = GatedEngine()
    engine.warm = True
    return engine


@pytest.fixture
def answers() -> Answers:
    return Answers()


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

    def __init__(self) -> None:
        super().__init__()
        self.warm = True

    def __call__(self, feeds):
        outputs = super().__call__(feeds)
        if (feeds["x"] == 13).any():
            raise RuntimeError("/home/me/model.onnx: boom")
        return outputs


def test_a_failing_request_does_not_fail_other_requests_of_its_batch(answers: Answers) -> None:
    engine = Fragile()
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

    def __init__(self) -> None:
        super().__init__()
        self.warm = True

    def __call__(self, feeds):
        outputs = super().__call__(feeds)
        return {"y": outputs["y"][: max(1, len(feeds["x"]) - 1)]}


def test_missing_output_rows_are_never_taken_from_another_request(answers: Answers) -> None:
    engine = Short()
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
