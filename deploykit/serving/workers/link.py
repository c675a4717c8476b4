"""Messages between the parent and one worker: pickled tuples over a socket pair of their own."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable
from typing import Any, cast

_SIZE_BYTES = 4

Message = tuple[Any, ...]


class WorkerLink(asyncio.Protocol):
    """One end of the socket pair, on an event loop. `lost` is called once the other end is gone."""

    def __init__(self, receive: Callable[[Message], None], lost: Callable[[], None]) -> None:
        self._receive = receive
        self._lost = lost
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= _SIZE_BYTES:
            end = _SIZE_BYTES + int.from_bytes(self._data[:_SIZE_BYTES], "little")
            if len(self._data) < end:
                return
            message = pickle.loads(bytes(self._data[_SIZE_BYTES:end]))  # noqa: S301 - our own
            del self._data[:end]
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._lost()

    def send(self, *message: Any) -> None:
        """Send a message; nothing happens once the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            data = pickle.dumps(message, 5)
            self._transport.write(len(data).to_bytes(_SIZE_BYTES, "little") + data)
