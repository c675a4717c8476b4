"""How many queued requests a batch policy makes due."""

from __future__ import annotations

import pytest

from deploykit.serving.batching.queue import BatchPolicy, BatchRun, Pending, due

A = (("x", "FP32", (4,)),)


def pending(rows: int = 1, arrived_us: int = 0) -> Pending:
    return Pending({}, rows, A, lambda _: None, arrived_us, 1 << 60, 1 << 60)


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
        ([pending(0), pending(0)], 0, 0, 2),
        ([pending(9), pending()], 100, 0, 1),
    ],
    ids=[
        "the queue is empty",
        "an idle engine takes one at once",
        "the delay has not passed",
        "the delay has passed",
        "the delay counts from the oldest",
        "a full request does not wait",
        "rows fill the batch exactly",
        "the next would overfill it",
        "no rows at all",
        "more rows than a batch may have run alone",
    ],
)
def test_a_batch_is_due_when_full_or_when_its_delay_has_passed(
    queue, max_delay_us: int, now_us: int, take: int
) -> None:
    assert due(queue, BatchPolicy(8, max_delay_us), now_us) == take


def test_a_model_without_batching_runs_one_request_at_a_time() -> None:
    assert due([pending(), pending()], BatchPolicy(0), 0) == 1


def test_the_busy_time_of_a_run_is_the_sum_of_its_stages() -> None:
    assert BatchRun([], 0, 1, 2, 4, 8, 16).busy_us == 31
