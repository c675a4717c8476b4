"""Front ends and the models of the process of the engines, connected within one process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from mmap import mmap
from typing import Any

import numpy as np

from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Engine
from deploykit.serving.batching.batcher import deliver_inline
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers.engine import EngineProcessModel, FrontEnd
from deploykit.serving.workers.front import EngineLink, RemoteEngine

LIMIT_S = 60  # against hanging
ROWS = RowIndependence(True, "by construction", (1 << 20,))


class Words(Engine):
    """Reverses words and adds 1 to numbers of any length; -1 is what it cannot bear."""

    device, runtime, batching, steady = "cpu", "fake", ROWS, True
    inputs = (TensorSpec("word", "string", ("N",)), TensorSpec("x", "float32", ("N", "T")))
    outputs = (TensorSpec("drow", "string", ("N",)), TensorSpec("y", "float32", ("N", "T")))

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        if (feeds["x"] == -1).any():
            raise RuntimeError("a row it cannot bear")
        self.batches.append(len(feeds["x"]))
        words = [each[::-1] for each in feeds["word"]]
        return {"drow": np.array(words, object), "y": feeds["x"] + np.float32(1)}

    def close(self) -> None: ...


class Linked:
    """Two models in the process of the engines, and front ends, each with its memory."""

    def __init__(self, options: ServeOptions, fronts: int = 2, size: int = 1 << 16) -> None:
        self.loop = asyncio.get_running_loop()
        self.options = options
        self.engines = {"a": Words(), "b": Words()}
        self.repository = ModelRepository(
            dict(self.engines),
            options,
            deliver=lambda run: self.loop.call_soon_threadsafe(deliver_inline, run),
            call_soon=self.loop.call_soon,
        )
        for model in self.repository.models.values():
            model.batcher.inline_max_rows = 1 << 20
        self.models = [EngineProcessModel(each) for each in self.repository.models.values()]
        self.links: list[EngineLink] = []
        self.ends: list[FrontEnd] = []
        self.served = []
        for _ in range(fronts):
            link = EngineLink()
            described = {n: [RemoteEngine.of(m)] for n, m in self.repository.models.items()}
            served = ModelRepository(described, options, make_model=link.make_model)
            self.served.append(served)
            self.links.append(link)
        self.size = size

    async def connect(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        memory = mmap(-1, self.size)
        end = FrontEnd(self.models, memory, lambda _: None)
        self.ends.append(end)
        await self.loop.create_unix_connection(lambda: end, sock=theirs)
        await self.links[number].connect(ours, memory)

    def ask(
        self, front: int, x: list[float], word: str = "ab", *, model: str = "a", **more: Any
    ) -> tuple[Pending, asyncio.Future[Pending]]:
        """One row for each front end to answer."""
        answered: asyncio.Future[Pending] = self.loop.create_future()
        feeds = {"word": np.array([word], object), "x": np.array([x], np.float32)}
        key = (("word", "BYTES", ()), ("x", "FP32", (len(x),)))
        request = Request(feeds, 1, key, (), **more)
        pending = self.served[front].find(model).submit(request, answered.set_result)
        return pending, answered

    async def close(self) -> None:
        for end in self.ends:
            if end.transport is not None:
                end.transport.close()
        while any(link.connection is not None for link in self.links):
            await asyncio.sleep(0)
        self.repository.close()
        for each in self.served:
            each.close()


def linked(
    test: Callable[[Linked], Awaitable[None]],
    options: ServeOptions | None = None,
    **more: Any,
) -> None:
    """Run `test` with front ends that are connected."""

    async def run() -> None:
        found = Linked(options or ServeOptions(), **more)
        for number in range(len(found.links)):
            await found.connect(number)
        try:
            await asyncio.wait_for(test(found), LIMIT_S)
        finally:
            await found.close()

    asyncio.run(run())


def values(pending: Pending) -> tuple[str, list[float]]:
    assert pending.error is None, pending.error
    return pending.outputs["drow"][0], pending.outputs["y"][0].tolist()


class Closing:
    """A transport that takes anything."""

    aborted = False

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.aborted = True
