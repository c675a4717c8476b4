"""Assemble gRPC messages, which have a prefix of 5 bytes, from the pieces of a stream."""

from __future__ import annotations

PREFIX_BYTES = 5  # compressed or not, length


class MessageReader:
    """`have`: bytes received and not taken. `need`: of the next message with its prefix."""

    __slots__ = ("_begin", "_pieces", "have", "need")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._begin = 0  # of the next message, in the first piece
        self.have = 0
        self.need = 0  # 0 while unknown

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.have += len(piece)

    def measure(self) -> int:
        """Read `need` from the prefix, which must have arrived."""
        self._join()
        prefix = self._pieces[0][self._begin : self._begin + PREFIX_BYTES]
        self.need = PREFIX_BYTES + int.from_bytes(prefix[1:], "big")
        return self.need

    def take(self) -> bytes:
        """The next message with its prefix, which must have arrived."""
        self._join()
        data, at, need = self._pieces[0], self._begin, self.need
        self.have -= need
        self.need = 0
        if self.have:
            self._begin = at + need
        else:
            self.clear()
        return data[at : at + need] if self.have or at else data

    def clear(self) -> None:
        self._pieces = []
        self._begin = 0

    def _join(self) -> None:
        if len(self._pieces) > 1:
            self._pieces[0] = self._pieces[0][self._begin :]
            self._pieces = [b"".join(self._pieces)]
            self._begin = 0
