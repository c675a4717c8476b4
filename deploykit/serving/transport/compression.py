"""Decompress request bodies, and compress replies for clients that accept it.

The size limit of a request applies to the decompressed size, checked during decompression.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache

from deploykit.core.errors import BadInput, TooLarge, UnknownEncoding, quote
from deploykit.core.tensors import Bytes

_WINDOWS = {b"gzip": 31, b"deflate": 15}  # zlib's `wbits`; deflate has zlib's header
_PIECE_BYTES = 1 << 16  # passed to zlib at once
_GROWTH_BYTES = 1 << 20  # produced by it at once
_MEMBERS = 256  # of one gzip body: each costs time, however short
_QUALITY = re.compile(rb"0(\.\d{0,3})?|1(\.0{0,3})?")
_FAST = 1  # compression level: higher ones cost a server more than they save


def decompress(body: Bytes, encoding: bytes, max_bytes: int) -> Bytes:
    """`body` decompressed; unchanged if the encoding is identity.

    Raises UnknownEncoding unless it is gzip or deflate, TooLarge above `max_bytes`, and
    BadInput for a truncated or damaged body, or one with trailing bytes.
    """
    name = encoding.strip().lower()
    if name in (b"identity", b""):
        return body
    if name not in _WINDOWS:
        raise UnknownEncoding(
            f"Content-Encoding {quote(encoding.decode('latin-1'))} is not supported",
            hint="send gzip, deflate or plain bytes",
        )
    try:
        return _inflate(body, name.decode(), max_bytes)
    except zlib.error as exc:
        raise BadInput(f"the body is not valid {name.decode()}") from exc


def _inflate(body: Bytes, name: str, max_bytes: int) -> bytes:
    out = io.BytesIO()
    at, members, remaining = 0, 0, max_bytes
    while at < len(body) or members == 0:
        if members == _MEMBERS:
            raise BadInput(f"the body is {name} in more than {_MEMBERS} parts")
        members += 1
        stream = zlib.decompressobj(_WINDOWS[name.encode()])
        while not stream.eof:
            piece: Bytes = stream.unconsumed_tail
            if not piece:
                piece, at = body[at : at + _PIECE_BYTES], at + _PIECE_BYTES
            if not piece:
                raise BadInput(f"the body ends in the middle of its {name} data")
            got = stream.decompress(piece, min(remaining + 1, _GROWTH_BYTES))
            if len(got) > remaining:
                raise TooLarge(
                    f"the body is above the limit of {max_bytes} bytes when decompressed",
                    hint="send smaller requests, or start the server with a larger "
                    "`max_body_bytes`",
                )
            remaining -= len(got)
            out.write(got)
        at = min(at, len(body)) - len(stream.unused_data)
        if name != "gzip" and at < len(body):  # only gzip may have several members
            raise BadInput(f"{len(body) - at} bytes follow the body's {name} data")
    return out.getvalue()


@lru_cache(maxsize=256)
def choose_encoding(accept: bytes) -> bytes | None:
    """b"gzip" or b"deflate" if Accept-Encoding prefers it to plain bytes, else None.

    Only codings that are named count, not `*`.
    """
    weights = {}
    for item in accept.lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        weights[name] = _weight(parameters)
    best = max(_WINDOWS, key=lambda name: weights.get(name, 0.0))
    weight = weights.get(best, 0.0)
    return best if weight > 0 and weight >= weights.get(b"identity", 0.0) else None


def _weight(parameters: Iterable[bytes]) -> float:
    """The `q` of one item, 1 when absent, 0 when it is not a number from 0 to 1."""
    for parameter in parameters:
        key, _, value = parameter.partition(b"=")
        if key.strip() == b"q":
            found = _QUALITY.fullmatch(value.strip())
            return float(value) if found else 0.0
    return 1.0


def compress(parts: Iterable[Bytes], coding: bytes) -> bytes:
    """The parts as one compressed body; `coding` as returned by `choose_encoding`."""
    stream = zlib.compressobj(_FAST, zlib.DEFLATED, _WINDOWS[coding])
    return b"".join([*map(stream.compress, parts), stream.flush()])
