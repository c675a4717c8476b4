"""Speak gRPC on one HTTP/2 connection of the load generator: unary calls, one at a time.

Header compression keeps no state, as no table is offered, so that a header block that was decoded
once is known. RFC 9113 (HTTP/2), RFC 7541 (HPACK), "gRPC over HTTP2" of the gRPC project.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar
from urllib.parse import unquote

from deploykit.core.extras import require
from deploykit.measure.load.check import AnswerCheck, one_line
from deploykit.measure.load.http1 import MOST_BYTES, MOST_HEAD, TOO_LONG, NotHttpError
from deploykit.measure.load.records import NO_ANSWER, WRONG

hpack = require("hpack")

SERVICE = "/inference.GRPCInferenceService/"
OK, UNIMPLEMENTED = 0, 12
CALLER = {3, 5, 7, 9, 11, 12, 16}  # codes that blame the request
_STATUSES: Mapping[int, int] = {4: 504, 8: 429, 14: 503}  # as HTTP calls them
_DATA, _HEADERS, _RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = (
    *range(2),
    *range(3, 10),
)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_WINDOW_BYTES, _FRAME_BYTES = 65535, 16384  # before the server's settings
_MOST_FRAME_BYTES = (1 << 24) - 1
_MOST = (1 << 31) - 1  # of a window
_MOST_BLOCKS = 1024  # that are remembered
_REFUSED_STREAM = 7


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


_GREETING = b"".join(
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        # no table, no pushes, windows and frames as large as they may be
        _frame(4, 0, 0, struct.pack(">HIHIHIHI", 1, 0, 2, 0, 4, _MOST, 5, _MOST_FRAME_BYTES)),
        _frame(8, 0, 0, struct.pack(">I", _MOST - _WINDOW_BYTES)),
    )
)


def header_block(host: str, method: str) -> bytes:
    """The header block of a call to `method` of the service, without compression."""
    named = ((4, SERVICE + method), (1, host), (31, "application/grpc"))
    block = b"\x83\x86"  # POST, http
    for index, value in named:
        block += (bytes((index,)) if index < 15 else bytes((15, index - 15))) + _string(value)
    return block + b"\x00" + _string("te") + _string("trailers")


def _string(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    return b"\x7f" + encode_varint(len(data) - 127) + data


def encode_varint(value: int) -> bytes:
    """As protobuf and HPACK write integers; a negative one in 64 bits."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def field(number: int, data: bytes) -> bytes:
    """A field of a protobuf message that holds bytes."""
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


def call_of(message: bytes) -> bytes:
    """A message as gRPC frames it."""
    return struct.pack(">BI", 0, len(message)) + message


