"""A stream of messages between two processes of one server: pickled tuples."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

_SIZE_BYTES = 4

Message = tuple[Any, ...]


class Link(asyncio.Protocol):
    """One end of a connection, on an event loop.

    `receive` gets the messages that the other end sent in one turn of its loop, `lost` is called
    once it has closed.
    """

    def __init__(
        self, receive: Callable[[Sequence[Message]], None], lost: Callable[[], None]
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._data = bytearray()
        self._out: list[Message] = []
        self.transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= _SIZE_BYTES:
            end = _SIZE_BYTES + int.from_bytes(self._data[:_SIZE_BYTES], "little")
            if len(self._data) < end:
                return
            messages = pickle.loads(bytes(self._data[_SIZE_BYTES:end]))  # noqa: S301 - our own
            del self._data[:end]
            self._receive(messages)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._lost()

    def send(self, *message: Any) -> None:
        """Send a message with the others of this turn; do nothing once the other end is closed."""
        if self.transport is not None and not self.transport.is_closing():
            if not self._out:
                asyncio.get_running_loop().call_soon(self._flush, self.transport)
            self._out.append(message)

    def _flush(self, transport: asyncio.Transport) -> None:
        data = pickle.dumps(self._out, 5)
        self._out = []
        transport.write(len(data).to_bytes(_SIZE_BYTES, "little") + data)
