"""HTTP/1.1 on one connection: parse, bound, answer in order.

In: bytes. Out: `Exchange`s for the routes, and their replies in the order of the requests. Every
wait and every size has a limit here, since the parser has none. A message that can be read in two
ways is refused and the connection closed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import cast

import httptools

from deploykit.serving.payload import show
from deploykit.serving.routes import Routes, reply_error

log = logging.getLogger(__name__)

_KEPT = (
    b"host",
    b"origin",
    b"expect",
    b"content-length",
    b"content-encoding",
    b"inference-header-content-length",
)
_LOCAL = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_IDLE, _HEAD, _BODY = range(3)


@dataclass(frozen=True)
class Limits:
    """What one connection may send and how long it may take."""

    header_bytes: int = 64 << 10
    headers: int = 100
    target_bytes: int = 8 << 10
    chunks: int = 65_536
    pipelined: int = 16
    connections: int = 4096
    header_s: float = 10.0  # from the connection, or from a message's first byte
    body_s: float = 30.0
    idle_s: float = 75.0
    write_s: float = 30.0  # a client that does not read its answer
    linger_s: float = 2.0  # to let it read why it was refused


class Listener:
    """What all connections of one server share."""

    def __init__(
        self, routes: Routes, limits: Limits, *, max_body_bytes: int, loopback: bool
    ) -> None:
        self.routes = routes
        self.limits = limits
        self.max_body_bytes = max_body_bytes
        self.loopback = loopback
        self.draining = False
        self.connections: set[Connection] = set()
        self._heads: dict[int, bytes] = {}
        self._date = ""
        self.tick(time.monotonic())

    def tick(self, now_s: float) -> None:
        """Close what took too long."""
        self.now_s = now_s
        date = formatdate(usegmt=True)
        if date != self._date:
            self._date = date
            self._heads.clear()
        for connection in list(self.connections):
            connection.check(now_s)

    def head(self, status: int) -> bytes:
        """The status line and the Date of a reply, made once a second."""
        found = self._heads.get(status)
        if found is None:
            text = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nDate: {self._date}\r\n"
            self._heads[status] = found = text.encode()
        return found

    @property
    def unanswered(self) -> int:
        """Requests that were read whole and whose reply has not been written."""
        return sum(connection.unanswered for connection in self.connections)

    def close_all(self) -> None:
        for connection in list(self.connections):
            connection.close()


class Exchange:
    """One request and its reply; see routes.Call."""

    __slots__ = (
        "answer",
        "body",
        "cancel",
        "connection",
        "encoding",
        "json_bytes",
        "keep_alive",
        "method",
        "old",
        "target",
    )

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.method = ""
        self.target = ""
        self.body = b""
        self.json_bytes: bytes | None = None
        self.encoding: bytes | None = None
        self.cancel: Callable[[], object] | None = None
        self.keep_alive = True
        self.old = False  # HTTP/1.0
        self.answer: bytes | None = None

    def reply(self, status: int, headers: bytes, parts: list[bytes]) -> None:
        """Send, or keep until the replies before it were sent; nothing if the client has gone."""
        connection = self.connection
        length = sum(map(len, parts))
        if connection.listener.draining and connection.is_last(self):
            self.keep_alive = False
        if not self.keep_alive:
            state = b"Connection: close\r\n"
        else:
            state = b"Connection: keep-alive\r\n" if self.old else b""
        tail = parts if self.method != "HEAD" else []
        self.answer = b"".join(
            (
                connection.listener.head(status),
                headers,
                b"Content-Length: %d\r\n" % length,
                state,
                b"\r\n",
                *tail,
            )
        )
        connection.flush()


class Connection(asyncio.Protocol):
    """One client. The parser calls the `on_...` methods from within `data_received`."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._limits = listener.limits
        limits = listener.limits
        self._limit_bytes = listener.max_body_bytes + 2 * limits.header_bytes + 16 * limits.chunks
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._exchange = Exchange(self)  # the one being read
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._count = self._header_bytes = self._fed_bytes = self._body_bytes = self._chunks = 0
        self._stage = _IDLE
        self._messages = 0
        self._mark = (0, _IDLE)
        self._since_s = listener.now_s
        self._deaf = False  # nothing more is read: refused, or the last request has come
        self._lingering = False
        self._stalled_s: float | None = None  # since when the client does not read

    @property
    def unanswered(self) -> int:
        return len(self._exchanges)

    def is_last(self, exchange: Exchange) -> bool:
        """Whether no request came after this one, so that the connection may end with its reply."""
        return bool(self._exchanges) and self._exchanges[-1] is exchange

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.listener.connections.add(self)
        if len(self.listener.connections) > self._limits.connections:
            self._refuse(503, f"there are {self._limits.connections} connections already")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._deaf = True
        self.listener.connections.discard(self)
        exchanges, self._exchanges = self._exchanges, deque()
        for exchange in exchanges:
            if exchange.cancel is not None:
                exchange.cancel()
                exchange.cancel = None

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._fed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "this server speaks HTTP/1.1 only")
        except httptools.HttpParserCallbackError:
            log.exception("a request could not be read")
            self._refuse(500, "an error inside the server; its log says more")
        except httptools.HttpParserError as exc:
            self._refuse(400, f"the request is not valid HTTP/1.1: {show(str(exc))}")
        if self._stage == _HEAD and self._fed_bytes > self._limits.header_bytes:
            self._refuse(431, f"the headers are above {self._limits.header_bytes} bytes")
        elif self._stage == _BODY and self._fed_bytes > self._limit_bytes:
            self._refuse_body()  # what is not body is chunk sizes and trailers
        mark = (self._messages, self._stage)
        if mark != self._mark:
            self._mark = mark
            self._since_s = self.listener.now_s
        if len(self._exchanges) >= self._limits.pipelined:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._stalled_s = self.listener.now_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_s = None
        self._transport.resume_reading()

    # -- httptools -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._stage = _HEAD
        self._messages += 1
        self._exchange = Exchange(self)
        self._headers = {}
        self._pieces = []
        self._count = self._header_bytes = self._body_bytes = self._chunks = 0

    def on_url(self, url: bytes) -> None:
        # Long targets come in pieces when they come in several packets.
        self._exchange.target += url.decode("latin-1")
        if len(self._exchange.target) > self._limits.target_bytes:
            self._refuse(414, f"the target is above {self._limits.target_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._count > self._limits.headers:
            self._refuse(431, f"there are more than {self._limits.headers} headers")
        elif self._header_bytes > self._limits.header_bytes:
            self._refuse(431, f"the headers are above {self._limits.header_bytes} bytes")
        name = name.lower()
        if name in _KEPT:
            if name in self._headers:
                self._refuse(400, f"the header {show(name.decode())} is given twice")
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._stage = _BODY
        parser, exchange, headers = self._parser, self._exchange, self._headers
        exchange.method = parser.get_method().decode("latin-1")
        exchange.keep_alive = parser.should_keep_alive()
        exchange.old = parser.get_http_version() == "1.0"
        exchange.json_bytes = headers.get(b"inference-header-content-length")
        exchange.encoding = headers.get(b"content-encoding")
        host = headers.get(b"host")
        if host is None and not exchange.old:
            self._refuse(400, "the header Host is missing")
        elif self.listener.loopback and not _is_local(host, headers.get(b"origin")):
            self._refuse(403, "this server answers on localhost only; see --host")
        elif int(headers.get(b"content-length", b"0")) > self.listener.max_body_bytes:
            self._refuse_body()
        elif (
            headers.get(b"expect", b"").lower() == b"100-continue"
            and not exchange.old
            and not self._exchanges
        ):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._limits.chunks:
            self._refuse(413, f"the body has more than {self._limits.chunks} chunks")

    def on_body(self, piece: bytes) -> None:
        if self._deaf:
            return
        self._body_bytes += len(piece)
        if self._body_bytes > self.listener.max_body_bytes:
            self._refuse_body()
            return
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        self._stage = _IDLE
        self._fed_bytes = 0
        exchange, pieces = self._exchange, self._pieces
        exchange.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        self._deaf = not exchange.keep_alive
        self._exchanges.append(exchange)
        self.listener.routes.handle(exchange)

    # -- answers ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the replies that are next in order."""
        exchanges = self._exchanges
        full = len(exchanges) >= self._limits.pipelined
        while exchanges and exchanges[0].answer is not None:
            exchange = exchanges.popleft()
            self._transport.write(cast("bytes", exchange.answer))
            if not exchange.keep_alive:
                self._finish()
                return
        if full and len(exchanges) < self._limits.pipelined and self._stalled_s is None:
            self._transport.resume_reading()
        if not exchanges and self._stage == _IDLE:
            self._since_s = self.listener.now_s

    def _refuse_body(self) -> None:
        limit = self.listener.max_body_bytes
        text = f"the body is above {limit} bytes; start the server with a larger --max-body-bytes"
        self._refuse(413, text)

    def _refuse(self, status: int, text: str) -> None:
        """Answer, after what is still to be answered, and read no more."""
        if self._deaf:
            return
        self._deaf = self._lingering = True
        exchange = self._exchange if self._stage != _IDLE else Exchange(self)
        exchange.keep_alive = False
        self._exchanges.append(exchange)
        reply_error(exchange, status, text)

    def _finish(self) -> None:
        """The last reply is on its way. A client that still sends gets time to read it."""
        self._deaf = True
        self._exchanges.clear()
        if self._lingering and self._transport.can_write_eof():
            self._transport.write_eof()
            self._since_s = self.listener.now_s
        else:
            self._transport.close()

    # -- deadlines and the end -------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Close the connection if it is past a limit."""
        limits, waited_s = self._limits, now_s - self._since_s
        if self._stalled_s is not None:
            if now_s - self._stalled_s > limits.write_s:
                self._transport.abort()
        elif self._lingering and not self._exchanges:
            if waited_s > limits.linger_s:
                self._transport.abort()
        elif self._deaf or self._exchanges:
            return  # a reply is being made
        elif self._stage == _IDLE:
            if waited_s > (limits.idle_s if self._messages else limits.header_s):
                self._transport.close()
        elif waited_s > (limits.header_s if self._stage == _HEAD else limits.body_s):
            part = "headers" if self._stage == _HEAD else "body"
            self._refuse(408, f"the request's {part} took too long")

    def close(self) -> None:
        """Close once what was written has gone out."""
        self._deaf = True
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


@lru_cache(maxsize=64)
def _is_local(host: bytes | None, origin: bytes | None) -> bool:
    """False for what a browser page from elsewhere sends: DNS rebinding, foreign forms."""
    names = [host] if host is not None else []
    if origin is not None:
        names.append(origin.partition(b"://")[2])
    return all(_LOCAL.fullmatch(name) for name in names)
