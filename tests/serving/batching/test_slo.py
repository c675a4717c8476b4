"""The SLO controller alone, and in a simulation with the real queue and a fake clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from deploykit.serving.batching.queue import BatchPolicy, Pending, RequestQueue
from deploykit.serving.batching.slo import Steering

SLO_US = 40_000
S = 1_000_000
TICK_US = 100_000
Times = Callable[[int, int], float]  # rows, now -> µs that a batch takes


def affine(rows: int, _now_us: int) -> float:
    return 10_000 + 500 * rows  # capacity at 20 rows, within 40 ms twice: 1,000 rows/s


@dataclass
class Answer:
    arrived_us: int
    latency_us: int | None  # None: refused


class Simulation:
    """Arrivals at given times into `engines` engines, steered or with a fixed policy."""

    def __init__(
        self,
        times: Times,
        policy: BatchPolicy,
        *,
        slo_us: int | None = None,
        engines: int = 1,
        warm: Sequence[int] = (1, 2, 4, 8, 16, 32),
    ) -> None:
        self.times = times
        self.queue = RequestQueue(policy)
        self.steering = None if slo_us is None else Steering(slo_us, policy, engines)
        self.idle = engines
        self.policies: list[BatchPolicy] = []
        self.answers: list[Answer] = []
        if self.steering:
            for rows in warm:
                self.steering.record_time(rows, round(times(rows, 0)), 0)

    def run(self, arrivals: Sequence[int]) -> list[Answer]:
        events: list[tuple[int, int, str, Any]] = []
        for number, at_us in enumerate(arrivals):
            heapq.heappush(events, (int(at_us), number, "arrive", None))
        for at_us in range(0, int(arrivals[-1]) + TICK_US, TICK_US):
            heapq.heappush(events, (at_us, -1, "tick", None))
        count = len(arrivals)
        while events:
            now_us, _, what, batch = heapq.heappop(events)
            if what == "arrive":
                self._arrive(now_us)
            elif what == "tick" and self.steering:
                self.queue.policy = self.steering.step(now_us, self.queue.added_rows)
                self.policies.append(self.queue.policy)
            elif what == "end":
                self.idle += 1
                self._answer(*batch, now_us)
            while self.idle and (taken := self.queue.take(now_us)):
                self.idle -= 1
                count += 1
                end_us = now_us + round(self.times(len(taken), now_us))
                heapq.heappush(events, (end_us, count, "end", (now_us, taken)))
            if self.idle and self.queue.count:
                count += 1
                heapq.heappush(events, (max(now_us + 1, self.queue.next_us()), count, "look", None))
        return self.answers

    def _arrive(self, now_us: int) -> None:
        request = Pending({}, 1, (), lambda _: None, now_us, 1 << 60, 1 << 60)
        if self.queue.add(request) is None:
            self.answers.append(Answer(now_us, None))

    def _answer(self, started_us: int, requests: list[Pending], now_us: int) -> None:
        if self.steering:
            self.steering.record_run(requests, started_us, now_us)
        self.answers += [Answer(r.arrived_us, now_us - r.arrived_us) for r in requests]


def poisson(*phases: tuple[float, float], seed: int = 0) -> list[int]:
    """Arrival times, µs, of phases of (seconds, requests per second) one after the other."""
    random = np.random.default_rng(seed)
    found: list[int] = []
    start_us = 0.0
    for seconds, rate in phases:
        gaps = random.exponential(S / rate, int(2 * seconds * rate) + 20)
        at_us = start_us + np.cumsum(gaps)
        start_us += seconds * S
        found += [int(at) for at in at_us[at_us < start_us]]
    return found


def p99_us(answers: Sequence[Answer], begin_s: float = 0, end_s: float = 1e9) -> float:
    taken = [
        answer.latency_us
        for answer in answers
        if answer.latency_us is not None and begin_s * S <= answer.arrived_us < end_s * S
    ]
    return float(np.quantile(taken, 0.99))


def each_second(answers: Sequence[Answer], seconds: int) -> Iterator[float]:
    for second in range(seconds):
        yield p99_us(answers, second, second + 1)


def refused(answers: Sequence[Answer], begin_s: float = 0, end_s: float = 1e9) -> float:
    those = [a.latency_us is None for a in answers if begin_s * S <= a.arrived_us < end_s * S]
    return sum(those) / len(those)


STEP = poisson((4, 200), (4, 800), (4, 3000), (4, 200))


def test_the_p99_stays_within_the_slo_in_every_second_of_a_load_step() -> None:
    """200, 800, 3,000 (three times what there is capacity for) and again 200 requests a second."""
    answers = Simulation(affine, BatchPolicy(32), slo_us=SLO_US).run(STEP)
    assert max(each_second(answers, 16)) <= SLO_US
    assert refused(answers, 0, 8) <= 0.03
    assert refused(answers, 12.1) == 0
    goodput_per_s = len([a for a in answers if 8 * S <= a.arrived_us < 12 * S]) / 4
    goodput_per_s *= 1 - refused(answers, 8, 12)
    assert goodput_per_s >= 0.85 * 1000  # nearly all the throughput of 20 rows at a time


@pytest.mark.parametrize(
    "fixed",
    [
        BatchPolicy(32),
        BatchPolicy(8),
        BatchPolicy(1),
        BatchPolicy(20),
        BatchPolicy(32, max_delay_us=30_000),
        BatchPolicy(32, queue=32),
    ],
    ids=["large", "small", "none", "the right size", "with a delay", "a short queue"],
)
def test_no_fixed_policy_stays_within_the_slo_during_a_load_step(fixed: BatchPolicy) -> None:
    answers = Simulation(affine, fixed).run(STEP)
    assert max(each_second(answers, 16)) > SLO_US


@pytest.mark.parametrize("slower", [0.5, 2.0], ids=["faster", "slower"])
def test_the_controller_follows_an_engine_whose_speed_changes(slower: float) -> None:
    """At 6 s, batches take another time than the warm-up said."""

    def times(rows: int, now_us: int) -> float:
        return affine(rows, now_us) * (slower if now_us > 6 * S else 1.0)

    simulation = Simulation(times, BatchPolicy(64), slo_us=60_000)
    answers = simulation.run(poisson((40, 4000)))
    assert p99_us(answers, 0, 6) <= 60_000
    assert p99_us(answers, 8) <= 60_000
    limits = [policy.max_batch for policy in simulation.policies]
    assert (limits[-1] > limits[50]) is (slower < 1)


def test_the_p99_stays_within_the_slo_when_batch_times_are_noisy() -> None:
    random = np.random.default_rng(1)

    def times(rows: int, now_us: int) -> float:
        return affine(rows, now_us) * random.lognormal(0, 0.2)

    answers = Simulation(times, BatchPolicy(32), slo_us=SLO_US).run(poisson((20, 900)))
    assert p99_us(answers, 4) <= SLO_US


def test_the_time_of_a_batch_is_an_upper_percentile_not_the_mean() -> None:
    steering = Steering(SLO_US, BatchPolicy(8))
    for n in range(500):
        steering.record_time(8, 24_000 if n % 10 == 0 else 18_000, n)
    assert 22_000 <= steering.time_us(8) <= 26_000  # the mean is 18,600


def test_several_engines_raise_the_row_limit_of_the_queue() -> None:
    answers = Simulation(affine, BatchPolicy(32), slo_us=SLO_US, engines=3).run(poisson((5, 2500)))
    assert p99_us(answers) <= SLO_US
    assert refused(answers) <= 0.05


def test_unmeasured_time_between_batches_is_corrected_for() -> None:
    """A batch takes 4 ms more than is measured: the controller uses less of the SLO."""

    def slower(rows: int, now_us: int) -> float:
        return affine(rows, now_us) + 4000

    class Hidden(Simulation):
        def _answer(self, started_us: int, requests: list[Pending], now_us: int) -> None:
            assert self.steering is not None
            self.steering.record_time(len(requests), now_us - started_us - 4000, now_us)
            self.steering._requests += len(requests)
            late = [now_us - request.arrived_us > SLO_US for request in requests]
            self.steering._late += sum(late)
            self.answers += [Answer(r.arrived_us, now_us - r.arrived_us) for r in requests]

    simulation = Hidden(slower, BatchPolicy(32), slo_us=SLO_US, warm=())
    assert simulation.steering is not None
    for rows in (1, 2, 4, 8, 16, 32):
        simulation.steering.record_time(rows, round(affine(rows, 0)), 0)
    answers = simulation.run(poisson((30, 3000)))
    assert p99_us(answers, 15) <= 1.06 * SLO_US  # 45 ms uncorrected
    assert p99_us(answers, 0, 3) > SLO_US


def test_the_batch_limit_is_the_largest_that_fits_twice_into_the_slo() -> None:
    steering = Steering(SLO_US, BatchPolicy(64))
    for rows in (1, 64):
        steering.record_time(rows, round(affine(rows, 0)), 0)
    policy = steering.step(0, 0)
    budget_us = 0.95 * SLO_US
    assert 2 * affine(policy.max_batch, 0) <= budget_us < 2 * affine(policy.max_batch + 1, 0)
    assert policy.queue_rows == policy.max_batch


def test_a_batch_size_that_was_slow_once_is_tried_again() -> None:
    steering = Steering(SLO_US, BatchPolicy(64))
    steering.record_time(8, 12_000, 0)
    steering.record_time(16, 60_000, 0)  # the machine was busy with something else
    assert steering.step(0, 0).max_batch == 9
    for now_us in (20 * S, 31 * S):
        steering.record_time(8, 12_000, now_us)
        assert steering.step(now_us, 0).max_batch == 9  # forgotten at the end of the second step
    assert steering.step(32 * S, 0).max_batch == 12


def test_the_policy_is_unchanged_before_anything_was_measured() -> None:
    base = BatchPolicy(32, 500, queue=7)
    assert Steering(SLO_US, base).step(0, 0) is base


def test_an_slo_that_cannot_be_met_is_served_in_small_batches() -> None:
    steering = Steering(100, BatchPolicy(32))
    for rows in (1, 2):
        steering.record_time(rows, 1000 * rows, 0)
    policy = steering.step(0, 0)
    assert (policy.max_batch, policy.max_delay_us, policy.queue_rows) == (1, 0, 1)


def test_larger_batches_are_tried_step_by_step() -> None:
    """Only a batch of one row was measured: it takes a quarter of the SLO."""
    simulation = Simulation(affine, BatchPolicy(32), slo_us=SLO_US, warm=(1,))
    answers = simulation.run(poisson((20, 1500)))
    limits = [policy.max_batch for policy in simulation.policies]
    assert limits[0] == 2
    assert limits[-1] >= 16
    assert p99_us(answers) <= SLO_US


def test_an_slo_that_cannot_be_met_still_allows_rows_that_add_little_time() -> None:
    steering = Steering(15_000, BatchPolicy(32))
    for rows in (1, 32):
        steering.record_time(rows, round(affine(rows, 0)), 0)
    assert steering.step(0, 0).max_batch == 6  # 13 ms, where one row takes 10.5


def test_a_model_without_batching_stays_unbatched() -> None:
    steering = Steering(SLO_US, BatchPolicy(0))
    steering.record_time(1, 2000, 0)
    policy = steering.step(0, 0)
    assert policy.max_batch == 0
    assert policy.queue_rows == 18  # one runs, 18 wait: 19 x 2 ms is 95 % of the SLO


@pytest.mark.parametrize(
    ("per_s", "delay_us"),
    [(20, 0), (400, 0), (600, 2000), (5000, 2000)],
    ids=["a lone client", "too few", "enough", "many"],
)
def test_a_delay_is_set_only_when_requests_come_often_enough(per_s: int, delay_us: int) -> None:
    """A separate batch costs 2 ms more than a joint one; at 500 rows/s, a row comes every 2 ms."""
    steering = Steering(SLO_US, BatchPolicy(8))
    for rows in (1, 2, 4, 8):
        steering.record_time(rows, 2000 + 100 * rows, 0)
    policies = [steering.step(n * TICK_US, n * per_s // 10) for n in range(50)]
    assert policies[-1].max_delay_us == delay_us
    assert policies[0].max_delay_us == 0


def test_the_given_max_delay_us_is_the_upper_limit() -> None:
    steering = Steering(SLO_US, BatchPolicy(8, max_delay_us=300))
    for rows in (1, 2, 8):
        steering.record_time(rows, 2000 + 100 * rows, 0)
    delays = [steering.step(n * TICK_US, n * 500).max_delay_us for n in range(20)]
    assert delays[0] == 0
    assert delays[-1] == 300
