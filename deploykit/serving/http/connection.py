"""One client's HTTP/1.1 connection: read a request, pass it to the routes, reply, read the next.

llhttp, which has no limits itself, parses heads only; ambiguous messages are refused. Every wait
has a limit. A head equal to a previous one is not parsed again: clients repeat theirs. A large body
is received directly into its final memory.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence
from email.utils import formatdate
from enum import IntEnum
from functools import cache, lru_cache, partial
from http import HTTPStatus

import httptools
import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Overloaded, TooLarge, quote
from deploykit.core.tensors import Bytes
from deploykit.pipelines.threads import Peer
from deploykit.serving.transport.connection import (
    RETRY,
    SPARE,
    Call,
    Connection,
    Head,
    Limits,
    MemoryBudget,
    Port,
    Refusal,
    extend,
    message_of,
    reply_error,
)
from deploykit.serving.transport.encodings import body_too_large
from deploykit.serving.transport.security import HEALTH, AccessControl

READ_BYTES = 64 << 10
PIECE_BYTES = 1 << 20  # the most bytes of a body received at once: their new memory takes 1 ms
_JOINED_BYTES = 64 << 10  # larger replies are written in parts, without a copy
_HEALTH = (b"GET " + HEALTH.encode(), b"HEAD " + HEALTH.encode())
_KNOWN_HEADS = 1024
_KNOWN_HEAD_BYTES = 1024
_UNREAD = Head()
_NOTHING = memoryview(b"")

_SINGLE = frozenset(  # any other header that is repeated is one list
    b"host origin expect content-length content-type transfer-encoding authorization "
    b"inference-header-content-length".split()
)
_ONCE = (b"host", b"transfer-encoding", b"content-length")  # proxies disagree about others
END = b"\r\n\r\n"
_END_BYTES = len(END)
# RFC 9112, 3.2.2: proxies get such targets; their host replaces the header
_ABSOLUTE = re.compile(r"https?://([^/?#@]+)([/?].*)?", re.IGNORECASE | re.DOTALL)

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_LINES = 500  # about a millisecond
_TARGET_BYTES = 8 << 10
_CHUNKS = 65_536


class _Fields:
    """A parser's callbacks collect here what llhttp finds in a head, complete or not."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.target = b""
        self.pairs: list[tuple[bytes, bytes]] = []  # the headers
        self.complete = self.old = self.keep_alive = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name.lower(), value.strip(b" \t")))  # llhttp keeps blanks

    def on_headers_complete(self) -> None:
        # The parser drops the headers at the end of the message, which may follow at once.
        self.complete = True
        self.old = self.parser.get_http_version() == "1.0"
        self.keep_alive = self.parser.should_keep_alive()

    def headers(self) -> tuple[dict[bytes, bytes], str]:
        """Return the headers, and why the request is ambiguous, or ""."""
        found: dict[bytes, bytes] = {}
        repeated = ""
        for name, value in self.pairs:
            before = found.get(name)
            if before is None:
                found[name] = value
            elif name not in _SINGLE:
                found[name] = before + b", " + value
            elif value != before or name in _ONCE:
                repeated = f"the header {quote(name.decode())} is given twice"
        return found, repeated


def read_head(
    limits: Limits, access: AccessControl, max_body_bytes: int, raw: bytes
) -> Head | None:
    """Parse a head up to its END, or as much of it as was received; None if more is needed.

    The head has a refusal if the request is invalid, ambiguous or not allowed.
    """
    fields, invalid = _Fields(), ""
    try:
        fields.parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # the client offers another protocol, which a server may ignore
    except httptools.HttpParserError as exc:
        invalid = f"the request is not valid HTTP/1.1: {quote(str(exc))}"
    method = fields.parser.get_method().decode("latin-1")
    del fields.parser  # a reference cycle: only the garbage collector would free it
    if raw.startswith(b"PRI * HTTP/2"):
        invalid = "this port speaks HTTP/1.1; HTTP/2 is spoken on the port for gRPC"
    elif not invalid and fields.complete != raw.endswith(END):
        invalid = "the request's head does not end where it should"
    headers, repeated = fields.headers()
    target = fields.target.decode("latin-1")
    refusal = Refusal(400, invalid or repeated) if invalid or repeated else None
    if len(target) > _TARGET_BYTES:
        refusal = Refusal(414, f"the target is above {_TARGET_BYTES} bytes")
    elif len(fields.pairs) > limits.headers or len(raw) > limits.header_bytes:
        most = f"{limits.headers} headers or {limits.header_bytes} bytes"
        refusal = Refusal(431, f"the request's head is above {most}")
    if refusal is not None:
        return Head(target=target, refusal=refusal)
    return _check(method, fields, headers, access, max_body_bytes) if fields.complete else None


