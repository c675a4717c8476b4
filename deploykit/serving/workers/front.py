"""Models whose engines run in another process: a front end's side of the connection to it.

A front end parses and checks requests as a single-process server does. It writes their tensors into
memory that both processes share, and reads the answers there; `engine` has the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from typing import Any, NamedTuple, cast

import numpy as np

from deploykit.core.artefact import Artefact
from deploykit.core.errors import DeploykitError, Overloaded, Unsupported, os_reason
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays, Engine
from deploykit.serving.batching.batcher import Batcher, deliver_inline, mark_expired, monotonic_us
from deploykit.serving.batching.queue import BatchPolicy, Pending
from deploykit.serving.models.model import InUse, ModelTask, ServedModel
from deploykit.serving.observe.metrics import Sample
from deploykit.serving.options import VERSION
from deploykit.serving.workers.blocks import BlockAllocator, Shapes, TensorCodec
from deploykit.serving.workers.link import Link, Message

log = logging.getLogger(__name__)

CONNECT_S = 0.2  # between two tries to connect to the engines
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


class _Sent(NamedTuple):
    """A request without an answer, with its block."""

    batcher: RemoteBatcher
    request: Pending
    at: int
    size: int


class EngineLink:
    """The models of the engine process, and the connection to it while it runs.

    `number`: of this front end. `memory`: shared with the engine process, the first half for
    requests. `address`: where that process listens.
    """

    def __init__(self, number: int, memory: mmap, address: str | bytes) -> None:
        self.models: dict[str, FrontModel] = {}  # in the order of the engine process
        self.memory = memory
        self.running = False  # whether the engine process has answered, and not ended since
        self.ran = asyncio.Event()
        self._number = number
        self._address = address
        self._read: list[tuple[int, int]] = []  # blocks of answers
        self._numbers = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self._blocks = BlockAllocator(0, len(self.memory) // 2)
        self._open: dict[int, _Sent] = {}

    def make_model(self, name: str, engines: Sequence[Engine], *more: Any) -> FrontModel:
        """Make a model; takes the parameters of `ServedModel`."""
        model = self.models[name] = FrontModel(self, len(self.models), name, engines, *more)
        return model

    async def stay_connected(self, leave: Callable[[], None]) -> None:
        """Connect to the engine process, and again when that has ended, until cancelled.

        `leave` is called if it serves other models now.
        """
        while True:
            lost = asyncio.Event()
            self._link = link = Link(partial(self._receive, leave), lost.set)
            try:
                with contextlib.ExitStack() as stack:
                    end = stack.enter_context(socket.socket(socket.AF_UNIX))
                    end.setblocking(False)  # other programs may have filled the queue
                    end.connect(self._address)
                    await link.connect(end)
                    stack.pop_all()
                link.send("front", self._number)
                await lost.wait()
                reason = "" if self.running else "they closed the connection"
            except OSError as exc:
                reason = os_reason(exc)
            if reason:  # here or there no file descriptor is left
                log.error("a worker cannot connect to the engines: %s; it is tried again", reason)
            self._fail_open()
            await asyncio.sleep(CONNECT_S)

    def _receive(self, leave: Callable[[], None], messages: Sequence[Message]) -> None:
        for kind, *content in messages:
            if kind == "answer":
                self._answer(*content)
            elif self._describe(content[0]):  # "models"
                self.running = True
                self.ran.set()
            else:
                leave()  # the successor knows them
        if self._read:
            self._link.send("read", self._read)
            self._read = []

    def _describe(self, engines: Mapping[str, RemoteEngine]) -> bool:
        """Update the models from the engine process; return False if it serves other ones now."""
        models = self.models
        accepts = {name: model.remote.accepts for name, model in models.items()}
        if accepts != {name: engine.accepts for name, engine in engines.items()}:
            return False
        for name, engine in engines.items():
            models[name].describe(engine)
        return True

    def start(self, batcher: RemoteBatcher, request: Pending) -> int:
        """Forward a request; return its number. Raises Overloaded, BadInput."""
        if not self.running:
            raise Overloaded(_ENDED, hint=_HINT)
        shapes = batcher.inputs.shapes(request.feeds)
        layout = batcher.inputs.layout(shapes)
        at = self._blocks.take(layout.size)
        if at is None:
            raise Overloaded(
                "the memory shared with the process of the engines is full", hint=_HINT
            )
        try:
            strings = batcher.inputs.write(self.memory, at, layout, request.feeds)
        except BaseException:
            self._blocks.give(at, layout.size)
            raise
        number = next(self._numbers)
        self._open[number] = _Sent(batcher, request, at, layout.size)
        self._link.send(  # flat: a tuple in it takes as long again to pickle
            "infer",
            number,
            batcher.index,
            at,
            shapes,
            strings,
            request.rows,
            request.arrived_us,
            request.deadline_us,
            request.give_up_us,
            request.priority,
            request.trace,
            request.decode_us,
            request.id,
        )
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request, which is answered in any case."""
        self._link.send("cancel", number)

    def _answer(
        self,
        number: int,
        error: DeploykitError | None,
        at: int,
        shapes: Shapes | None,
        strings: Mapping[str, np.ndarray] | None,
    ) -> None:
        batcher, request, block, block_bytes = self._open.pop(number)
        self._blocks.give(block, block_bytes)
        batcher.numbers.pop(request, None)
        layout = None if shapes is None else batcher.outputs.layout(shapes)
        if layout is not None:
            self._read.append((at, layout.size))
        if request.finished:  # cancelled, or past its deadline
            return
        request.finished = True
        request.error = error
        if layout is not None:
            request.outputs = batcher.outputs.read(self.memory, at, layout, strings, copy=True)
        deliver_inline((request,))

    def _fail_open(self) -> None:
        """Fail the requests that the engine process was to answer."""
        self.running = False
        waiting = self._open
        self._begin()
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
        try:
            self.numbers[request] = self._link.start(self, request)
        except Overloaded:
            self._metrics.count("rejected")
            raise

    def cancel(self, request: Pending) -> bool:
        """Cancel a request. The engine process answers in any case; the answer is dropped."""
        number = self.numbers.pop(request, None)
        if number is None:
            return False
        request.finished = True
        self._link.cancel(number)
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
        return None if self.link.running else _ENDED

    def samples(self) -> list[Sample]:
        """Return the counters of this process; the engine process reports the rest."""
        labels = {"model": self.name, "version": VERSION}
        ready = Sample("deploykit_model_ready", labels, self.why_not_ready() is None)
        return [*self.metrics.samples(0, 0), ready]

    def _new_batcher(self, *_: object, **_more: object) -> Batcher:
        return RemoteBatcher(self)
