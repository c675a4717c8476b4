"""Parse the head of an HTTP/1.1 request into a checked `Head`, within limits.

llhttp, the parser, has no limits itself and gets heads only: the connection reads the bodies.
Ambiguous messages are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import httptools
import numpy as np

from deploykit.core.errors import BadInput, TooLarge, quote
from deploykit.serving.transport.call import Head, Refusal, body_too_large, message_of
from deploykit.serving.transport.security import AccessControl

_USED = frozenset(
    b"host origin expect content-length content-encoding content-type transfer-encoding accept "
    b"accept-encoding authorization traceparent inference-header-content-length "
    b"access-control-request-headers access-control-request-private-network".split()
)
_LISTS = frozenset(  # a header that is repeated is one list, which is no valid traceparent
    b"accept accept-encoding content-encoding access-control-request-headers traceparent".split()
)
_ONCE = (b"host", b"transfer-encoding", b"content-length")  # proxies disagree about others
END = b"\r\n\r\n"
# RFC 9112, 3.2.2: proxies get such targets; their host replaces the header
_ABSOLUTE = re.compile(r"https?://([^/?#@]+)([/?].*)?", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one connection: sizes, counts and times."""

    header_bytes: int = 64 << 10
    headers: int = 100
    target_bytes: int = 8 << 10
    chunks: int = 65_536
    connections: int = 4096
    header_s: float = 10.0  # from the connection or a message's first byte; also for TLS
    stall_s: float = 30.0  # a pause in a body, or of a client that does not read its reply
    idle_s: float = 75.0
    linger_s: float = 2.0  # for reading the error reply