def _check(
    method: str,
    fields: _Fields,
    headers: dict[bytes, bytes],
    access: AccessControl,
    max_body_bytes: int,
) -> Head:
    """Return the head, with a refusal if the request is not allowed."""
    target, old = fields.target.decode("latin-1"), fields.old
    host = headers.get(b"host")
    if (absolute := _ABSOLUTE.fullmatch(target)) and (host is not None or old):
        host, target = absolute[1].encode("latin-1"), absolute[2] or "/"
        target = target if target[0] == "/" else f"/{target}"
    path = access.path_of(target)
    coding = headers.get(b"transfer-encoding")
    length = int(headers.get(b"content-length", b"0")) if coding is None else None
    refusal: Refusal | None
    if host is None and not old:
        refusal = Refusal(400, "the header Host is missing")
    elif coding is not None and (old or coding.lower() != b"chunked"):
        offered = "without HTTP/1.1" if old else "only chunked"
        refusal = Refusal(400, f"Transfer-Encoding {quote(coding)} is not offered, {offered}")
    else:
        refusal = access.refusal(method, path, host, headers)
    if refusal is None and length is not None and length > max_body_bytes:
        refusal = Refusal(413, message_of(body_too_large(max_body_bytes)))
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
        cors=access.cors_headers(host, headers),
        refusal=refusal,
    )


