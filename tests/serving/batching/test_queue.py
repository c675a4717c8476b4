"""The queue of one model: batches by shape, priorities, deadlines and the row limit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import InputKey
from deploykit.pipelines.threads import Peer
from deploykit.serving.batching.queue import BatchPolicy, Pending, RequestQueue, due

A: InputKey = (("x", "FP32", (4,)),)
B: InputKey = (("x", "FP32", (5,)),)


def pending(
    number: int,
    *,
    key: InputKey = A,
    rows: int = 1,
    us: int = 0,
    priority: int = 0,
    by_us: int = 1 << 50,
) -> Pending:
    """A request that is identified by `number`."""
    feeds = {"x": np.full((rows, 1), number)}
    return Pending(feeds, rows, key, lambda _: None, us, by_us, by_us, priority)


def numbers(requests: list[Pending]) -> list[int]:
    return [int(request.feeds["x"][0, 0]) for request in requests]


def filled(policy: BatchPolicy, *requests: Pending) -> RequestQueue:
    queue = RequestQueue(policy)
    for request in requests:
        assert queue.add(request) is not None
    return queue


BATCH_US = 30_000


def drained(queue: RequestQueue, now_us: int = 0) -> list[list[int]]:
    found = []
    while batch := queue.take(now_us):
        found.append(numbers(batch))
        now_us += BATCH_US
    assert (queue.count, queue.rows) == (0, 0)
    return found


@pytest.mark.parametrize(
    ("policy", "requests", "batches"),
    [
        (BatchPolicy(8), [{}, {"key": B}, {}, {"key": B}, {}], [[0, 2, 4], [1, 3]]),
        # the oldest runs first, whatever its shape
        (BatchPolicy(2), [{}, {}, {"key": B}, {}], [[0, 1], [2], [3]]),
        # a lower number first, and equal ones by arrival; 0 and 99 are the default
        (
            BatchPolicy(8),
            [{"priority": p} for p in (0, 3, 1, 2, 1, 99)],
            [[2, 4], [0, 3, 5], [1]],
        ),
    ],
    ids=["shapes", "the oldest", "priorities"],
)
def test_batches_are_of_one_shape_and_priority(
    policy: BatchPolicy, requests: list[dict[str, Any]], batches: list[list[int]]
) -> None:
    queue = RequestQueue(policy)
    for _ in range(2):  # a shape can be queued again after its queue was emptied
        for number, options in enumerate(requests):
            queue.add(pending(number, us=number, **options))
        assert drained(queue) == batches


def sent(number: int, peer: Peer, rows: int = 32) -> Pending:
    request = pending(number, rows=rows)
    request.sender = SimpleNamespace(peer=peer)
    return request


@pytest.mark.parametrize(
    ("most", "other"), [(Peer("a", 0), Peer("b", 0)), (Peer("a", 0), Peer("a", 1))], ids=str
)
def test_clients_take_turns_once_requests_wait_for_long(most: Peer, other: Peer) -> None:
    """The requests of one do not delay a single one of another: addresses, else connections."""
    queue = filled(BatchPolicy(32), *(sent(number, most) for number in range(64)))
    assert numbers(queue.take(50_000)) == [0]  # a short wait is by arrival
    assert numbers(queue.take(200_000)) == [1]
    queue.add(sent(100, other, rows=1))
    order = [queue.take(200_000 + BATCH_US * at) for at in range(1, 4)]
    assert 100 in [number for batch in order for number in numbers(batch)]
    queue.add(sent(101, other))
    queue.add(sent(102, other))
    found = [batch[0] for batch in drained(queue, 400_000)]
    assert found.index(101) < 3
    assert found.index(102) < 5
    alone = [number for number in found if number < 100]
    assert alone == sorted(alone)


def test_many_connections_of_an_address_have_one_share_and_small_requests_are_first() -> None:
    queue = filled(BatchPolicy(32), *(sent(number, Peer("a", number)) for number in range(30)))
    queue.add(sent(40, Peer("a", 40), rows=1))
    assert 40 in numbers([*queue.take(200_000), *queue.take(200_000)])
    for number in range(50, 60):
        queue.add(sent(number, Peer("b", 0)))
    found = [number for batch in drained(queue, 400_000) for number in batch]
    assert found.index(59) < 21


def test_turns_hold_while_more_requests_arrive() -> None:
    """Two clients get as many rows, whatever each of them queues."""
    queue, served = RequestQueue(BatchPolicy(4, max_delay_us=1000)), [0, 0]
    for now in range(100):
        for request in range(3):
            queue.add(sent(0, Peer("a", request), rows=2))
        queue.add(sent(1, Peer("b", 0), rows=2))
        for request in queue.take(now * 90_000):
            served[numbers([request])[0]] += request.rows
    assert served[0] + served[1] == 400
    assert abs(served[0] - served[1]) < 40


def test_a_low_priority_request_runs_before_half_its_time_limit_has_passed() -> None:
    queue = filled(BatchPolicy(1), pending(0, priority=3, by_us=1000), pending(1, priority=1))
    assert numbers(queue.take(499)) == [1]
    queue.add(pending(2, priority=1))
    assert numbers(queue.take(500)) == [0]


def test_a_full_batch_overtakes_one_that_is_not_full() -> None:
    queue = filled(BatchPolicy(2, 100), pending(0), pending(1, key=B), pending(2, key=B))
    assert numbers(queue.take(1)) == [1, 2]
    assert queue.take(1) == []
    queue.add(pending(3, key=B, us=50))
    assert numbers(queue.take(100)) == [0]
    assert queue.take(100) == []
    assert numbers(queue.take(100, hurry=True)) == [3]


def test_expired_requests_are_taken_from_any_position() -> None:
    requests = [(0, A, 50), (1, A, 10), (2, B, 10), (3, A, 20), (4, A, 60), (5, B, 60)]
    queue = filled(BatchPolicy(8), *(pending(n, key=key, by_us=us) for n, key, us in requests))
    assert queue.take_late(9) == []
    assert sorted(numbers(queue.take_late(10))) == [1, 2]
    assert numbers(queue.take_late(20)) == [3]
    assert numbers(queue.take(20)) == [0, 4]
    assert numbers(queue.take_late(math.inf)) == [5]  # in the end all are late
    queue.add(pending(6))
    assert drained(queue) == [[6]]


@pytest.mark.parametrize(
    ("waiting", "rows", "fits"),
    [([], 9, True), ([1], 3, True), ([1], 4, False), ([1] * 4, 1, False)],
    ids=["alone", "exactly full", "one row too many", "already full"],
)
def test_a_request_fits_while_the_queued_rows_stay_within_queue_rows(
    waiting: list[int], rows: int, fits: bool
) -> None:
    policy = BatchPolicy(8, queue_rows=4)
    queue = filled(policy, *(pending(n, rows=rows) for n, rows in enumerate(waiting)))
    assert (queue.add(pending(9, rows=rows)) is not None) is fits
    assert queue.count == len(waiting) + fits


def test_next_us_is_the_earliest_deadline_or_end_of_a_delay() -> None:
    queue = RequestQueue(BatchPolicy(8, 100))
    queue.add(pending(0, us=10, by_us=1000))
    queue.add(pending(1, key=B, us=20, by_us=50))
    assert queue.next_us() == 50
    queue.take_late(50)
    assert queue.next_us() == 110


DUE = {  # rows and arrival of each request, the delay, the time, and how many are taken
    "an idle engine takes one at once": ([(1, 0)], 0, 0, 1),
    "the delay has not passed": ([(1, 0)], 100, 99, 0),
    "the delay has passed": ([(1, 0)], 100, 100, 1),
    "the delay counts from the oldest": ([(1, 0), (1, 90)], 100, 100, 2),
    "rows fill the batch exactly": ([(5, 0), (3, 0), (1, 0)], 100, 0, 2),
    "the next would overfill it": ([(5, 0), (4, 0)], 100, 0, 1),
    "no rows at all": ([(0, 0), (0, 0)], 0, 0, 2),
    "more rows than a batch may have run alone": ([(9, 0), (1, 0)], 100, 0, 1),
}


@pytest.mark.parametrize(("queue", "max_delay_us", "now_us", "take"), DUE.values(), ids=DUE)
def test_a_batch_is_due_when_full_or_when_its_delay_has_passed(
    queue: list[tuple[int, int]], max_delay_us: int, now_us: int, take: int
) -> None:
    requests = [pending(0, rows=rows, us=us) for rows, us in queue]
    assert due(requests, BatchPolicy(8, max_delay_us), now_us) == take
