"""The simulated queue against the distributions that are known in closed form."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest

from deploykit.planning.capacity import by_batch, capacity, p99_s

SERVICE_S = 0.01


def md1_p99_s(load: float) -> float:
    """M/D/1's waiting time (Erlang, 1909), by bisection, and the service; in units of service.

    P(W <= t) = (1 - load) sum over k <= t of (load (k - t))^k / k! exp(load (t - k)).
    """

    def share(t: float) -> float:
        with localcontext() as context:
            context.prec = 80  # the terms alternate and are large
            total = Decimal(0)
            for k in range(int(t) + 1):
                x = Decimal(load) * (Decimal(k) - Decimal(t))
                total += x**k / math.factorial(k) * (-x).exp() if k or x else (-x).exp()
            return float((1 - Decimal(load)) * total)

    low, high = 0.0, 200.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < 0.99 else (low, middle)
    return (1 + low) * SERVICE_S


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.8])
def test_single_requests_wait_as_in_an_m_d_1_queue(load: float) -> None:
    found = p99_s(load / SERVICE_S, (SERVICE_S,))
    assert found == pytest.approx(md1_p99_s(load), rel=0.06)  # 36,000 arrivals: some 4 %


def test_a_request_alone_takes_its_service_time() -> None:
    assert p99_s(1e-3, (SERVICE_S,)) == pytest.approx(SERVICE_S)


def test_batches_carry_more_than_single_requests() -> None:
    single = capacity(100, 0.05, {1: SERVICE_S})
    batched = capacity(100, 0.05, {1: SERVICE_S, 8: 2 * SERVICE_S})
    assert batched.rate_each_per_s > 2 * single.rate_each_per_s  # type: ignore[operator]
    assert (single.max_batch, batched.max_batch) == (1, 8)


@pytest.mark.parametrize("rate", [10.0, 1000.0, 123456.0])
def test_as_many_replicas_as_the_rate_needs_and_no_more(rate: float) -> None:
    found = capacity(rate, 0.05, {1: SERVICE_S})
    assert found.replicas is not None
    assert found.rate_each_per_s is not None
    assert (found.replicas - 1) * found.rate_each_per_s < rate
    assert rate <= found.replicas * found.rate_each_per_s
    assert found.p99_ms is not None
    assert found.p99_ms <= 50


def test_a_bound_below_the_service_time_is_met_by_no_number_of_replicas() -> None:
    found = capacity(10, 0.005, {1: SERVICE_S})
    assert found.replicas is None
    assert found.why == "a request alone takes 10 ms"


def test_a_bound_just_above_the_service_time_leaves_no_room_for_a_queue() -> None:
    found = capacity(10, SERVICE_S * 1.0000001, {1: SERVICE_S})
    assert found.replicas is None or found.rate_each_per_s < 2  # type: ignore[operator]


def test_batches_between_two_that_are_given_lie_on_a_line() -> None:
    assert by_batch({1: 1.0, 3: 3.0, 5: 7.0}) == (1.0, 2.0, 3.0, 5.0, 7.0)
    assert by_batch({4: 2.0}) == (2.0, 2.0, 2.0, 2.0)


def test_a_huge_batch_is_no_list_of_that_length() -> None:
    assert len(by_batch({1: 1.0, 1 << 40: 2.0})) == 4096
