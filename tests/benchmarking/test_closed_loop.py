from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deploykit.benchmarking.timing import Block, closed_loop, run_block
from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from tests.support.fake_engine import FakeEngine
from tests.support.measure.virtual_time import Timed, VirtualTime

FEEDS = random_feeds(FakeEngine().inputs, {"N": 4})
ROOT = Path(__file__).resolve().parents[2]
LONG_S = 1e4  # two million calls of 5 ms: far more than happen before a stop


def run(
    *latencies: Callable[[int], float], length_s: float = 0.5, settle_s: float = 0.0
) -> tuple[Block, list[Timed]]:
    """One block of engines with these latencies by call; 4 rows a call."""
    clock = VirtualTime()
    engines = [Timed(clock, latency_s, [], "") for latency_s in latencies]
    return run_block(engines, FEEDS, 4, length_s, clock, settle_s=settle_s), engines


def five_ms(_: int) -> float:
    return 0.005


def test_the_calls_add_up_to_the_block() -> None:
    block, _ = run(lambda call: 0.1 if call % 2 else 0.2)
    assert block.calls_ns.tolist() == [200_000_000, 100_000_000, 200_000_000]
    assert (block.rows, block.seconds) == (12, pytest.approx(0.5))
    assert block.rate == pytest.approx(24.0)


def test_the_loop_itself_is_a_clock_and_an_append_per_call() -> None:
    """What the instrument adds to a call, counted: two calls into C and none into Python."""
    counts: Counter[str] = Counter()

    def engine(_feeds: Arrays) -> dict[str, np.ndarray]:
        return {}

    def count(_frame: object, event: str, what: object) -> None:
        counts[f"{event} {getattr(what, '__name__', '')}" if event == "c_call" else event] += 1

    steps = deque(range(0, 10_000, 10))
    sys.setprofile(count)
    try:
        calls = closed_loop(engine, FEEDS, 5_000, steps.popleft)  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert len(calls) == 500
    assert counts["c_call append"] == 500
    assert counts["c_call popleft"] == 501
    assert counts["call"] <= 500 + 50  # the engine, and what begins the loop
    assert sum(n for name, n in counts.items() if name.startswith("c_call")) <= 1001 + 200


def test_a_call_that_has_begun_is_finished() -> None:
    block, _ = run(lambda _: 0.35)
    assert block.seconds == pytest.approx(0.7)
    assert block.rate == pytest.approx(4 / 0.35)


@pytest.mark.parametrize("engines", [1, 2])
def test_the_settling_calls_are_not_counted(engines: int) -> None:
    block, ran = run(*[lambda call: 0.1 if call < 3 else 0.005] * engines, settle_s=0.25)
    assert block.calls_ns.max() == 5_000_000
    assert len(ran[0].batches) >= 3 + 100


def test_sessions_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def latency_s(call: int) -> float:
        if call == 0:
            meeting.wait()
        return 0.005

    run(latency_s, latency_s, latency_s)
    assert not meeting.broken


def test_sessions_start_together_after_the_slowest_has_settled() -> None:
    settled = threading.Event()
    early: list[bool] = []

    def slow(call: int) -> float:
        if call == 49:
            settled.set()
        return 0.005

    def quick(call: int) -> float:
        if call > 0:
            early.append(not settled.is_set())
        return 0.3

    run(slow, quick, settle_s=0.25)
    assert set(early) == {False}


def test_sessions_of_different_speed_add_their_own_rates() -> None:
    block, _ = run(five_ms, lambda _: 0.05)
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


def test_one_failing_session_stops_the_others() -> None:
    def failing(call: int) -> float:
        if call == 10:
            raise BadInput("stop here")
        return 0.005

    clock = VirtualTime()
    engines = [Timed(clock, each, [], "") for each in (five_ms, failing)]
    before = set(threading.enumerate())
    with pytest.raises(BadInput, match="stop here"):
        run_block(engines, FEEDS, 4, LONG_S, clock)
    assert len(engines[0].batches) < 1_000_000
    assert set(threading.enumerate()) <= before


def test_ctrl_c_stops_the_sessions_and_waits_for_them() -> None:
    """In a process of its own: a signal that came too late would end the tests."""
    code = "from tests.benchmarking.test_closed_loop import interrupt_two_sessions as run; run()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def interrupt_two_sessions() -> None:
    once = threading.Lock()  # a second signal would come when nothing waits for it
    workers = set()

    def latency_s(_: int) -> float:
        workers.add(threading.current_thread())
        at_work = all(len(engine.batches) > 100 for engine in engines)
        if at_work and once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        return 0.005

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start jobs without
    clock = VirtualTime()
    engines: list[Timed] = []
    engines += [Timed(clock, latency_s, [], "") for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run_block(engines, FEEDS, 4, LONG_S, clock)
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers - {threading.current_thread()})
    assert max(len(engine.batches) for engine in engines) < 1_000_000


@pytest.mark.parametrize("sessions", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_in_calls_and_afterwards_as_before(
    enabled: bool, fails: bool, sessions: int
) -> None:
    seen = set()

    def latency_s(call: int) -> float:
        seen.add(gc.isenabled())
        if fails and call == 3:
            raise BadInput("stop here")
        return 0.005

    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        try:
            run(*[latency_s] * sessions)
        except BadInput:
            assert fails
        after = gc.isenabled()
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == {False}
    assert after is enabled


class Queued(FakeEngine):
    """A GPU: calls take `call_s` of a virtual clock each, one after the other."""

    slots = 2

    def __init__(self, clock: VirtualTime, call_s: float) -> None:
        super().__init__()
        self.clock, self.call_ns = clock, round(call_s * 1e9)
        self.free_ns = self.running = self.most = 0

    def submit(self, _feeds: Arrays) -> Queued._Call:
        self.running += 1
        self.most = max(self.most, self.running)
        self.free_ns = max(self.free_ns, self.clock.now_ns) + self.call_ns
        return Queued._Call(self, self.free_ns)

    class _Call:
        def __init__(self, engine: Queued, end_ns: int) -> None:
            self.engine, self.end_ns = engine, end_ns

        def result(self) -> dict[str, np.ndarray]:
            self.engine.running -= 1
            self.engine.clock.now_ns = max(self.engine.clock.now_ns, self.end_ns)
            return {}


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
