"""Messages between two processes of one server. A message is a pickled tuple."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from deploykit.core.errors import DeploykitError, Overloaded

_SIZE_BYTES = 4  # of a message's length

Message = tuple[Any, ...]


class LinkLost(Overloaded):
    """The process that was asked has closed the connection."""


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


class Channel(Link):
    """A Link whose ends also ask each other questions.

    `follow` gets each message, `answer` each question: it returns what `ask` returns at the other
    end, or raises a DeploykitError.
    """

    def __init__(
        self,
        follow: Callable[[Message], None],
        answer: Callable[[Message], Awaitable[Any]],
        lost: Callable[[], None],
    ) -> None:
        super().__init__(self._sort, lost)
        self._follow = follow
        self._answer = answer
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._replies: set[asyncio.Task[None]] = set()

    def ask(self, *question: Any) -> asyncio.Future[Any]:
        """Return the answer of the other end, or its error; LinkLost once it has closed."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self.send("ask", number, question)
        if self.transport is None or self.transport.is_closing():
            self._fail_asked()
        return future

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail_asked()
        super().connection_lost(exc)

    def _sort(self, messages: Sequence[Message]) -> None:
        for message in messages:
            match message:
                case "ask", number, question:
                    task = asyncio.ensure_future(self._reply(number, question))
                    self._replies.add(task)  # the loop alone does not keep it
                    task.add_done_callback(self._replies.discard)
                case "answer", number, value:
                    _settle(self._asked.pop(number), value)
                case _:
                    self._follow(message)

    async def _reply(self, number: int, question: Message) -> None:
        try:
            value = await self._answer(question)
        except DeploykitError as exc:
            value = exc
        self.send("answer", number, value)

    def _fail_asked(self) -> None:
        asked, self._asked = self._asked, {}
        for future in asked.values():
            _settle(future, LinkLost("the server is shutting down"))


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if future.cancelled():
        return
    if isinstance(value, DeploykitError):
        future.set_exception(value)
        future.exception()  # taken note of, even if nobody waits for it any more
    else:
        future.set_result(value)
