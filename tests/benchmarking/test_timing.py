"""Calls in a closed loop, sessions at once, setups in turns, by a virtual clock; and processes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.benchmarking.timing import (
    Block,
    Measured,
    ProcessEngine,
    Setup,
    Timing,
    closed_loop,
    make_point,
    run_block,
    sweep,
)
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.evidence import Interval
from deploykit.engines.engine import Arrays
from tests.support.fake_engine import FakeEngine, Function
from tests.support.measure.virtual_time import QUICK, Bench, Timed, VirtualTime, feeds

FEEDS = feeds(4)
ROOT = Path(__file__).resolve().parents[2]
LONG_S = 1e4  # two million calls of 5 ms: far more than happen before a stop


def run(*latencies: Callable[[int], float], settle_s: float = 0.0) -> tuple[Block, list[Timed]]:
    """A block of half a second of engines with these latencies by call; 4 rows a call."""
    clock = VirtualTime()
    engines = [Timed(clock, latency_s, [], "") for latency_s in latencies]
    return run_block(engines, FEEDS, 4, 0.5, clock, settle_s=settle_s), engines


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_calls_add_up_to_the_block_and_one_that_has_begun_is_finished() -> None:
    block, _ = run(lambda call: 0.1 if call % 2 else 0.2)
    assert block.calls_ns.tolist() == [200_000_000, 100_000_000, 200_000_000]
    assert (block.rows, block.seconds) == (12, pytest.approx(0.5))
    assert block.rate == pytest.approx(24.0)


def test_the_settling_calls_are_not_counted() -> None:
    block, ran = run(*[lambda call: 0.1 if call < 3 else 0.005] * 2, settle_s=0.25)
    assert block.calls_ns.max() == 5_000_000
    assert len(ran[0].batches) >= 3 + 100


def test_sessions_of_different_speed_run_at_the_same_time_and_add_their_own_rates() -> None:
    meeting = threading.Barrier(2, timeout=60)

    def meet(call: int, latency_s: float) -> float:
        if call == 0:
            meeting.wait()
        return latency_s

    block, _ = run(lambda call: meet(call, 0.005), lambda call: meet(call, 0.05))
    assert not meeting.broken
    assert block.rate == pytest.approx(800 + 80)
    assert len(block.calls_ns) == 100 + 10


def test_sessions_that_are_done_keep_the_load_up_for_the_others() -> None:
    beyond_its_share = threading.Event()
    seen: list[bool] = []

    def fast(call: int) -> float:
        if call == 5:  # five calls of 0.1 s are its share
            beyond_its_share.set()
        return 0.1

    def slow(_: int) -> float:
        seen.append(beyond_its_share.wait(timeout=60))
        return 0.5

    block, _ = run(fast, slow)
    assert seen[0]
    assert len(block.calls_ns) == 5 + 1  # what was done beyond the share does not count


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_in_calls_and_afterwards_as_before(enabled: bool) -> None:
    seen = set()

    def latency_s(call: int) -> float:
        seen.add(gc.isenabled())
        return failing(BadInput, 3)(call)

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(BadInput):
            run(latency_s, latency_s)
        assert (seen, gc.isenabled()) == ({False}, enabled)
    finally:
        gc.enable()


class Queued(FakeEngine):
    """A GPU: calls take `call_s` of a virtual clock each, one after the other."""

    slots = 2

    def __init__(self, clock: VirtualTime, call_s: float) -> None:
        super().__init__()
        self.clock, self.call_ns = clock, round(call_s * 1e9)
        self.free_ns = self.running = self.most = 0

    def submit(self, _feeds: Arrays) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        end_ns = self.free_ns = max(self.free_ns, self.clock.now_ns) + self.call_ns

        def result() -> dict[str, np.ndarray]:
            self.running -= 1
            self.clock.now_ns = max(self.clock.now_ns, end_ns)
            return {}

        return SimpleNamespace(result=result)


@pytest.mark.parametrize("settle_s", [0.0, 0.05])
def test_two_calls_in_flight_are_timed_each_and_their_rate_is_that_of_the_engine(
    settle_s: float,
) -> None:
    """Each call waits for the one before it, so it takes twice as long as the engine per call."""
    clock = VirtualTime()
    engine = Queued(clock, 0.01)
    block = run_block([engine], FEEDS, 4, 0.5, clock, settle_s=settle_s, in_flight=2)
    assert (engine.most, engine.running) == (2, 0)
    assert block.calls_ns.tolist() == [10_000_000] + [20_000_000] * 49
    assert block.rows == 4 * 50
    assert block.rate == pytest.approx(400)
    assert block.seconds == pytest.approx(0.5)


def test_a_point_holds_what_was_timed(bench: Bench) -> None:
    (point,) = bench.sweep(bench.setup("A", sessions=3))
    assert len(bench.engines) == 3
    assert (point.latency.p50_ms, point.latency.max_ms) == (Interval(5.0, 5.0, 5.0), 5.0)
    assert point.round_rates == pytest.approx([3 * 800, 3 * 800])
    assert point.throughput_per_s.value == pytest.approx(3 * 800)
    assert sum(point.histogram.counts) == point.samples == 600
    assert (point.label, point.precision, point.device) == ("A", "fp32", "cpu")
    assert (point.runtime, point.scenario, point.shapes) == ("fake", "closed-loop", {"x": (4, 4)})
    assert (point.batch, point.sessions, point.threads, point.rounds) == (4, 3, 1, 2)
    assert (point.duration_s, point.note) == (pytest.approx(1.0), "no warm-up")


def test_calls_that_overrun_their_block_are_counted_whole(bench: Bench) -> None:
    (point,) = bench.sweep(bench.setup("A", 0.35))  # two calls fit into 0.5 s: the second overruns
    assert point.samples == 4
    assert point.duration_s == pytest.approx(1.4)
    assert point.throughput_per_s.value == pytest.approx(4 / 0.35)
    (point,) = bench.sweep(bench.setup("A", 10.0), timing=Timing(0.0, 1.0, 3))
    assert (point.samples, point.latency.p50_ms) == (3, None)  # one a round


def test_setups_take_turns_forwards_and_backwards(bench: Bench) -> None:
    setups = [bench.setup(label) for label in "ABC"]
    bench.sweep(*setups, timing=Timing(warmup_s=0.0, seconds=1.0, rounds=4))
    assert bench.order == "ACBCABACAB"  # ACB BCA BAC CAB, where neighbours meet joined


@pytest.mark.parametrize(
    ("seconds", "call_s", "rounds"), [(60.0, 0.005, 60), (2.0, 0.005, 40), (5.0, 0.2, 5)]
)
def test_rounds_are_as_many_as_fit_at_most_60(
    bench: Bench, seconds: float, call_s: float, rounds: int
) -> None:
    points = bench.sweep(bench.setup("A"), bench.setup("B", call_s), timing=Timing(0.5, seconds))
    assert [point.rounds for point in points] == [rounds, rounds]


def test_inputs_are_made_once_per_batch_and_a_setup_left_out_above_its_largest(
    bench: Bench,
) -> None:
    points = bench.sweep(bench.setup("A", max_batch=2), bench.setup("B"), batches=(2, 4))
    assert [(p.batch, p.label) for p in points] == [(2, "A"), (2, "B"), (4, "B")]
    assert bench.fed == [2, 4]
    assert [engine.closed for engine in bench.engines] == [True] * 2
    with pytest.raises(BadInput, match="no engine takes a batch of 4") as caught:
        bench.sweep(bench.setup("A", max_batch=2), batches=(8, 4))
    assert caught.value.hint == "the largest is 2"
    with pytest.raises(BadInput, match="made for batch 4 hold 3 rows"):
        sweep([bench.setup("A")], [4], QUICK, lambda _: feeds(3))


def test_a_fixed_batch_is_not_timed_as_another() -> None:
    setups = [Setup("A", lambda: Function(lambda _: {}, "x:float32[8,4]"))]
    timing, eight = Timing(0.0, 0.01, 2), feeds(8)
    fixed = r"A: cannot run batch 4: its input is fixed, x:float32\[8"
    with pytest.raises(BadInput, match=fixed) as caught:
        sweep(setups, [4], timing, lambda _: eight)
    assert caught.value.hint.startswith("`batches` 8, or export")
    assert sweep(setups, [8], timing, lambda _: eight)[0].batch == 8


def failing(error: type[BaseException], at: int) -> Callable[[int], float]:
    def latency_s(call: int) -> float:
        if call == at:
            raise error("stop here")
        return 0.005

    return latency_s


@pytest.mark.parametrize("sessions", [1, 3])
@pytest.mark.parametrize("error", [BadInput, KeyboardInterrupt, ZeroDivisionError])
def test_engines_are_closed_and_threads_gone_when_a_call_fails(
    bench: Bench, error: type[BaseException], sessions: int
) -> None:
    before, timing = set(threading.enumerate()), Timing(0.0, LONG_S, 2)
    failed = bench.setup("A", failing(error, at=30), sessions=sessions)
    with pytest.raises(error, match="stop here"):
        bench.sweep(failed, bench.setup("B", 0.5), timing=timing)
    assert [engine.closed for engine in bench.engines] == [True] * (sessions + 1)
    assert max(len(engine.batches) for engine in bench.engines) < 1_000_000
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("batches", [(), (0, 1), (1, 1)])
def test_batches_that_make_no_sense_open_nothing(bench: Bench, batches: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="`batches` must be"):
        bench.sweep(bench.setup("A"), batches=batches)
    assert bench.engines == []


def test_what_happens_before_the_engine_is_warm_is_not_timed(bench: Bench) -> None:
    cold = bench.setup("A", lambda call: 0.1 if call < 20 else 0.005)
    (point,) = bench.sweep(cold, timing=Timing(warmup_s=10.0, seconds=1.0, rounds=2))
    assert (point.latency.max_ms, point.note) == (5.0, "")
    bench.sweep(bench.setup("A", 0.1), timing=Timing(warmup_s=10.0, seconds=1.0, rounds=2))
    # four windows of 1 s that agree, then two rounds of 0.5 s
    assert len(bench.engines[1].batches) == 40 + 2 * 5


def test_a_slow_rise_that_the_warm_up_does_not_see_is_seen_in_the_rounds(bench: Bench) -> None:
    slowly = bench.setup("A", lambda _: 0.005 * 0.99 ** (bench.clock.now_ns / 1e9))
    steady = bench.setup("B", 0.005)
    risen, other = bench.sweep(slowly, steady, timing=Timing(1.0, 5.0))
    assert risen.marks == ("calls still sped up, by 12% over the rounds: a longer run is needed",)
    assert other.marks == ()


def test_noise_is_no_rise(bench: Bench) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        noisy = bench.setup("A", lambda _: 0.005 * float(random.lognormal(0, 0.3)))
        (point,) = bench.sweep(noisy, timing=Timing(0.5, 1.0))
        assert point.marks == ()


def test_warm_up_that_never_settles_is_bounded_and_noted(bench: Bench) -> None:
    ended_s: list[float] = []
    (point,) = bench.sweep(
        bench.setup("A", lambda call: 0.02 * 1.1**call),
        timing=Timing(warmup_s=10 / 3, seconds=0.1, rounds=2),
        on_progress=lambda *_: ended_s.append(bench.clock.now_ns / 1e9),
    )
    assert "not yet steady after 3.33 s" in point.note
    assert 10 / 3 <= ended_s[1] < 4  # when round 1 was reported; a running call was finished


SHORT = Timing(0.0, 0.04, rounds=4)


class Noting(FakeEngine):
    def __init__(self, label: str, folder: Path) -> None:
        super().__init__()
        self.label, self.folder = label, folder

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if not self.batches:
            with (self.folder / "journal").open("a") as journal:
                journal.write(f"{self.label} {os.getpid()}\n")
        return super().__call__(feeds)


def test_each_process_is_fresh_and_every_second_begins_at_the_other_end(tmp_path: Path) -> None:
    setups = [Setup(label, partial(Noting, label, tmp_path)) for label in "AB"]
    steps: list[tuple[str, float]] = []
    points = sweep(setups, [1, 2], SHORT, feeds, lambda *step: steps.append(step), processes=2)
    journal = [line.split() for line in (tmp_path / "journal").read_text().splitlines()]
    assert [label for label, _ in journal] == ["A", "B", "B", "A"]
    assert len({pid for _, pid in journal}) == 2
    assert str(os.getpid()) not in {pid for _, pid in journal}
    assert [f"{point.label}{point.batch}" for point in points] == ["A1", "B1", "A2", "B2"]
    for point in points:
        assert (point.processes, point.rounds, len(point.round_rates)) == (2, 4, 2)
        assert point.histogram is not None
        assert point.samples >= 4
    assert steps[-1] == ("done", 1.0)
    assert steps[0] == ("A, batch 1: warm-up", 0.0)
    assert [share for _, share in steps] == sorted(share for _, share in steps)


def measured(*rates: float) -> Measured:
    """One process, with a block of ten calls at each of these rates."""
    blocks = [Block(np.full(10, 1e9 / rate).astype(np.int64), 10, rate) for rate in rates]
    return Measured(Setup("A", FakeEngine), 1, "cpu", "fake", {}, "", {}, blocks)


def test_intervals_are_those_over_processes_or_over_blocks_whichever_are_wider() -> None:
    alone = make_point([measured(100.0, 101.0, 100.0, 101.0)]).throughput_per_s
    apart = [measured(*[rate, rate + 1] * 2) for rate in (95.0, 100.0, 105.0)]
    over_processes = make_point(apart).throughput_per_s
    assert alone.high - alone.low < 4 < 20 < over_processes.high - over_processes.low
    alike = make_point([measured(80.0, 120.0), measured(120.0, 80.0)]).throughput_per_s
    assert alike.high - alike.low > 30


TWO_ROWS = {"x": np.ones((2, 4), np.float32)}


def refuse() -> FakeEngine:
    raise BadInput("a.onnx: no such file")


class Tuned(FakeEngine):
    options = MappingProxyType({"spinning": "0"})


def test_a_session_in_a_process_is_the_engine_of_that_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[bool] = []
    with ProcessEngine(partial(Tuned, latency_s=0.005)) as engine:
        assert (engine.inputs, engine.outputs) == (FakeEngine().inputs, FakeEngine().outputs)
        assert (engine.device, engine.runtime) == ("cpu", "fake")
        assert dict(engine.options) == {"spinning": "0"}
        calls = closed_loop(engine, TWO_ROWS, 100_000_000, time.perf_counter_ns)
        assert 1 <= len(calls) <= 20  # timed over there
        assert min(calls) >= 5_000_000
        assert sum(calls) >= 100_000_000
        pipe, send = engine._child._pipe, engine._child._pipe.send
        monkeypatch.setattr(pipe, "send", lambda it: (sent.append(it[0] is not None), send(it))[1])
        other = {"x": np.zeros((1, 4), np.float32)}
        for inputs in (other, other, TWO_ROWS):
            found = engine(inputs)
        assert found["y"].tolist() == [[3.0] * 4] * 2
        assert sent == [True, False, True]  # inputs cross the pipe once
        engine._child._process.send_signal(signal.SIGINT)  # as a terminal sends it to all of them
        assert engine(TWO_ROWS)["y"].shape == (2, 4)
    with ProcessEngine(refuse) as refused, pytest.raises(BadInput, match="no such file"):
        refused(TWO_ROWS)
    with ProcessEngine(FakeEngine) as fresh, pytest.raises(BadInput, match="unknown input 'y'"):
        fresh({"y": np.zeros(1)})


def test_a_process_that_is_killed_is_an_error_and_stops_the_others() -> None:
    engines = [ProcessEngine(partial(FakeEngine, latency_s=0.002)) for _ in range(2)]
    for engine in engines:
        engine(TWO_ROWS)
    timer = threading.Timer(0.3, engines[0]._child._process.kill)
    timer.start()
    with pytest.raises(DeploykitError, match="the system ended it"):
        run_block(engines, TWO_ROWS, 2, 600.0, time.perf_counter_ns)
    for engine in engines:
        engine.close()
