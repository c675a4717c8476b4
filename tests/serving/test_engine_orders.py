"""Requests, ends of calls, failures, cancellations and reloads in any order, on a TensorRT engine.

The engine is ours on the stand-in for TensorRT and CUDA; a call ends when the machine lets it.
Whatever happens, each request is answered once, with its own rows or an error that has a cause, and
all memory is given back.
"""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deploykit.core.errors import DeploykitError, Expired
from deploykit.engines.tensorrt.engine import TensorRtEngine
from deploykit.serving.batching.batcher import Batcher
from deploykit.serving.batching.queue import BatchPolicy, Pending
from tests.support.campaign import rounds
from tests.support.runtimes.own_cuda import FakeCuda
from tests.support.runtimes.tensorrt_opened import PROFILE, Opened, X, Y
from tests.support.serving.loops import KEY, Clock, submit
from tests.support.serving.running import WAIT_S

SIZES = (1, 2, 4, 8)
NEVER_US = 1 << 50


class HeldCuda(FakeCuda):
    """A wait ends when one is permitted."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.held_back = False  # not during the preparation

    def wait(self, event: int) -> None:
        if self.held_back:
            assert self.permits.acquire(timeout=WAIT_S)
        super().wait(event)


class Orders(RuleBasedStateMachine):
    """`excuses`: how many requests may have failed for what was injected."""

    @initialize(
        slots=st.integers(1, 3),
        graphs=st.sampled_from([(), SIZES]),
        instances=st.integers(1, 2),
        max_batch=st.sampled_from([1, 4, 8]),
        delay_us=st.sampled_from([0, 0, 1000]),
    )
    def begin(
        self, slots: int, graphs: tuple[int, ...], instances: int, max_batch: int, delay_us: int
    ) -> None:
        self.cuda = HeldCuda()
        self.clock = Clock()
        self.opened = Opened((X, Y), (PROFILE,), cuda=self.cuda, slots=slots, graphs=graphs)
        first = self.opened.engine
        self.policy = BatchPolicy(max_batch=max_batch, max_delay_us=delay_us)
        self.instances = instances
        self.engines = [first, *(first.share() for _ in range(instances - 1))]
        for engine in self.engines:
            calls = [{"x": np.zeros((size, 4), np.float32)} for size in reversed(SIZES)]
            engine.prepare(calls, joined=True)
        self.cuda.held_back = True
        self.batchers = [self.batcher()]
        self.sent: list[Pending] = []
        self.answers: list[Pending] = []
        self.cancelled: list[Pending] = []
        self.excuses = 0
        self.reloads = 0

    def batcher(self) -> Batcher:
        return Batcher(self.engines, self.policy, clock_us=self.clock, close_engines=True)

    @rule(rows=st.integers(1, 8), limit_us=st.sampled_from([NEVER_US, NEVER_US, 5000]))
    def send(self, rows: int, limit_us: int) -> None:
        first = 100.0 * len(self.sent)
        x = first + np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        request = submit(
            self.batchers[-1], {"x": x}, rows, KEY, self.answers.append, give_up_us=limit_us
        )
        self.sent.append(request)

    @rule(count=st.integers(1, 3))
    def end_calls(self, count: int) -> None:
        self.cuda.permits.release(count)
        threading.Event().wait(0.001)  # lets the engines' threads run

    @rule(call=st.sampled_from(["set_input_shape", "execute_async_v3"]))
    def fail_in_tensorrt(self, call: str) -> None:
        self.excuses += self.opened.nv.fail.pop(call, None) is None  # another one may be pending
        self.opened.nv.fail[call] = "Error Code 2: Internal Error (the test says so)"

    @rule(call=st.sampled_from(["copy_in", "record", "wait", "launch"]))
    def fail_in_cuda(self, call: str) -> None:
        self.excuses += self.cuda.fail.pop(call, None) is None
        self.cuda.fail[call] = "InvalidValue"

    @precondition(lambda self: self.sent)
    @rule(number=st.integers(0, 1 << 10))
    def cancel(self, number: int) -> None:
        request = self.sent[number % len(self.sent)]
        if any(batcher.cancel(request) for batcher in self.batchers):
            self.cancelled.append(request)

    @rule(us=st.sampled_from([500, 2000]))
    def pass_time(self, us: int) -> None:
        self.clock.us += us
        for batcher in self.batchers:
            batcher.expire()

    @precondition(lambda self: self.reloads < 2)
    @rule()
    def reload(self) -> None:
        """As `ServedModel.replace` does: the old engines answer what they accepted."""
        self.reloads += 1
        before, engines = self.batchers[-1], list[TensorRtEngine]()
        try:
            for _ in range(self.instances):
                engines.append(self.engines[0].share())
        except DeploykitError:
            assert self.excuses
            for engine in engines:
                engine.close()
            return
        self.engines = engines
        self.batchers.append(self.batcher())
        before.retire()

    def teardown(self) -> None:
        if not hasattr(self, "batchers"):
            return
        self.cuda.held_back = False
        self.cuda.permits.release(100)  # to the few threads that wait already
        left = [batcher.close(timeout_s=WAIT_S) for batcher in self.batchers]
        assert left == [0] * len(left)
        assert all(batcher.ended for batcher in self.batchers)
        assert len(self.answers) == len({id(request) for request in self.answers})
        done = {id(request) for request in (*self.answers, *self.cancelled)}
        assert done == {id(request) for request in self.sent}
        assert len(done) == len(self.answers) + len(self.cancelled)
        failed = [request for request in self.answers if request.error is not None]
        for request in self.answers:
            if request.error is None:
                np.testing.assert_array_equal(request.outputs["y"], 2 * request.feeds["x"] + 1)
        unexplained = [r for r in failed if not isinstance(r.error, Expired)]
        assert len(unexplained) <= self.excuses
        assert not any(request.outputs for request in unexplained)
        assert self.cuda.held() == {}


Orders.TestCase.settings = settings(
    max_examples=rounds(10, 300),
    stateful_step_count=rounds(20, 60),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestOrders = Orders.TestCase
