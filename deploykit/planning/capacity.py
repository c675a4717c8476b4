"""How many replicas of a target carry a rate of requests within a bound on p99.

Requests arrive at random (Poisson) and are spread evenly over the replicas, at random too, so that
each sees Poisson arrivals. It runs as our server does: an engine that is idle never waits, and
takes all requests that queued while it was busy, up to the largest batch: a bulk-service queue
(N. T. J. Bailey, "On queueing processes with bulk service", J. R. Stat. Soc. B 16, 1954), whose
waiting times have no closed form where the service depends on the batch; so it is simulated, with
arrivals drawn once from a fixed seed. With batches of one it is M/D/1, whose known distribution
(A. K. Erlang, 1909) the tests compare it with.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from deploykit.core.json_value import Record

_ARRIVALS, _WARM_UP, _SEED = 40_000, 4_000, 0
_STEPS = 12  # of the bisection: the rate is known to 1 in 4096
_MOST_BATCH = 4096  # larger batches are not joined out of single requests
QUANTILE = 0.99


@dataclass(frozen=True)
class Capacity(Record):
    """`replicas` carry `rate_per_s` within `bound_ms` at p99; None where no number of them does.

    `rate_each_per_s`: the most that one carries. `p99_ms`: with that many replicas. `why`: the
    reason where there is none. `max_batch`: requests that one call takes. `per_million`: the
    price of a million requests on all replicas.
    """

    rate_per_s: float
    bound_ms: float
    replicas: int | None
    rate_each_per_s: float | None
    p99_ms: float | None
    why: str = ""
    max_batch: int = 1
    precision: str = ""
    per_million: float | None = None


def capacity(rate_per_s: float, bound_s: float, service_s: Mapping[int, float]) -> Capacity:
    """`service_s`: seconds of a call by batch size, from 1 on; between two a straight line."""
    service = by_batch(service_s)
    if service[0] > bound_s:
        why = f"a request alone takes {service[0] * 1e3:.3g} ms"
        return Capacity(rate_per_s, bound_s * 1e3, None, None, None, why)
    most = max((place + 1) / seconds for place, seconds in enumerate(service))
    low, high = 0.0, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if p99_s(middle, service) <= bound_s else (low, middle)
    if not low:
        why = "a second request that waits for the first is late"
        return Capacity(rate_per_s, bound_s * 1e3, None, None, None, why)
    replicas = math.ceil(rate_per_s / low)
    p99_ms = p99_s(rate_per_s / replicas, service) * 1e3
    return Capacity(rate_per_s, bound_s * 1e3, replicas, low, p99_ms, max_batch=len(service))


def by_batch(service_s: Mapping[int, float]) -> tuple[float, ...]:
    """Seconds of batch 1, 2, 3, … up to the largest; one not given lies between its neighbours."""
    sizes = sorted(service_s)
    wanted = np.arange(1, min(sizes[-1], _MOST_BATCH) + 1)
    return tuple(np.interp(wanted, sizes, [service_s[size] for size in sizes]).tolist())


def p99_s(rate_per_s: float, service_s: Sequence[float]) -> float:
    """The 99th percentile of waiting and service together; `service_s` as `by_batch` gives it."""
    arrivals = (_unit_arrivals() / rate_per_s).tolist()
    ends: list[float] = []
    free, first, most = 0.0, 0, len(service_s)
    while first < _ARRIVALS:
        start = max(free, arrivals[first])
        last = bisect_right(arrivals, start, first, min(_ARRIVALS, first + most))
        free = start + service_s[last - first - 1]
        ends += [free] * (last - first)
        first = last
    waited = np.asarray(ends) - np.asarray(arrivals)
    return float(np.quantile(waited[_WARM_UP:], QUANTILE))


@cache
def _unit_arrivals() -> np.ndarray:
    """Times of arrivals at a rate of 1."""
    return np.cumsum(np.random.default_rng(_SEED).exponential(size=_ARRIVALS))
