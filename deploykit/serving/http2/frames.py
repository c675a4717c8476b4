"""The frames of HTTP/2 (RFC 9113): types, flags and error codes."""

from __future__ import annotations

import struct

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
