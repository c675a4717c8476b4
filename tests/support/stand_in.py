"""A fake Open Inference Protocol server on a real socket; the test decides every answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

IMAGE = {"name": "image", "datatype": "FP32", "shape": [-1, 2, 3]}
ANSWER = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [0.5]}]}
Infer = Callable[["StandIn", int], object]  # (server, number of earlier inferences)


def reply(status: int, body: object, extra: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\n{extra}Content-Length: {len(data)}\r\n\r\n".encode() + data


class StandIn:
    """An Open Inference Protocol server of one model. `infer` decides each inference's answer.

    It returns bytes to send, None to close the connection without an answer, or an awaitable of
    either. `bodies` are the received inference requests: the JSON part and the tensors. Each takes
    `pause_s`, so that a load leaves the cores to others.
    """

    def __init__(
        self,
        infer: Infer = lambda _server, _n: reply(200, ANSWER),
        models: Sequence[str] = ("m",),
        inputs: Sequence[dict[str, object]] = (IMAGE,),
        other: Callable[[str], bytes | None] = lambda _path: None,
        pause_s: float = 0.005,
        extensions: Sequence[str] = ("binary_tensor_data",),
        prefix: str = "",
    ) -> None:
        self.extensions, self.prefix = extensions, prefix
        self.pause_s = pause_s
        self.infer, self.models, self.inputs, self.other = infer, models, inputs, other
        self.bodies: list[tuple[dict[str, object], bytes]] = []
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        self.tasks.add(asyncio.get_running_loop().create_task(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, IndexError):
            while True:  # an HTTP/2 client sends lines of one word
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                answer = await self.answer(head[0].split(" ")[1], fields, body)
                if answer is None:
                    break
                writer.write(answer)
                if b"Connection: close" in answer or fields.get("connection") == "close":
                    break
        writer.close()

    async def answer(self, path: str, fields: dict[str, str], body: bytes) -> bytes | None:
        if (other := self.other(path)) is not None:
            return other
        if not path.startswith(self.prefix):
            return reply(404, {"error": f"no {path}"})
        path = path.removeprefix(self.prefix)
        if path == "/v2":
            return reply(200, {"name": "stand-in", "extensions": self.extensions})
        if path == "/v2/repository/index":
            return reply(
                200, [{"name": name, "version": "1", "state": "READY"} for name in self.models]
            )
        if path.endswith("/infer"):
            split = int(fields.get("inference-header-content-length", len(body)))
            self.bodies.append((json.loads(body[:split]), body[split:]))
            found = self.infer(self, len(self.bodies) - 1)
            await asyncio.sleep(self.pause_s)
            return await found if asyncio.iscoroutine(found) else found  # type: ignore[return-value]
        if path == f"/v2/models/{self.models[0]}":
            return reply(200, {"name": self.models[0], "inputs": list(self.inputs), "outputs": []})
        return reply(404, {"error": f"no {path}"})

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a separate thread; yields the URL."""
        ready: threading.Event = threading.Event()

        async def main() -> None:
            self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
            self.tasks |= asyncio.all_tasks()
            self.listener = await asyncio.start_server(self.connect, "127.0.0.1", 0)
            self.port = self.listener.sockets[0].getsockname()[1]
            ready.set()
            await self.stop.wait()
            await self.die()

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        assert ready.wait(60)
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            self.loop.call_soon_threadsafe(self.stop.set)
            thread.join(60)
            assert not thread.is_alive()

    async def die(self) -> None:
        """Stop listening and drop every connection."""
        for listening in self.listener.sockets:
            self.loop.remove_reader(listening.fileno())
        # asyncio accepts in tasks of its own: a server closed before they ran loses their sockets
        while accepting := asyncio.all_tasks() - self.tasks:
            await asyncio.wait(accepting)
        self.listener.close()
        for writer in list(self.writers):
            writer.transport.abort()
