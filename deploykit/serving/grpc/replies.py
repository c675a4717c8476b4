"""The constant parts of gRPC replies, as HTTP/2 frames and HPACK blocks.

They do not use HPACK's dynamic table, so they are the same for all connections.
"""

from __future__ import annotations

import struct
from urllib.parse import quote as percent_encode

from deploykit.serving.http2.frames import END_HEADERS, END_STREAM, HEADERS, frame, literal

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


def error_block(status: str, message: str) -> bytes:
    """The trailers of a call that failed."""
    encoded = percent_encode(message[:_LONGEST_MESSAGE], safe=_SAFE).encode()
    return literal(b"grpc-status", b"%d" % STATUS[status]) + literal(b"grpc-message", encoded)
