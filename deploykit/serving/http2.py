"""One HTTP/2 connection: frames and headers in, streams, flow control, deadlines, the end.

`benchmarks/grpc_stacks.md` has the measurement that chose this over grpcio's servers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import struct
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from hpack import Decoder, HPACKDecodingError, HPACKError
from hpack.hpack import encode_integer

from deploykit.core.tensors import Bytes
from deploykit.serving.transport.connection import BUG, Connection, Limits, MemoryBudget, Port

log = logging.getLogger(__name__)
logging.getLogger("hpack").setLevel(logging.INFO)  # below, it logs all headers, with tokens

# RFC 9113: frame types, flags and error codes
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 1, 1, 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
FRAME_SIZE_ERROR, REFUSED_STREAM = 6, 7
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11
FRAME = struct.Struct(">BHBBI")  # length (8 + 16 bits), type, flags, stream
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}  # payload sizes of frames
LARGEST_WINDOW = LARGEST_STREAM = (1 << 31) - 1
FRAME_BYTES = 1 << 14  # the largest frame that we accept: HTTP/2's default
FIRST_WINDOW = 65535

STREAM_WINDOW = 1 << 20  # bytes that a client may send on a stream before an update
CONNECTION_WINDOW = 1 << 24  # the same on all streams of a connection
UPDATE_BYTES = CONNECTION_WINDOW // 2  # received bytes of DATA after which we update the window
READ_BYTES = 256 << 10
WAITING_BYTES = 16 << 20  # unread answers above which a connection's requests wait
_TOGETHER_BYTES = 1 << 18  # joined writes above this size are flushed at once
_HIGH_WATER_BYTES = 1 << 20  # unsent bytes from which on we stop reading
_UNCHECKED_BYTES = 4096  # of frames, each with _FRAME_COST more, that are read between two looks
_FRAME_COST = 256  # at the clock: HPACK can encode a header in a single byte
_SETTINGS_COST = 10  # counts as so many frames, as each may move the windows of all streams

_CACHED = 64
_TABLE_SIZES = 2  # table sizes that a header block may begin with (RFC 7541, section 4.2)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")  # RFC 9113, section 8.2.1: no upper case
_VALUE = re.compile(rb"[^\0\r\n \t](?:[^\0\r\n]*[^\0\r\n \t])?|")
_REQUEST = frozenset((b":method", b":scheme", b":path"))
_OPTIONAL = frozenset((b":authority",))
_HOP_BY_HOP = b"connection proxy-connection keep-alive transfer-encoding upgrade".split()

# what a connection reads next: the preface, frames, the rest of a header block, or nothing more
AWAIT_PREFACE, OPEN, IN_HEADERS, CLOSED = range(4)

Pairs = list[tuple[bytes, bytes]]


class ConnectionFault(Exception):  # noqa: N818 - RFC 9113 calls it a connection error
    """The connection must close; `code` is one of HTTP/2's error codes."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: Bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _number(value: int) -> bytes:
    """Encode a window or an error code as a payload."""
    return value.to_bytes(4, "big")


