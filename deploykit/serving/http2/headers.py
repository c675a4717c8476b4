"""Decode and check HTTP/2 header blocks (HPACK, RFC 7541), with a cache of previous blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from hpack import Decoder, HPACKDecodingError

_CACHED = 64
_TABLE_SIZES = 2  # table sizes that a header block may begin with (RFC 7541, section 4.2)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")  # RFC 9113, section 8.2.1: no upper case
_VALUE = re.compile(rb"[^\0\r\n \t](?:[^\0\r\n]*[^\0\r\n \t])?|")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_REQUEST = frozenset((b":method", b":scheme", b":path"))
_OPTIONAL = frozenset((b":authority",))
_HOP_BY_HOP = b"connection proxy-connection keep-alive transfer-encoding upgrade".split()

H = TypeVar("H")
Pairs = list[tuple[bytes, bytes]]


class _Decoder(Decoder):
    """Bounds the changes of the table's size, which cost time but yield no header."""

    sizes = 0  # in this block

    def _update_encoding_context(self, data: bytes | memoryview) -> int:
        self.sizes += 1
        if self.sizes > _TABLE_SIZES:
            raise HPACKDecodingError("too many changes of the table's size")
        return super()._update_encoding_context(data)


class MalformedHeaders(Exception):  # noqa: N818 - RFC 9113 calls them malformed
    """The request's headers are not allowed (RFC 9113, section 8): a stream error."""


class HeaderReader(Generic[H]):
    """Reads the header blocks of one connection; `parse` makes a head from names and values."""

    def __init__(self, parse: Callable[[Pairs], H], max_bytes: int) -> None:
        self._parse = parse
        self._decoder = _Decoder(max_bytes)
        self._known: dict[bytes, H] = {}

    def read(self, block: bytes) -> H:
        """Return the head. Raises MalformedHeaders, and HPACKError, which ends the connection."""
        head = self._known.get(block)
        if head is not None:
            return head
        pairs, changed = self.decode(block)
        check_request(pairs)
        head = self._parse(pairs)
        if not changed and len(self._known) < _CACHED:
            self._known[block] = head
        return head

    def decode(self, block: bytes) -> tuple[Pairs, bool]:
        """Decode a block without other checks. Raises HPACKError.

        Also returns whether it changed HPACK's table, and so what equal blocks mean.
        """
        entries = self._decoder.header_table.dynamic_entries
        newest, count = (entries[0] if entries else None), len(entries)
        self._decoder.sizes = 0
        pairs = cast("Pairs", self._decoder.decode(block, raw=True))
        changed = len(entries) != count or (count > 0 and entries[0] is not newest)
        if changed:
            self._known.clear()
        return pairs, changed


def check_request(pairs: Pairs) -> None:
    """Raise MalformedHeaders unless the headers are those of a request."""
    count = 0
    while count < len(pairs) and pairs[count][0].startswith(b":"):
        count += 1
    pseudo = [name for name, _ in pairs[:count]]
    if not _REQUEST <= set(pseudo) <= _REQUEST | _OPTIONAL or len(set(pseudo)) < count:
        raise MalformedHeaders("a request has :method, :scheme and :path once, and no others")
    for name, value in pairs[:count]:
        if not _VALUE.fullmatch(value) or not (value or name in _OPTIONAL):
            raise MalformedHeaders("a pseudo-header is empty or has characters it cannot have")
    check_fields(pairs[count:])


def check_fields(pairs: Pairs) -> None:
    """Raise MalformedHeaders for pseudo-headers and for headers that HTTP/2 forbids."""
    for name, value in pairs:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise MalformedHeaders("a header has characters that it cannot have, or is misplaced")
        if name == b"content-length" and not _LENGTH.fullmatch(value):
            raise MalformedHeaders("content-length is not a number")
        if name in _HOP_BY_HOP or (name == b"te" and value != b"trailers"):
            raise MalformedHeaders("a header is about the connection, which HTTP/2 forbids")