class ChunkedBody:
    """Reads a chunked body (RFC 9112, 7.1) strictly. Raises BadInput, TooLarge above a limit."""

    def __init__(self, limits: Limits, max_body_bytes: int) -> None:
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self.body = bytearray()
        self.done = False
        self._left = 0  # bytes of this chunk still to come, with the CR LF after it
        self._body_bytes = self._chunks = self._trailer_bytes = self._lines = 0
        self._last = False  # only trailers follow

    def feed(self, data: bytes, at: int) -> int:
        """Consume bytes from `at` on, at most _LINES whole lines; return the index after them."""
        last = self._lines + _LINES
        while at < len(data) and not self.done and self._lines < last:
            if self._left:
                piece = data[at : at + self._left]
                self.body += piece
                self._left -= len(piece)
                at += len(piece)
                if not self._left:
                    if not self.body.endswith(b"\r\n"):
                        raise BadInput("a chunk does not end where its size says")
                    del self.body[-2:]
                continue
            end = data.find(b"\n", at) + 1
            line = data[at : end or len(data)]
            if self._trailer_bytes + len(line) > self._limits.header_bytes:
                most = self._limits.header_bytes
                raise TooLarge(f"lines between or after chunks are above {most} bytes")
            if not end:
                break
            self._lines += 1
            at = end
            if self._last:
                if not line.endswith(b"\r\n"):
                    raise BadInput("a line after the last chunk does not end with CR LF")
                self._trailer_bytes += len(line)
                self.done = line == b"\r\n"
            else:
                self._begin_chunk(line)
        return at

    def _begin_chunk(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if not match:
            raise BadInput("the size of a chunk is not a hexadecimal number")
        size = int(match[1], 16)
        self._chunks += 1
        self._body_bytes += size
        if self._chunks > _CHUNKS:
            raise TooLarge(f"the body has more than {_CHUNKS} chunks")
        if self._body_bytes > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        self._last = size == 0
        self._left = size and size + 2


class State(IntEnum):
    """A connection is in one state, which decides what received bytes are."""

    NEW = 0  # waits for the first request
    IDLE = 1  # waits for another request
    HEAD = 2  # part of a head received
    SIZED = 3  # part of a body received whose length is known
    CHUNKED = 4  # part of a chunked body received
    ANSWERING = 5  # the request is being answered
    LAST = 6  # reads no more; closes once all is sent
    REFUSED = 7  # reads no more; the client gets time to read the error reply
    CLOSED = 8


NEW, IDLE, HEAD, SIZED, CHUNKED, ANSWERING, LAST, REFUSED, CLOSED = State


class Exchange(Call):
    """A request of a connection."""

    __slots__ = ("begun_s", "connection", "keep_alive")

    def __init__(self, connection: HttpConnection, head: Head) -> None:
        listener = connection.listener
        Call.__init__(self, head, listener.memory)
        self.connection = connection
        self.keep_alive = head.keep_alive
        self.begun_s = listener.turns.clock_s() if listener.records else 0.0

    @property
    def peer(self) -> Peer:
        return Peer.of(self.connection.transport.get_extra_info("peername"), self.connection)

    def reply(self, status: int, headers: bytes, parts: Sequence[Bytes]) -> None:
        """Send the reply. Raises Overloaded for an answer above the memory budget."""
        connection, head = self.connection, self.head
        if self.gone:
            return
        if self.held_bytes:  # the request is not needed any more
            self.release()
        listener = connection.listener
        length = sum(map(len, parts))
        large = length > _JOINED_BYTES
        if large and status < 400:
            connection.count_unsent()
            if not self.reserve(length):
                raise Overloaded(self.memory.message)
        listener.replies[status] += 1
        if listener.records:
            asked = f"{quote(head.method)[1:-1]} {quote(head.target)[1:-1]}"
            listener.record(self, asked, str(status), connection.transport, failed=status >= 400)
        if listener.draining and not connection.kept:
            self.keep_alive = False
        end = b"\r\n"
        if head.old or not self.keep_alive:
            end = b"Connection: %b\r\n\r\n" % (b"keep-alive" if self.keep_alive else b"close")
        size = b"Content-Length: %d\r\n" % length
        if head.method == "HEAD":
            parts = ()
        lines: list[Bytes] = [_status_lines(status), headers, head.cors, size, end]
        connection.sent_bytes += length
        if large:
            connection.write_large([b"".join(lines), *parts])
            self.release()
        else:
            connection.transport.write(b"".join([*lines, *parts]))
        connection.end_exchange(self)


@cache
def _status_lines(status: int) -> bytes:
    """Return the first two lines of a reply, status and Date; its cache is cleared in time."""
    date = formatdate(usegmt=True)
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nDate: {date}\r\n".encode()


class Listener(Port):
    """State that all HTTP/1.1 connections share. `handle` gets each complete request."""

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        limits: Limits,
        access: AccessControl,
        max_body_bytes: int,
        memory: MemoryBudget,
    ) -> None:
        super().__init__(limits, memory)
        self.handle = handle
        self.max_body_bytes = max_body_bytes
        self.view = memoryview(bytearray(READ_BYTES))  # only one connection reads at a time
        self._spare: deque[HttpConnection] = deque()  # clients above the limit, the newest of them
        self.read_long = partial(read_head, limits, access, max_body_bytes)
        self.read_short = lru_cache(_KNOWN_HEADS)(self.read_long)  # clients repeat their heads
        self.forget_heads = self.read_short.cache_clear  # other requests are allowed now
        self.longest_s = dict.fromkeys(State, limits.stall_s) | {  # of each state
            NEW: limits.header_s,
            IDLE: limits.idle_s,
            HEAD: limits.header_s,
            REFUSED: limits.linger_s,
        }

    def connect(self) -> HttpConnection:
        return HttpConnection(self)

    def tick(self, now_s: float) -> None:
        _status_lines.cache_clear()  # their Date is that of a tick
        super().tick(now_s)

    def has_spare_place(self, connection: HttpConnection) -> bool:
        """Return whether a new connection is one above the limit, which may ask for the health."""
        if self.has_place():
            return False
        self._spare.append(connection)
        if len(self._spare) > SPARE:
            self._spare.popleft().refuse_spare()
        return True