def literal(name: bytes, value: bytes) -> bytes:
    """Encode an HPACK literal that the client's table does not store; `name` is below 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes(encode_integer(len(value), 7)) + value


class Stream:
    """A stream from its headers to its trailers. A subclass interprets what it receives."""

    def __init__(self, link: Http2Connection, number: int) -> None:
        self.link = link
        self.id = number
        self.send_window = link.first_window  # bytes of DATA that the client accepts
        self.receive_window = STREAM_WINDOW  # bytes of DATA that the client may still send
        self.unsent: list[memoryview] = []  # DATA blocked by the windows; few, so no deque
        self.trailers: bytes | None = None  # the frame that follows `unsent`
        self.ended = False  # the client sends no more
        self.gone = False  # the stream has ended: nothing can be sent

    @property
    def unread_bytes(self) -> int:
        return sum(map(len, self.unsent))

    @property
    @abstractmethod
    def unanswered(self) -> int:
        """Return the number of requests whose replies have not been written."""

    @abstractmethod
    def begin(self, ended: bool) -> None:
        """Start after the headers were read; `ended`: nothing follows."""

    @abstractmethod
    def receive(self, piece: bytes, ended: bool) -> None:
        """Receive the content of a DATA frame; `ended`: it is the last."""

    @abstractmethod
    def read(self) -> None:
        """Process what was received, once all output was sent."""

    @abstractmethod
    def check(self, now_s: float) -> None:
        """Fail the stream if it is past a limit; called periodically."""

    def send(self, data: bytes) -> None:
        """Send DATA, which counts as unread until the windows allow it."""
        self.link.answer_bytes += len(data)
        self.unsent.append(memoryview(data))
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
            piece, rest = unsent[0][:take], unsent[0][take:]
            unsent[:1] = [rest] if rest else []
            link.count_sent(self, len(piece))
            link.write(frame(DATA, 0, self.id, piece))
            link.answers_read(len(piece))
        if self.trailers is None:
            self.read()
        else:
            link.write(self.trailers)
            if not self.ended:  # the client need not send more
                link.write(frame(RST_STREAM, 0, self.id, _number(NO_ERROR)))
            self.finish()

    def finish(self) -> None:
        """End the stream and drop its unsent output."""
        self.gone = True
        self.trailers = None
        if self.unsent:
            self.link.answers_read(self.unread_bytes)
            self.unsent.clear()
        self.link.drop(self)


class MalformedHeaders(Exception):  # noqa: N818 - RFC 9113 calls them malformed
    """The request's headers are not allowed (RFC 9113, section 8): a stream error."""


