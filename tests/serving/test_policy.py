from __future__ import annotations

import pytest

from deploykit.serving.policy import BatchPolicy, Pending, due

A, B = (("x", "FP32", (4,)),), (("x", "FP32", (5,)),)


def pending(rows: int = 1, key=A, arrived_us: int = 0) -> Pending:
    return Pending({}, rows, key, lambda _: None, arrived_us, 1 << 60, 1 << 60)


@pytest.mark.parametrize(
    ("queue", "max_delay_us", "now_us", "take"),
    [
        ([], 0, 0, 0),
        ([pending()], 0, 0, 1),
        ([pending()], 100, 99, 0),
        ([pending()], 100, 100, 1),
        ([pending(arrived_us=0), pending(arrived_us=90)], 100, 100, 2),
        ([pending(8)], 100, 0, 1),
        ([pending(5), pending(3), pending(1)], 100, 0, 2),
        ([pending(5), pending(4)], 100, 0, 1),
        ([pending(), pending(key=B)], 100, 0, 1),
        ([pending(), pending(), pending(key=B), pending()], 0, 0, 2),
        ([pending(0), pending(0)], 0, 0, 2),
    ],
    ids=[
        "nothing waits",
        "an idle engine takes one at once",
        "the delay has not passed",
        "the delay has passed",
        "the delay counts from the oldest",
        "a full request does not wait",
        "rows fill the batch exactly",
        "the next would overfill it",
        "another shape ends the batch",
        "order is kept across shapes",
        "no rows at all",
    ],
)
def test_how_many_are_due(queue, max_delay_us: int, now_us: int, take: int) -> None:
    assert due(queue, BatchPolicy(8, max_delay_us), now_us) == take


def test_a_model_without_batching_runs_one_request_at_a_time() -> None:
    assert due([pending(), pending()], BatchPolicy(0), 0) == 1
