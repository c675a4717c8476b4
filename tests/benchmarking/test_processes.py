from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest

from deploykit.benchmarking.processes import ProcessEngine
from deploykit.benchmarking.timing import closed_loop, run_block
from deploykit.core.errors import BadInput, DeploykitError
from tests.support.fake_engine import FakeEngine

FEEDS = {"x": np.ones((2, 4), np.float32)}


class Refusing(FakeEngine):
    def __init__(self) -> None:
        raise BadInput("a.onnx: no such file")


@pytest.fixture(name="engine", scope="module")
def engine_fixture() -> Iterator[ProcessEngine]:
    with ProcessEngine(partial(FakeEngine, latency_s=0.005)) as engine:
        yield engine


class Tuned(FakeEngine):
    options = MappingProxyType({"spinning": "0"})


def test_its_options_are_those_of_the_engine_over_there() -> None:
    with ProcessEngine(Tuned) as engine:
        assert engine.device == "cpu"
        assert dict(engine.options) == {"spinning": "0"}


def test_it_is_the_engine_of_another_process(engine: ProcessEngine) -> None:
    assert engine.inputs == FakeEngine().inputs
    assert engine.outputs == FakeEngine().outputs
    assert (engine.device, engine.runtime) == ("cpu", "fake")
    assert engine(FEEDS)["y"].tolist() == [[3.0] * 4] * 2


def test_its_calls_are_timed_over_there(engine: ProcessEngine) -> None:
    calls = closed_loop(engine, FEEDS, 100_000_000, time.perf_counter_ns)
    assert 1 <= len(calls) <= 20
    assert min(calls) >= 5_000_000
    assert sum(calls) >= 100_000_000


def test_inputs_cross_the_pipe_once(engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    pipe, send = engine._child._pipe, engine._child._pipe.send
    monkeypatch.setattr(pipe, "send", lambda each: (sent.append(each[0]), send(each))[1])
    other = {"x": np.zeros((1, 4), np.float32)}
    for feeds in (other, other, FEEDS):
        engine(feeds)
    assert [each is not None for each in sent] == [True, False, True]


def test_a_refusal_over_there_is_raised_here(engine: ProcessEngine) -> None:
    with ProcessEngine(Refusing) as refusing, pytest.raises(BadInput, match="no such file"):
        refusing(FEEDS)
    with ProcessEngine(FakeEngine) as fresh, pytest.raises(BadInput, match="unknown input 'y'"):
        fresh({"y": np.zeros(1)})


def test_sessions_in_processes_run_at_once_and_end_with_the_block() -> None:
    engines = [ProcessEngine(partial(FakeEngine, latency_s=0.002)) for _ in range(2)]
    block = run_block(engines, FEEDS, 2, 0.05, time.perf_counter_ns, settle_s=0.01)
    assert len(block.calls_ns) >= 2
    pids = [engine._child._process.pid for engine in engines]
    for engine in engines:
        engine.close()
        engine.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_is_killed_is_an_error_and_stops_the_others() -> None:
    engines = [ProcessEngine(partial(FakeEngine, latency_s=0.002)) for _ in range(2)]
    for engine in engines:
        engine(FEEDS)
    timer = threading.Timer(0.3, engines[0]._child._process.kill)
    timer.start()
    with pytest.raises(DeploykitError, match="the system ended it"):
        run_block(engines, FEEDS, 2, 600.0, time.perf_counter_ns)
    for engine in engines:
        engine.close()


def test_an_inherited_interrupt_does_not_end_it(engine: ProcessEngine) -> None:
    engine(FEEDS)
    engine._child._process.send_signal(signal.SIGINT)  # as a terminal sends it to all its processes
    assert engine(FEEDS)["y"].shape == (2, 4)
