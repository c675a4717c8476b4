"""One gRPC call on an HTTP/2 stream: messages to its Method, replies and a status back."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote as percent_encode

from deploykit.core.errors import BadInput, quote
from deploykit.core.tensors import Bytes
from deploykit.pipelines.threads import Peer
from deploykit.serving.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    STREAM_WINDOW,
    WAITING_BYTES,
    Http2Connection,
    Stream,
    frame,
    literal,
)
from deploykit.serving.models.pipelines import Receiver
from deploykit.serving.transport.connection import About, extend, message_of, refusal_of
from deploykit.serving.transport.encodings import decompress

log = logging.getLogger(__name__)

PREFIX_BYTES = 5  # the prefix of a message: a compression flag and the length
_LENGTH = struct.Struct(">I")
_HEALTH_BYTES = 1024  # largest message to a public method over the memory budget
_CONTENT_TYPE = re.compile(rb"application/grpc(\+proto)?[ \t]*(;.*)?", re.IGNORECASE)
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_US = {b"H": 3.6e9, b"M": 6e7, b"S": 1e6, b"m": 1e3, b"u": 1.0, b"n": 1e-3}
STATUS = {
    "OK": 0, "CANCELLED": 1, "INVALID_ARGUMENT": 3, "DEADLINE_EXCEEDED": 4, "NOT_FOUND": 5,
    "RESOURCE_EXHAUSTED": 8, "UNIMPLEMENTED": 12, "INTERNAL": 13, "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}  # fmt: skip
# The constant parts of replies do not use HPACK's dynamic table, so that they are the same for all
# connections.
NOT_GRPC = b"\x08\x03415" + literal(b"content-type", b"application/grpc")  # index 8: ":status"
REPLY_HEADERS = b"\x88" + literal(b"content-type", b"application/grpc")  # 0x88: ":status: 200"
REPLY_HEADERS += literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
OK = literal(b"grpc-status", b"0")
# FIRST_FRAME, stream, REPLY_HEADERS; length << 8 | DATA, no flag, stream; not compressed, length
REPLY_START = struct.Struct(f">5sI{len(REPLY_HEADERS)}sIxIxI")
REPLY_END = struct.Struct(f">5sI{len(OK)}s")  # LAST_FRAME, stream, OK
FIRST_FRAME = frame(HEADERS, END_HEADERS, 0, REPLY_HEADERS)[:5]  # without its stream
LAST_FRAME = frame(HEADERS, END_HEADERS | END_STREAM, 0, OK)[:5]
_SAFE = " !\"#$&'()*+,/:;<=>?@[\\]^_`{|}~"  # characters of a message that need no encoding; not "%"
_LONGEST_MESSAGE = 1000


@dataclass(frozen=True)
class Method:
    """The handlers of a method. `message(call, data, at)`: the message is `data[at:]`.

    Its error is the reply. `ended(call)` is called after the last of several messages. `public`:
    needs no token. `max_bytes`: the most bytes of a message.
    """

    message: Callable[[Any, bytes, int], None]  # called with the Call
    ended: Callable[[Any], None] | None = None
    public: bool = False
    max_bytes: int = 1 << 32


@dataclass(frozen=True)
class CallHead:
    """The parsed headers of a call. `refusal`: status and message of an immediate error reply.

    `speaks_grpc`: the client expects a gRPC status.
    """

    path: str
    method: Method | None
    timeout_us: int | None
    trace: str | None
    encoding: bytes  # the encoding of compressed messages
    refusal: tuple[str, str] | None
    speaks_grpc: bool = True


def parse_head(
    methods: Mapping[str, Method],
    allows: Callable[[bytes | None], bool],
    max_headers: int,
    pairs: list[tuple[bytes, bytes]],
) -> CallHead:
    """Parse a call's headers. `allows`: whether an authorization is valid."""
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        if keys.count(b"traceparent") > 1:
            del values[b"traceparent"]  # as one that cannot be parsed: a new trace begins
        if keys.count(b"authorization") > 1:
            values[b"authorization"] = b""  # proxies disagree about which of them counts
    content_type = values.get(b"content-type", b"")
    speaks_grpc = _CONTENT_TYPE.fullmatch(content_type) is not None
    path = values.get(b":path", b"").decode("latin-1")
    method = methods.get(path)
    trace, timeout = values.get(b"traceparent"), values.get(b"grpc-timeout")
    match = None if timeout is None else _TIMEOUT.fullmatch(timeout)
    refusal: tuple[str, str] | None = None
    if not speaks_grpc:
        text = f"send 'content-type: application/grpc', not {quote(content_type)}"
        refusal = ("UNIMPLEMENTED", f"this port speaks gRPC with protobuf only: {text}")
    elif values.get(b":method") != b"POST":
        refusal = ("UNIMPLEMENTED", "this port speaks gRPC only: send POST")
    elif len(pairs) > max_headers:
        refusal = ("RESOURCE_EXHAUSTED", f"there are more than {max_headers} headers")
    elif not (method and method.public) and not allows(values.get(b"authorization")):
        text = "a token is needed: send the metadata 'authorization: Bearer TOKEN'"
        refusal = ("UNAUTHENTICATED", text)
    elif method is None:
        refusal = ("UNIMPLEMENTED", f"the method {quote(path)} is not offered by this server")
    elif timeout is not None and match is None:
        refusal = ("INVALID_ARGUMENT", f"grpc-timeout is {quote(timeout)}")
    return CallHead(
        path,
        method,
        None if match is None else max(1, int(int(match[1]) * _UNITS_US[match[2]])),
        None if trace is None else trace.decode("latin-1"),
        values.get(b"grpc-encoding", b"identity"),
        refusal,
        speaks_grpc,
    )


