"""What all HTTP/1.1 connections of a server share: limits, known heads, status lines, the clock."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from operator import itemgetter
from typing import Protocol

from deploykit.serving.http.exchange import Exchange
from deploykit.serving.http.head import END, HttpLimits
from deploykit.serving.transport.call import Head
from deploykit.serving.transport.memory import MemoryBudget
from deploykit.serving.transport.security import HEALTH, AccessControl
from deploykit.serving.transport.turns import Turns

READ_BYTES = 64 << 10
_HEALTH = (b"GET " + HEALTH.encode(), b"HEAD " + HEALTH.encode())
_IDLE_S = 1.0  # after which a connection without a request is closed if there are too many
_EXHAUSTED_IDLE_S = 5.0  # the same if the process has no file descriptor left
_CLOSED_AT_ONCE = 32  # finding them takes a millisecond
_KNOWN_HEADS = 1024
_KNOWN_HEAD_BYTES = 1024


class HttpClient(Protocol):
    """What the listener needs of a connection. `idle_since_s`: None while it has a request."""

    @property
    def idle_since_s(self) -> float | None: ...

    @property
    def unanswered(self) -> int: ...

    def check(self, now_s: float) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Listener:
    """The state shared by all connections of a server. `handle` gets each complete request."""

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        limits: HttpLimits,
        access: AccessControl,
        max_body_bytes: int,
        memory: MemoryBudget,
    ) -> None:
        self.handle = handle
        self.memory = memory
        self.limits = limits
        self.access = access
        self.max_body_bytes = max_body_bytes
        self.turns = Turns()
        self.draining = False
        self.connections: set[HttpClient] = set()
        self.read_into = bytearray(READ_BYTES)  # shared: only one connection reads at a time
        self.view = memoryview(self.read_into)
        self.known_heads: dict[bytes, Head] = {}  # clients repeat theirs
        self._closing = 0  # connections, to make room
        self._searched_s = math.nan  # when none was idle: not again before the next tick
        self._lines: dict[int, bytes] = {}
        self._date = ""
        self.tick(time.monotonic())

    def tick(self, now_s: float) -> None:
        """Close connections that are past a limit."""
        self.now_s = now_s
        date = formatdate(usegmt=True)
        if date != self._date:
            self._date = date
            self._lines.clear()
        for connection in list(self.connections):
            connection.check(now_s)

    def keep(self, raw: bytes, head: Head) -> None:
        """Cache a head; not with a trace id, which differs in each request."""
        if len(raw) <= _KNOWN_HEAD_BYTES and head.trace is None:
            if len(self.known_heads) >= _KNOWN_HEADS:
                self.known_heads.clear()
            self.known_heads[raw] = head

    def is_health_check(self, end: int) -> bool:
        """Whether the first `end` bytes received are just that: it costs little."""
        data = self.read_into
        return data.startswith(_HEALTH, 0, end) and data.find(END, 0, end) == end - len(END)

    def make_room(self) -> bool:
        """Whether there are no more connections than allowed, or idle ones are closed for it."""
        if len(self.connections) <= self.limits.connections:
            self._closing = 0
        elif self._closing:  # those close in the next turn of the event loop
            self._closing -= 1
        elif self._searched_s == self.now_s:
            return False
        else:
            self._closing = self.close_idle(_IDLE_S)
            self._searched_s = math.nan if self._closing else self.now_s
            return self._closing > 0
        return True

    def close_idle(self, least_s: float = _EXHAUSTED_IDLE_S) -> int:
        """Close connections that are idle for longest, for `least_s` at least; returns how many."""
        last_s = self.now_s - least_s
        found = [(each.idle_since_s, each) for each in self.connections]
        idle = [(since_s, each) for since_s, each in found if since_s and since_s <= last_s]
        chosen = heapq.nsmallest(_CLOSED_AT_ONCE, idle, key=itemgetter(0))
        for _, connection in chosen:
            connection.abort()
        return len(chosen)

    def line(self, status: int) -> bytes:
        """The status line and the Date of a reply, cached for a second."""
        found = self._lines.get(status)
        if found is None:
            text = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nDate: {self._date}\r\n"
            self._lines[status] = found = text.encode()
        return found

    @property
    def unanswered(self) -> int:
        """Complete requests whose reply has not been written."""
        return sum(connection.unanswered for connection in self.connections)

    def close_all(self) -> None:
        for connection in list(self.connections):
            connection.close()
