"""What a waiting request is, and when a batch of them is due. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.core.tensors import InputKey
from deploykit.runtimes.engine import Arrays

LEVELS = 3  # of priority; 1 is run first
DEFAULT_LEVEL = 2  # of a request without a priority, or with one that is no level, as in Triton


@dataclass(frozen=True)
class BatchPolicy:
    """`max_batch` in rows, 0 for a model that is never batched; `queue` in waiting requests.

    `preferred`: batches of so many rows are run without waiting for the delay to pass, as in
    Triton. `queue_rows`: rows that may wait, None for as many as `queue` allows.
    """

    max_batch: int = 32
    max_delay_us: int = 0
    queue: int = 1024
    preferred: tuple[int, ...] = ()
    queue_rows: int | None = None


@dataclass(eq=False, slots=True)
class Pending:
    """One request, from `submit` to its answer. Only `outputs` or `error` is set at the end."""

    feeds: Arrays
    rows: int
    key: InputKey  # requests with equal keys may run together
    done: Callable[[Pending], None]
    arrived_us: int
    deadline_us: int  # past it a waiting request is not run any more
    give_up_us: int  # past it even a running request is answered with Expired
    priority: int = 0  # as the client gave it
    trace: str | None = None  # the client's W3C traceparent
    decode_us: int = 0  # what reading the request took, before it arrived here
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    error: DeploykitError | None = None
    finished: bool = False


class BatchRun(NamedTuple):
    """One run of the engine that went well: who was in it, and what each part took.

    The copies are 0 for an engine that does not time them apart; `engine_us` is without them.
    `idle_us`: how long the requests, added up, waited while the engine that ran them was idle.
    `instance`: which of the model's engines it was.
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
    """Receives events, on whichever thread they happen; this one ignores them."""

    def ran(self, run: BatchRun) -> None:
        """A batch ended well."""

    def failed(self, request: Pending, now_us: int) -> None:
        """A request ended with `request.error`."""

    def refused(self) -> None:
        """A request was not taken, the queue being full or closed."""

    def cancelled(self) -> None:
        """A waiting request was taken back by its owner."""


class Watchers(Watcher):
    """Passes events to several, in order."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def ran(self, run: BatchRun) -> None:
        for watcher in self._watchers:
            watcher.ran(run)

    def failed(self, request: Pending, now_us: int) -> None:
        for watcher in self._watchers:
            watcher.failed(request, now_us)

    def refused(self) -> None:
        for watcher in self._watchers:
            watcher.refused()

    def cancelled(self) -> None:
        for watcher in self._watchers:
            watcher.cancelled()


def due(waiting: Iterable[Pending], policy: BatchPolicy, now_us: int) -> int:
    """How many requests at the head of `waiting`, all of one key, to run now; 0 means wait.

    The largest preferred size that the requests add up to, while the delay has not passed; else
    all that fit into `max_batch`, once that is full or the delay has passed. A request of more rows
    than that runs alone.
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
