"""Walk a protobuf file by its field headers, reading only the pages that are asked for."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import overload

from deploykit.core.errors import BadInput

_PAGE_BYTES = 1 << 14
MAX_NESTED = 12  # graphs in graphs: ONNX Runtime 1.23 opens 12 in 0.2 s, 20 in 30 s
_MAX_FIELDS = 5_000_000  # read of one file: each costs a microsecond or two


class Pages:
    """A file's bytes by position, read where they are asked for. Raises IndexError past the end.

    Raises ValueError for what is no regular file. `left`: fields that may still be read.

    Not mapped: a server looks at files that somebody may be truncating, which ends a process that
    has them mapped (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO must not wait
        info = os.fstat(self._file)
        if not stat.S_ISREG(info.st_mode):
            os.close(self._file)
            raise ValueError("not a regular file")
        self._size = info.st_size
        self.left = _MAX_FIELDS
        self._at, self._page = 0, b""

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> bytes: ...
    def __getitem__(self, key: int | slice) -> int | bytes:
        if isinstance(key, slice):
            begin, end, _ = key.indices(self._size)
            return os.pread(self._file, max(0, end - begin), begin)
        if not 0 <= key - self._at < len(self._page):
            self._at, self._page = key, os.pread(self._file, _PAGE_BYTES, key)
        return self._page[key - self._at]


def fields(data: Pages, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Protobuf fields in data[at:end]: (number, begin, end), or (number, value, -1) of a varint.

    Raises ValueError, or IndexError at the end of the file, for what is no protobuf.
    """
    for number, wire, _, begin, stop in spans(data, at, end):
        if wire == 0:
            yield number, _varint(data, begin)[0], -1
        elif wire == 2:
            yield number, begin, stop


def spans(data: Pages, at: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Protobuf fields in data[at:end]: (number, wire type, start, begin of the value, end).

    Raises as `fields` does.
    """
    while at < end:
        start = at
        key, at = _varint(data, at)
        number, wire, begin = key >> 3, key & 7, at
        data.left -= 1
        if not number or data.left < 0:  # zeros are no protobuf, however many
            raise ValueError("not a protobuf")
        if wire == 0:
            _, at = _varint(data, at)
        elif wire == 2:
            size, begin = _varint(data, at)
            at = begin + size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError("not a protobuf")
        if at > end:
            raise ValueError("not a protobuf")
        yield number, wire, start, begin, at


def damaged(path: Path) -> BadInput:
    """The error for an ONNX file that a reader of protobuf refuses."""
    try:
        with Pages(path) as data:
            if _deeply_nested(data):
                return too_deep(path)
    except (OSError, ValueError, IndexError):
        pass
    return BadInput(f"{path}: is a truncated or damaged ONNX file")


def too_deep(path: Path) -> BadInput:
    return BadInput(
        f"{path}: has subgraphs in subgraphs, more than {MAX_NESTED} deep",
        hint="If, Loop and Scan hold subgraphs: export the model with fewer in one another",
    )


def _deeply_nested(data: Pages) -> bool:
    left = [(at, end, 0) for number, at, end in fields(data, 0, len(data)) if number == 7]
    while left:
        graph, stop, depth = left.pop()
        if depth > MAX_NESTED:
            return True
        for number, at, end in fields(data, graph, stop):
            if number != 1 or end == -1:  # a node
                continue
            for inner, begin, last in fields(data, at, end):
                if inner == 5 and last != -1:  # an attribute
                    found = fields(data, begin, last)
                    left += [(a, b, depth + 1) for n, a, b in found if n in (6, 11) and b != -1]
    return False


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _varint(data: Pages, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not a protobuf")
