"""One client's HTTP/1.1 connection: read requests, pass them to the routes, reply in order.

Every wait has a limit. A head equal to a previous one is not parsed again: clients repeat theirs. A
large body is received directly into its final memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from enum import IntEnum
from http import HTTPStatus
from typing import cast

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.core.tensors import Bytes
from deploykit.serving.http.chunked import ChunkedBody
from deploykit.serving.http.exchange import Exchange
from deploykit.serving.http.head import END, HeadReader, Limits
from deploykit.serving.transport.call import RETRY, Head, reply_error
from deploykit.serving.transport.memory import MemoryBudget
from deploykit.serving.transport.security import AccessControl

_READ_BYTES = 64 << 10
_KNOWN_HEADS = 1024
_KNOWN_HEAD_BYTES = 1024
_UNREAD = Head()


class State(IntEnum):
    """What a connection does with received bytes. Below LAST it reads requests."""

    IDLE = 0  # waiting for a request
    HEAD = 1  # part of a head received
    BODY = 2  # a head and part of its body received
    LAST = 3  # reads no more; closes after the last reply
    REFUSED = 4  # reads no more; the error reply is still to be sent
    LINGERING = 5  # the client gets time to read the error reply
    CLOSED = 6


IDLE, HEAD, BODY, LAST, REFUSED, LINGERING, CLOSED = State


class Listener:
    """The state shared by all connections of a server. `handle` gets each complete request."""

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        limits: Limits,
        access: AccessControl,
        max_body_bytes: int,
        memory: MemoryBudget,
    ) -> None:
        self.handle = handle
        self.memory = memory
        self.limits = limits
        self.access = access
        self.max_body_bytes = max_body_bytes
        self.draining = False
        self.connections: set[Connection] = set()
        self.read_into = bytearray(_READ_BYTES)  # shared: only one connection reads at a time
        self.view = memoryview(self.read_into)
        self.known_heads: dict[bytes, Head] = {}  # clients repeat theirs
        self._lines: dict[int, bytes] = {}
        self._date = ""
        self.tick(time.monotonic())

    def tick(self, now_s: float) -> None:
        """Close connections that are past a limit."""
        self.now_s = now_s
        date = formatdate(usegmt=True)
        if date != self._date:
            self._date = date
            self._lines.clear()
        for connection in list(self.connections):
            connection.check(now_s)

    def keep(self, raw: bytes, head: Head) -> None:
        """Cache a head; not with a trace id, which differs in each request."""
        if len(raw) <= _KNOWN_HEAD_BYTES and head.trace is None:
            if len(self.known_heads) >= _KNOWN_HEADS:
                self.known_heads.clear()
            self.known_heads[raw] = head

    def line(self, status: int) -> bytes:
        """The status line and the Date of a reply, cached for a second."""
        found = self._lines.get(status)
        if found is None:
            text = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nDate: {self._date}\r\n"
            self._lines[status] = found = text.encode()
        return found

    @property
    def unanswered(self) -> int:
        """Complete requests whose reply has not been written."""
        return sum(connection.unanswered for connection in self.connections)

    def close_all(self) -> None:
        for connection in list(self.connections):
            connection.close()


class Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._limits = listener.limits
        self._exchanges: deque[Exchange] = deque()  # complete, not yet answered
        self._exchange = Exchange(self, _UNREAD)  # the one being read
        self._reader: HeadReader | None = None  # of an incomplete or uncached head
        self._body_left: memoryview | None = None  # memory for the rest of a body of known length
        self._body: memoryview = self.listener.view
        self._chunks: ChunkedBody | None = None
        self._state = IDLE
        self._served = False  # at least one request was complete
        self._since_s = listener.now_s
        self._stalled_s: float | None = None  # since when the client does not read

    @property
    def unanswered(self) -> int:
        return len(self._exchanges)

    def is_last(self, exchange: Exchange) -> bool:
        """Whether this is the latest request, so that the connection may end with its reply."""
        return bool(self._exchanges) and self._exchanges[-1] is exchange

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.listener.connections.add(self)
        if len(self.listener.connections) > self._limits.connections:
            self._refuse(503, f"there are {self._limits.connections} connections already")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._state = CLOSED
        self._discard()
        self._exchange.release()
        del self._exchange  # a reference cycle: only the garbage collector would free it
        self.listener.connections.discard(self)
        exchanges, self._exchanges = self._exchanges, deque()
        for exchange in exchanges:
            exchange.gone = True
            exchange.release()
            if exchange.cancel is not None:
                exchange.cancel()
                exchange.cancel = None

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self.listener.view if self._body_left is None else self._body_left

    def buffer_updated(self, nbytes: int) -> None:
        left = self._body_left
        if left is not None:
            if not self._reserve(nbytes):
                return
            if nbytes < len(left):
                self._body_left = left[nbytes:]
                return
            self._body_left = None
            body, self._body = self._body, self.listener.view  # frees the memory of the body
            self._complete(self._exchange, body)
        elif self._state < LAST:
            self._read(nbytes)
        if len(self._exchanges) >= self._limits.pipelined:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._stalled_s = self.listener.now_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_s = None
        self._transport.resume_reading()

    # -- requests --------------------------------------------------------------------------------

    def _read(self, end: int) -> None:
        """Process received data: the first `end` bytes of the shared buffer."""
        listener = self.listener
        data, view = listener.read_into, listener.view
        at = 0
        while at < end and self._state < LAST:
            if self._chunks is not None:
                at += self._read_chunks(self._chunks, bytes(view[at:end]))
                continue
            if self._state is IDLE:
                stop = data.find(END, at, end) + len(END)
                if stop >= len(END):
                    head = listener.known_heads.get(bytes(view[at:stop]))
                    if head is not None:
                        at = self._begin(head, stop, end)
                        continue
                if data.startswith(b"\r\n", at, end):
                    at += 2  # some clients send an empty line after a body
                    continue
                self._enter(HEAD)
                self._reader = HeadReader(self._limits, listener.access, listener.max_body_bytes)
            at = self._read_head(cast("HeadReader", self._reader), at, end)

    def _read_head(self, reader: HeadReader, at: int, end: int) -> int:
        raw = bytes(self.listener.view[at:end])
        used, head = reader.feed(raw)
        if head is None:
            return end
        self._reader = None
        if head.refusal is None and reader.bytes == used:  # received in one piece
            self.listener.keep(raw[:used], head)
        return self._begin(head, at + used, end)

    def _begin(self, head: Head, at: int, end: int) -> int:
        """Start a request: take the received part of its body from `at` on."""
        exchange = self._exchange = Exchange(self, head)
        if head.refusal is not None:
            self._enter(BODY)
            self._refuse(head.refusal.status, head.refusal.text, head.refusal.headers)
            return end
        received, length, view = end - at, head.length, self.listener.view
        if length is not None and received >= length:
            self._complete(exchange, bytes(view[at : at + length]) if length else b"")
            return at + length
        self._enter(BODY)
        if head.expect and not received and not self._exchanges:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if length is None:
            self._chunks = ChunkedBody(
                max_body_bytes=self.listener.max_body_bytes,
                max_chunks=self._limits.chunks,
                max_trailer_bytes=self._limits.header_bytes,
            )
            return at
        try:
            self._body = _body_memory(length, head.json_bytes)
        except MemoryError:
            self._refuse(503, f"there is no memory for a body of {length} bytes", RETRY)
            return end
        self._body[:received] = view[at:end]
        self._body_left = self._body[received:]
        return end

    def _read_chunks(self, chunks: ChunkedBody, data: bytes) -> int:
        try:
            used = chunks.feed(data)
        except DeploykitError as exc:
            self._refuse(exc.http_status, f"{exc.message}; {exc.hint}" if exc.hint else exc.message)
            return len(data)
        if not self._reserve(used):
            return len(data)
        if chunks.done:
            self._chunks = None
            self._complete(self._exchange, chunks.body)
        return used

    def _reserve(self, size: int) -> bool:
        if self._exchange.reserve(size):
            return True
        self._refuse(503, self.listener.memory.message, RETRY)
        return False

    def _complete(self, exchange: Exchange, body: Bytes) -> None:
        exchange.body = body
        self._state = IDLE if exchange.keep_alive else LAST
        self._served = True
        self._exchanges.append(exchange)
        self.listener.handle(exchange)

    # -- replies ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the replies that are next in order."""
        exchanges = self._exchanges
        full = len(exchanges) >= self._limits.pipelined
        while exchanges and (answer := exchanges[0].pending_reply) is not None:
            exchange = exchanges.popleft()
            if len(answer) == 1:
                self._transport.write(answer[0])
            else:
                self._transport.writelines(answer)
            exchange.pending_reply = None
            if not exchange.keep_alive:
                self._finish()
                return
        if full and len(exchanges) < self._limits.pipelined and self._stalled_s is None:
            self._transport.resume_reading()
        if not exchanges and self._state is IDLE:
            self._since_s = self.listener.now_s

    def _refuse(self, status: int, text: str, headers: bytes = b"") -> None:
        """Reply with an error after the pending replies, and read no more."""
        if self._state >= LAST:
            return
        exchange = self._exchange if self._state is BODY else Exchange(self, _UNREAD)
        self._state = REFUSED
        self._discard()
        exchange.keep_alive = False
        self._exchanges.append(exchange)
        reply_error(exchange, status, text, headers)

    def _finish(self) -> None:
        """The last reply was written. A client that is still sending gets time to read it."""
        for exchange in self._exchanges:
            exchange.release()
        self._exchanges.clear()
        if self._state is REFUSED and self._transport.can_write_eof():
            self._transport.write_eof()
            self._enter(LINGERING)
        else:
            self._enter(LINGERING if self._state is REFUSED else LAST)
            self._transport.close()

    def _discard(self) -> None:
        """Free the data of an incomplete request."""
        self._body_left = self._chunks = self._reader = None
        self._body = self.listener.view

    # -- deadlines and the end -------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        self._state = state
        self._since_s = self.listener.now_s

    def check(self, now_s: float) -> None:
        """Close the connection if it is past a limit."""
        limits, waited_s, state = self._limits, now_s - self._since_s, self._state
        if self._stalled_s is not None:
            if now_s - self._stalled_s > limits.write_s:
                self._transport.abort()
        elif state is LINGERING:
            if waited_s > limits.linger_s:
                self._transport.abort()
        elif state >= LAST or self._exchanges:
            return  # a reply is pending
        elif state is IDLE:
            if waited_s > (limits.idle_s if self._served else limits.header_s):
                self._transport.close()
        elif waited_s > (limits.header_s if state is HEAD else limits.body_s):
            part = "headers" if state is HEAD else "body"
            self._refuse(408, f"the request's {part} took too long")

    def close(self) -> None:
        """Close once all written data is sent."""
        self._state = LAST
        self._discard()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def _body_memory(length: int, json_bytes: bytes | None) -> memoryview:
    """Uninitialised memory for a body; the binary part is aligned for numbers.

    The operating system allocates pages on the first write, so a length that a client only claims
    costs nothing.
    """
    json = int(json_bytes) if json_bytes is not None and json_bytes[:18].isdigit() else 0
    pad = -json % 16
    return np.empty(pad + length, np.uint8).data[pad:]
