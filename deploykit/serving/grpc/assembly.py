"""Assemble gRPC messages, which have a prefix of 5 bytes, from the pieces of a stream."""

from __future__ import annotations

import struct

PREFIX_BYTES = 5  # compressed or not, length
_LENGTH = struct.Struct(">I")
_SMALL_BYTES = 1024  # pieces below it are joined, as an object of Python costs more than its bytes


class MessageReader:
    """`have`: bytes received and not taken. `need`: of the next message with its prefix."""

    __slots__ = ("_data", "_later", "_start", "have", "need")

    def __init__(self) -> None:
        self._data = b""
        self._start = 0  # of the next message in it
        self._later: list[bytes | bytearray] = []  # the pieces after it
        self.have = 0
        self.need = 0  # 0 until the prefix has arrived

    def add(self, piece: bytes) -> None:
        if self.have:
            later = self._later
            if len(piece) >= _SMALL_BYTES:
                later.append(piece)
            elif later and type(later[-1]) is bytearray:
                later[-1] += piece
            else:
                later.append(bytearray(piece))
        else:
            self._data, self._start = piece, 0
        self.have += len(piece)
        if not self.need and self.have >= PREFIX_BYTES:
            self._read_prefix()

    def take(self) -> bytes:
        """The next message with its prefix, which must have arrived."""
        if self._later:
            self._join()
        data, start, end = self._data, self._start, self._start + self.need
        self.have -= self.need
        self.need = 0
        if self.have:
            self._start = end
            if self.have >= PREFIX_BYTES:
                self._read_prefix()
        else:
            self._data = b""
        return data[start:end]

    def _read_prefix(self) -> None:
        if self._later:
            self._join()
        self.need = PREFIX_BYTES + _LENGTH.unpack_from(self._data, self._start + 1)[0]

    def _join(self) -> None:
        self._data = b"".join((self._data[self._start :], *self._later))
        self._start, self._later = 0, []
