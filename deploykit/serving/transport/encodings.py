"""The encodings of HTTP bodies and gRPC messages: charsets and compression."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable

from deploykit.core.errors import BadInput, TooLarge, UnknownEncoding, quote
from deploykit.core.tensors import Bytes

COMPRESSED = b"Content-Encoding: %s\r\nVary: Accept-Encoding\r\n"
_CHARSET = re.compile(rb';\s*charset="?([^\s;"]+)', re.I)
_UTF8 = (b"utf-8", b"utf8", b"us-ascii", b"ascii", b"binary")
_LATIN = (b"iso-8859-1", b"latin1", b"windows-1252")
_WINDOWS = {b"gzip": 31, b"deflate": 15}  # zlib's `wbits`; deflate has zlib's header
_PIECE_BYTES = 1 << 16  # input of zlib in one step
_GROWTH_BYTES = 1 << 20  # output of zlib in one step
_MEMBERS = 256  # members of one gzip body: each costs time, however short
_ACCEPTED = re.compile(rb"(gzip|deflate)(?:\s*;\s*q=(?:1(?:\.0*)?|0\.0*[1-9]\d*))?")
_FAST = 1  # compression level: higher ones cost a server more than they save


def body_too_large(most_bytes: int, when: str = "") -> TooLarge:
    hint = "start the server with a larger `max_body_bytes`"
    return TooLarge(f"the body is above {most_bytes} bytes{when}", hint=hint)


def other_charset(content_type: bytes | None) -> bytes | None:
    """Return the charset that a Content-Type names, unless it is one that is read as UTF-8."""
    match = _CHARSET.search(content_type or b"")
    return None if match is None or match[1].lower() in _UTF8 else match[1]


def check_charset(charset: bytes | None, body: Bytes) -> None:
    """Raise UnknownEncoding unless `body` reads as UTF-8 in the charset that `other_charset` found.

    Java's HTTP clients name ISO-8859-1 for any text, which changes nothing in ASCII.
    """
    if charset is None or (charset.lower() in _LATIN and bytes(body).isascii()):
        return
    name = quote(charset.decode("latin-1"))
    raise UnknownEncoding(f"the charset {name} is not offered", hint="send UTF-8")


def decompress(body: Bytes, encoding: bytes | None, max_bytes: int) -> Bytes:
    """Return `body` decompressed; unchanged if the encoding is None or identity.

    Raises UnknownEncoding unless it is gzip or deflate, BadInput for a truncated or damaged body or
    trailing bytes, and TooLarge above `max_bytes`, which is checked during decompression.
    """
    if encoding is None:
        return body
    text = encoding.decode("latin-1")
    names = [name.strip().removeprefix("x-") for name in text.lower().split(",")]
    names = [name for name in names if name not in ("identity", "")]
    if not names:
        return body
    name = names[0]
    if len(names) > 1 or name.encode() not in _WINDOWS:
        hint = "send gzip, deflate or plain bytes"
        raise UnknownEncoding(f"the encoding {quote(text)} is not supported", hint=hint)
    try:
        return _inflate(body, name, max_bytes)
    except zlib.error as exc:
        raise BadInput(f"the body is not valid {name}") from exc


def _inflate(body: Bytes, name: str, max_bytes: int) -> bytes:
    out, at = io.BytesIO(), 0
    for _ in range(_MEMBERS):
        stream = zlib.decompressobj(_WINDOWS[name.encode()])
        while not stream.eof:
            piece: Bytes = stream.unconsumed_tail
            if not piece:
                piece, at = body[at : at + _PIECE_BYTES], at + _PIECE_BYTES
            if not piece:
                raise BadInput(f"the body ends in the middle of its {name} data")
            left = max_bytes - out.tell()
            got = stream.decompress(piece, min(left + 1, _GROWTH_BYTES))
            if len(got) > left:
                raise body_too_large(max_bytes, " when decompressed")
            out.write(got)
        at = min(at, len(body)) - len(stream.unused_data)
        if at == len(body):
            return out.getvalue()
        if name != "gzip":  # only gzip may have several members
            raise BadInput(f"{len(body) - at} bytes follow the body's {name} data")
    raise BadInput(f"the body is {name} in more than {_MEMBERS} parts")


def choose_encoding(accept: bytes) -> bytes | None:
    """Return b"gzip" or b"deflate", which Accept-Encoding names first and allows, else None."""
    matches = [_ACCEPTED.fullmatch(each.strip()) for each in accept.lower().split(b",")]
    return next((match[1] for match in matches if match), None)


def compress(parts: Iterable[Bytes], coding: bytes) -> bytes:
    """Return the parts as one compressed body; `coding` as returned by `choose_encoding`."""
    stream = zlib.compressobj(_FAST, zlib.DEFLATED, _WINDOWS[coding])
    return b"".join([*map(stream.compress, parts), stream.flush()])
