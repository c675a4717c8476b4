"""Models whose engines run in another process: a front end's side of the connection to it.

A front end parses and checks requests as a single-process server does. It writes their tensors into
memory that both processes share, and reads the answers there; `engine` has the other side.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, NamedTuple, cast

import numpy as np

from deploykit.core.artefact import Artefact
from deploykit.core.errors import Overloaded, Unsupported
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays, Engine
from deploykit.serving.batching.batcher import Batcher, deliver_inline, mark_expired, monotonic_us
from deploykit.serving.batching.queue import LEVELS, BatchPolicy, Pending
from deploykit.serving.models.model import InUse, ModelTask, ServedModel
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.options import VERSION
from deploykit.serving.workers import blocks as exchange
from deploykit.serving.workers.blocks import RECORD, Record, RecordConnection, TensorCodec

LATE_US = 500_000  # after so long we send the 504 that the engine process should have sent
_ENDED = "the process of the engines has ended and is being replaced"
_HINT = "try again in a moment, or send the request elsewhere"


@dataclass(frozen=True)
class RemoteEngine(Engine):
    """The engines of one model in the engine process, as that describes them; can be pickled."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int | None = field()  # without Engine's default, as are the fields below
    device: str
    runtime: str
    notes: tuple[str, ...] = field()
    batching: RowIndependence | None = field()
    source: Artefact | None = field()
    count: int
    not_batched: str
    in_use: InUse

    @classmethod
    def of(cls, model: ServedModel) -> RemoteEngine:
        copied = ("inputs", "outputs", "max_batch", "device", "runtime", "batching", "source")
        return cls(
            **{name: getattr(model.engines[0], name) for name in copied},
            notes=model.notes,
            count=len(model.engines),
            not_batched=model.not_batched,
            in_use=model.in_use,
        )

    @property
    def accepts(self) -> tuple[object, ...]:
        """Return the properties that requests are checked against."""
        return self.inputs, self.outputs, self.max_batch, self.not_batched

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:  # noqa: ARG002
        raise Unsupported("this engine runs in another process")

    def close(self) -> None: ...


class EngineLink:
    """The models of the engine process, and the connection to it while it runs."""

    def __init__(self) -> None:
        self.models: dict[str, FrontModel] = {}  # in the order of the engine process
        self.connected = asyncio.Event()
        self.connection: _Connection | None = None

    def make_model(self, name: str, engines: Sequence[Engine], *more: Any) -> FrontModel:
        """Make a model; takes the parameters of `ServedModel`."""
        model = self.models[name] = FrontModel(self, len(self.models), name, engines, *more)
        return model

    async def connect(self, end: socket.socket, memory: mmap) -> None:
        """Send requests over this connection from now on."""
        before = self.connection
        connection = self.connection = _Connection(self, memory)
        if before is not None:
            before.close_if_replaced()
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=end)
        self.connected.set()

    def describe(self, engines: Mapping[str, RemoteEngine]) -> bool:
        """Update the models from the engine process; return False if it serves other ones now."""
        models = self.models
        accepts = {name: model.remote.accepts for name, model in models.items()}
        if accepts != {name: engine.accepts for name, engine in engines.items()}:
            return False
        for name, engine in engines.items():
            models[name].describe(engine)
        return True


class _Sent(NamedTuple):
    """A request without an answer, with its block."""

    batcher: RemoteBatcher
    request: Pending
    at: int
    size: int


