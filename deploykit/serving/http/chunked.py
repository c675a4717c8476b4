"""Read a chunked body (RFC 9112, 7.1) strictly and within limits; trailers are dropped."""

from __future__ import annotations

import re

from deploykit.core.errors import BadInput, TooLarge

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_SIZE_LINE_BYTES = 4096
_LINES = 1000  # about a millisecond
_SIZE_LINE, _DATA, _DATA_END, _TRAILER = range(4)


class ChunkedBody:
    """The state of one chunked body. Raises BadInput, and TooLarge above a limit."""

    def __init__(self, *, max_body_bytes: int, max_chunks: int, max_trailer_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_chunks = max_chunks
        self._max_trailer_bytes = max_trailer_bytes
        self._pieces: list[bytes] = []
        self._state = _SIZE_LINE
        self._line = b""  # the part received of a size line, a chunk's end or a trailer
        self._left = 0  # bytes of this chunk still to come
        self._body_bytes = self._chunks = self._trailer_bytes = self._lines = 0
        self.done = False

    @property
    def body(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def feed(self, data: bytes, at: int = 0) -> int:
        """Consume the body's bytes from `at` on, _LINES lines at most; returns the index after."""
        last = self._lines + _LINES
        while at < len(data) and not self.done and self._lines < last:
            if self._state == _DATA:
                piece = data[at : at + self._left]
                self._pieces.append(piece)
                self._left -= len(piece)
                at += len(piece)
                if not self._left:
                    self._state = _DATA_END
                continue
            end = data.find(b"\n", at) + 1
            piece = data[at : end or len(data)]
            self._lines += 1
            self._line += piece
            at += len(piece)
            self._read_line(complete=end > 0)
        return at

    def _read_line(self, *, complete: bool) -> None:
        line = self._line
        if self._state == _DATA_END:
            if not b"\r\n".startswith(line):
                raise BadInput("a chunk does not end where its size says")
        elif self._state == _TRAILER:
            if self._trailer_bytes + len(line) > self._max_trailer_bytes:
                limit = self._max_trailer_bytes
                raise TooLarge(f"the trailers are above {limit} bytes")
            if complete and not line.endswith(b"\r\n"):
                raise BadInput("a line after the last chunk does not end with CR LF")
        elif len(line) > _SIZE_LINE_BYTES:
            raise BadInput(f"the line of a chunk's size is above {_SIZE_LINE_BYTES} bytes")
        if not complete:
            return
        self._line = b""
        if self._state == _DATA_END:
            self._state = _SIZE_LINE
        elif self._state == _TRAILER:
            self._trailer_bytes += len(line)
            self.done = line == b"\r\n"
        else:
            self._begin_chunk(line)

    def _begin_chunk(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if not match:
            raise BadInput("the size of a chunk is not a hexadecimal number")
        self._left = int(match[1], 16)
        self._chunks += 1
        self._body_bytes += self._left
        if self._chunks > self._max_chunks:
            raise TooLarge(f"the body has more than {self._max_chunks} chunks")
        if self._body_bytes > self._max_body_bytes:
            raise TooLarge(
                f"the body is above {self._max_body_bytes} bytes",
                hint="start the server with a larger `max_body_bytes`",
            )
        self._state = _DATA if self._left else _TRAILER
