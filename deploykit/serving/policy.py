"""What a waiting request is, and when a batch of them is due. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.runtimes.engine import Arrays

Key = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, datatype, shape without axis 0


@dataclass(frozen=True)
class BatchPolicy:
    """`max_batch` in rows, 0 for a model that is never batched; `queue` in waiting requests."""

    max_batch: int = 32
    max_delay_us: int = 0
    queue: int = 1024


@dataclass(eq=False, slots=True)
class Pending:
    """One request, from `submit` to its answer. Only `outputs` or `error` is set at the end."""

    feeds: Arrays
    rows: int
    key: Key  # requests with equal keys may run together
    done: Callable[[Pending], None]
    arrived_us: int
    deadline_us: int  # past it a waiting request is not run any more
    give_up_us: int  # past it even a running request is answered with Expired
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    error: DeploykitError | None = None
    finished: bool = False


@dataclass(frozen=True)
class BatchRun:
    """One run of the engine that went well: who was in it, and what each part took."""

    requests: Sequence[Pending]
    started_us: int
    stack_us: int
    engine_us: int
    split_us: int


class Watcher:
    """Is told what happened, on whichever thread it happened; this one ignores it all."""

    def ran(self, run: BatchRun) -> None:
        """A batch ended well."""

    def failed(self, request: Pending, now_us: int) -> None:
        """A request ended with `request.error`."""

    def refused(self) -> None:
        """A request was not taken, the queue being full or closed."""

    def cancelled(self) -> None:
        """A waiting request was taken back by its owner."""


def due(queue: Sequence[Pending], policy: BatchPolicy, now_us: int) -> int:
    """How many requests at the head of `queue` to run now; 0 means wait.

    Each of them fits `max_batch` rows: that was checked on entry.
    """
    take = rows = 0
    for request in queue:
        joins = request.key == queue[0].key and rows + request.rows <= policy.max_batch
        if take and not joins:
            return take  # the next one cannot join, so waiting gains nothing
        take, rows = take + 1, rows + request.rows
    full = rows >= policy.max_batch
    late = take > 0 and now_us - queue[0].arrived_us >= policy.max_delay_us
    return take if full or late else 0
