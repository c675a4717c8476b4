"""One HTTP request and its reply, which waits for the replies to the requests before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from deploykit.core.tensors import Bytes
from deploykit.serving.transport.call import Head
from deploykit.serving.transport.memory import MemoryBudget

_JOINED_BYTES = 64 << 10  # a larger reply is written in parts rather than copied together


class Listener(Protocol):
    """What an exchange needs of the server's listener."""

    memory: MemoryBudget
    draining: bool

    def line(self, status: int) -> bytes: ...


class Connection(Protocol):
    """What an exchange needs of the connection that it came on."""

    @property
    def listener(self) -> Listener: ...

    @property
    def gone(self) -> bool: ...

    def is_last(self, exchange: Exchange) -> bool: ...

    def flush(self) -> None: ...


class Exchange:
    """What is known of one request, and what is to be sent for it."""

    __slots__ = ("answer", "body", "cancel", "connection", "head", "held_bytes", "keep_alive")

    def __init__(self, connection: Connection, head: Head) -> None:
        self.connection = connection
        self.head = head
        self.body: Bytes = b""
        self.cancel: Callable[[], object] | None = None
        self.keep_alive = head.keep_alive
        self.answer: list[Bytes] | None = None
        self.held_bytes = 0  # bytes that are counted in the listener's

    def hold(self, size: int) -> bool:
        """Count `size` bytes until this is answered; whether the server has room for them."""
        self.held_bytes += size
        return self.connection.listener.memory.add(size, self.held_bytes)

    def release(self) -> None:
        self.connection.listener.memory.bytes -= self.held_bytes
        self.held_bytes = 0

    @property
    def gone(self) -> bool:
        return self.connection.gone

    def reply(self, status: int, headers: bytes, parts: Sequence[Bytes]) -> None:
        """Send, or keep until the replies before it were sent; nothing if the client has gone."""
        connection, head = self.connection, self.head
        if connection.gone:
            return
        if self.held_bytes:  # what was asked is not needed any more, whenever the reply can go
            self.release()
        listener = connection.listener
        length = sum(map(len, parts))
        if listener.draining and connection.is_last(self):
            self.keep_alive = False
        if self.keep_alive:
            state = b"Connection: keep-alive\r\n" if head.old else b""
        else:
            state = b"Connection: close\r\n"
        size = b"Content-Length: %d\r\n" % length
        if head.method == "HEAD":
            parts = ()
        if length <= _JOINED_BYTES:
            line = listener.line(status)
            self.answer = [b"".join((line, headers, head.cors, size, state, b"\r\n", *parts))]
        else:
            first = (listener.line(status), headers, head.cors, size, state, b"\r\n")
            self.answer = [b"".join(first), *parts]
        connection.flush()
