"""Queue requests for an engine, grouped by priority and shape, oldest first.

No locks and no clock: `Batcher` has them. Requests of other shapes do not split a batch. Only the
search for expired requests visits all of them, and it runs only when some have expired; so do
turns: once requests wait for long, clients share the engine, by rows (start-time fair queuing).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.core.tensors import InputKey
from deploykit.engines.engine import Arrays
from deploykit.pipelines.threads import NOBODY

LEVELS = 3  # priorities; 1 is run first
DEFAULT_LEVEL = 2  # for a request without a valid priority, as in Triton
NEVER_US = 1 << 60
_LONG_US = 100_000  # a wait from which on it is the clients' turns that count, not the arrival
_TURNS_US = 25_000  # how often they are counted: a millisecond for 2,000 requests


@dataclass(frozen=True)
class BatchPolicy:
    """The limits of batches and of the queue.

    `max_batch` is in rows, 0 for no batching; `queue` in requests; `queue_rows` in rows, None for
    no limit. `hung_us`: an engine whose call takes longer is counted as hung.
    """

    max_batch: int = 32
    max_delay_us: int = 0
    queue: int = 1024
    queue_rows: int | None = None
    hung_us: int = NEVER_US


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
    id: str | None = None  # the client's name for it
    sender: Any = None  # whose `peer` takes turns with others
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    error: DeploykitError | None = None
    finished: bool = False


def stack(batch: Sequence[Pending]) -> Arrays:
    """Join the requests' rows along axis 0, in order; one request's arrays are aligned instead."""
    if len(batch) == 1:
        return {name: align(array) for name, array in batch[0].feeds.items()}
    names = batch[0].feeds
    return {name: np.concatenate([request.feeds[name] for request in batch]) for name in names}


def align(array: np.ndarray) -> np.ndarray:
    """Return the array aligned, as native libraries need it: received bytes may begin anywhere."""
    return array if array.flags.aligned else array.copy()


class BatchRun(NamedTuple):
    """A successful run of the engine: its requests, and the time of each stage.

    `copy_in_us` and `copy_out_us` are 0 for an engine that does not time its copies; `engine_us`
    excludes them. `idle_us`: the sum of the times that requests waited while the engine was idle.
    """

    requests: Sequence[Pending]
    started_us: int
    stack_us: int
    copy_in_us: int
    engine_us: int
    copy_out_us: int
    split_us: int
    idle_us: int = 0

    @property
    def busy_us(self) -> int:
        return self.stack_us + self.copy_in_us + self.engine_us + self.copy_out_us + self.split_us


class Watcher:
    """Receives events on the thread where they happen; this base class ignores them."""

    def record_run(self, run: BatchRun) -> None:
        """A batch succeeded."""

    def record_failure(self, request: Pending, now_us: int) -> None:
        """A request ended with `request.error`."""

    def record_refusal(self, request: Pending) -> None:
        """A request was refused with its `error`: invalid, late, or the queue is full or closed."""

    def record_cancellation(self) -> None:
        """The sender cancelled a waiting request."""


def due(waiting: Iterable[Pending], policy: BatchPolicy, now_us: int) -> int:
    """Return how many requests at the head of `waiting`, all of one key, to run; 0 means wait.

    It is all that fit into `max_batch`, once the batch is full or the delay has passed. A request
    of more rows runs alone.
    """
    take = rows = 0
    oldest_us = next((request.arrived_us for request in waiting), now_us)
    for request in waiting:
        rows += request.rows
        take += not take or rows <= policy.max_batch
        if rows >= policy.max_batch:  # it is full, or the next one cannot join
            break
    late = not policy.max_delay_us or now_us - oldest_us >= policy.max_delay_us
    return take if late or rows >= policy.max_batch else 0


class _Group:
    """Requests that may run together, in the order of their arrival."""

    __slots__ = ("key", "level", "requests", "rows")

    def __init__(self, level: int, key: InputKey) -> None:
        self.level = level
        self.key = key
        self.requests: OrderedDict[Pending, None] = OrderedDict()  # removes any in constant time
        self.rows = 0

    @property
    def oldest(self) -> Pending:
        return next(iter(self.requests))

    def order(self, now_us: int) -> tuple[int, int]:
        """Sort by priority, then by age; a request past half of its time limit overtakes others."""
        oldest = self.oldest
        urgent = now_us >= (oldest.arrived_us + oldest.deadline_us) // 2
        return 0 if urgent else self.level, oldest.arrived_us


class RequestQueue:
    """The waiting requests: `count` of `rows` rows."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.count = 0
        self.most = 0  # the largest count before a removal; its reader resets it
        self.rows = 0
        self._groups: dict[tuple[int, InputKey], _Group] = {}  # contains no empty group
        self._last = _Group(DEFAULT_LEVEL, ())  # the group of the last request; may be empty
        self._soonest_us = NEVER_US  # no deadline is earlier
        self._turns_us = 0  # when turns are next counted
        self._now = 0  # the virtual time, in rows
        self._spent: dict[Hashable, int] = {}  # when a client's next rows may start
        self._starts: dict[Pending, tuple[int, Hashable]] = {}  # of those in turns

    def add(self, request: Pending) -> bool | None:
        """Add a request; return whether an idle engine should look at the queue again.

        Return None, without adding it, if the queue is full. One that would be alone always fits.
        """
        policy, count, rows = self.policy, self.count, request.rows
        most = policy.queue_rows
        if count >= policy.queue or (most is not None and count and self.rows + rows > most):
            return None
        level = request.priority
        if not 0 < level <= LEVELS:
            level = DEFAULT_LEVEL
        group = self._last
        if group.key is not request.key or group.level != level:
            group = self._groups.get((level, request.key)) or _Group(level, request.key)
            self._last = group
        was_empty = not group.requests
        if was_empty:
            self._groups[(level, request.key)] = group
        group.requests[request] = None
        group.rows += rows
        self.count = count + 1
        self.rows += rows
        if request.deadline_us < self._soonest_us:
            self._soonest_us = request.deadline_us
        return was_empty or not policy.max_delay_us or group.rows >= policy.max_batch

    def take(self, now_us: int, *, hurry: bool = False) -> list[Pending]:
        """Return the next batch, or nothing if it should wait. `hurry`: ignore the delay."""
        policy = self.policy
        if not self.count:
            return []
        groups: Iterable[_Group] = self._groups.values()
        if len(self._groups) > 1:
            groups = sorted(groups, key=lambda group: group.order(now_us))
        for group in groups:
            requests = group.requests
            if not policy.max_delay_us and group.rows <= policy.max_batch:
                batch = list(requests)
                requests.clear()
                self._count_removed(group, batch)
                return batch
            waited_us = now_us - group.oldest.arrived_us
            if group.rows > policy.max_batch and waited_us > _LONG_US and now_us >= self._turns_us:
                self._turns_us = now_us + _TURNS_US
                self._take_turns(requests)
            count = due(requests, policy, now_us)
            if not count and hurry:
                count = len(requests)  # more rows than `max_batch` would have run already
            if count:
                batch = [requests.popitem(False)[0] for _ in range(count)]
                for request in batch if self._starts else ():
                    start, client = self._starts.pop(request, (self._now, None))
                    self._now = max(self._now, start)
                    self._spent[client] = start + request.rows
                self._count_removed(group, batch)
                return batch
            if not policy.max_delay_us:
                break
        return []

    def _take_turns(self, requests: OrderedDict[Pending, None]) -> None:
        """Order requests by the rows that their clients had before: addresses, else connections."""
        peers = [request.sender.peer if request.sender else NOBODY for request in requests]
        at = int(all(peer.address == peers[0].address for peer in peers))
        self._spent = {key: rows for key, rows in self._spent.items() if rows > self._now}
        ends, self._starts = dict(self._spent), {}
        for request, peer in zip(requests, peers, strict=True):
            start = ends.get(peer[at], self._now)
            self._starts[request] = start, peer[at]
            ends[peer[at]] = start + request.rows
        for request in sorted(requests, key=lambda each: self._starts[each][0] + each.rows):
            requests.move_to_end(request)  # a small one before others that start then

    def take_late(self, now_us: float) -> list[Pending]:
        """Remove and return the requests past their deadline."""
        if now_us < self._soonest_us:
            return []
        waiting = [request for group in self._groups.values() for request in group.requests]
        late = [request for request in waiting if request.deadline_us <= now_us]
        for request in late:
            self.remove(request)
        left_us = (request.deadline_us for request in waiting if request.deadline_us > now_us)
        self._soonest_us = min(left_us, default=NEVER_US)
        return late

    def remove(self, request: Pending) -> bool:
        """Remove a request; return False when it is not waiting here."""
        level = request.priority if 0 < request.priority <= LEVELS else DEFAULT_LEVEL
        group = self._groups.get((level, request.key))
        if group is None or request not in group.requests:
            return False
        del group.requests[request]
        self._count_removed(group, [request])
        return True

    def next_us(self) -> int:
        """Return when the next delay or deadline passes."""
        first_us = min((each.oldest.arrived_us for each in self._groups.values()), default=NEVER_US)
        return min(first_us + self.policy.max_delay_us, self._soonest_us)

    def _count_removed(self, group: _Group, requests: list[Pending]) -> None:
        if self.count > self.most:
            self.most = self.count
        rows = sum([request.rows for request in requests]) if group.requests else group.rows
        group.rows -= rows
        self.rows -= rows
        self.count -= len(requests)
        if not group.requests:
            del self._groups[(group.level, group.key)]
            if not self._groups:
                self._soonest_us = NEVER_US
                self._now, self._spent, self._starts = 0, {}, {}
