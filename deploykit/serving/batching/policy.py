"""A waiting request, and the rule for when a batch is due. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.core.tensors import InputKey
from deploykit.runtimes.engine import Arrays

LEVELS = 3  # of priority; 1 is run first
DEFAULT_LEVEL = 2  # for a request without a valid priority, as in Triton


@dataclass(frozen=True)
class BatchPolicy:
    """`max_batch` in rows, 0 for a model that is never batched; `queue` in waiting requests.

    `preferred`: batch sizes in rows that run without waiting for the delay to pass, as in
    Triton. `queue_rows`: rows that may wait, None for as many as `queue` allows.
    """

    max_batch: int = 32
    max_delay_us: int = 0
    queue: int = 1024
    preferred: tuple[int, ...] = ()
    queue_rows: int | None = None


@dataclass(eq=False, slots=True)
class Pending:
    """One request, from `submit` to its reply. At the end, either `outputs` or `error` is set."""

    feeds: Arrays
    rows: int
    key: InputKey  # requests with equal keys may run together
    done: Callable[[Pending], None]
    arrived_us: int
    deadline_us: int  # a request that still waits then expires
    give_up_us: int  # even a running request is answered with Expired then
    priority: int = 0  # as the client sent it
    trace: str | None = None  # the client's W3C traceparent
    decode_us: int = 0  # time to decode the request, before it arrived here
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    error: DeploykitError | None = None
    finished: bool = False


class BatchRun(NamedTuple):
    """A successful run of the engine: its requests, and the time of each stage.

    The copies are 0 for an engine that does not time them; `engine_us` excludes them.
    `idle_us`: the sum of the times that requests waited while the engine was idle.
    `instance`: the number of the engine.
    """

    requests: Sequence[Pending]
    started_us: int
    stack_us: int
    copy_in_us: int
    engine_us: int
    copy_out_us: int
    split_us: int
    idle_us: int = 0
    instance: int = 0

    @property
    def busy_us(self) -> int:
        return self.stack_us + self.copy_in_us + self.engine_us + self.copy_out_us + self.split_us


class Watcher:
    """Receives events on the thread where they happen; this base class ignores them."""

    def record_run(self, run: BatchRun) -> None:
        """A batch succeeded."""

    def record_failure(self, request: Pending, now_us: int) -> None:
        """A request ended with `request.error`."""

    def record_refusal(self) -> None:
        """A request was refused: the queue is full or closed."""

    def record_cancellation(self) -> None:
        """The sender cancelled a waiting request."""


class Watchers(Watcher):
    """Passes events to several, in order."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def record_run(self, run: BatchRun) -> None:
        for watcher in self._watchers:
            watcher.record_run(run)

    def record_failure(self, request: Pending, now_us: int) -> None:
        for watcher in self._watchers:
            watcher.record_failure(request, now_us)

    def record_refusal(self) -> None:
        for watcher in self._watchers:
            watcher.record_refusal()

    def record_cancellation(self) -> None:
        for watcher in self._watchers:
            watcher.record_cancellation()


def due(waiting: Iterable[Pending], policy: BatchPolicy, now_us: int) -> int:
    """How many requests at the head of `waiting`, all of one key, to run now; 0 means wait.

    Before the delay has passed: the largest preferred size that the requests add up to. Else, or
    once the batch is full: all that fit into `max_batch`. A request of more rows runs alone.
    """
    take = rows = preferred = 0
    oldest_us = now_us
    full = False
    for request in waiting:
        if take and rows + request.rows > policy.max_batch:
            full = True  # the next one cannot join, so waiting gains nothing
            break
        if not take:
            oldest_us = request.arrived_us
        take, rows = take + 1, rows + request.rows
        if rows in policy.preferred:
            preferred = take
        if rows >= policy.max_batch:
            full = True
            break
    late = policy.max_delay_us > 0 and now_us - oldest_us >= policy.max_delay_us
    if preferred and not late:
        return preferred
    return take if full or late or not policy.max_delay_us else 0
