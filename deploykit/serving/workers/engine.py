"""The process that runs the engines of several front ends; `front` has the other side.

It is a server without direct clients. Requests of all front ends wait in one queue per model, so
batches form across them.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap

from deploykit.core.errors import Overloaded
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.model import ServedModel
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers import blocks as exchange
from deploykit.serving.workers.blocks import Record, RecordConnection, TensorCodec
from deploykit.serving.workers.front import RemoteEngine
from deploykit.serving.workers.group import Hooks, Member


class EngineMember(Member):
    """The process of the engines in the server's group. It ends after the front ends."""

    runs_engines = True

    def share_of(self, options: ServeOptions) -> ServeOptions:
        return options

    async def join(self, hooks: Hooks) -> None:
        self._repository = hooks.repository
        self._models = [EngineProcessModel(each) for each in hooks.repository.models.values()]
        self._fronts: set[FrontEnd] = set()
        self.engines = self._describe()
        await super().join(hooks)

    def listening(self) -> None:
        """Do nothing: only front ends have clients."""

    def report_state(self, not_ready: str | None) -> None:
        """Report the state, and changes of the engines such as a replaced file."""
        super().report_state(not_ready)
        found = self._describe()
        if found != self.engines:
            self.engines = found
            self._link.send("engines", found)

    def may_close(self) -> bool:
        return not self._fronts

    async def connect(self, end: socket.socket, memory: mmap) -> None:
        front = FrontEnd(self._models, memory, self._fronts.discard)
        self._fronts.add(front)
        await asyncio.get_running_loop().create_unix_connection(lambda: front, sock=end)

    def _describe(self) -> dict[str, RemoteEngine]:
        return {name: RemoteEngine.of(each) for name, each in self._repository.models.items()}


class EngineProcessModel:
    """A model with the layouts of its tensors in shared memory."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.inputs = TensorCodec(model.engines[0].inputs)
        self.outputs = TensorCodec(model.engines[0].outputs)


class FrontEnd(RecordConnection):
    """The requests of one front end. `lost` is called once it has disconnected."""

    def __init__(
        self, models: Sequence[EngineProcessModel], memory: mmap, lost: Callable[[FrontEnd], None]
    ) -> None:
        super().__init__(memory, len(memory) // 2, len(memory))
        self._models = models
        self._lost = lost
        self._open: dict[int, tuple[EngineProcessModel, Pending]] = {}
        self._unread: deque[tuple[int, int]] = deque()  # blocks of answers, oldest first

    def take(self, record: Record, more: bytes) -> None:
        if record[0] == exchange.REQUEST:
            self._start(record, more)
        elif record[0] == exchange.READ:
            for _ in range(record[3]):
                self.arena.give(*self._unread.popleft())
        else:  # CANCEL
            number = record[3]
            found = self._open.get(number)
            if found is not None and found[0].model.cancel(found[1]):
                del self._open[number]
                self.send(exchange.CANCEL, number)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Cancel the requests of the front end."""
        self.transport = None
        waiting, self._open = self._open, {}
        for model, request in waiting.values():
            model.model.cancel(request)
        self._lost(self)

    def _start(self, record: Record, more: bytes) -> None:
        _, level, index, number, rows, decode_us, at = record[:7]
        arrived_us, deadline_us, give_up_us, traced, length = record[7:]
        model, end = self._models[index], length - traced
        layout = model.inputs.parse(more[:end])
        feeds = model.inputs.read(self.memory, at, layout, copy=False)
        buckets = model.model.buckets
        key = layout.key if buckets is None else buckets.key(layout.key)
        trace, _, name = more[end:].decode().partition("\n")
        done = partial(self._answer, number)
        request = Pending(
            feeds, rows, key, done, arrived_us, deadline_us, give_up_us, level, decode_us=decode_us
        )
        request.trace, request.id = trace or None, name or None
        self._open[number] = model, request
        try:
            model.model.enqueue(request)
        except Overloaded as exc:
            request.error = exc
            self._answer(number, request)

    def _answer(self, number: int, request: Pending) -> None:
        found = self._open.pop(number, None)
        if found is None:  # the front end has disconnected
            return
        error = request.error
        if error is None:
            codec = found[0].outputs
            layout, strings = codec.encode(request.outputs)
            at = self.arena.take(layout.size)
            if at is not None:
                codec.write(self.memory, at, layout, request.outputs, strings)
                self._unread.append((at, layout.size))
                self.send(exchange.DONE, number, at, layout.head)
                return
            error = Overloaded(
                "the answer does not fit into the memory shared with the process of the engines",
                hint="try again later, or ask for less at once",
            )
        self.send(exchange.FAILED, number, more=pickle.dumps(error))
