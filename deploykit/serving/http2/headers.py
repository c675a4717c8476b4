"""Decode HTTP/2 header blocks (HPACK, RFC 7541), with a cache of previous blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from hpack import Decoder
from hpack.table import HeaderTable

_CACHED = 64

H = TypeVar("H")
Pairs = list[tuple[bytes, bytes]]


class _Table(HeaderTable):
    """HPACK's dynamic table that counts its changes: they change what equal blocks mean."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    def _shrink(self) -> None:
        self.changes += 1
        super()._shrink()


class HeaderReader(Generic[H]):
    """Reads the header blocks of one connection; `parse` makes a head from names and values."""

    def __init__(self, parse: Callable[[Pairs], H], max_bytes: int) -> None:
        self._parse = parse
        self._decoder = Decoder(max_bytes)
        self._table = self._decoder.header_table = _Table()
        self._known: dict[bytes, H] = {}

    def read(self, block: bytes) -> H:
        """Raises HPACKError, after which the connection must close."""
        head = self._known.get(block)
        if head is not None:
            return head
        changes = self._table.changes
        head = self._parse(cast("Pairs", self._decoder.decode(block, raw=True)))
        if self._table.changes != changes:
            self._known.clear()
        elif len(self._known) < _CACHED:
            self._known[block] = head
        return head
