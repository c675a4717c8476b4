"""Flow control of an HTTP/2 connection: windows both ways, what is written, deadlines and the end.

Large messages get receive window as they need it, oldest first, within what one connection may
hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from deploykit.serving.http2.frames import (
    ENHANCE_YOUR_CALM,
    GOAWAY,
    NO_ERROR,
    SETTINGS,
    STREAM_WINDOW,
    WINDOW_UPDATE,
    frame,
)
from deploykit.serving.http2.headers import Pairs
from deploykit.serving.http2.stream import Stream
from deploykit.serving.transport.memory import MemoryBudget

log = logging.getLogger(__name__)

FRAME_BYTES = 1 << 14  # of the largest frame we accept: what HTTP/2 starts with
FIRST_WINDOW = 65535
CONNECTION_WINDOW = 1 << 24  # bytes of DATA that a client may send before it must see an update
_RESERVED_MESSAGES = 4  # of the largest size that one connection may be sending at once
_TOGETHER_BYTES = 1 << 18  # written at once
_HIGH_WATER_BYTES = 1 << 20  # not read by the client: then we read nothing from it


@dataclass(frozen=True)
class Limits:
    """What one connection may send and how long it may take."""

    connections: int = 4096
    streams: int = 512  # at once on one connection
    outstanding: int = 256  # replies of one stream that are not sent yet
    header_bytes: int = 64 << 10
    headers: int = 100
    empty_frames: int = 2000  # between two ticks: pings, resets, ...
    header_s: float = 10.0  # from the connection to its settings; from a header block to its end
    body_s: float = 30.0  # of one message
    idle_s: float = 75.0  # without a stream
    write_s: float = 30.0  # a client that does not read its reply
    linger_s: float = 2.0  # to let it read why its connection is closed


class Shared:
    """What all connections of one server share.

    `parse` makes a head of a stream's headers, `open` a stream on a connection from its number and
    its head.
    """

    def __init__(
        self,
        parse: Callable[[Pairs], Any],
        open: Callable[[Any, int, Any], Stream],  # noqa: A002 - it opens a stream
        limits: Limits,
        max_message_bytes: int,
        memory: MemoryBudget,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parse = parse
        self.open = open
        self.limits = limits
        self.max_message_bytes = max_message_bytes
        self.memory = memory
        self.connections: set[Flow] = set()
        self.clock_s = clock_s
        self.now_s = clock_s()

    def tick(self) -> None:
        """Close what took too long."""
        self.now_s = now_s = self.clock_s()
        for connection in list(self.connections):
            connection.check(now_s)

    @property
    def unanswered(self) -> int:
        return sum(connection.unanswered for connection in self.connections)


class Flow(asyncio.Protocol):
    """One client's connection; `Connection` reads its frames."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.streams: dict[int, Stream] = {}
        self.frame_bytes = FRAME_BYTES  # of the largest frame that the client takes
        self.send_window = FIRST_WINDOW  # bytes of DATA that the client will take
        self.first_window = FIRST_WINDOW  # and on a new stream
        self.last = 0  # the highest stream that the client has opened
        self.closed_for_reading = False  # nothing more is read
        self.has_settings = False  # the client has sent its settings
        self.in_header_block = False
        self.empty_frames = 0
        self.since_s = shared.now_s  # without a stream, or with half a header block
        self._received = 0  # bytes of DATA since our last update
        self._reserved = 0  # bytes that large messages were given
        self._asking: deque[Stream] = deque()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._stalled_s: float | None = None  # since when the client does not read
        self._blocked_s: float | None = None  # since when its windows hold up a reply

    @property
    def unanswered(self) -> int:
        return sum(stream.unanswered for stream in self.streams.values())

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        self.shared.connections.add(self)
        limits = self.shared.limits
        values = ((3, limits.streams), (4, STREAM_WINDOW), (6, limits.header_bytes))
        settings = b"".join(n.to_bytes(2, "big") + v.to_bytes(4, "big") for n, v in values)
        more = (CONNECTION_WINDOW - 65535).to_bytes(4, "big")
        self.write(frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more))
        if len(self.shared.connections) > limits.connections:
            self.end(ENHANCE_YOUR_CALM, f"there are {limits.connections} connections already")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.closed_for_reading = True
        self.shared.connections.discard(self)
        for stream in list(self.streams.values()):
            stream.cancelled()

    def pause_writing(self) -> None:
        self._stalled_s = self.shared.now_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_s = None
        self._transport.resume_reading()
        self.push()

    # -- windows ---------------------------------------------------------------------------------

    def received(self, size: int) -> None:
        """Bytes of DATA have come, on whatever stream; the client may send as many more."""
        self._received += size
        if self._received > CONNECTION_WINDOW // 2:
            self._update(0, self._received)
            self._received = 0

    def reserve(self, stream: Stream, more: int) -> None:
        """Let the client send `more` bytes of a large message once the connection can hold them."""
        if not stream.asked_bytes:
            stream.asked_bytes = more
            self._asking.append(stream)
            self._grant()

    def release(self, stream: Stream) -> None:
        """The window of a large message is free for others."""
        self._reserved -= stream.granted_bytes
        stream.granted_bytes = 0
        if self._asking:
            self._grant()

    def _grant(self) -> None:
        budget = _RESERVED_MESSAGES * self.shared.max_message_bytes
        while self._asking:
            stream = self._asking[0]
            more = stream.asked_bytes
            if not stream.finished and self._reserved and self._reserved + more > budget:
                return
            self._asking.popleft()
            stream.asked_bytes = 0
            if not stream.finished:
                stream.granted_bytes += more
                self._reserved += more
                self.allow(stream, more)

    def allow(self, stream: Stream, more: int) -> None:
        stream.receive_window += more
        self._update(stream.id, more)

    def _update(self, number: int, more: int) -> None:
        self.write(frame(WINDOW_UPDATE, 0, number, more.to_bytes(4, "big")))

    def sendable(self, stream: Stream) -> int:
        """Bytes of DATA that may be sent on this stream now."""
        if self._stalled_s is not None:
            return 0
        return min(self.send_window, stream.send_window)

    def sent(self, stream: Stream, size: int) -> None:
        self.send_window -= size
        stream.send_window -= size
        self._blocked_s = None

    def push(self) -> None:
        for stream in list(self.streams.values()):
            if stream.out or stream.trailers is not None:
                stream.push()

    # -- deadlines and the end -------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send, together with what else is written in this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > _TOGETHER_BYTES:
            self._flush()

    def later(self, what: Callable[[], None]) -> None:
        """Call it in the loop's next turn."""
        self._loop.call_soon(what)

    def _flush(self) -> None:
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()
        self._out_bytes = 0

    def drop(self, stream: Stream) -> None:
        """The stream is over."""
        self.streams.pop(stream.id, None)
        self.release(stream)
        if not self.streams:
            self.since_s = self.shared.now_s

    def check(self, now_s: float) -> None:
        """Close the connection if it is past a limit, and let each stream check its own."""
        limits, waited_s = self.shared.limits, now_s - self.since_s
        self.empty_frames = 0
        for stream in list(self.streams.values()):
            stream.check(now_s)
        if not any(stream.out for stream in self.streams.values()):
            self._blocked_s = None
        elif self._blocked_s is None:
            self._blocked_s = now_s
        since_s = self._stalled_s if self._stalled_s is not None else self._blocked_s
        late = since_s is not None and now_s - since_s > limits.write_s
        if self.closed_for_reading:
            late = late or waited_s > limits.linger_s
        elif self.in_header_block or not self.has_settings:
            late = late or waited_s > limits.header_s
        if late:
            self._transport.abort()
        elif not self.streams and waited_s > limits.idle_s:
            self.close()

    def close(self) -> None:
        """Accept no more streams, and close once what was written has been sent."""
        self.end(NO_ERROR, "")

    def end(self, code: int, text: str) -> None:
        """Read no more. `code` is HTTP/2's; a client at fault gets time to read why."""
        if self.closed_for_reading:
            return
        self.closed_for_reading = True
        about = self.last.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()
        self.write(frame(GOAWAY, 0, 0, about))
        self._flush()
        if not code:
            self._transport.close()
            return
        log.info("an HTTP/2 connection is closed: %s", text)
        for stream in list(self.streams.values()):
            stream.cancelled()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self.since_s = self.shared.now_s
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
