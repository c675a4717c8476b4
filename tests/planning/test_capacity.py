"""The simulated queue against the server's own queue."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from deploykit.planning.capacity import (
    QUEUE,
    ReplicaModel,
    by_batch,
    capacity,
    latencies_s,
    p99_s,
    served_s,
)
from deploykit.serving.batching.queue import BatchPolicy, Pending, RequestQueue
from deploykit.serving.options import ServeOptions

SERVICE_S = 0.01
GROWING = tuple(0.004 + 0.002 * size for size in range(1, 9))


class Event:
    """Several servers as they run: their real queues, and the clock as a heap of events.

    Each arrival goes to the replica named in `to`. Nothing is shared with the model under test.
    """

    def __init__(self, replica: ReplicaModel, replicas: int) -> None:
        policy = BatchPolicy(max_batch=len(replica.service_s), queue=replica.queue)
        self.replica, self.queues = replica, [RequestQueue(policy) for _ in range(replicas)]
        self.busy = [False] * replicas
        self.server_s = [0.0] * replicas
        self.taken_s: dict[int, float] = {}
        self.heap: list[tuple[float, int, int, str, int]] = []
        self.order = itertools.count()

    def run(self, arrivals_s: Sequence[float], to: Sequence[int]) -> list[float]:
        for number, at_s in enumerate(arrivals_s):
            self._push(at_s, 0, "arrives", number)
        while self.heap:
            now_s, _, _, what, number = heapq.heappop(self.heap)
            if what == "arrives":
                queue = self.queues[to[number]]
                ns = int(now_s * 1e9)
                request = Pending({}, 1, (), _ignore, ns, 1 << 62, 1 << 62, decode_us=number)
                if queue.add(request) is None:
                    self.taken_s[number] = math.inf
                self._push(now_s, 2, "looks", to[number])
            elif what == "ends":
                self.busy[number] = False
                self._push(now_s, 2, "looks", number)
            elif not self.busy[number] and (batch := self.queues[number].take(int(now_s * 1e9))):
                self._start(now_s, number, [request.decode_us for request in batch], arrivals_s)
        return [self.taken_s[number] for number in range(len(arrivals_s))]

    def _start(
        self, now_s: float, server: int, batch: Sequence[int], arrivals_s: Sequence[float]
    ) -> None:
        """Answers are written after the engine, by a thread that may have others to write."""
        replica = self.replica
        engine_s = now_s + replica.service_s[len(batch) - 1]
        ready_s = max(self.server_s[server], engine_s) + len(batch) * replica.request_s
        self.server_s[server], self.busy[server] = ready_s, True
        for number in batch:
            self.taken_s[number] = ready_s - arrivals_s[number]
        self._push(engine_s if replica.overlaps else ready_s, 1, "ends", server)

    def _push(self, at_s: float, rank: int, what: str, number: int) -> None:
        """At one time arrivals come first: an engine that is free takes all that is there."""
        heapq.heappush(self.heap, (at_s, rank, next(self.order), what, number))


def _ignore(_: Pending) -> None:
    """These requests have no client."""


def poisson(rate_per_s: float, count: int, seed: int = 1) -> list[float]:
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    return [float(each) for each in np.cumsum(gaps)]


@pytest.mark.parametrize(
    "replica",
    [
        ReplicaModel((SERVICE_S,)),
        ReplicaModel(GROWING),
        ReplicaModel(GROWING, 1e-3),
        ReplicaModel(GROWING, 1e-3, overlaps=True),
        ReplicaModel(GROWING, 1e-3, overlaps=True, queue=12),
        ReplicaModel((SERVICE_S, SERVICE_S), queue=3),
    ],
    ids=["single", "batches", "own time", "overlaps", "overlaps, short queue", "short queue"],
)
@pytest.mark.parametrize("load", [0.5, 0.95, 1.3])
def test_requests_wait_as_in_the_server_s_own_queue(replica: ReplicaModel, load: float) -> None:
    arrivals_s = poisson(load * replica.most_per_s, 1000)
    expected = Event(replica, 1).run(arrivals_s, [0] * len(arrivals_s))
    assert latencies_s(arrivals_s, replica) == pytest.approx(expected)
    if replica.queue < 20 and load > 1:
        assert math.inf in expected


def test_two_replicas_behind_a_random_spread_hold_the_bound_at_twice_the_rate() -> None:
    bound_s = 0.06
    found = capacity(1.0, bound_s, dict(enumerate(GROWING, start=1)), request_s=1e-3)
    assert found.rate_each_per_s is not None
    replica = ReplicaModel(GROWING[: found.max_batch], 1e-3)
    for share, holds in ((0.9, True), (1.1, False)):
        arrivals_s = poisson(2 * share * found.rate_each_per_s, 20_000)
        to = np.random.default_rng(2).integers(2, size=len(arrivals_s)).tolist()
        taken_s = Event(replica, 2).run(arrivals_s, to)
        assert (float(np.quantile(taken_s, 0.99)) <= bound_s) is holds


@pytest.mark.parametrize("rate", [10.0, 1e12])
def test_as_many_replicas_as_the_rate_needs_and_no_more(rate: float) -> None:
    found = capacity(rate, 0.05, {1: SERVICE_S})
    assert (found.replicas - 1) * found.rate_each_per_s < rate
    assert rate <= found.replicas * found.rate_each_per_s
    assert SERVICE_S * 1e3 <= found.p99_ms <= 50


def test_a_bound_near_the_service_time_leaves_no_room_for_a_queue() -> None:
    assert p99_s(1e-3, ReplicaModel((SERVICE_S,))) == pytest.approx(SERVICE_S)
    found = capacity(10, SERVICE_S * 1.0000001, {1: SERVICE_S})
    assert found.replicas is None or found.rate_each_per_s < 2
    late = capacity(1, 0.01, {1: 0.00995}, request_s=1e-4)
    assert (late.replicas, late.why) == (None, "a request alone takes 10.1 ms")


def test_batches_between_two_that_are_given_lie_on_a_line() -> None:
    assert by_batch({1: 1.0, 3: 3.0, 5: 7.0}) == (1.0, 2.0, 3.0, 5.0, 7.0)
    assert by_batch({4: 2.0}) == (2.0, 2.0, 2.0, 2.0)
    assert len(by_batch({1: 1.0, 1 << 40: 2.0})) == 4096


def test_the_largest_batch_is_the_one_that_carries_most() -> None:
    service_s = {1: 0.001, 8: 0.004, 32: 0.04}
    assert capacity(1, 0.05, service_s).max_batch == 8
    assert capacity(1, 0.05, service_s | {32: 0.01}).max_batch == 32
    assert capacity(1, 0.005, service_s | {32: 0.01}).max_batch == 8  # 32 are too late at once


def test_the_server_takes_longer_for_a_call_the_longer_the_engine_had_the_caches() -> None:
    own_us = [(served_s(each) - each) * 1e6 for each in (0.0, 4e-4, 1.6e-3, 2e-3, 1.0)]
    assert own_us == [pytest.approx(each) for each in (40, 58, 112, 130, 130)]


def test_the_server_s_own_time_bounds_a_fast_engine() -> None:
    for overlaps, rate in ((False, 1 / 1.01e-4), (True, 1e4)):
        found = capacity(1, 0.01, {1: 1e-6}, request_s=1e-4, overlaps=overlaps)
        assert found.rate_each_per_s == pytest.approx(rate, rel=0.05)
    assert ServeOptions().queue == QUEUE
