"""Places for connections: while too many are open, those that are idle for longest are closed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from operator import itemgetter
from typing import Protocol

SPARE = 512  # clients above the limit that may ask for the server's health; 2 turns of accepting
_IDLE_S = 1.0  # after which a connection without a request is closed if there are too many
_EXHAUSTED_IDLE_S = 5.0  # the same if the process has no file descriptor left
_CLOSED_AT_ONCE = 32  # finding them takes a millisecond


class IdleClient(Protocol):
    """A connection. `idle_since_s`: None while it has a request."""

    @property
    def idle_since_s(self) -> float | None: ...

    def abort(self) -> None: ...


class Places:
    """The places at one port: `limit` connections."""

    def __init__(self, connections: Collection[IdleClient], limit: int) -> None:
        """`connections`: the open ones, which their owner adds and removes."""
        self._connections = connections
        self._limit = limit
        self._closing = 0  # connections, to make room
        self._searched_s = math.nan  # when none was idle: not again before the next tick

    def make_room(self, now_s: float) -> bool:
        """Whether the newest connection has a place, perhaps since idle ones are closed for it."""
        if len(self._connections) <= self._limit:
            self._closing = 0
        elif self._closing:  # those close in the next turn of the event loop
            self._closing -= 1
        elif self._searched_s == now_s:
            return False
        else:
            self._closing = self.close_idle(now_s, _IDLE_S)
            self._searched_s = math.nan if self._closing else now_s
            return self._closing > 0
        return True

    def close_idle(self, now_s: float, least_s: float = _EXHAUSTED_IDLE_S) -> int:
        """Close connections that are idle for longest, for `least_s` at least; returns how many."""
        last_s = now_s - least_s
        found = [(each.idle_since_s, each) for each in self._connections]
        idle = [(since_s, each) for since_s, each in found if since_s and since_s <= last_s]
        chosen = heapq.nsmallest(_CLOSED_AT_ONCE, idle, key=itemgetter(0))
        for _, connection in chosen:
            connection.abort()
        return len(chosen)
