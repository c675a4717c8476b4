"""The requests that wait for an engine: one lane for each priority and shape, run oldest first.

In: requests, one at a time. Out: batches of them when the policy says so. No locks and no clock:
the batcher has them. Requests of other shapes do not break a batch up, and nothing here walks over
all that waits but the search for what has expired, which is made only when something has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from deploykit.core.tensors import InputKey
from deploykit.serving.batching.policy import DEFAULT_LEVEL, LEVELS, BatchPolicy, Pending, due

_NEVER_US = 1 << 62


class _Lane:
    """Requests that may run together, in the order they came."""

    __slots__ = ("key", "level", "requests", "rows")

    def __init__(self, level: int, key: InputKey) -> None:
        self.level = level
        self.key = key
        self.requests: OrderedDict[Pending, None] = OrderedDict()  # any can leave at once
        self.rows = 0

    @property
    def oldest(self) -> Pending:
        return next(iter(self.requests))

    def order(self, now_us: int) -> tuple[int, int]:
        """By priority, then by age; once half of its time is gone, a request overtakes others."""
        oldest = self.oldest
        urgent = now_us >= (oldest.arrived_us + oldest.deadline_us) // 2
        return 0 if urgent else self.level, oldest.arrived_us


class Lanes:
    """`count` requests of `rows` rows wait. `added_rows` counts all that ever came."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.count = 0
        self.rows = 0
        self.added_rows = 0
        self._lanes: dict[tuple[int, InputKey], _Lane] = {}  # none of them empty
        self._last = _Lane(DEFAULT_LEVEL, ())  # where the last request went, empty or not
        self._soonest_us = _NEVER_US  # no deadline is before it

    def fits(self, rows: int) -> bool:
        """Whether the queue has room; a request that is alone in it always fits."""
        policy = self.policy
        most = policy.queue_rows
        return self.count < policy.queue and (
            most is None or not self.count or self.rows + rows <= most
        )

    def add(self, request: Pending) -> bool:
        """Whether an idle engine should look again: nothing to do for it is False."""
        level = request.priority
        if not 0 < level <= LEVELS:
            level = DEFAULT_LEVEL
        lane, rows = self._last, request.rows
        if lane.key is not request.key or lane.level != level:
            lane = self._lanes.get((level, request.key)) or _Lane(level, request.key)
            self._last = lane
        fresh = not lane.requests
        if fresh:
            self._lanes[(level, request.key)] = lane
        lane.requests[request] = None
        lane.rows += rows
        self.count += 1
        self.rows += rows
        self.added_rows += rows
        if request.deadline_us < self._soonest_us:
            self._soonest_us = request.deadline_us
        policy = self.policy
        if fresh or not policy.max_delay_us:
            return True
        return lane.rows >= min(policy.preferred, default=policy.max_batch)

    def take(self, now_us: int, *, hurry: bool = False) -> list[Pending]:
        """The next batch, or nothing if it should wait. `hurry`: without any delay."""
        policy = self.policy
        if not self.count:
            return []
        plain = not (policy.max_delay_us or policy.preferred)
        for lane in self._in_order(now_us):
            requests = lane.requests
            if plain and lane.rows <= policy.max_batch:
                batch = list(requests)
                requests.clear()
                self._left(lane, batch)
                return batch
            count = due(requests, policy, now_us)
            if not count and hurry:
                count = len(requests)  # it would have run already, had it been too much
            if count:
                batch = [requests.popitem(False)[0] for _ in range(count)]
                self._left(lane, batch)
                return batch
            if not policy.max_delay_us:
                break
        return []

    def _in_order(self, now_us: int) -> Iterable[_Lane]:
        lanes = self._lanes.values()
        return lanes if len(lanes) < 2 else sorted(lanes, key=lambda lane: lane.order(now_us))

    def take_late(self, now_us: int) -> list[Pending]:
        """What is past its deadline, wherever it stands."""
        if now_us < self._soonest_us:
            return []
        late = []
        self._soonest_us = _NEVER_US
        for lane in list(self._lanes.values()):
            here = [request for request in lane.requests if request.deadline_us <= now_us]
            for request in here:
                del lane.requests[request]
            late += here
            for request in lane.requests:
                self._soonest_us = min(self._soonest_us, request.deadline_us)
            self._left(lane, here)
        return late

    def take_all(self) -> list[Pending]:
        """Empty the queue."""
        found = [request for lane in self._lanes.values() for request in lane.requests]
        self._lanes.clear()
        self._last = _Lane(DEFAULT_LEVEL, ())
        self.count = self.rows = 0
        return found

    def remove(self, request: Pending) -> bool:
        """False when it does not wait here."""
        level = request.priority if 0 < request.priority <= LEVELS else DEFAULT_LEVEL
        lane = self._lanes.get((level, request.key))
        if lane is None or request not in lane.requests:
            return False
        del lane.requests[request]
        self._left(lane, [request])
        return True

    def next_us(self) -> int:
        """When to look again if nothing comes before: a delay or a deadline passes."""
        oldest_us = min(
            (lane.oldest.arrived_us for lane in self._lanes.values()), default=_NEVER_US
        )
        return min(oldest_us + self.policy.max_delay_us, self._soonest_us)

    def _left(self, lane: _Lane, requests: list[Pending]) -> None:
        """`requests` left `lane`."""
        rows = sum([request.rows for request in requests]) if lane.requests else lane.rows
        lane.rows -= rows
        self.rows -= rows
        self.count -= len(requests)
        if not lane.requests:
            del self._lanes[(lane.level, lane.key)]
            if not self._lanes:
                self._soonest_us = _NEVER_US
