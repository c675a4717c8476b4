"""One gRPC call on an HTTP/2 connection: messages in, answers out, both under flow control.

In: pieces of DATA frames. Out: whole messages to the call's `Method`, one at a time, and the frames
of its answers, as far as the client's windows let them go. No answer's header refers to HPACK's
dynamic table, so that answers are constants and need no state.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as percent_encoded

from deploykit.core.errors import DeploykitError, UnknownEncoding, quote
from deploykit.serving.http2.headers import Head, Method
from deploykit.serving.transport.compression import decompress

if TYPE_CHECKING:
    from deploykit.serving.http2.flow import Flow

log = logging.getLogger(__name__)

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
NO_ERROR, CANCEL = 0, 8
FRAME = struct.Struct(">BHBBI")  # length (8 + 16 bits), type, flags, stream
PREFIX_BYTES = 5  # of a gRPC message: compressed or not, length
ROOM = 1 << 20  # bytes that a client may send on a stream unasked
_QUESTION_BYTES = 1024  # of a message, at most: "are you ready?"
_MESSAGES_A_TURN = 64  # of one streaming call, before other calls get their turn

STATUS = {
    "OK": 0,
    "CANCELLED": 1,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "RESOURCE_EXHAUSTED": 8,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that the other side must not put into its table; below 127 bytes each."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


_OPENING = b"\x88" + _literal(b"content-type", b"application/grpc")  # 0x88 is ":status: 200"
_OPENING += _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
_SAFE = " !\"#$&'()*+,/:;<=>?@[\\]^_`{|}~"  # of a text in a header; not "%"
_TEXT = 1000
_DONE = _literal(b"grpc-status", b"0")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


class Call:
    """One stream, from its headers to its trailers."""

    __slots__ = (
        "answering",
        "asked_bytes",
        "begin",
        "busy",
        "cancel",
        "connection",
        "deadline_s",
        "ended",
        "finished",
        "granted_bytes",
        "have",
        "head",
        "heard",
        "held",
        "id",
        "need",
        "opened",
        "out",
        "pieces",
        "room",
        "since_s",
        "sizes",
        "slots",
        "trailers",
        "window",
    )

    def __init__(self, connection: Flow, number: int, head: Head, window: int) -> None:
        self.connection = connection
        self.id = number
        self.head = head
        self.window = window  # bytes of DATA that the client will take
        self.room = ROOM  # bytes of DATA that the client may still send
        self.granted_bytes = 0  # of `room`, what was given for a large message
        self.asked_bytes = 0  # what is to be given when the connection has it to give
        self.pieces: list[bytes] = []
        self.begin = 0  # of what was not handed over, in the first piece
        self.have = 0
        self.held = 0  # bytes that are counted in the server's
        self.sizes: deque[int] = deque()  # of them, for each message of several not yet answered
        self.need = 0  # bytes of the message being read, prefix included; 0 while not known
        self.busy = False
        self.heard = False  # a message was handed over
        self.ended = False  # the client has sent its last
        self.answering = 0  # messages handed over and not answered
        self.slots: deque[Any] = deque()  # for whoever answers in order
        self.out: deque[memoryview] = deque()  # what the windows held back
        self.trailers: bytes | None = None  # what follows `out`
        self.opened = False  # the answer's headers were sent
        self.finished = False
        self.cancel: Callable[[], object] | None = None  # what to do if the client gives up
        self.since_s = connection.shared.now_s
        timeout_us = head.timeout_us
        self.deadline_s: float | None = None
        if timeout_us is not None:  # `now_s` is a tick old
            self.deadline_s = connection.shared.clock_s() + timeout_us / 1e6

    @property
    def unanswered(self) -> int:
        return self.answering or (1 if self.out or self.trailers is not None else 0)

    @property
    def reading(self) -> bool:
        """Whether the client owes us bytes: half a message, or a call's only one."""
        method = self.head.method
        return not self.ended and (self.have > 0 or (method is not None and method.ended is None))

    # -- in --------------------------------------------------------------------------------------

    def received(self, piece: bytes, ended: bool) -> None:
        """A DATA frame's content. Hands over what it completes."""
        self.ended = self.ended or ended
        if piece:
            if not self.have:
                self.since_s = self.connection.shared.now_s
            self.pieces.append(piece)
            self.have += len(piece)
            if not self._hold(len(piece)):
                return
        self.read()

    def read(self) -> None:
        """Hand over the messages that are here whole, while there is room for their answers."""
        if not self.busy:  # a message that is answered at once comes back here
            self.busy = True
            self.busy = self._read()

    def _read_on(self) -> None:
        self.busy = False
        self.read()

    def _read(self) -> bool:
        """Whether it goes on in the loop's next turn, so that other calls get theirs."""
        method, shared = self.head.method, self.connection.shared
        left = _MESSAGES_A_TURN
        while self.have >= PREFIX_BYTES and not self.finished and method is not None:
            if not self.need:
                self._join()
                prefix = self.pieces[0][self.begin : self.begin + PREFIX_BYTES]
                self.need = PREFIX_BYTES + int.from_bytes(prefix[1:], "big")
                if self.need > shared.max_body_bytes + PREFIX_BYTES:
                    self._too_large()
                    return False
            if self.have < self.need or (method.ended is None and not self.ended):
                break
            if self.out or len(self.slots) >= shared.limits.outstanding:
                return False  # read on when the client has taken some answers
            if not left:
                self.connection.later(self._read_on)
                return True
            left -= 1
            self._hand_over(method)
        if self.finished or method is None:
            return False
        if self.need - self.have > self.room:
            self.connection.ask(self, self.need - self.have - self.room)
        if self.ended:
            if self.have:
                text = f"the message ends after {self.have} of {self.need or PREFIX_BYTES} bytes"
                self.fail("INVALID_ARGUMENT", text)
            elif method.ended is not None:
                method.ended(self)
            elif not self.heard:
                self.fail("INVALID_ARGUMENT", "the call holds no message")
        return False

    def _join(self) -> None:
        if len(self.pieces) > 1:
            self.pieces[0] = self.pieces[0][self.begin :]
            self.pieces = [b"".join(self.pieces)]
            self.begin = 0

    def _hand_over(self, method: Method) -> None:
        self._join()
        data, at, need = self.pieces[0], self.begin, self.need
        self.have -= need
        self.need = 0
        self.connection.release(self)
        if not self.have:
            self.pieces = []
            self.begin = 0
        elif method.ended is None:
            self.fail("INVALID_ARGUMENT", "the call holds more than one message")
            return
        else:
            self.begin = at + need
        if self.have or at:
            data = data[at : at + need]
        if method.ended is not None:
            missing = ROOM - self.room - self.have
            if missing > ROOM // 2 and not self.ended:
                self.connection.allow(self, missing)
        at = PREFIX_BYTES
        if data[0]:
            plain = self._decompressed(data)
            if plain is None or not self._hold(len(plain)):
                return
            data, at = plain, 0
            need += len(plain)
        if method.ended is not None:
            self.sizes.append(need)
        self.heard = True
        self.answering += 1
        method.message(self, data, at)

    def _hold(self, size: int) -> bool:
        """Count bytes; without room the call fails, unless it only asks how the server is."""
        self.held += size
        held, method = self.connection.shared.held, self.head.method
        asks = method is not None and method.open and self.held <= _QUESTION_BYTES
        if held.add(size, self.held) or asks:
            return True
        self.fail("UNAVAILABLE", held.text)
        return False

    def release(self, size: int) -> None:
        """Bytes of it are held no more."""
        self.held -= size
        self.connection.shared.held.bytes -= size

    def _too_large(self) -> None:
        limit = self.connection.shared.max_body_bytes
        self.fail(
            "RESOURCE_EXHAUSTED",
            f"the message is above {limit} bytes; start the server with a larger --max-body-bytes",
        )

    def _decompressed(self, data: bytes) -> bytes | None:
        """The message's bytes; None when the call was refused. Stops at the limit, not after it."""
        encoding = self.head.encoding
        if data[0] != 1 or encoding == b"identity":
            self.fail("INVALID_ARGUMENT", "a message's first byte does not fit 'grpc-encoding'")
            return None
        try:
            limit = self.connection.shared.max_body_bytes
            return bytes(decompress(data[PREFIX_BYTES:], encoding, limit))
        except UnknownEncoding:
            text = f"grpc-encoding is {quote(encoding)}; send gzip, deflate or plain messages"
            self.fail("UNIMPLEMENTED", text)
        except DeploykitError as exc:
            self.fail(exc.grpc_status, exc.message)
        return None

    # -- out -------------------------------------------------------------------------------------

    def reply(self, parts: list[bytes]) -> None:
        """The only answer of a call, and its end."""
        if self.finished:
            return
        connection, number = self.connection, self.id
        length = PREFIX_BYTES + sum(map(len, parts))
        if length <= connection.can_send(self) and length <= connection.frame_bytes:
            connection.sent(self, length)
            connection.write(
                b"".join(
                    (
                        FRAME.pack(0, len(_OPENING), HEADERS, END_HEADERS, number),
                        _OPENING,
                        FRAME.pack(length >> 16, length & 0xFFFF, DATA, 0, number),
                        b"\0",
                        (length - PREFIX_BYTES).to_bytes(4, "big"),
                        *parts,
                        FRAME.pack(0, len(_DONE), HEADERS, END_HEADERS | END_STREAM, number),
                        _DONE,
                    )
                )
            )
            self._finished()
            return
        self.send(parts)
        self.finish()

    def send(self, parts: list[bytes]) -> None:
        """One answer of several."""
        if self.finished:
            return
        if not self.opened:
            self.opened = True
            self.connection.write(frame(HEADERS, END_HEADERS, self.id, _OPENING))
        length = sum(map(len, parts))
        self.out.extend(map(memoryview, (b"\0" + length.to_bytes(4, "big"), *parts)))
        self.answering = max(0, self.answering - 1)  # of the health there is always one more
        if self.sizes:
            self.release(self.sizes.popleft())
        elif self.ended:
            self.release(self.held)
        self.push()

    def finish(self) -> None:
        """No more answers: the call went well."""
        self._end(frame(HEADERS, END_HEADERS | END_STREAM, self.id, _DONE))

    def fail(self, status: str, text: str) -> None:
        """End the call with an error; what was sent before it still goes out."""
        if self.finished or self.trailers is not None:
            return
        cancel, self.cancel = self.cancel, None
        if cancel is not None:
            cancel()
        log.info("%s: %s %s", quote(self.head.path), status, quote(text))
        message = percent_encoded(text[:_TEXT], safe=_SAFE).encode()
        block = _literal(b"grpc-status", b"%d" % STATUS[status])
        block += b"\x00\x0cgrpc-message" + _length(len(message)) + message
        if not self.opened:
            block = _OPENING + block
        self._end(frame(HEADERS, END_HEADERS | END_STREAM, self.id, block))

    def _end(self, trailers: bytes) -> None:
        if self.finished or self.trailers is not None:
            return
        self.trailers = trailers
        self.answering = 0
        self.slots.clear()
        self.push()

    def push(self) -> None:
        """Send what the windows take."""
        connection = self.connection
        while self.out:
            take = min(connection.can_send(self), connection.frame_bytes)
            if take <= 0:
                return
            piece = self.out[0]
            pieces = []
            size = 0
            while self.out and size < take:
                piece = self.out.popleft()
                if size + len(piece) > take:
                    self.out.appendleft(piece[take - size :])
                    piece = piece[: take - size]
                pieces.append(piece)
                size += len(piece)
            connection.sent(self, size)
            head = FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, self.id)
            connection.write(b"".join((head, *pieces)))
        if self.trailers is None:
            self.read()  # what waited for room
        else:
            connection.write(self.trailers)
            if not self.ended:  # it need not send the rest
                connection.write(frame(RST_STREAM, 0, self.id, NO_ERROR.to_bytes(4, "big")))
            self._finished()

    def gone(self) -> None:
        """The client gave up, or its connection has ended: drop what nobody waits for."""
        cancel, self.cancel = self.cancel, None
        self._finished()
        if cancel is not None:
            cancel()

    def _finished(self) -> None:
        self.finished = True
        self.answering = 0
        self.trailers = None
        self.pieces = []
        self.out.clear()
        self.connection.drop(self)


def _length(size: int) -> bytes:
    """An HPACK length of 7 bits and what follows."""
    if size < 127:
        return bytes([size])
    out = [127]
    size -= 127
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    return bytes([*out, size])
