"""Flow control of an HTTP/2 connection: windows in both directions, writes, deadlines, the end.

Large messages are granted receive window, oldest first, up to a limit per connection.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from deploykit.core.tensors import Bytes
from deploykit.serving.http2.headers import Pairs
from deploykit.serving.transport.listener import IdleClient, Places
from deploykit.serving.transport.memory import MemoryBudget
from deploykit.serving.transport.turns import BUSY_BYTES, Checked, Checks, Turns

# The frames of HTTP/2 (RFC 9113): types, flags and error codes.

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 1, 1, 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 5, 6, 7, 8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11
FRAME = struct.Struct(">BHBBI")  # length (8 + 16 bits), type, flags, stream
LARGEST_WINDOW = LARGEST_STREAM = (1 << 31) - 1
STREAM_WINDOW = 1 << 20  # bytes that a client may send on a stream before an update


class ConnectionFault(Exception):  # noqa: N818 - RFC 9113 calls it a connection error
    """The connection must close; `code` is one of HTTP/2's error codes."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """An HPACK literal that is not added to the client's table; the name is below 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """An HPACK integer with a prefix of 7 bits."""
    if size < 127:
        return bytes([size])
    out = [127]
    size -= 127
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    return bytes([*out, size])


# One HTTP/2 stream: its windows and its output. A subclass interprets what it receives.


class Link(Protocol):
    """The part of a connection that a stream uses."""

    frame_bytes: int
    first_window: int

    def sendable(self, stream: Stream) -> int: ...
    def count_sent(self, stream: Stream, size: int) -> None: ...
    def write(self, data: bytes) -> None: ...
    def drop(self, stream: Stream) -> None: ...


class Stream:
    """From its headers to its trailers."""

    __slots__ = (
        "ended",
        "gone",
        "granted_bytes",
        "id",
        "link",
        "receive_window",
        "requested_bytes",
        "send_window",
        "trailers",
        "unsent",
    )

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.id = number
        self.send_window = link.first_window  # bytes of DATA that the client accepts
        self.receive_window = STREAM_WINDOW  # bytes of DATA that the client may still send
        self.granted_bytes = 0  # added to it for a large message
        self.requested_bytes = 0  # to be added once the connection's limit allows
        self.unsent: list[memoryview] = []  # DATA blocked by the windows; few, so no deque
        self.trailers: bytes | None = None  # the frame that follows `unsent`
        self.ended = False  # the client sends no more
        self.gone = False  # it has ended: nothing can be sent

    # -- for subclasses --------------------------------------------------------------------------

    @property
    @abstractmethod
    def unanswered(self) -> int:
        """Requests whose replies have not been written."""

    @abstractmethod
    def begin(self, ended: bool) -> None:
        """The headers have been read; `ended`: nothing follows."""

    @abstractmethod
    def receive(self, piece: bytes, ended: bool) -> None:
        """The content of a DATA frame; `ended`: it is the last."""

    @abstractmethod
    def resume(self) -> None:
        """All output was sent; there may be more."""

    @abstractmethod
    def check(self, now_s: float) -> None:
        """Fail the stream if it is past a limit; called periodically."""

    # -- output ----------------------------------------------------------------------------------

    def send(self, parts: Iterable[Bytes]) -> None:
        self.unsent.extend(map(memoryview, parts))
        self.push()

    def end(self, trailers: bytes) -> None:
        """Send the last frame once the DATA before it is sent."""
        self.trailers = trailers
        self.push()

    def push(self) -> None:
        """Send what the windows allow."""
        link, unsent = self.link, self.unsent
        while unsent:
            take = min(link.sendable(self), link.frame_bytes)
            if take <= 0:
                return
            pieces = []
            size = 0
            while unsent and size < take:
                piece = unsent.pop(0)
                if size + len(piece) > take:
                    unsent.insert(0, piece[take - size :])
                    piece = piece[: take - size]
                pieces.append(piece)
                size += len(piece)
            link.count_sent(self, size)
            head = FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, self.id)
            link.write(b"".join((head, *pieces)))
        if self.trailers is None:
            self.resume()
        else:
            link.write(self.trailers)
            if not self.ended:  # the client need not send more
                link.write(frame(RST_STREAM, 0, self.id, NO_ERROR.to_bytes(4, "big")))
            self.finish()

    def reset(self, code: int) -> None:
        """End the stream with an error code of HTTP/2 instead of an answer."""
        self.link.write(frame(RST_STREAM, 0, self.id, code.to_bytes(4, "big")))
        self.finish()

    def finish(self) -> None:
        """End the stream; unsent output is dropped."""
        self.gone = True
        self.trailers = None
        self.unsent.clear()
        self.link.drop(self)


# What the connections of one server share: limits, counts, and turns of the event loop.

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


log = logging.getLogger(__name__)

