"""Share each turn of the event loop among all clients, so that no number of them blocks it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

TURN_S = 0.01  # for requests, in one turn of the loop; a new connection takes four turns
DELIVERY_S = 0.01  # for continuations of work on other threads
# Bytes to receive at once when this turn of the event loop is used up; with TLS each byte may be a
# separate record, which takes a microsecond to decrypt.
BUSY_BYTES = {False: 4 << 10, True: 256}
_SHORT_S = 0.001  # shorter work adds up before a turn is counted


class Turns:
    """Bounds the time that work takes in one turn of the loop; more waits for the next turns.

    `busy`: this turn is used up: call `wait`. Once a turn is counted, all work of the loop in it
    counts, such as reading and running engines.
    """

    def __init__(
        self, clock_s: Callable[[], float] = time.monotonic, turn_s: float | None = None
    ) -> None:
        self.clock_s = clock_s
        self.waiting: deque[Callable[[], None]] = deque()
        self.busy = False
        self._turn_s = TURN_S if turn_s is None else turn_s
        self._spent_s = 0.0  # in short work, since the last counted turn
        self._begun_s = 0.0  # when the counted turn began
        self._scheduled = False  # a turn is being counted, until `_begin`

    def spend(self, since_s: float) -> None:
        """Count the time since `since_s`, by `clock_s`."""
        now_s = self.clock_s()
        if not self._scheduled:
            self._spent_s += now_s - since_s
            if self._spent_s <= _SHORT_S:
                return
            self._count_from(now_s - self._spent_s)
        self.busy = now_s - self._begun_s > self._turn_s

    def late(self) -> bool:
        """Return whether work of many steps should wait with the next one."""
        now_s = self.clock_s()
        self._count_from(now_s)
        self.busy = now_s - self._begun_s > self._turn_s
        return self.busy

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` now, or in one of the next turns if this one is used up."""
        if self.busy:
            self.wait(work)
            return
        begun_s = self.clock_s()
        work()
        self.spend(begun_s)

    def wait(self, work: Callable[[], None], *, urgent: bool = False) -> None:
        """Call `work` in one of the next turns, in order; urgent work comes first."""
        (self.waiting.appendleft if urgent else self.waiting.append)(work)
        self._count_from(self.clock_s())

    def _count_from(self, begun_s: float) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._begun_s = begun_s
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin a turn: half of it is for the work that waits, half for new work."""
        self._scheduled = self.busy = False
        self._spent_s = 0.0
        begun_s, waiting = self.clock_s(), self.waiting
        if waiting:
            self._count_from(begun_s)
        for _ in range(len(waiting)):
            try:
                waiting.popleft()()
            except Exception:  # the other work must not wait forever
                log.exception("work on the event loop failed")
            elapsed_s = self.clock_s() - begun_s
            self.busy = elapsed_s > self._turn_s
            if elapsed_s > self._turn_s / 2:
                break
