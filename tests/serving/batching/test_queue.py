from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.tensors import InputKey
from deploykit.serving.batching.policy import BatchPolicy, Pending
from deploykit.serving.batching.queue import RequestQueue

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
    """A request that is told apart by `number`."""
    feeds = {"x": np.full((rows, 1), number)}
    return Pending(feeds, rows, key, lambda _: None, us, by_us, by_us, priority)


def numbers(requests: list[Pending]) -> list[int]:
    return [int(request.feeds["x"][0, 0]) for request in requests]


def filled(policy: BatchPolicy, *requests: Pending) -> RequestQueue:
    lanes = RequestQueue(policy)
    for request in requests:
        lanes.add(request)
    return lanes


def drained(lanes: RequestQueue, now_us: int = 0) -> list[list[int]]:
    found = []
    while batch := lanes.take(now_us):
        found.append(numbers(batch))
    assert (lanes.count, lanes.rows) == (0, 0)
    return found


def test_shapes_do_not_break_up_each_others_batches() -> None:
    keys = [A, B, A, B, A]
    lanes = filled(BatchPolicy(8), *(pending(n, key=key, us=n) for n, key in enumerate(keys)))
    assert drained(lanes) == [[0, 2, 4], [1, 3]]


def test_the_oldest_goes_first_whatever_its_shape() -> None:
    lanes = filled(BatchPolicy(2), *(pending(n, us=n) for n in range(3)), pending(9, key=B, us=1))
    lanes.add(pending(3, us=3))
    assert drained(lanes) == [[0, 1], [9], [2, 3]]


def test_a_lower_priority_number_goes_first_in_order_of_arrival() -> None:
    priorities = [0, 3, 1, 2, 1, 99]
    lanes = filled(BatchPolicy(8), *(pending(n, priority=p) for n, p in enumerate(priorities)))
    assert drained(lanes) == [[2, 4], [0, 3, 5], [1]]


def test_no_priority_makes_another_wait_till_its_deadline() -> None:
    lanes = filled(BatchPolicy(1), pending(0, priority=3, by_us=1000), pending(1, priority=1))
    assert numbers(lanes.take(499)) == [1]
    lanes.add(pending(2, priority=1))
    assert numbers(lanes.take(500)) == [0]


def test_a_full_batch_does_not_wait_behind_one_that_is_not() -> None:
    lanes = filled(BatchPolicy(2, 100), pending(0), pending(1, key=B), pending(2, key=B))
    assert numbers(lanes.take(1)) == [1, 2]
    assert lanes.take(1) == []
    assert numbers(lanes.take(100)) == [0]


def test_hurry_ends_the_delay() -> None:
    lanes = filled(BatchPolicy(8, 100), pending(0), pending(1))
    assert lanes.take(0) == []
    assert numbers(lanes.take(0, hurry=True)) == [0, 1]


def test_what_is_late_is_taken_from_wherever_it_stands() -> None:
    lanes = filled(
        BatchPolicy(8),
        pending(0, by_us=50),
        pending(1, by_us=10),
        pending(2, key=B, by_us=10),
        pending(3, by_us=20),
    )
    assert lanes.take_late(9) == []
    assert sorted(numbers(lanes.take_late(10))) == [1, 2]
    assert numbers(lanes.take_late(20)) == [3]
    assert drained(lanes) == [[0]]


def test_what_is_removed_never_runs() -> None:
    first, second = pending(0), pending(1)
    lanes = filled(BatchPolicy(8), first, second)
    assert lanes.remove(first)
    assert not lanes.remove(first)
    assert not lanes.remove(pending(2, key=B))
    assert drained(lanes) == [[1]]


def test_an_emptied_lane_is_used_again() -> None:
    lanes = RequestQueue(BatchPolicy(8))
    for n in range(3):
        lanes.add(pending(n, rows=2))
        assert lanes.rows == 2
        assert drained(lanes) == [[n]]
    assert lanes.added_rows == 6


def test_taking_all_leaves_nothing_behind() -> None:
    lanes = filled(BatchPolicy(8), pending(0), pending(1, key=B))
    assert sorted(numbers(lanes.take_all())) == [0, 1]
    lanes.add(pending(2))
    assert drained(lanes) == [[2]]


@pytest.mark.parametrize(
    ("waiting", "rows", "fits"),
    [([], 9, True), ([1], 3, True), ([1], 4, False), ([1, 1, 1], 1, True), ([1] * 4, 1, False)],
    ids=["alone in it", "to the brim", "one row too many", "small ones", "it is full"],
)
def test_rows_that_may_wait(waiting: list[int], rows: int, fits: bool) -> None:
    policy = BatchPolicy(8, queue_rows=4)
    lanes = filled(policy, *(pending(n, rows=rows) for n, rows in enumerate(waiting)))
    assert lanes.fits(rows) is fits


def test_when_to_look_again() -> None:
    lanes = RequestQueue(BatchPolicy(8, 100))
    lanes.add(pending(0, us=10, by_us=1000))
    lanes.add(pending(1, key=B, us=20, by_us=50))
    assert lanes.next_us() == 50
    lanes.take_late(50)
    assert lanes.next_us() == 110


def test_an_engine_is_woken_only_for_what_it_can_do() -> None:
    at_once = RequestQueue(BatchPolicy(4))
    assert [at_once.add(pending(n)) for n in range(3)] == [True] * 3
    delayed = RequestQueue(BatchPolicy(4, 100))
    assert [delayed.add(pending(n)) for n in range(4)] == [True, False, False, True]
    preferred = RequestQueue(BatchPolicy(8, 100, preferred=(2, 6)))
    assert [preferred.add(pending(n)) for n in range(3)] == [True, True, True]
