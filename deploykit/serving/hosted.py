"""The server's routes behind another server's sockets and event loop: one request, one answer.

The other server parses HTTP, enforces its own limits and decides which clients may call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from deploykit.core.errors import Overloaded
from deploykit.core.tensors import Bytes
from deploykit.engines.engine import Closing, Engine
from deploykit.serving.batching.batcher import Loop, deliver_inline
from deploykit.serving.batching.queue import Pending
from deploykit.serving.http.routes import Routes
from deploykit.serving.models.offload import ThreadOffload
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.connection import Call, Head, MemoryBudget, reply_exception

TICK_S = 0.25  # how often requests past their deadline are answered

Fields = tuple[tuple[bytes, bytes], ...]  # header fields, names in lower case
Asked = tuple[str, str, Fields, bytes]  # method, path with query, headers, body
Answered = tuple[int, Fields, bytes]  # status, headers without Content-Length, body


class HostedApp(Closing):
    """Serves `models` on the running event loop, and closes their engines in `close`."""

    def __init__(self, models: Mapping[str, Sequence[Engine]], options: ServeOptions) -> None:
        """Prove that rows may be joined and run each engine at every size; blocks the loop."""
        self._loop = asyncio.get_running_loop()
        self._engines = models
        loop = Loop(self._deliver, call_soon=self._loop.call_soon)
        self.repository = ModelRepository(models, options, loop)
        self._memory = MemoryBudget(options.max_held_bytes, options.max_body_bytes)
        self._offload = ThreadOffload(self._loop, threads=2)
        self._routes = Routes(self.repository, self._offload)
        self.repository.warm_up()
        self._ticking = self._loop.create_task(self._tick())

    async def answer(self, asked: Asked) -> Answered:
        """Answer one request, if need be with an error. A cancelled request leaves the queue."""
        method, target, fields, body = asked
        headers = dict(fields)
        path, host = target.partition("?")[0], headers.get(b"host")
        head = Head.of(method, target, path, headers, host=host, length=len(body))
        call = _Call(head, self._memory, body)
        try:
            if not call.reserve(len(body)):
                reply_exception(call, Overloaded(self._memory.message))
            else:
                self._routes.handle(call)
            return await call.answered
        finally:
            call.abandon()

    def close(self) -> None:
        """Answer the accepted requests, then close the engines."""
        self._ticking.cancel()
        self.repository.close()
        self._offload.close()
        for engines in self._engines.values():
            for engine in engines:
                engine.close()

    async def _tick(self) -> None:
        while True:
            self.repository.expire()
            await asyncio.sleep(TICK_S)

    def _deliver(self, requests: Sequence[Pending]) -> None:
        """Deliver answers from an engine's thread: wake the loop once per batch."""
        self._loop.call_soon_threadsafe(deliver_inline, requests)


class _Call(Call):
    """A call whose reply resolves a future."""

    __slots__ = ("answered",)

    def __init__(self, head: Head, memory: MemoryBudget, body: bytes) -> None:
        super().__init__(head, memory, body)
        self.answered: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()

    def reply(self, status: int, headers: bytes, parts: Sequence[Bytes]) -> None:
        body = b"" if self.head.method == "HEAD" else b"".join(parts)
        if not self.answered.done():
            lines = (line.partition(b": ") for line in headers.split(b"\r\n") if line)
            fields = tuple((name.lower(), value) for name, _, value in lines)
            self.answered.set_result((status, fields, body))
