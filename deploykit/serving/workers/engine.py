"""The process that runs the engines of several front ends; `front` has the other side.

It is a server without direct clients. Requests of all front ends wait in one queue per model, so
batches form across them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from mmap import mmap
from typing import Any

from deploykit.core.errors import DeploykitError, Overloaded
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.model import ServedModel
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers.front import RemoteEngine
from deploykit.serving.workers.group import Hooks, Member
from deploykit.serving.workers.link import BlockAllocator, Link, Message, TensorCodec

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # process, user and group of a socket's other end


class EngineMember(Member):
    """The process of the engines in the server's group. It ends after the front ends.

    `listener`: the socket that front ends connect to; `memories`: what each of them shares.
    """

    runs_engines = True

    def __init__(self, *more: Any, listener: socket.socket, memories: Sequence[mmap]) -> None:
        super().__init__(*more)
        self._listener = listener
        self._memories = memories
        self.fronts: set[FrontEnd] = set()

    def share_of(self, options: ServeOptions) -> ServeOptions:
        return options

    async def join(self, hooks: Hooks) -> None:
        self._repository = hooks.repository
        self._models = [EngineProcessModel(each) for each in hooks.repository.models.values()]
        self.engines = self._describe()
        await super().join(hooks)
        accept = partial(FrontEnd, self._models, self._memories, self.fronts, lambda: self.engines)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(accept, sock=self._listener)

    def listening(self) -> None:
        """Do nothing: only front ends have clients."""

    def report_state(self, not_ready: str | None) -> None:
        """Report the state, and changes of the engines such as a replaced file."""
        super().report_state(not_ready)
        found = self._describe()
        if found != self.engines:
            self.engines = found
            self._link.send("engines", found)
            for front in self.fronts:
                front.send("models", found)

    def may_close(self) -> bool:
        return not self.fronts

    def _describe(self) -> dict[str, RemoteEngine]:
        return {name: RemoteEngine.of(each) for name, each in self._repository.models.items()}


class EngineProcessModel:
    """A model with the layouts of its tensors in shared memory."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.inputs = TensorCodec(model.engines[0].inputs)
        self.outputs = TensorCodec(model.engines[0].outputs)


class FrontEnd(Link):
    """The requests of one front end, which is one of `fronts` while it is connected."""

    def __init__(
        self,
        models: Sequence[EngineProcessModel],
        memories: Sequence[mmap],
        fronts: set[FrontEnd],
        describe: Callable[[], Mapping[str, RemoteEngine] | None],
    ) -> None:
        super().__init__(self._take, self._on_lost)
        self._models = models
        self._memories = memories
        self._fronts = fronts
        self._describe = describe
        self._open: dict[int, tuple[EngineProcessModel, Pending]] = {}
        self._memory: mmap  # both are known once it says which one it is
        self._blocks: BlockAllocator

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse other users' programs: what they send is not unpickled."""
        super().connection_made(transport)
        credentials = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            transport.abort()  # type: ignore[attr-defined]

    def _take(self, messages: Sequence[Message]) -> None:
        try:
            for kind, *content in messages:
                if kind == "infer":
                    self._start(content)
                elif kind == "read":
                    for block in content[0]:
                        self._blocks.give(*block)
                elif kind == "cancel":
                    number = content[0]
                    found = self._open.get(number)
                    if found is not None and found[0].model.cancel(found[1]):
                        del self._open[number]
                        self.send("answer", number, None, 0, None, None)
                else:  # "front"
                    self._memory = self._memories[content[0] - 1]
                    self._blocks = BlockAllocator(len(self._memory) // 2, len(self._memory))
                    self._fronts.add(self)
                    self.send("models", self._describe())
        except (LookupError, TypeError, ValueError, DeploykitError) as exc:
            log.error("a process of this server sent what it should not: %s", exc)
            if self.transport is not None:
                self.transport.abort()

    def _on_lost(self) -> None:
        """Cancel the requests of the front end."""
        self._fronts.discard(self)
        waiting, self._open = self._open, {}
        for model, request in waiting.values():
            model.model.cancel(request)

    def _start(self, content: Sequence[Any]) -> None:
        number, index, at, shapes, strings, rows, arrived_us, deadline_us, *more = content
        give_up_us, priority, trace, decode_us, name = more
        model = self._models[index]
        layout = model.inputs.layout(shapes)
        feeds = model.inputs.read(self._memory, at, layout, strings, copy=False)
        buckets = model.model.buckets
        key = layout.key if buckets is None else buckets.key(layout.key)
        done = partial(self._answer, number)
        request = Pending(feeds, rows, key, done, arrived_us, deadline_us, give_up_us, priority)
        request.trace, request.decode_us, request.id = trace, decode_us, name
        self._open[number] = model, request
        try:
            model.model.enqueue(request)
        except Overloaded as exc:
            request.error = exc
            self._answer(number, request)

    def _answer(self, number: int, request: Pending) -> None:
        model, _ = self._open.pop(number, (None, None))
        if model is None:  # the front end has disconnected
            return
        error = request.error
        if error is None:
            shapes = model.outputs.shapes(request.outputs)
            layout = model.outputs.layout(shapes)
            at = self._blocks.take(layout.size)
            if at is not None:
                strings = model.outputs.write(self._memory, at, layout, request.outputs)
                self.send("answer", number, None, at, shapes, strings)
                return
            error = Overloaded(
                "the answer does not fit into the memory shared with the process of the engines",
                hint="try again later, or ask for less at once",
            )
        self.send("answer", number, error, 0, None, None)