class HttpConnection(Connection):
    """One client. `_state` says what is being read, into `_body` for `_exchange`."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self.listener = listener
        self._limits = listener.limits
        self._state = NEW
        self._spare = False  # above the limit of connections: only health checks are answered
        self._by_s = listener.now_s + listener.limits.header_s  # when the client must have acted
        self._body: memoryview | ChunkedBody | None = None
        self._left = _NOTHING  # the part of a body of known length that is to come
        self._exchange = Exchange(self, _UNREAD)  # the request that is read or answered

    @property
    def unanswered(self) -> int:
        return int(self.queued or self.answering)

    @property
    def idle_since_s(self) -> float | None:
        busy = self._state > HEAD or self.queued or self.unsent_bytes
        return None if busy else self._by_s - self.listener.longest_s[self._state]

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._spare = self.listener.has_spare_place(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._state = CLOSED
        self._discard()
        self._exchange.abandon()
        del self._exchange  # a reference cycle: only the garbage collector would free it

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        if self._state is SIZED:
            return self.part_of(self._left[:PIECE_BYTES])
        return self.part_of(self.listener.view)

    def buffer_updated(self, nbytes: int) -> None:
        if self._state is SIZED:
            self._receive(nbytes)
        elif self._state <= ANSWERING:  # else received data are dropped
            self.data_received(bytes(self.listener.view[:nbytes]))

    def is_urgent(self, data: bytes) -> bool:
        """Return whether received data are just a cheap health check."""
        return data.startswith(_HEALTH) and data.find(END) == len(data) - _END_BYTES

    def refuse_spare(self) -> None:
        self._refuse(503, f"there are {self._limits.connections} connections already")

    def resume_writing(self) -> None:
        self._by_s = max(self._by_s, self.listener.now_s + self._limits.stall_s)
        super().resume_writing()

    # -- requests --------------------------------------------------------------------------------

    def process(self, data: bytes) -> None:
        """Process the next request, or a part of it; what follows waits for another turn."""
        if self._state <= HEAD:
            self._read(data)
        elif isinstance(self._body, ChunkedBody):
            self._read_chunks(self._body, data, 0)

    def _read(self, data: bytes) -> None:
        data = data.lstrip(b"\r\n")  # empty lines, as after a body
        end = data.find(END)
        stop = len(data) if end < 0 else end + _END_BYTES
        short = stop <= _KNOWN_HEAD_BYTES
        head = (self.listener.read_short if short else self.listener.read_long)(data[:stop])
        if head is not None:
            self._begin(head, data, stop)
        elif data:
            self.keep(data)
            if self._state is not HEAD:
                self._enter(HEAD)

    def _begin(self, head: Head, data: bytes, at: int) -> None:
        """Start a request; its body is in `data` from `at` on, as far as it was received."""
        self._exchange = Exchange(self, head)
        refusal, length, size = head.refusal, head.length, len(data)
        if refusal is not None:
            self._enter(SIZED)
            self._refuse(refusal.status, refusal.text, refusal.headers)
        elif self._spare and (length != 0 or not head.path.startswith(HEALTH)):
            self.refuse_spare()
        elif length is not None and at + length <= size:
            self._complete(data[at : at + length], data[at + length :])
        else:
            if head.expect and at == size:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._begin_body(head, data, at)

    def _begin_body(self, head: Head, data: bytes, at: int) -> None:
        if head.length is None:
            self._enter(CHUNKED)
            self._body = chunks = ChunkedBody(self._limits, self.listener.max_body_bytes)
            self._read_chunks(chunks, data, at)
            return
        self._enter(SIZED)
        pad = -(head.json_bytes or 0) % 16  # the binary part is aligned for numbers
        try:  # uninitialised: a length that a client only claims costs no memory
            self._body = body = np.empty(pad + head.length, np.uint8).data[pad:]
        except MemoryError:
            self._refuse(503, f"there is no memory for a body of {head.length} bytes", RETRY)
            return
        size = len(data) - at
        body[:size], self._left = data[at:], body[size:]

    def _receive(self, size: int) -> None:
        """Count `size` bytes of a body of known length, which are in place already."""
        if not self._reserve(size):
            return
        self._left = self._left[size:]
        if not self._left:
            self._state, self.answering = ANSWERING, True
            self.listener.turns.run(self._end_body)
        elif self.listener.turns.late():
            self.pause()
            self.listener.turns.wait(self.go_on)

    def _end_body(self) -> None:
        body, self._body, self._left = self._body, None, _NOTHING
        if isinstance(body, memoryview):  # else the client has left meanwhile
            self._complete(body)

    def _read_chunks(self, chunks: ChunkedBody, data: bytes, at: int) -> None:
        try:
            end = chunks.feed(data, at)
        except DeploykitError as exc:
            self._refuse(exc.http_status, message_of(exc))
            return
        if not self._reserve(end - at):
            return
        self.listener.turns.late()
        if chunks.done:
            self._body = None
            self._complete(bytes(chunks.body), data[end:])
        elif end < len(data):
            self.keep(data[end:])
            if end > at:
                self.go_on()

    def _reserve(self, size: int) -> bool:
        """Count bytes of the body that is being read."""
        self._by_s = extend(self._by_s, size, self.listener.now_s, self._limits.stall_s)
        if self._exchange.reserve(size):
            return True
        self._refuse(503, self.listener.memory.message, RETRY)
        return False

    def _complete(self, body: Bytes, rest: bytes = b"") -> None:
        """Have the request answered. `rest`: what was received after it."""
        exchange = self._exchange
        exchange.body = body
        del body  # the route frees its memory
        self._state, self.answering = ANSWERING, True
        if rest:
            self.keep(rest)
        self.listener.handle(exchange)

    # -- replies ---------------------------------------------------------------------------------

    def write_large(self, parts: Sequence[Bytes]) -> None:
        """Write a reply in parts, which are not copied."""
        if self.tls:  # the TLS transport forwards each write whole and does not count it
            for part in parts:
                for at in range(0, len(part), READ_BYTES):
                    self.transport.write(memoryview(part)[at : at + READ_BYTES])
        else:
            self.transport.writelines(parts)
        self.count_unsent()

    def end_exchange(self, exchange: Exchange) -> None:
        """Go on after the reply to a request."""
        self.answering = False
        if not exchange.keep_alive:
            self._finish()
        elif self._state is ANSWERING:
            self._state = IDLE
            self._by_s = self.listener.now_s + self._limits.idle_s
            if self.kept or self.paused:
                self.go_on()

    def _refuse(self, status: int, text: str, headers: bytes = b"") -> None:
        """Reply with an error, and read no more."""
        if self._state >= ANSWERING:
            return
        exchange = self._exchange if self._state >= SIZED else Exchange(self, _UNREAD)
        self._enter(REFUSED)
        self._discard()
        exchange.keep_alive = False
        reply_error(exchange, status, text, headers)

    # -- deadlines and the end -------------------------------------------------------------------

    def _finish(self) -> None:
        """End after the last reply. A client that is still sending gets time to read it."""
        if self._state is REFUSED and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self._enter(LAST)
            self.transport.close()

    def _discard(self) -> None:
        """Free the data of an incomplete request."""
        body, self._body, self._left = self._body, None, _NOTHING
        self.take_kept()
        if isinstance(body, memoryview):
            self.listener.turns.run(body.release)  # 4 ms for 36 MB

    def _enter(self, state: State) -> None:
        self._state = state
        self._by_s = self.listener.now_s + self.listener.longest_s[state]

    def check(self, now_s: float) -> None:
        state = self._state
        if not self.reads(now_s):
            self.transport.abort()
        elif self.queued or self.stalled or state is ANSWERING or now_s <= self._by_s:
            pass  # the client waits for the server, has to read first, or has time
        elif state in (SIZED, CHUNKED):
            self._refuse(408, "the request's body stalled, or came too slowly")
        elif state >= LAST:  # closed, except for what the client has not read
            self.transport.abort()
        elif state <= IDLE:
            self.close()
        else:
            self._refuse(408, "the request's headers took too long")

    def close(self) -> None:
        self._enter(LAST)
        self._discard()
        self.transport.close()
