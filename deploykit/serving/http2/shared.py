"""What the connections of one server share: limits, counts, and turns of the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deploykit.serving.http2.headers import Pairs
from deploykit.serving.http2.stream import Stream
from deploykit.serving.transport.memory import MemoryBudget
from deploykit.serving.transport.places import IdleClient, Places
from deploykit.serving.transport.turns import Checked, Checks, Turns

log = logging.getLogger(__name__)

READ_BYTES = 256 << 10


class Http2Client(IdleClient, Checked, Protocol):
    """A connection, as the server sees it."""

    @property
    def unanswered(self) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Http2Limits:
    """What one connection may send and how long it may take."""

    connections: int = 4096
    streams: int = 512  # concurrent, per connection
    outstanding: int = 256  # unsent replies of one stream
    all_streams: int = 16384  # of all connections; each costs memory and time while it is open
    header_bytes: int = 64 << 10
    header_frames: int = 128  # of one header block
    headers: int = 100
    empty_frames: int = 2000  # a second: pings, resets, refused calls, ...
    header_s: float = 10.0  # until the settings arrive; until a header block is complete
    body_s: float = 30.0  # of one message
    idle_s: float = 75.0  # without a stream
    write_s: float = 30.0  # for a client that does not read its reply
    linger_s: float = 2.0  # for reading the reason of a close

    @classmethod
    def divided(cls, parts: int) -> Http2Limits:
        """Those of one of `parts` processes, which share the limits of all connections."""
        limits = cls()
        connections, streams = limits.connections, limits.all_streams
        return replace(
            limits, connections=-(-connections // parts), all_streams=-(-streams // parts)
        )


class Shared:
    """The state shared by all connections of a server.

    `parse` makes a head from a stream's headers; `open` makes a stream from connection, number and
    head.
    """

    def __init__(
        self,
        parse: Callable[[Pairs], Any],
        open: Callable[[Any, int, Any], Stream],  # noqa: A002 - it opens a stream
        limits: Http2Limits,
        max_message_bytes: int,
        memory: MemoryBudget,
        offload: Callable[[Callable[[], Any], Callable[[Callable[[], Any]], None]], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parse = parse
        self.open = open
        self.limits = limits
        self.max_message_bytes = max_message_bytes
        self.memory = memory
        self.offload = offload  # `offload(work, then)`: work on another thread, then here
        self.connections: set[Http2Client] = set()
        self.places = Places(self.connections, limits.connections)
        self.open_streams = 0  # of all connections
        self.view = memoryview(bytearray(READ_BYTES))  # only one connection reads at a time
        self.turns = Turns(clock_s)
        self._checks = Checks(self.turns, self.connections)
        self._written: list[Http2Client] = []  # with output for the end of this turn of the loop
        self.clock_s = clock_s
        self.now_s = clock_s()
        self.tick_s = 0.0  # between the last two ticks

    def close_idle(self) -> None:
        """Close idle connections, as there are no file descriptors left."""
        self.places.close_idle(self.now_s)

    def flush_soon(self, connection: Http2Client) -> None:
        """Flush it once what runs in this turn of the loop has written."""
        if not self._written:
            asyncio.get_running_loop().call_soon(self._flush)
        self._written.append(connection)

    def _flush(self) -> None:
        written, self._written = self._written, []
        for connection in written:
            try:
                connection.flush()
            except Exception:  # the others must not lose their output
                log.exception("writing to an HTTP/2 connection failed")

    def tick(self) -> None:
        """Close what took too long, unless this is still being done since the last tick."""
        if self._checks.running:
            return
        now_s = self.clock_s()
        self.tick_s, self.now_s = now_s - self.now_s, now_s
        self._checks.begin(now_s)

    @property
    def unanswered(self) -> int:
        return sum(connection.unanswered for connection in self.connections)