class Grpc:
    """One connection. After an answer: `error` says what is wrong with it, `keep` if it goes on."""

    greeting = _GREETING
    _blocks: ClassVar[dict[bytes, dict[str, str]]] = {}

    def __init__(self, block: bytes, calls: Sequence[bytes], check: AnswerCheck | None) -> None:
        self._block, self._calls, self._check = block, calls, check
        self.control = b""  # to send besides requests
        self.error: str | None = None
        self.keep = True
        self.code: int | None = None  # of the last answer
        self.message = b""
        self._stream, self._request, self._prefix = -1, 0, 0
        self._window, self._first_window, self._stream_window = (_WINDOW_BYTES,) * 3
        self._frame_bytes = _FRAME_BYTES
        self._left: memoryview = memoryview(b"")  # of the call, behind what windows let through
        self.buffer = bytearray()
        self._headers, self._body, self._fields = bytearray(), bytearray(), dict[str, str]()
        self._ends = False  # the server's side of the call
        self._taken = 0  # bytes of the connection's window that the server used

    def request(self, number: int) -> bytes:
        """The bytes of that call, as far as the server's windows let them through."""
        self._request = number
        self._stream += 2
        self._stream_window = self._first_window
        self._left = memoryview(self._calls[number])
        self._fields, self._body, self._ends = {}, bytearray(), False
        return _frame(_HEADERS, _END_HEADERS, self._stream, self._block) + self._release()

    def _release(self) -> bytes:
        frames = []
        while self._left and (room := min(self._window, self._stream_window)) > 0:
            part = self._left[: min(room, self._frame_bytes)]
            self._left = self._left[len(part) :]
            self._window -= len(part)
            self._stream_window -= len(part)
            frames.append(_frame(_DATA, 0 if self._left else _END_STREAM, self._stream, part))
        return b"".join(frames)

    def end(self) -> int | None:
        """The end of the connection completes no answer."""
        return None

    def feed(self, data: bytes) -> int | None:
        """The status of the answer that `data` completes, in HTTP's numbers; None: more must come.

        Raises NotHttpError.
        """
        self.buffer += data
        done, at = None, 0
        while len(self.buffer) >= at + 9:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", self.buffer, at)
            end = at + 9 + (high << 16 | low)
            if kind > _CONTINUATION and at == 0 and self.buffer.startswith(b"HTTP/1"):
                raise NotHttpError("is HTTP/1.1")
            if len(self.buffer) < end:
                break
            payload = bytes(self.buffer[at + 9 : end])
            at = end
            try:
                status = self._on_frame(kind, flags, stream & _MOST, payload)
            except (struct.error, IndexError, hpack.HPACKError) as exc:
                raise NotHttpError("has a damaged HTTP/2 frame") from exc
            done = status if status is not None else done
        del self.buffer[:at]
        return done

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> int | None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    self._stream_window += value - self._first_window
                    self._first_window = value
                elif name == 5:
                    self._frame_bytes = min(max(value, _FRAME_BYTES), _MOST_FRAME_BYTES)
            self.control += _frame(_SETTINGS, _ACK, 0) + self._release()
        elif kind == _PING and not flags & _ACK:
            self.control += _frame(_PING, _ACK, 0, payload)
        elif kind == _WINDOW:
            (more,) = struct.unpack(">I", payload)
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
            self.control += self._release()
        elif kind == _GOAWAY:
            self.keep = False
            if struct.unpack_from(">I", payload)[0] < self._stream:
                return self._fail(503, "the server is closing its connections")
        elif kind == _RST and stream == self._stream:
            code = struct.unpack(">I", payload)[0]
            refused = 503 if code == _REFUSED_STREAM else NO_ANSWER
            return self._fail(refused, f"the server reset the call: HTTP/2 code {code}")
        elif kind in (_DATA, _HEADERS, _CONTINUATION):
            return self._on_part(kind, flags, stream, payload)
        return None

    def _on_part(self, kind: int, flags: int, stream: int, payload: bytes) -> int | None:
        """A part of an answer. What belongs to an earlier call is left out."""
        if kind == _DATA:
            self._taken += len(payload)
            if self._taken > _MOST // 2:
                self.control += _frame(_WINDOW, 0, 0, struct.pack(">I", self._taken))
                self._taken = 0
        padded = flags & _PADDED and kind != _CONTINUATION
        start = (1 if padded else 0) + (5 if kind == _HEADERS and flags & _PRIORITY else 0)
        payload = payload[start : len(payload) - (payload[0] if padded else 0)]
        if kind == _DATA:
            if stream == self._stream:
                self._body += payload
        else:
            self._headers += payload
        if len(self._body) > MOST_BYTES or len(self._headers) > MOST_HEAD:
            raise NotHttpError(TOO_LONG)
        if flags & _END_HEADERS and kind != _DATA:
            block, self._headers = bytes(self._headers), bytearray()
            if stream == self._stream:
                self._fields |= self._decode(block)
        if stream != self._stream:
            return None
        if kind != _CONTINUATION and flags & _END_STREAM:
            self._ends = True
        whole = kind == _DATA or flags & _END_HEADERS
        return self._complete() if self._ends and whole else None

    @classmethod
    def _decode(cls, block: bytes) -> dict[str, str]:
        found = cls._blocks.get(block)
        if found is None:
            decoder = hpack.Decoder()
            decoder.max_allowed_table_size = 0
            decoder.header_table_size = 0
            found = {str(name): str(value) for name, value in decoder.decode(block)}
            if len(cls._blocks) >= _MOST_BLOCKS:
                cls._blocks.clear()
            cls._blocks[block] = found
        return found

    def _complete(self) -> int:
        """The answer is whole: the status in its trailers decides."""
        code = self._fields.get("grpc-status", "")
        if not re.fullmatch("[0-9]{1,3}", code):
            status = self._fields.get(":status", "none")
            return self._fail(WRONG, f"an answer without a gRPC status (HTTP status {status})")
        self.code = int(code)
        if self.code != OK:
            message = unquote(self._fields.get("grpc-message", ""))
            return self._fail(_STATUSES.get(self.code, 500), one_line(f"gRPC {code}: {message}"))
        if (
            len(self._body) < 5
            or self._body[0]
            or len(self._body) != 5 + int.from_bytes(self._body[1:5], "big")
        ):
            return self._fail(WRONG, "OK without one message that is not compressed")
        self.message = bytes(self._body[5:])
        self.keep = self.keep and not self._left
        self.error = None
        if self._check is not None:
            self.error, self._prefix = self._check.message_problem(
                self.message, self._prefix, self._request
            )
        return 200 if self.error is None else WRONG

    def _fail(self, status: int, error: str) -> int:
        self.error = error
        if self._left:  # the rest of the call is never sent: the connection cannot be used again
            self.keep = False
        return status


def infer_request(model: str, tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """A `ModelInferRequest`; `tensors`: name, datatype, shape, values."""
    inputs, raw = [], []
    for name, datatype, shape, values in tensors:
        sizes = b"".join(map(encode_varint, shape))
        inputs.append(field(1, name.encode()) + field(2, datatype.encode()) + field(3, sizes))
        raw.append(field(7, values))
    return field(1, model.encode()) + b"".join([*(field(5, each) for each in inputs), *raw])
