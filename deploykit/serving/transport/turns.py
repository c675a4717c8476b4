"""Share each turn of the event loop among connections, so that no number of them stops it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

_TURN_S = 0.02  # for requests, in one turn of the loop; a new connection takes four turns
_SHORT_S = 0.001  # a turn with less is not counted


class Turns:
    """Counts the time that requests took in this turn; those beyond it wait for the next turns.

    `busy`: this turn is used up: call `wait`. `overdrawn`: even health checks wait then.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.clock_s = clock_s
        self.waiting: deque[Callable[[], None]] = deque()
        self.busy = self.overdrawn = False
        self._spent_s = 0.0
        self._scheduled = False

    def spend(self, since_s: float) -> None:
        """Count the time since then, by `clock_s`."""
        self._spent_s += self.clock_s() - since_s
        if self._spent_s > _SHORT_S:
            self.busy = self._spent_s > _TURN_S
            self.overdrawn = self._spent_s > 2 * _TURN_S
            self._schedule()

    def wait(self, work: Callable[[], None]) -> None:
        """Call it in one of the next turns, in order."""
        self.waiting.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """A turn begins: half is for the work that waits, which counts its time, half for new."""
        self._scheduled = self.busy = self.overdrawn = False
        self._spent_s = 0.0
        begin_s = self.clock_s()
        for _ in range(len(self.waiting)):
            self.waiting.popleft()()
            if self.busy or self.clock_s() - begin_s > _TURN_S / 2:
                break
        if self.waiting:
            self._schedule()