class _Connection(RecordConnection):
    """The connection to the engine process, until that process ends."""

    def __init__(self, link: EngineLink, memory: mmap) -> None:
        super().__init__(memory, 0, len(memory) // 2)
        self._link = link
        self._open: dict[int, _Sent] = {}
        before = link.connection
        self._number: int = before._number if before is not None else 0  # `cancel` uses it here
        self._read = 0

    def start(self, batcher: RemoteBatcher, request: Pending) -> int:
        """Forward a request; return its number. Raises Overloaded, BadInput."""
        layout, strings = batcher.inputs.encode(request.feeds)
        at = self.arena.take(layout.size)
        if at is None:
            raise Overloaded(
                "the memory shared with the process of the engines is full", hint=_HINT
            )
        try:
            batcher.inputs.write(self.memory, at, layout, request.feeds, strings)
        except BaseException:
            self.arena.give(at, layout.size)
            raise
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        self._open[number] = _Sent(batcher, request, at, layout.size)
        about = f"{request.trace or ''}\n{request.id or ''}".encode()  # a traceparent is one line
        level = request.priority if 0 < request.priority <= LEVELS else 0
        self.write(
            RECORD.pack(
                exchange.REQUEST,
                level,
                batcher.index,
                number,
                request.rows,
                min(request.decode_us, 0xFFFFFFFF),
                at,
                request.arrived_us,
                request.deadline_us,
                request.give_up_us,
                len(about),
                len(layout.head) + len(about),
            )
            + layout.head
            + about
        )
        return number

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._read:
            self.send(exchange.READ, self._read)
            self._read = 0
        self.close_if_replaced()

    def close_if_replaced(self) -> None:
        """Close it once another is in use and it waits for no answer."""
        replaced = self._link.connection is not self
        if replaced and not self._open and self.transport is not None:
            self.transport.close()

    def take(self, record: Record, more: bytes) -> None:
        kind, number, at = record[0], record[3], record[6]
        batcher, request, block, block_bytes = self._open.pop(number)
        self.arena.give(block, block_bytes)
        batcher.numbers.pop(request, None)
        self._read += kind == exchange.DONE
        if request.finished:  # cancelled, or past its deadline
            return
        request.finished = True
        if kind == exchange.DONE:
            layout = batcher.outputs.parse(more)
            request.outputs = batcher.outputs.read(self.memory, at, layout, copy=True)
        else:
            request.error = pickle.loads(more)  # noqa: S301 - our own process wrote it
        deliver_inline((request,))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Fail the requests that the engine process was to answer."""
        self.transport = None
        if self._link.connection is self:
            self._link.connection = None
        waiting, self._open = self._open, {}
        for batcher, request, _, _ in waiting.values():
            batcher.numbers.pop(request, None)
            if not request.finished:
                request.finished = True
                request.error = Overloaded(_ENDED, hint=_HINT)
                batcher.fail([request])


class RemoteBatcher(Batcher):
    """Forwards requests to the engine process. `numbers`: those of unanswered requests."""

    engines = hung = waiting = unanswered = 0  # the engine process counts them
    inline_max_rows = 0
    lost = False
    ended = True
    watchers = ()
    policy = BatchPolicy()

    def __init__(self, model: FrontModel) -> None:
        self.index = model.index
        self.inputs = TensorCodec(model.remote.inputs)
        self.outputs = TensorCodec(model.remote.outputs)
        self.numbers: dict[Pending, int] = {}
        self._link = model.link
        self._metrics = model.metrics
        self.policy = BatchPolicy(model.max_batch, queue=0)

    def take_most_waiting(self) -> int:
        return 0

    def submit(self, request: Pending) -> None:
        connection = self._link.connection
        try:
            if connection is None:
                raise Overloaded(_ENDED, hint=_HINT)
            self.numbers[request] = connection.start(self, request)
        except Overloaded:
            self._metrics.count("rejected")
            raise

    def cancel(self, request: Pending) -> bool:
        """Cancel a request. The engine process answers in any case; the answer is dropped."""
        number = self.numbers.pop(request, None)
        if number is None or self._link.connection is None:
            return False
        request.finished = True
        self._link.connection.send(exchange.CANCEL, number)
        return True

    def expire(self) -> None:
        now_us = monotonic_us()
        late = [each for each in self.numbers if each.give_up_us + LATE_US <= now_us]
        for request in late:
            self.cancel(request)
        mark_expired(late, now_us)
        self.fail(late)

    def fail(self, requests: Sequence[Pending]) -> None:
        """Deliver errors that the engine process did not report."""
        for request in requests:
            self._metrics.record_failure(request, monotonic_us())
        deliver_inline(requests)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> int:  # noqa: ARG002
        return 0


class FrontModel(ServedModel):
    """A model that the engine process serves; requests are checked and answered here."""

    def __init__(
        self, link: EngineLink, index: int, name: str, engines: Sequence[Engine], *more: Any
    ) -> None:
        self.link = link
        self.index = index
        self.remote = cast("RemoteEngine", engines[0])
        super().__init__(name, engines, *more)
        if self.remote.not_batched and not self.not_batched:
            self._stop_batching(self.remote.not_batched)
        self.in_use = self.remote.in_use

    def describe(self, engine: RemoteEngine) -> None:
        """Update the description of the model, such as a new file."""
        if engine.in_use != self.in_use:
            self.task = ModelTask(self.name, engine)
        self.remote, self.in_use = engine, engine.in_use
        self.engines = (engine,) * engine.count

    def warm_up(self) -> None:
        """Do nothing: the engine process has warmed the model up."""

    @property
    def notes(self) -> tuple[str, ...]:
        return self.remote.notes

    def why_not_ready(self) -> str | None:
        return _ENDED if self.link.connection is None else None

    def samples(self) -> list[Sample]:
        """Return the counters of this process; the engine process reports the rest."""
        labels = {"model": self.name, "version": VERSION}
        ready = Sample("deploykit_model_ready", labels, self.why_not_ready() is None)
        return [*self.metrics.samples(0, 0), ready]

    def _new_batcher(self, *_: object, **_more: object) -> Batcher:
        return RemoteBatcher(self)
