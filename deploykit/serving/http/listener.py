"""What all HTTP/1.1 connections of a server share: limits, known heads, status lines, the clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

from deploykit.serving.http.chunked import ChunkedBody
from deploykit.serving.http.exchange import Exchange
from deploykit.serving.http.head import END, HttpLimits
from deploykit.serving.transport.call import Head
from deploykit.serving.transport.memory import MemoryBudget
from deploykit.serving.transport.places import SPARE, IdleClient, Places
from deploykit.serving.transport.security import HEALTH, AccessControl
from deploykit.serving.transport.turns import BUSY_BYTES, Checked, Checks, Turns

READ_BYTES = 64 << 10
PIECE_BYTES = 1 << 20  # of a body, received at once: its new memory takes 1 ms
_HEALTH = (b"GET " + HEALTH.encode(), b"HEAD " + HEALTH.encode())
_KNOWN_HEADS = 1024
_KNOWN_HEAD_BYTES = 1024


class HttpClient(IdleClient, Checked, Protocol):
    """What the listener needs of a connection."""

    @property
    def unanswered(self) -> int: ...

    def close(self) -> None: ...

    def refuse_spare(self) -> None: ...


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
        self._checks = Checks(self.turns, self.connections)
        self._places = Places(self.connections, limits.connections)
        self._spare: deque[HttpClient] = deque()  # clients above the limit, the newest of them
        self.read_into = bytearray(READ_BYTES)  # shared: only one connection reads at a time
        self.view = memoryview(self.read_into)
        self.busy_bytes = BUSY_BYTES
        self.known_heads: dict[bytes, Head] = {}  # clients repeat theirs
        self.last_head: tuple[bytes, Head | None] = b"", None  # the last that was found
        self._lines: dict[int, bytes] = {}
        self._date = ""
        self.tick(time.monotonic())

    def tick(self, now_s: float) -> None:
        """Take the time, and close connections that are past a limit."""
        self.now_s = now_s
        date = formatdate(usegmt=True)
        if date != self._date:
            self._date = date
            self._lines.clear()
        self._checks.begin(now_s)

    def find_head(self, at: int, end: int) -> tuple[bytes, Head | None]:
        """The head received from `at` on, if it is known; the next one often equals it."""
        raw = bytes(self.view[at : self.read_into.find(END, at, end) + len(END)])
        head = self.known_heads.get(raw)
        if head is not None:
            self.last_head = raw, head
        return raw, head

    def keep(self, raw: bytes, head: Head) -> None:
        """Cache a head; not with a trace id or a boundary, which differ in each request."""
        form = head.content_type is not None and b"boundary" in head.content_type
        if len(raw) <= _KNOWN_HEAD_BYTES and head.trace is None and not form:
            if len(self.known_heads) >= _KNOWN_HEADS:
                self.known_heads.clear()
            self.known_heads[raw] = head

    def chunked_body(self) -> ChunkedBody:
        return ChunkedBody(
            max_body_bytes=self.max_body_bytes,
            max_chunks=self.limits.chunks,
            max_trailer_bytes=self.limits.header_bytes,
        )

    def is_health_check(self, end: int) -> bool:
        """Whether the first `end` bytes received are just that: it costs little."""
        data = self.read_into
        return data.startswith(_HEALTH, 0, end) and data.find(END, 0, end) == end - len(END)

    def make_room(self, connection: HttpClient) -> bool:
        """Whether a new connection has a place; otherwise it may ask for the server's health.

        So that a load balancer's check gets through. Of too many such clients the oldest leave.
        """
        if self._places.make_room(self.now_s):
            return True
        self._spare.append(connection)
        if len(self._spare) > SPARE:
            self._spare.popleft().refuse_spare()
        return False

    def close_idle(self) -> None:
        """Close idle connections, as there are no file descriptors left."""
        self._places.close_idle(self.now_s)

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