class GrpcCall(Stream):
    """A call from its headers to its trailers."""

    def __init__(self, link: Http2Connection, number: int, head: CallHead) -> None:
        Stream.__init__(self, link, number)
        shared = link.shared
        self.head = head
        self.held_bytes = 0  # bytes of messages counted in the server's memory budget
        self.unreplied = 0  # messages delivered and not answered
        self.slots: list[Any] = []  # replies of a streaming call, in order
        self.opened = False  # the reply's headers have been sent
        self.cancel: Callable[[], object] | None = None  # called if the client cancels
        self._data = bytearray()  # of messages with their prefixes, received and not delivered
        self._need = 0  # bytes of the next message with its prefix, 0 until that has arrived
        self._sizes: list[int] = []  # bytes of each delivered message of a streaming call
        self._in_turn = False  # messages are being delivered, now or in the next turn of the loop
        self._inflating = False  # a message is being decompressed
        self._received_one = False
        self._by_s = shared.now_s + shared.limits.stall_s  # when more of a message must have come
        self.begun_s = shared.turns.clock_s() if shared.records else 0.0
        self.about: About | None = None
        timeout_us = head.timeout_us
        deadline_s = None if timeout_us is None else shared.turns.clock_s() + timeout_us / 1e6
        self.deadline_s = deadline_s  # by the clock, as `now_s` may be a tick old

    @property
    def peer(self) -> Peer:
        return Peer.of(self.link.transport.get_extra_info("peername"), self.link)

    @property
    def unanswered(self) -> int:
        return self.unreplied or (1 if self.unsent or self.trailers is not None else 0)

    @property
    def left_us(self) -> int | None:
        """Return the time until the client's deadline; None without one."""
        if self.deadline_s is None:
            return None
        return int((self.deadline_s - self.link.shared.turns.clock_s()) * 1e6)

    # -- messages in -----------------------------------------------------------------------------

    def begin(self, ended: bool) -> None:
        if self.head.refusal is not None:
            self.ended = ended
            self.link.count_frame()  # it needs no token
            self.fail(*self.head.refusal)
        elif ended:
            self.receive(b"", True)

    def receive(self, piece: bytes, ended: bool) -> None:
        if ended:
            self.ended = True
        if piece:
            shared = self.link.shared
            now_s, stall_s = shared.now_s, shared.limits.stall_s
            if self._data:
                self._by_s = extend(self._by_s, len(piece), now_s, stall_s)
            else:
                self._by_s = now_s + stall_s
            self._data += piece
            self._read_prefix()
            if not self._reserve(len(piece)):
                return
        self.read()

    def _read_prefix(self) -> None:
        started = len(self._data) >= PREFIX_BYTES
        self._need = PREFIX_BYTES + _LENGTH.unpack_from(self._data, 1)[0] if started else 0

    def read(self) -> None:
        """Deliver complete messages, while replies can be sent."""
        if not (self._in_turn or self._inflating):  # a reply sent immediately re-enters here
            self._in_turn = True
            self._in_turn = self._deliver_all()

    def _continue(self) -> None:
        self._in_turn = False
        self.read()

    def _deliver_all(self) -> bool:  # noqa: C901, PLR0912 - why a call stops here, one reason each
        """Return whether to continue in the next turn of the loop, after other calls."""
        method, link, data = self.head.method, self.link, self._data
        if method is None:
            return False
        shared, delivered = link.shared, False
        most = min(method.max_bytes, shared.max_message_bytes)
        while self._need and not self.gone:
            if self._need - PREFIX_BYTES > most:
                text = f"the message is above {most} bytes"
                if most == shared.max_message_bytes:
                    text += "; start the server with a larger `max_body_bytes`"
                self.fail("RESOURCE_EXHAUSTED", text)
                return False
            if len(data) < self._need or (method.ended is None and not self.ended):
                break
            full = len(self.slots) >= shared.limits.outstanding or link.answer_bytes > WAITING_BYTES
            if self.unsent or full:
                return False  # `read` continues when the client has read some replies
            if delivered and shared.turns.late():
                shared.turns.wait(self._continue)
                return True
            delivered = True
            self._deliver(method)
            if self._inflating:
                return False  # `_decompress` continues this
        if self.gone:
            return False
        missing = self._need - len(data)
        if missing > self.receive_window:
            link.allow(self, missing - self.receive_window)
        if not self.ended:
            return False
        if data:
            size = self._need or PREFIX_BYTES
            self.fail("INVALID_ARGUMENT", f"the message ends after {len(data)} of {size} bytes")
        elif method.ended is not None:
            method.ended(self)
        elif not self._received_one:
            self.fail("INVALID_ARGUMENT", "the call holds no message")
        return False

    def _deliver(self, method: Method) -> None:
        size = self._need
        whole = len(self._data) == size
        data = bytes(self._data) if whole else bytes(memoryview(self._data)[:size])
        del self._data[:size]  # which moves nothing
        self._need = 0
        if not whole:
            self._read_prefix()
        if method.ended is not None:
            used = STREAM_WINDOW - self.receive_window - len(self._data)
            if used > STREAM_WINDOW // 2 and not self.ended:
                self.link.allow(self, used)
            self._sizes.append(size)
        elif self._data:
            self.fail("INVALID_ARGUMENT", "the call holds more than one message")
            return
        self._received_one = True
        self.unreplied += 1
        try:
            if data[0]:
                self._decompress(method, data)
            else:
                method.message(self, data, PREFIX_BYTES)
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            self._inflating = False
            fail_with(self, exc)

    def _decompress(self, method: Method, data: bytes) -> None:
        """Deliver a compressed message, which another thread decompresses. Raises Overloaded."""
        encoding = self.head.encoding
        if data[0] != 1 or encoding == b"identity":
            raise BadInput("a message's first byte does not fit 'grpc-encoding'")

        def then(result: Callable[[], bytes]) -> None:
            self._inflating = False
            if self.gone or self.trailers is not None:
                return
            try:
                plain = result()
                if self._sizes:
                    self._sizes[-1] += len(plain)
                if self._reserve(len(plain)):
                    method.message(self, plain, 0)
            except Exception as exc:  # noqa: BLE001 - every error is a reply
                fail_with(self, exc)
            self.read()

        def work() -> bytes:
            return bytes(decompress(data[PREFIX_BYTES:], encoding, most))

        shared = self.link.shared
        most = min(method.max_bytes, shared.max_message_bytes)
        self._inflating = True
        shared.offload(work, then, peer=self.peer)

    # -- memory ----------------------------------------------------------------------------------

    def _reserve(self, size: int) -> bool:
        """Count bytes in the memory budget; above it the call fails, except small health checks."""
        self.held_bytes += size
        memory, method = self.link.shared.memory, self.head.method
        if memory.add(size, self.held_bytes):
            return True
        if method is not None and method.public and self.held_bytes <= _HEALTH_BYTES:
            return True
        self.fail("UNAVAILABLE", memory.message)
        return False

    def reserve(self, size: int, slot: int | None = None) -> bool:
        """Count decoded bytes until the reply, which is the one in `slot` of a streaming call."""
        if slot is not None:
            self._sizes[slot] += size
        self.held_bytes += size
        return self.link.shared.memory.add(size, self.held_bytes + self.unread_bytes)

    # -- replies ---------------------------------------------------------------------------------

    def reply(self, parts: Sequence[Bytes]) -> None:
        """Send the only reply of a call and end it."""
        if self.deadline_s is not None and (self.left_us or 0) <= 0:
            self.fail("DEADLINE_EXCEEDED", "the call's deadline has passed")
        if self.gone or self.trailers is not None:
            return
        link, number = self.link, self.id
        message_bytes = sum(map(len, parts))
        length = PREFIX_BYTES + message_bytes
        if link.take_window(self, length):
            start = REPLY_START.pack(
                FIRST_FRAME, number, REPLY_HEADERS, length << 8 | DATA, number, message_bytes
            )
            link.write(b"".join((start, *parts, REPLY_END.pack(LAST_FRAME, number, OK))))
            self._record("OK")
            self.finish()
            return
        self.send_message(parts)
        self.complete()

    def send_message(self, parts: Sequence[Bytes]) -> None:
        """Send one of several replies."""
        if self.gone or self.trailers is not None:
            return
        self.unreplied = max(0, self.unreplied - 1)  # health updates answer no message
        size = self._sizes.pop(0) if self._sizes else self.held_bytes if self.ended else 0
        self.held_bytes -= size
        link, memory = self.link, self.link.shared.memory
        memory.release(size)
        data = b"".join((b"\0", sum(map(len, parts)).to_bytes(4, "big"), *parts))
        at_once = not self.unsent and link.take_window(self, len(data))
        fits = at_once or memory.add(len(data), self.held_bytes + self.unread_bytes + len(data))
        if not fits:
            memory.release(len(data))
            self.fail("UNAVAILABLE", memory.message)
            return
        if not self.opened:
            self.opened = True
            link.write(frame(HEADERS, END_HEADERS, self.id, REPLY_HEADERS))
        if at_once:
            link.write(frame(DATA, 0, self.id, data))
        else:
            self.send(data)

    def complete(self) -> None:
        """End the call with status OK."""
        if not self.gone and self.trailers is None:
            self._record("OK")
            self._end(OK)

    def fail(self, status: str, message: str) -> None:
        """End the call with an error, after the replies before it."""
        if self.gone or self.trailers is not None:
            return
        cancel, self.cancel = self.cancel, None
        if cancel is not None:
            cancel()
        log.info("%s: %s %s", quote(self.head.path), status, quote(message))
        self._record(status)
        text = percent_encode(message[:_LONGEST_MESSAGE], safe=_SAFE).encode()
        block = literal(b"grpc-status", b"%d" % STATUS[status]) + literal(b"grpc-message", text)
        if not self.opened:
            block = (REPLY_HEADERS if self.head.speaks_grpc else NOT_GRPC) + block
        self._end(block)

    def _record(self, status: str) -> None:
        """Count the call, and log it if calls are logged."""
        shared = self.link.shared
        shared.replies[status] += 1
        if shared.records:
            path, failed = quote(self.head.path)[1:-1], status != "OK"
            shared.record(self, path, status, self.link.transport, failed=failed)

    def _end(self, block: bytes) -> None:
        self.unreplied = 0
        self.slots.clear()
        self.end(frame(HEADERS, END_HEADERS | END_STREAM, self.id, block))

    def check(self, now_s: float) -> None:
        if self.deadline_s is not None and self.deadline_s <= now_s:
            self.fail("DEADLINE_EXCEEDED", "the call's deadline has passed")
        elif not self.ended and now_s > self._by_s:
            method = self.head.method  # a client may pause between the messages of a stream
            if self._data or (method is not None and method.ended is None):
                self.fail("DEADLINE_EXCEEDED", "the message stalled, or came too slowly")

    def finish(self) -> None:
        """End the call; drop its requests that still wait for an engine."""
        cancel, self.cancel = self.cancel, None
        self.unreplied = 0
        self._data.clear()  # an incomplete message
        Stream.finish(self)
        self.link.shared.memory.bytes -= self.held_bytes
        self.held_bytes = 0
        if cancel is not None:
            cancel()


class Replying(Receiver, Protocol):
    """A receiver of one reply: a GrpcCall, or a ReplySlot of a streaming call."""

    @property
    def left_us(self) -> int | None: ...
    def fail(self, status: str, message: str) -> None: ...


def fail_with(reply_to: Replying, error: Exception) -> None:
    """Send an error as the reply; log one that is not a DeploykitError instead of sending it."""
    exc = refusal_of(error, "a gRPC call")
    reply_to.fail(exc.grpc_status, message_of(exc))
