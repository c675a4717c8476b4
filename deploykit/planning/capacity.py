"""Compute how many replicas of a target carry a rate of requests within a bound on p99.

Requests arrive at random (Poisson) and are spread over the replicas at random, so that each sees
Poisson arrivals. A replica works like our server: an idle engine never waits, and takes all queued
requests up to the largest batch; a full queue refuses. This is a bulk-service queue (N. T. J.
Bailey, "On queueing processes with bulk service", J. R. Stat. Soc. B 16, 1954). Its waiting times
have no closed form if the service depends on the batch, so it is simulated, with arrivals from a
fixed seed. With batches of one it is M/D/1, and the tests compare it with that distribution (A. K.
Erlang, 1909) and with the server's own queue.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from deploykit.core.json_value import Record

QUEUE = 1024  # requests that may wait: the server's default
# The server's processor time for an empty call, for each of its requests and for each byte of their
# tensors (sockets, HTTP, JSON, copies). An engine that used the caches makes the server's work
# longer, in proportion to its time up to 2 ms. See benchmarks/plan_capacity.py.
CALL_S, REQUEST_S, BYTE_S = 40e-6, 20e-6, 0.6e-9
_COLD, _COLD_UNTIL_S = 0.045, 2e-3
QUANTILE = 0.99

_ARRIVALS, _WARM_UP, _SEED = 40_000, 4_000, 0
_STEPS, _PRECISION = 12, 0.005  # of the bisection: most steps, relative precision
_LARGEST_BATCH = 4096  # larger batches are not joined from single requests
_BETTER = 1.01  # factor of the rate that justifies a smaller largest batch
_QUIETEST = 1e-6  # share of a replica's rate, below which requests never meet


@dataclass(frozen=True)
class ReplicaModel:
    """A model of one server. `service_s`: seconds of a call with 1, 2, 3, ... requests.

    `request_s`: the server's processor time for a request. `overlaps`: that time overlaps with the
    engine's, as on a GPU; on a CPU both share the cores.
    """

    service_s: tuple[float, ...]
    request_s: float = 0.0
    overlaps: bool = False
    queue: int = QUEUE

    @property
    def alone_s(self) -> float:
        """Seconds of a request that waits for no other."""
        return self.service_s[0] + self.request_s

    @property
    def most_per_s(self) -> float:
        """The highest possible rate, whatever the latency."""
        calls = ((size, seconds) for size, seconds in enumerate(self.service_s, start=1))
        if self.overlaps:
            rate = max(size / seconds for size, seconds in calls)
            return min(rate, 1 / self.request_s) if self.request_s else rate
        return max(size / (seconds + size * self.request_s) for size, seconds in calls)


@dataclass(frozen=True)
class Capacity(Record):
    """`replicas` carry `rate_per_s` within `bound_ms` at p99; None where no number of them does.

    `rate_each_per_s`: the most that one carries; the server's own work then takes `server_busy` of
    a core. `p99_ms`: with that many replicas. `why`: the reason where there is none. `max_batch`:
    requests that one call takes, the server's `max_batch`.
    """

    rate_per_s: float
    bound_ms: float
    replicas: int | None = None
    rate_each_per_s: float | None = None
    p99_ms: float | None = None
    why: str = ""
    max_batch: int = 1
    server_busy: float = 0.0
    precision: str = ""


def capacity(
    rate_per_s: float,
    bound_s: float,
    service_s: Mapping[int, float],
    *,
    request_s: float = 0.0,
    overlaps: bool = False,
) -> Capacity:
    """Return how many replicas carry `rate_per_s` with their p99 within `bound_s`.

    `service_s`: seconds of a call by batch size, from 1 on, interpolated linearly. The largest
    batch is the size whose call is within the bound and with which a replica carries most.
    `request_s`, `overlaps`: see `ReplicaModel`.
    """
    least = min(service_s)
    in_time = {size: each for size, each in service_s.items() if each <= bound_s or size == least}
    whole = ReplicaModel(by_batch(in_time), request_s, overlaps)
    nothing = Capacity(rate_per_s, bound_s * 1e3)
    if whole.alone_s > bound_s:
        return replace(nothing, why=f"a request alone takes {whole.alone_s * 1e3:.3g} ms")
    best, most = whole, 0.0
    for size in sorted({min(each, _LARGEST_BATCH) for each in in_time}, reverse=True):
        tried = replace(whole, service_s=whole.service_s[:size])
        more = most * _BETTER
        if not most or (more < tried.most_per_s and p99_s(more, tried) <= bound_s):
            best, most = tried, _most_within(bound_s, tried)
    if not most:
        return replace(nothing, why="a second request that waits for the first is late")
    replicas = max(1, math.ceil(rate_per_s / most))
    return replace(
        nothing,
        replicas=replicas,
        rate_each_per_s=most,
        p99_ms=p99_s(max(rate_per_s / replicas, most * _QUIETEST), best) * 1e3,
        max_batch=len(best.service_s),
        server_busy=most * request_s,
    )


def served_s(engine_s: float) -> float:
    """Return the seconds of an engine's call including the server's work for it."""
    return engine_s + CALL_S + _COLD * min(engine_s, _COLD_UNTIL_S)


def by_batch(service_s: Mapping[int, float]) -> tuple[float, ...]:
    """Interpolate the seconds of batch 1, 2, 3, ... up to the largest."""
    sizes = sorted(service_s)
    wanted = np.arange(1, min(sizes[-1], _LARGEST_BATCH) + 1)
    return tuple(np.interp(wanted, sizes, [service_s[size] for size in sizes]).tolist())


def p99_s(rate_per_s: float, replica: ReplicaModel) -> float:
    """Return the 99th percentile of waiting and service; infinite if 1 % is refused."""
    taken_s = latencies_s((_unit_arrivals() / rate_per_s).tolist(), replica)
    return float(np.quantile(taken_s[_WARM_UP:], QUANTILE, method="inverted_cdf"))


def latencies_s(arrivals_s: Sequence[float], replica: ReplicaModel) -> list[float]:
    """Return the time from each arrival to its answer; infinite for a refused request."""
    taken_s = [math.inf] * len(arrivals_s)
    waiting: deque[int] = deque()
    engine_s = server_s = 0.0  # when each is free
    service_s, arrived, most = replica.service_s, 0, len(replica.service_s)
    while waiting or arrived < len(arrivals_s):
        begin_s = engine_s if waiting else max(engine_s, arrivals_s[arrived])
        until = bisect_right(arrivals_s, begin_s, arrived)
        waiting.extend(range(arrived, min(until, arrived + replica.queue - len(waiting))))
        arrived = until
        size = min(most, len(waiting))
        engine_s = begin_s + service_s[size - 1]
        server_s = max(server_s, engine_s) + size * replica.request_s
        if not replica.overlaps:
            engine_s = server_s
        for _ in range(size):
            request = waiting.popleft()
            taken_s[request] = server_s - arrivals_s[request]
    return taken_s


def _most_within(bound_s: float, replica: ReplicaModel) -> float:
    """Return the highest rate whose p99 is within the bound; 0.0 if there is none."""
    low, high = 0.0, replica.most_per_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if p99_s(middle, replica) <= bound_s else (low, middle)
        if high - low <= _PRECISION * low:
            break
    return low


@cache
def _unit_arrivals() -> np.ndarray:
    return np.cumsum(np.random.default_rng(_SEED).exponential(size=_ARRIVALS))