class HeaderReader(Decoder):
    """Reads the header blocks of one connection; `parse` makes a head from names and values."""

    def __init__(self, parse: Callable[[Pairs], Any], max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._parse = parse
        self._known: dict[bytes, Any] = {}  # heads by their blocks
        self._sizes = 0  # changes of the table's size in this block: they yield no header

    def _update_encoding_context(self, data: bytes | memoryview) -> int:
        self._sizes += 1
        if self._sizes > _TABLE_SIZES:
            raise HPACKDecodingError("too many changes of the table's size")
        return super()._update_encoding_context(data)

    def read(self, block: bytes) -> Any:
        """Return the head. Raises MalformedHeaders, and HPACKError, which ends the connection."""
        known = self._known
        head = known.get(block)
        if head is None:
            pairs = self.read_pairs(block)
            check_request(pairs)
            head = self._parse(pairs)
            if known is self._known and len(known) < _CACHED:
                known[block] = head
        return head

    def read_pairs(self, block: bytes) -> Pairs:
        """Decode a block without other checks. Raises HPACKError."""
        entries = self.header_table.dynamic_entries
        newest, count, self._sizes = (entries[0] if entries else None), len(entries), 0
        pairs = cast("Pairs", self.decode(block, raw=True))
        if len(entries) != count or (count and entries[0] is not newest):
            self._known = {}  # equal blocks mean something else now
        return pairs


def check_request(pairs: Pairs) -> None:
    """Raise MalformedHeaders unless the headers are those of a request, without forbidden ones."""
    names = [name for name, _ in pairs]
    pseudo = [name for name in names if name.startswith(b":")]
    once = len(set(pseudo)) == len(pseudo) and names[: len(pseudo)] == pseudo
    if not once or not _REQUEST <= set(pseudo) <= _REQUEST | _OPTIONAL:
        raise MalformedHeaders("a request begins with :method, :scheme and :path, each once")
    for name, value in pairs:
        if not _VALUE.fullmatch(value) or not (_NAME.fullmatch(name) or name in pseudo):
            raise MalformedHeaders("a header has characters that it cannot have")
        if not value and name in _REQUEST:
            raise MalformedHeaders("a pseudo-header is empty")
        if name in _HOP_BY_HOP or (name == b"te" and value != b"trailers"):
            raise MalformedHeaders("a header is about the connection, which HTTP/2 forbids")


@dataclass(frozen=True)
class Http2Limits(Limits):
    """Limits of one connection, and of all together."""

    streams: int = 512  # concurrent, per connection
    outstanding: int = 256  # unsent replies of one stream
    all_streams: int = 16384  # on all connections; each costs memory and time while it is open
    empty_frames: int = 2000  # per second: pings, resets, refused calls, ...
    max_age_s: float = math.inf  # then the client is asked to connect again


class Http2Port(Port):
    """State that all HTTP/2 connections of a server share.

    `parse` makes a head from a stream's headers; `open` makes a stream from connection, number and
    head; `offload(work, then, peer=...)` runs `work` on another thread,
    then `then` on the event loop's.
    """

    limits: Http2Limits

    def __init__(
        self,
        parse: Callable[[Pairs], Any],
        open: Callable[[Any, int, Any], Stream],  # noqa: A002 - it opens a stream
        limits: Http2Limits,
        max_message_bytes: int,
        memory: MemoryBudget,
        offload: Callable[..., None],
    ) -> None:
        super().__init__(limits, memory)
        self.parse = parse
        self.open = open
        self.max_message_bytes = max_message_bytes
        self.offload = offload
        self.open_streams = 0  # on all connections
        self.view = memoryview(bytearray(READ_BYTES))  # only one connection reads at a time

    def connect(self) -> Http2Connection:
        return Http2Connection(self)

    def retire(self) -> None:
        super().retire()
        for connection in cast("set[Http2Connection]", self.connections):
            connection.retire(self.now_s)


class Http2Connection(Connection):
    """One client's connection: its streams, its windows and its unsent output."""

    def __init__(self, shared: Http2Port) -> None:
        super().__init__(shared)
        self.shared = shared
        self.phase = AWAIT_PREFACE
        self.since_s = shared.now_s  # start of the current wait: idle, or inside a header block
        # some later than others, so that not all clients connect again at once
        self._retire_at_s = shared.now_s + shared.limits.max_age_s * random.uniform(0.9, 1.1)  # noqa: S311
        self._close_at_s = math.inf  # then the client knows that it should open no more streams
        self._heads = HeaderReader(shared.parse, shared.limits.header_bytes)
        self._block = bytearray()  # an incomplete header block
        self._block_of = (0, 0)  # its flags and its stream
        self.empty_frames = 0
        # streams
        self.streams: dict[int, Stream] = {}
        self.last = 0  # the highest stream that the client has opened
        # what the client sends
        self.received_bytes = 0  # bytes of DATA since our last update
        # what the client accepts
        self.frame_bytes = FRAME_BYTES  # the largest frame
        self.send_window = FIRST_WINDOW  # bytes of DATA that it accepts
        self.first_window = FIRST_WINDOW  # the same on a new stream
        self.answer_bytes = 0  # bytes of answers that exceed its windows
        self._will_push = False
        self._writes = bytearray()  # output of this turn

    @property
    def unanswered(self) -> int:
        return sum(stream.unanswered for stream in self.streams.values())

    @property
    def idle_since_s(self) -> float | None:
        busy = self.streams or self.unsent_bytes or self.phase == CLOSED
        return None if busy else self.since_s

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        shared, limits = self.shared, self.shared.limits
        values = ((3, limits.streams), (4, STREAM_WINDOW), (6, limits.header_bytes))
        settings = b"".join(struct.pack(">HI", *pair) for pair in values)
        self.write(frame(SETTINGS, 0, 0, settings))
        self._update(0, CONNECTION_WINDOW - FIRST_WINDOW)
        if not shared.has_place():
            self.end(ENHANCE_YOUR_CALM, f"there are {limits.connections} connections already")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.phase = CLOSED
        self.shared.turns.run(self._finish_all)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self.part_of(self.shared.view)

    def buffer_updated(self, nbytes: int) -> None:
        if self.phase != CLOSED:
            self.data_received(bytes(self.shared.view[:nbytes]))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._push_soon()

    # -- frames in -------------------------------------------------------------------------------

    def process(self, data: bytes) -> None:
        try:
            rest = data[self._frames(data) :]
        except ConnectionFault as exc:
            self.end(exc.code, str(exc))
        except HPACKError:
            self.end(COMPRESSION_ERROR, "the headers are not valid HPACK, or too large")
        except Exception:  # any bug: this connection ends with a reason, the server does not
            log.exception("an HTTP/2 connection failed")
            self.end(INTERNAL_ERROR, BUG)
        else:
            if rest:
                self.keep(rest)
                if self.shared.turns.busy:  # they may be whole frames
                    self.go_on()

    def _frames(self, data: bytes) -> int:
        """Process the complete frames that this turn allows; return the index after them."""
        at, size = 0, len(data)
        if self.phase == AWAIT_PREFACE:
            if not data.startswith(PREFACE[:size]):
                raise ConnectionFault(PROTOCOL_ERROR, "this port speaks HTTP/2 with gRPC only")
            if size < len(PREFACE):
                return 0
            self.phase = OPEN
            at = len(PREFACE)
        turns, unchecked = self.shared.turns, 0
        while size - at >= 9 and self.phase != CLOSED:
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            number &= LARGEST_STREAM  # the highest bit is reserved
            length = high << 16 | low
            if length > FRAME_BYTES:
                raise ConnectionFault(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = at + 9 + length
            if end > size:
                break
            if unchecked > _UNCHECKED_BYTES and turns.late():
                break
            unchecked = 0 if unchecked > _UNCHECKED_BYTES else unchecked + length + _FRAME_COST
            if self.phase == IN_HEADERS and (kind, number) != (CONTINUATION, self._block_of[1]):
                raise ConnectionFault(PROTOCOL_ERROR, "a frame inside a header block")
            if kind == DATA:
                self._data(data, at + 9, end, flags, number)
            elif kind == HEADERS:
                self._headers(data[at + 9 : end], flags, number)
            elif kind == CONTINUATION:
                self._continue_headers(data[at + 9 : end], flags)
            else:
                self._other(kind, flags, number, data[at + 9 : end])
            at = end
        return size if self.phase == CLOSED else at

    def _data(self, data: bytes, at: int, end: int, flags: int, number: int) -> None:
        length, stream = end - at, self._find(number)
        self.received_bytes += length
        if self.received_bytes > UPDATE_BYTES:
            self._update(0, self.received_bytes)
            self.received_bytes = 0
        if flags & PADDED:
            if not length or data[at] >= length:
                raise ConnectionFault(PROTOCOL_ERROR, "more padding than the frame has")
            end -= data[at]
            at += 1
        ended = flags & END_STREAM != 0
        if at == end and (stream is None or not ended):
            self.count_frame()
        if stream is None:
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "more data than the window allows")
        stream.receive(data[at:end], ended)

    def _find(self, number: int) -> Stream | None:
        """Return the stream that a frame is for; None if it has ended: the frame is ignored.

        The client may not know that yet. What it sends counts in the connection's window.
        """
        if number > self.last or not number & 1:
            raise ConnectionFault(PROTOCOL_ERROR, "a frame on an idle stream")
        stream = self.streams.get(number)
        return None if stream is None or stream.ended else stream

    def _headers(self, payload: bytes, flags: int, number: int) -> None:
        if not number & 1:
            raise ConnectionFault(PROTOCOL_ERROR, "a client's stream number must be odd")
        if flags & (PADDED | PRIORITIZED):
            padded = bool(flags & PADDED)
            start = padded + (5 if flags & PRIORITIZED else 0)
            end = len(payload) - (payload[0] if padded and payload else 0)
            if start > end:
                raise ConnectionFault(PROTOCOL_ERROR, "more padding than the frame has")
            payload = payload[start:end]
        if flags & END_HEADERS:
            self._open(payload, flags, number)
        else:
            self._block, self._block_of = bytearray(payload), (flags, number)
            self.phase = IN_HEADERS
            self.since_s = self.shared.now_s

    def _continue_headers(self, payload: bytes, flags: int) -> None:
        if self.phase != IN_HEADERS:
            raise ConnectionFault(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block += payload
        if len(self._block) > self.shared.limits.header_bytes:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "the headers are too large")
        self.count_frame()
        if flags & END_HEADERS:
            self.phase = OPEN
            self._open(bytes(self._block), *self._block_of)

    def _open(self, block: bytes, flags: int, number: int) -> None:
        if number <= self.last:
            self._trailers(block, flags, number)
            return
        self.last = number
        try:
            head = self._heads.read(block)
        except MalformedHeaders as exc:
            log.info("HTTP/2 headers are refused: %s", exc)
            self._refuse(number, PROTOCOL_ERROR)
            return
        shared, streams = self.shared, self.streams
        limits = shared.limits
        full = len(streams) >= limits.streams or shared.open_streams >= limits.all_streams
        if full or shared.now_s > self._close_at_s:
            self._refuse(number, REFUSED_STREAM)
            return
        shared.open_streams += 1
        stream = streams[number] = shared.open(self, number, head)
        if shared.draining:  # only now: a client without an open call may never make one here
            self.retire(shared.now_s)
        stream.begin(flags & END_STREAM != 0)

    def _trailers(self, block: bytes, flags: int, number: int) -> None:
        """Process headers on a stream opened before: they can only be its last frame."""
        self._heads.read_pairs(block)
        stream = self._find(number)
        if stream is None:
            self.count_frame()
            return
        if not flags & END_STREAM:
            raise ConnectionFault(PROTOCOL_ERROR, "trailers must end the stream")
        stream.receive(b"", True)

    def _other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self.count_frame()
        size = _SIZES.get(kind, len(payload))
        if len(payload) != size:
            raise ConnectionFault(FRAME_SIZE_ERROR, f"a frame of type {kind} has {size} bytes")
        if kind == WINDOW_UPDATE:
            self._window_update(number, int.from_bytes(payload, "big") & LARGEST_WINDOW)
        elif kind == RST_STREAM:
            self._find(number)
            stream = self.streams.get(number)
            if stream is not None:
                stream.ended = True
                stream.finish()
        elif kind == SETTINGS:
            self._settings(flags, payload)
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))

    def _settings(self, flags: int, payload: bytes) -> None:
        if len(payload) % 6:
            raise ConnectionFault(FRAME_SIZE_ERROR, "malformed SETTINGS")
        if flags & ACK:
            return
        self.count_frame(_SETTINGS_COST + len(payload) // 6)
        first_window = self.first_window
        for name, value in struct.iter_unpack(">HI", payload):
            if name == 4:
                first_window = _checked_window(value)
            elif name == 5:
                if not 1 << 14 <= value < 1 << 24:
                    raise ConnectionFault(PROTOCOL_ERROR, "a frame size out of range")
                self.frame_bytes = min(value, 1 << 20)
        more, self.first_window = first_window - self.first_window, first_window
        if more:
            for stream in self.streams.values():
                stream.send_window = _checked_window(stream.send_window + more)
            self._push_soon()
        self.write(frame(SETTINGS, ACK, 0))

    def _window_update(self, number: int, more: int) -> None:
        if number:
            self._find(number)
        stream = self.streams.get(number)
        if not number:
            self.send_window = _checked_window(self.send_window + more)
            self._push_soon()
        elif stream is not None:
            stream.send_window = _checked_window(stream.send_window + more)
            stream.push()

    def count_frame(self, frames: int = 1) -> None:
        """Count a frame that carries no content. Raises ConnectionFault for too many."""
        self.empty_frames += frames
        if self.empty_frames > self.shared.limits.empty_frames:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames without content")

    # -- windows ---------------------------------------------------------------------------------

    def allow(self, stream: Stream, more: int) -> None:
        """Let the client send `more` bytes on this stream."""
        stream.receive_window += more
        self._update(stream.id, more)

    def _update(self, number: int, more: int) -> None:
        self.write(frame(WINDOW_UPDATE, 0, number, _number(more)))

    def sendable(self, stream: Stream) -> int:
        """Return how many bytes of DATA may be sent on this stream now."""
        free = 0 if self.stalled else min(self.send_window, stream.send_window)
        if free <= 0 and self.read_by_s is None:
            self.read_by_s = self.shared.now_s + self.shared.limits.stall_s
        return free

    def take_window(self, stream: Stream, size: int) -> bool:
        """Count `size` bytes of DATA as sent, if this stream may send them in one frame."""
        fits = size <= self.frame_bytes and size <= self.send_window and size <= stream.send_window
        if self.stalled or not fits:
            return False
        self.count_sent(stream, size)
        return True

    def count_sent(self, stream: Stream, size: int) -> None:
        self.send_window -= size
        stream.send_window -= size
        self.sent_bytes += size
        self.empty_frames -= 2  # the client may acknowledge it with window updates

    def answers_read(self, size: int) -> None:
        """Free answers that the client has read; streams that waited for it go on."""
        self.shared.memory.release(size)
        full, self.answer_bytes = self.answer_bytes > WAITING_BYTES, self.answer_bytes - size
        if full and self.answer_bytes <= WAITING_BYTES:
            self._push_soon()

    def _push_soon(self) -> None:
        """Push all streams in one of the next turns, once for all changes that the client makes."""
        if not self._will_push and self.streams:
            self._will_push = True
            self.shared.turns.wait(self._push)

    def _push(self) -> None:
        self._will_push = False
        for stream in list(self.streams.values()):
            stream.push()

    # -- output, deadlines and the end -----------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send `data`, joined with other writes of this turn of the loop."""
        if not self._writes:  # flush once the running callbacks of this turn have written
            asyncio.get_running_loop().call_soon(self.flush)
        self._writes += data
        if len(self._writes) > _TOGETHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Pass what was written to the transport."""
        writes, self._writes = self._writes, bytearray()
        if writes and not self.transport.is_closing():
            self.transport.write(writes)

    def drop(self, stream: Stream) -> None:
        """Forget a finished stream."""
        if self.streams.pop(stream.id, None) is not None:
            self.shared.open_streams -= 1
        if not self.streams:
            self.since_s = self.shared.now_s

    def _refuse(self, number: int, code: int) -> None:
        """Reset a stream that has not begun."""
        self.count_frame()
        self.write(frame(RST_STREAM, 0, number, _number(code)))

    def check(self, now_s: float) -> None:
        limits, waited_s = self.shared.limits, now_s - self.since_s
        allowed = max(1, round(limits.empty_frames * self.shared.tick_s))
        self.empty_frames = max(0, self.empty_frames - allowed)
        for stream in list(self.streams.values()):
            stream.check(now_s)
        late = not self.reads(now_s, waits=any(each.unsent for each in self.streams.values()))
        if self.phase == CLOSED:
            late = late or waited_s > limits.linger_s
        elif self.phase != OPEN:
            late = late or waited_s > limits.header_s
        if late:
            self.transport.abort()
        elif not self.streams and (waited_s > limits.idle_s or now_s > self._close_at_s):
            self.close()
        elif now_s > self._retire_at_s:
            self.retire(now_s)

    def retire(self, now_s: float) -> None:
        """Ask the client to open no more streams here; close once those it has opened have ended.

        It may open some until it has read this.
        """
        if self.phase != CLOSED and self._close_at_s == math.inf:
            self._close_at_s = now_s + self.shared.limits.linger_s
            self.write(frame(GOAWAY, 0, 0, _number(LARGEST_STREAM) + _number(NO_ERROR)))

    def close(self) -> None:
        self.end(NO_ERROR, "")

    def end(self, code: int, text: str) -> None:
        """Send GOAWAY and read no more; after an error, wait for the client to read it."""
        if self.phase == CLOSED:
            return
        self.phase = CLOSED
        self.write(frame(GOAWAY, 0, 0, _number(self.last) + _number(code) + text.encode()))
        self.flush()
        if not code:
            self.transport.close()
            return
        log.info("an HTTP/2 connection is closed: %s", text)
        self._finish_all()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.since_s = self.shared.now_s
        else:
            self.transport.close()

    def _finish_all(self) -> None:
        for stream in list(self.streams.values()):
            stream.finish()


def _checked_window(window: int) -> int:
    if window > LARGEST_WINDOW:
        raise ConnectionFault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
    return window