FRAME_BYTES = 1 << 14  # the largest frame that we accept: HTTP/2's default
FIRST_WINDOW = 65535
CONNECTION_WINDOW = 1 << 24  # bytes of DATA that a client may send before an update
UPDATE_BYTES = CONNECTION_WINDOW // 2  # of DATA, after which we send it
_RESERVED_MESSAGES = 4  # of maximum size that one connection may send at once
_TOGETHER_BYTES = 1 << 18  # written at once
_HIGH_WATER_BYTES = 1 << 20  # unsent bytes from which on we stop reading
_LEFT_OPEN = 1024  # streams that we have ended and the client perhaps not; twice the largest count
LEAST_BYTES_S = 32 << 10  # a client that reads its answers more slowly is disconnected
WAITING_BYTES = 16 << 20  # of answers, above which a connection's requests wait


class Flow(asyncio.BufferedProtocol):
    """One client's connection; `Http2Connection` reads its frames."""

    data_received: Callable[[bytes], None]

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
        self.queued = False  # its frames wait for a turn of the loop
        # number -> receive window of streams that we have ended, and the client not: what it sent
        # before it knew is ignored
        self.left_open: OrderedDict[int, int] = OrderedDict()
        self.since_s = shared.now_s  # start of the current wait: idle, or inside a header block
        self.received_bytes = 0  # of DATA since our last update
        self._reserved = 0  # window granted to large messages
        self._waiting: deque[Stream] = deque()
        self._writes: list[bytes] = []
        self._write_bytes = 0
        self._will_push = False
        self.answer_bytes = 0  # of answers that its windows do not take
        self._parked: dict[Stream, None] = {}  # with requests that wait until answers are read
        self._flushed = 0  # bytes given to the transport
        self._buffered = 0  # of them, not yet sent: counted in the memory budget
        self._read_by_s: float | None = None  # when the client must have read more of them
        self._stalled_s: float | None = None  # when the client stopped reading
        self._blocked_s: float | None = None  # when its windows began to block a reply

    @property
    def unanswered(self) -> int:
        return sum(stream.unanswered for stream in self.streams.values())

    @property
    def idle_since_s(self) -> float | None:
        busy = self.streams or self._buffered or self.closed_for_reading
        return None if busy else self.since_s

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._tls = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        self.shared.connections.add(self)
        limits = self.shared.limits
        values = ((3, limits.streams), (4, STREAM_WINDOW), (6, limits.header_bytes))
        settings = b"".join(n.to_bytes(2, "big") + v.to_bytes(4, "big") for n, v in values)
        more = (CONNECTION_WINDOW - 65535).to_bytes(4, "big")
        self.write(frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more))
        if not self.shared.places.make_room(self.shared.now_s):
            self.end(ENHANCE_YOUR_CALM, f"there are {limits.connections} connections already")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.closed_for_reading = True
        self.shared.connections.discard(self)
        self.shared.memory.bytes -= self._buffered
        self._buffered = 0
        self.shared.turns.run(self._finish_all)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        shared, tls = self.shared, self._tls
        if shared.turns.late() if tls else shared.turns.busy:  # it is used up
            return shared.view[: BUSY_BYTES[tls]]
        return shared.view

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self.shared.view[:nbytes]))

    def _finish_all(self) -> None:
        for stream in list(self.streams.values()):
            stream.finish()

    def pause_writing(self) -> None:
        self._stalled_s = self.shared.now_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_s = None
        if self.queued:
            self.shared.turns.wait(self.continue_reading)
        else:
            self._transport.resume_reading()
        self.push_soon()

    def wait_for_turn(self) -> None:
        """Process the frames that were received in later turns of the loop, and read no more."""
        self.queued = True
        self._transport.pause_reading()
        self.shared.turns.wait(self.continue_reading)

    def continue_reading(self) -> None:
        """It is this connection's turn; a client that does not read must wait."""
        if not self.queued or self._stalled_s is not None or self.closed_for_reading:
            return
        self.queued = False
        self.data_received(b"")
        if not self.queued and self._stalled_s is None and not self.closed_for_reading:
            self._transport.resume_reading()

    def count_frame(self, frames: int = 1) -> None:
        """Count a frame that carries no content. Raises ConnectionFault for too many."""
        self.empty_frames += frames
        if self.empty_frames > self.shared.limits.empty_frames:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames without content")

    # -- windows ---------------------------------------------------------------------------------

    def allow_more(self) -> None:
        """Let the client send as much DATA on any stream as was received."""
        self._update(0, self.received_bytes)
        self.received_bytes = 0

    def reserve(self, stream: Stream, more: int) -> None:
        """Grant window for `more` bytes of a large message once the connection's limit allows."""
        if not stream.requested_bytes:
            stream.requested_bytes = more
            self._waiting.append(stream)
            self._grant()

    def release(self, stream: Stream) -> None:
        """Return the window granted to a large message."""
        self._reserved -= stream.granted_bytes
        stream.granted_bytes = 0
        if self._waiting:
            self._grant()

    def _grant(self) -> None:
        budget = _RESERVED_MESSAGES * self.shared.max_message_bytes
        while self._waiting:
            stream = self._waiting[0]
            more = stream.requested_bytes
            if not stream.gone and self._reserved and self._reserved + more > budget:
                return
            self._waiting.popleft()
            stream.requested_bytes = 0
            if not stream.gone:
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

    def take_window(self, stream: Stream, size: int) -> bool:
        """Count `size` bytes of DATA as sent, if they may be sent on this stream in one frame."""
        free = self._stalled_s is None and size <= self.frame_bytes
        if not free or size > self.send_window or size > stream.send_window:
            return False
        self.count_sent(stream, size)
        return True

    def count_sent(self, stream: Stream, size: int) -> None:
        self.send_window -= size
        stream.send_window -= size
        self._blocked_s = None
        self.empty_frames -= 2  # the client may tell us that it has read them

    def park(self, stream: Stream) -> None:
        """Resume this stream once the client has read answers."""
        self._parked[stream] = None

    def answers_read(self, size: int) -> None:
        self.answer_bytes -= size
        if self._parked and self.answer_bytes <= WAITING_BYTES:
            for stream in self._parked:
                self.shared.turns.wait(stream.resume)
            self._parked = {}

    def push_soon(self) -> None:
        """`push` in one of the next turns, once for all that the client has changed."""
        if not self._will_push and self.streams:
            self._will_push = True
            self.shared.turns.wait(self.push)

    def push(self) -> None:
        self._will_push = False
        for stream in list(self.streams.values()):
            if stream.unsent or stream.trailers is not None:
                stream.push()

    # -- deadlines and the end -------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send, joined with other writes of this turn of the loop."""
        writes = self._writes
        if not writes:
            self.shared.flush_soon(self)
        writes.append(data)
        self._write_bytes += len(data)
        if self._write_bytes > _TOGETHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Give what was written to the transport."""
        writes = self._writes
        if writes and not self._transport.is_closing():
            self._transport.write(writes[0] if len(writes) == 1 else b"".join(writes))
            self._flushed += self._write_bytes
        writes.clear()
        self._write_bytes = 0

    def drop(self, stream: Stream) -> None:
        """Forget a finished stream."""
        if self.streams.pop(stream.id, None) is not None:
            self.shared.open_streams -= 1
        if not stream.ended:
            self._leave_open(stream.id, stream.receive_window)
        if stream.granted_bytes or self._waiting:
            self.release(stream)
        if not self.streams:
            self.since_s = self.shared.now_s

    def refuse(self, number: int, code: int, flags: int) -> None:
        """Reset a stream that has not begun."""
        self.count_frame()
        self.write(frame(RST_STREAM, 0, number, code.to_bytes(4, "big")))
        if not flags & END_STREAM:
            self._leave_open(number, STREAM_WINDOW)

    def _leave_open(self, number: int, window: int) -> None:
        self.left_open[number] = window
        if len(self.left_open) > _LEFT_OPEN:
            self.left_open.popitem(last=False)

    def check(self, now_s: float) -> None:
        """Close the connection if it is past a limit, and let each stream check its own."""
        limits, waited_s = self.shared.limits, now_s - self.since_s
        allowed = max(1, round(limits.empty_frames * self.shared.tick_s))
        self.empty_frames = max(0, self.empty_frames - allowed)
        for stream in list(self.streams.values()):
            stream.check(now_s)
        if not any(stream.unsent for stream in self.streams.values()):
            self._blocked_s = None
        elif self._blocked_s is None:
            self._blocked_s = now_s
        reads = self._count_buffered(now_s)
        since_s = self._stalled_s if self._stalled_s is not None else self._blocked_s
        late = not reads or (since_s is not None and now_s - since_s > limits.write_s)
        if self.closed_for_reading:
            late = late or waited_s > limits.linger_s
        elif self.in_header_block or not self.has_settings:
            late = late or waited_s > limits.header_s
        if late:
            self._transport.abort()
        elif not self.streams and waited_s > limits.idle_s:
            self.close()

    def _count_buffered(self, now_s: float) -> bool:
        """Count what the transport has not sent; whether the client reads it fast enough."""
        size = self._transport.get_write_buffer_size()
        if size == self._buffered == 0:
            return True
        sent, self._flushed = self._flushed - (size - self._buffered), 0
        self.shared.memory.bytes += size - self._buffered
        self._buffered = size
        latest_s = now_s + self.shared.limits.write_s
        if size == 0 or self._read_by_s is None:
            self._read_by_s = latest_s if size else None
            return True
        self._read_by_s = min(latest_s, self._read_by_s + sent / LEAST_BYTES_S)
        return now_s <= self._read_by_s

    def close(self) -> None:
        """Accept no more streams; close once all written data is sent."""
        self.end(NO_ERROR, "")

    def end(self, code: int, text: str) -> None:
        """Send GOAWAY and read no more; after an error, wait for the client to read it."""
        if self.closed_for_reading:
            return
        self.closed_for_reading = True
        payload = self.last.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()
        self.write(frame(GOAWAY, 0, 0, payload))
        self.flush()
        if not code:
            self._transport.close()
            return
        log.info("an HTTP/2 connection is closed: %s", text)
        self._finish_all()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self.since_s = self.shared.now_s
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
