"""One HTTP request and its reply, which waits for the replies to the requests before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from deploykit.core.errors import Overloaded
from deploykit.core.tensors import Bytes
from deploykit.serving.transport.call import Head
from deploykit.serving.transport.memory import MemoryBudget

_JOINED_BYTES = 64 << 10  # larger replies are written in parts, without a copy


class ExchangeListener(Protocol):
    """What an exchange needs of the server's listener."""

    memory: MemoryBudget
    draining: bool

    def line(self, status: int) -> bytes: ...


class Connection(Protocol):
    """What an exchange needs of the connection that it came on."""

    @property
    def listener(self) -> ExchangeListener: ...

    def is_last(self, exchange: Exchange) -> bool: ...

    def flush(self) -> None: ...

    def release_sent(self) -> None: ...


class Exchange:
    """A request, and its reply until it is sent."""

    __slots__ = (
        "body",
        "cancel",
        "connection",
        "gone",
        "head",
        "held_bytes",
        "keep_alive",
        "pending_reply",
    )

    def __init__(self, connection: Connection, head: Head) -> None:
        self.connection = connection
        self.head = head
        self.body: Bytes = b""
        self.cancel: Callable[[], object] | None = None
        self.gone = False  # no reply can be sent any more
        self.keep_alive = head.keep_alive
        self.pending_reply: list[Bytes] | None = None
        self.held_bytes = 0  # bytes counted in the memory budget

    def reserve(self, size: int) -> bool:
        """Count `size` bytes in the memory budget until the reply; whether they fit."""
        self.held_bytes += size
        return self.connection.listener.memory.add(size, self.held_bytes)

    def release(self) -> None:
        self.connection.listener.memory.release(self.held_bytes)
        self.held_bytes = 0

    def abandon(self) -> None:
        """The client has disconnected."""
        self.gone = True
        self.release()
        cancel, self.cancel = self.cancel, None
        if cancel is not None:
            cancel()

    def reply(self, status: int, headers: bytes, parts: Sequence[Bytes]) -> None:
        """Send after the replies before it; does nothing if the client has disconnected.

        Raises Overloaded for a large answer above the memory budget; an error always fits.
        """
        connection, head = self.connection, self.head
        if self.gone:
            return
        if self.held_bytes:  # the request is not needed any more
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
            length = 0
        if length <= _JOINED_BYTES:
            line = listener.line(status)
            self.pending_reply = [
                b"".join((line, headers, head.cors, size, state, b"\r\n", *parts))
            ]
        else:
            first = (listener.line(status), headers, head.cors, size, state, b"\r\n")
            self._reserve_answer(status, length)
            self.pending_reply = [b"".join(first), *parts]
        connection.flush()
        if self.pending_reply is not None and not self.held_bytes:  # it waits for those before it
            self._reserve_answer(status, length)

    def _reserve_answer(self, status: int, size: int) -> None:
        if status >= 400:
            return
        self.connection.release_sent()
        if not self.reserve(size):
            raise Overloaded(self.connection.listener.memory.message)


def body_memory(length: int, json_bytes: bytes | None) -> memoryview:
    """Uninitialised memory for a body; the binary part is aligned for numbers.

    The operating system allocates pages on the first write, so a length that a client only claims
    costs nothing.
    """
    json = int(json_bytes) if json_bytes is not None and json_bytes[:18].isdigit() else 0
    pad = -json % 16
    return np.empty(pad + length, np.uint8).data[pad:]