class _Fields:
    """A parser's callbacks collect here what llhttp finds in a head, complete or not."""

    def __init__(self, limits: HttpLimits) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self._limits = limits
        self._count = 0
        self.target = b""
        self.headers: dict[bytes, bytes] = {}
        self.complete = self.old = self.keep_alive = False
        self.refusal: Refusal | None = None

    def refuse(self, status: int, text: str) -> None:
        self.refusal = self.refusal or Refusal(status, text)

    def on_url(self, url: bytes) -> None:
        self.target += url
        if len(self.target) > self._limits.target_bytes:
            self.refuse(414, f"the target is above {self._limits.target_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        if self._count > self._limits.headers:
            self.refuse(431, f"there are more than {self._limits.headers} headers")
        name = name.lower()
        if name in _USED:
            value, before = value.strip(b" \t"), self.headers.get(name)  # llhttp keeps blanks
            if before is not None and name in _LISTS:
                value = before + b", " + value
            elif before is not None and (value != before or name in _ONCE):
                self.refuse(400, f"the header {quote(name.decode())} is given twice")
            self.headers[name] = value

    def on_headers_complete(self) -> None:
        # The parser drops the headers at the end of the message, which may follow at once.
        self.complete = True
        self.old = self.parser.get_http_version() == "1.0"
        self.keep_alive = self.parser.should_keep_alive()


def read_head(
    raw: bytes, limits: HttpLimits, access: AccessControl, max_body_bytes: int
) -> Head | None:
    """Parse a head up to its END, or as much of it as was received; None if more is needed."""
    fields = _Fields(limits)
    parser = fields.parser
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # the client offers another protocol, which a server may ignore
    except httptools.HttpParserError as exc:
        fields.refuse(400, f"the request is not valid HTTP/1.1: {quote(str(exc))}")
    if len(raw) > limits.header_bytes:
        fields.refuse(431, f"the headers are above {limits.header_bytes} bytes")
    if fields.complete != raw.endswith(END):
        text = "the request's head does not end where it should"
        if fields.target == b"*" and parser.get_method() == b"PRI":
            text = "this port speaks HTTP/1.1; HTTP/2 is spoken on the port for gRPC"
        fields.refuse(400, text)
    del fields.parser  # a reference cycle: only the garbage collector would free it
    if fields.refusal is not None:
        return Head(target=fields.target.decode("latin-1"), refusal=fields.refusal)
    method = parser.get_method().decode("latin-1")
    return _check(method, fields, access, max_body_bytes) if fields.complete else None


def _check(method: str, fields: _Fields, access: AccessControl, max_body_bytes: int) -> Head:
    """Return the head, with a refusal if the request is ambiguous or not allowed."""
    headers, old = fields.headers, fields.old
    host, origin = headers.get(b"host"), headers.get(b"origin")
    target = fields.target.decode("latin-1")
    if (absolute := _ABSOLUTE.fullmatch(target)) and (host is not None or old):
        host, target = absolute[1].encode("latin-1"), absolute[2] or "/"
        target = target if target[0] == "/" else f"/{target}"
    path = access.path_of(target)
    coding = headers.get(b"transfer-encoding")
    length = int(headers.get(b"content-length", b"0")) if coding is None else None
    if host is None and not old:
        fields.refuse(400, "the header Host is missing")
    elif coding is not None and (old or coding.lower() != b"chunked"):
        offered = "without HTTP/1.1" if old else "only chunked"
        fields.refuse(400, f"Transfer-Encoding {quote(coding)} is not offered, {offered}")
    elif refusal := access.refusal(method, path, host, origin, headers.get(b"authorization")):
        fields.refusal = refusal
    elif length is not None and length > max_body_bytes:
        fields.refuse(413, message_of(body_too_large(max_body_bytes)))
    return Head.of(
        method,
        target,
        path,
        headers,
        host=host,
        keep_alive=fields.keep_alive,
        old=old,
        length=length,
        expect=not old and headers.get(b"expect", b"").lower() == b"100-continue",
        cors=access.cors_headers(origin, host, headers),
        refusal=fields.refusal,
    )


class SizedBody:
    """A body of known length, received directly into its memory; `left`: the part to come.

    The memory is uninitialised: the system allocates pages on the first write, so a length that a
    client only claims costs nothing. The binary part is aligned for numbers.
    """

    def __init__(self, length: int, json_bytes: bytes | None, received: bytes) -> None:
        """Allocate the memory and copy the `received` part. Raises MemoryError."""
        digits = (json_bytes or b"")[-4:]  # 16 divides 10,000
        pad = -int(digits) % 16 if digits.isdigit() else 0
        self.body: memoryview = np.empty(pad + length, np.uint8).data[pad:]
        self.body[: len(received)] = received
        self.left = self.body[len(received) :]


_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_LINES = 1000  # about a millisecond


class ChunkedBody:
    """Reads a chunked body (RFC 9112, 7.1) strictly. Raises BadInput, TooLarge above a limit."""

    def __init__(self, limits: HttpLimits, max_body_bytes: int) -> None:
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self.body = bytearray()
        self._left = 0  # bytes of this chunk still to come
        self._in_chunk = False  # its end is still to come
        self._body_bytes = self._chunks = self._trailer_bytes = self._lines = 0
        self._last = False  # only trailers follow
        self.done = False

    def feed(self, data: bytes, at: int) -> int:
        """Consume bytes from `at` on, at most _LINES whole lines; return the index after them."""
        last = self._lines + _LINES
        while at < len(data) and not self.done and self._lines < last:
            if self._left:
                piece = data[at : at + self._left]
                self.body += piece
                self._left -= len(piece)
                at += len(piece)
                continue
            end = data.find(b"\n", at) + 1
            line = data[at : end or len(data)]
            if self._trailer_bytes + len(line) > self._limits.header_bytes:
                most = self._limits.header_bytes
                raise TooLarge(f"lines between or after chunks are above {most} bytes")
            if self._in_chunk and not b"\r\n".startswith(line):
                raise BadInput("a chunk does not end where its size says")
            if not end:
                break
            self._lines += 1
            self._read_line(line)
            at = end
        return at

    def _read_line(self, line: bytes) -> None:
        if self._in_chunk:
            self._in_chunk = False
        elif self._last:
            if not line.endswith(b"\r\n"):
                raise BadInput("a line after the last chunk does not end with CR LF")
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
        if self._chunks > self._limits.chunks:
            raise TooLarge(f"the body has more than {self._limits.chunks} chunks")
        if self._body_bytes > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        self._in_chunk = self._left > 0
        self._last = not self._in_chunk
