"""The engines of all workers in one process, and the models of those workers, the front ends.

A front end parses and checks requests as a single-process server does. It writes their tensors into
memory that both processes share, and reads the answers there. The process of the engines is a
server without direct clients. Requests of all front ends wait in one queue per model, so batches
form across them.

One process alone takes and returns the blocks of a `BlockAllocator`; it sends the other where a
block begins, and the shapes from which `TensorCodec.layout` finds the tensors in it. Strings are
not in the block but in the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import struct
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from mmap import mmap
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np

from deploykit.core.artefact import Artefact
from deploykit.core.errors import DeploykitError, Overloaded, Unsupported, os_reason
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import PROTOCOL_NAMES, InputKey, TensorSpec, carrier
from deploykit.engines.engine import Arrays, Engine
from deploykit.serving.batching.batcher import Batcher, deliver_inline, mark_expired, monotonic_us
from deploykit.serving.batching.queue import BatchPolicy, Pending
from deploykit.serving.models.model import InUse, ModelTask, ServedModel
from deploykit.serving.observe.metrics import Sample
from deploykit.serving.options import VERSION
from deploykit.serving.workers.link import Link, Message

log = logging.getLogger(__name__)

CONNECT_S = 0.2  # between two tries to connect to the engines
LATE_US = 500_000  # after so long we send the 504 that the engine process should have sent
_ALIGN = 64
_CACHED = 4096  # the most cached layouts
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a socket's other end
_ENDED = "the process of the engines has ended and is being replaced"
_HINT = "try again in a moment, or send the request elsewhere"
# the fields of a Pending that it sends, in the order in which Pending takes them
_ABOUT = attrgetter(
    *("rows", "arrived_us", "deadline_us", "give_up_us", "priority", "trace", "decode_us", "id")
)

Shapes = tuple[tuple[int, ...], ...]


class BlockAllocator:
    """Allocates blocks between the bytes `start` and `end`: the first that is free."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)]  # in order, with bytes in use between them

    def take(self, size: int) -> int | None:
        """Return where a block of `size` bytes begins, more than 0; None if none is free."""
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                left = [(start + size, end)] if end - start > size else []
                self._free[number : number + 1] = left
                return start
        return None

    def give(self, at: int, size: int) -> None:
        """Return a block that was taken with this size."""
        free, end = self._free, at + size
        number = bisect(free, (at, end))
        if number < len(free) and free[number][0] == end:
            end = free.pop(number)[1]
        if number and free[number - 1][1] == at:
            number -= 1
            at = free.pop(number)[0]
        free.insert(number, (at, end))


class Place(NamedTuple):
    """The location of a tensor in a block. `dtype` None: strings, which are not in it."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    at: int
    size: int


class Layout(NamedTuple):
    """The locations of a message's tensors in a block of `size` bytes."""

    size: int
    places: tuple[Place, ...]
    key: InputKey


class TensorCodec:
    """Places the inputs, or the outputs, of a model in a block. Both processes have one."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._dtypes = [None if s.dtype == "string" else np.dtype(carrier(s.dtype)) for s in specs]
        self.layout: Callable[[Shapes], Layout] = lru_cache(_CACHED)(self._layout)

    def shapes(self, arrays: Arrays) -> Shapes:
        return tuple([arrays[spec.name].shape for spec in self._specs])

    def write(
        self, memory: mmap, at: int, layout: Layout, arrays: Arrays
    ) -> dict[str, np.ndarray] | None:
        """Write the arrays into the block at `at`; return those of strings, if there are any."""
        strings = {}
        for name, dtype, _, offset, size in layout.places:
            start, array = at + offset, arrays[name]
            if dtype is None:
                strings[name] = array
            else:
                same = array.dtype == dtype and array.flags.c_contiguous  # in this byte order
                whole: Any = array if same else np.ascontiguousarray(array, dtype)
                memory[start : start + size] = whole
        return strings or None

    def read(
        self,
        memory: mmap,
        at: int,
        layout: Layout,
        strings: Mapping[str, np.ndarray] | None,
        *,
        copy: bool,
    ) -> dict[str, np.ndarray]:
        """Return the arrays of the block at `at`, as views without `copy`."""
        found = {}
        for name, dtype, shape, offset, _ in layout.places:
            if dtype is None:
                found[name] = (strings or {})[name]
            else:
                array: np.ndarray = np.ndarray(shape, dtype, memory, at + offset)
                found[name] = array.copy() if copy else array
        return found

    def _layout(self, shapes: Shapes) -> Layout:
        """Place tensors of these shapes, which may have more axes than a file declares."""
        places, key, at = [], [], 0
        for spec, dtype, shape in zip(self._specs, self._dtypes, shapes, strict=True):
            size = 0 if dtype is None else math.prod(shape) * dtype.itemsize
            places.append(Place(spec.name, dtype, shape, at, size))
            key.append((spec.name, PROTOCOL_NAMES[spec.dtype], shape[1:]))
            at += -(-size // _ALIGN) * _ALIGN
        return Layout(max(_ALIGN, at), tuple(places), tuple(key))


# -- in a front end ------------------------------------------------------------------------------


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


class EngineLink:
    """The models of the engine process, and the connection to it while it runs.

    `number`: of this front end. `memory`: shared with the engine process, the first half for
    requests. `address`: where that process listens. `open`: by `id`, the requests without an answer
    of that process, cancelled ones too, each with its block: where it begins, and its size.
    """

    def __init__(self, number: int, memory: mmap, address: str | bytes) -> None:
        self.models: dict[str, FrontModel] = {}  # in the order of the engine process
        self.running = False  # whether the engine process has answered, and not ended since
        self.ran = asyncio.Event()
        self._memory = memory
        self._number = number
        self._address = address
        self._begin()

    def _begin(self) -> None:
        self._blocks = BlockAllocator(0, len(self._memory) // 2)
        self.open: dict[int, tuple[RemoteBatcher, Pending, int, int]] = {}

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
            self.running, waiting = False, self.open
            self._begin()
            for batcher, request, *_ in waiting.values():
                if not request.finished:
                    request.finished, request.error = True, Overloaded(_ENDED, hint=_HINT)
                    batcher.fail(request)
            await asyncio.sleep(CONNECT_S)

    def _receive(self, leave: Callable[[], None], messages: Sequence[Message]) -> None:
        read: list[tuple[int, int]] = []  # blocks of answers
        for kind, *content in messages:
            if kind == "answer":
                self._answer(read, *content)
            elif self._describe(content[0]):  # "models"
                self.running = True
                self.ran.set()
            else:
                leave()  # the successor knows them
        if read:
            self._link.send("read", read)

    def _describe(self, engines: Mapping[str, RemoteEngine]) -> bool:
        """Update the models from the engine process; return False if it serves other ones now."""
        models = self.models
        accepts = {name: model.remote.accepts for name, model in models.items()}
        if accepts != {name: engine.accepts for name, engine in engines.items()}:
            return False
        for name, engine in engines.items():
            models[name].describe(engine)
        return True

    def submit(self, batcher: RemoteBatcher, request: Pending) -> None:
        """Forward a request. Raises Overloaded."""
        if not self.running:
            raise Overloaded(_ENDED, hint=_HINT)
        shapes = batcher.inputs.shapes(request.feeds)
        layout = batcher.inputs.layout(shapes)
        at = self._blocks.take(layout.size)
        if at is None:
            raise Overloaded(
                "the memory shared with the process of the engines is full", hint=_HINT
            )
        strings = batcher.inputs.write(self._memory, at, layout, request.feeds)
        number = id(request)
        self.open[number] = batcher, request, at, layout.size
        about = _ABOUT(request)  # sent flat: a tuple in a message takes as long again to pickle
        self._link.send("infer", number, batcher.index, at, shapes, strings, *about)

    def cancel(self, request: Pending) -> bool:
        """Cancel a request. The engine process answers in any case; the answer is dropped."""
        if request.finished or id(request) not in self.open:
            return False
        request.finished = True
        self._link.send("cancel", id(request))
        return True

    def _answer(
        self,
        read: list[tuple[int, int]],
        number: int,
        error: DeploykitError | None,
        at: int,
        shapes: Shapes | None,
        strings: Mapping[str, np.ndarray] | None,
    ) -> None:
        batcher, request, block, block_bytes = self.open.pop(number)
        self._blocks.give(block, block_bytes)
        layout = None if shapes is None else batcher.outputs.layout(shapes)
        if layout is not None:
            read.append((at, layout.size))
        if request.finished:  # cancelled, or past its deadline
            return
        request.finished = True
        request.error = error
        if layout is not None:
            request.outputs = batcher.outputs.read(self._memory, at, layout, strings, copy=True)
        deliver_inline((request,))


class RemoteBatcher(Batcher):
    """Forwards requests to the engine process."""

    engines = hung = waiting = unanswered = 0  # the engine process counts them
    inline_max_rows = 0
    lost = False
    watchers = ()
    policy = BatchPolicy()

    def __init__(self, model: FrontModel) -> None:
        self.index = model.index
        self.inputs = TensorCodec(model.remote.inputs)
        self.outputs = TensorCodec(model.remote.outputs)
        self._link = model.link
        self._metrics = model.metrics
        self.policy = BatchPolicy(model.max_batch, queue=0)

    def take_most_waiting(self) -> int:
        return 0

    def submit(self, request: Pending) -> None:
        try:
            self._link.submit(self, request)
        except Overloaded:
            self._metrics.count("rejected")
            raise

    def cancel(self, request: Pending) -> bool:
        return self._link.cancel(request)

    def expire(self) -> None:
        now_us = monotonic_us()
        for batcher, request, *_ in list(self._link.open.values()):
            late = batcher is self and request.give_up_us + LATE_US <= now_us
            if late and self.cancel(request):
                mark_expired((request,), now_us)
                self.fail(request)

    def fail(self, request: Pending) -> None:
        """Deliver an error that the engine process did not report."""
        self._metrics.record_failure(request, monotonic_us())
        deliver_inline((request,))

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

    def _set_batcher(self) -> None:
        self.batcher = RemoteBatcher(self)


# -- in the process of the engines ---------------------------------------------------------------


class FrontEnd(Link):
    """The requests of one front end, which is one of `fronts` while it is connected."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        memories: Sequence[mmap],
        fronts: set[FrontEnd],
        describe: Callable[[], Mapping[str, RemoteEngine] | None],
    ) -> None:
        super().__init__(self._take, self._on_lost)
        self._models = [
            (each, TensorCodec(each.engines[0].inputs), TensorCodec(each.engines[0].outputs))
            for each in models
        ]
        self._memories = memories
        self._fronts = fronts
        self._describe = describe
        self._open: dict[int, tuple[ServedModel, Pending]] = {}
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
        for kind, *content in messages:
            if kind == "infer":
                self._start(content)
            elif kind == "read":
                for block in content[0]:
                    self._blocks.give(*block)
            elif kind == "cancel":
                number = content[0]
                found = self._open.get(number)
                if found is not None and found[0].batcher.cancel(found[1]):
                    del self._open[number]
                    self.send("answer", number, None, 0, None, None)
            else:  # "front"
                self._memory = self._memories[content[0] - 1]
                self._blocks = BlockAllocator(len(self._memory) // 2, len(self._memory))
                self._fronts.add(self)
                self.send("models", self._describe())

    def _on_lost(self) -> None:
        """Cancel the requests of the front end."""
        self._fronts.discard(self)
        waiting, self._open = self._open, {}
        for model, request in waiting.values():
            model.batcher.cancel(request)

    def _start(self, content: Sequence[Any]) -> None:
        number, index, at, shapes, strings, rows, *times = content
        model, inputs, outputs = self._models[index]
        layout = inputs.layout(shapes)
        feeds = inputs.read(self._memory, at, layout, strings, copy=False)
        buckets = model.buckets
        key = layout.key if buckets is None else buckets.key(layout.key)
        request = Pending(feeds, rows, key, partial(self._answer, number, outputs), *times)
        self._open[number] = model, request
        try:
            model.batcher.submit(request)
        except Overloaded as exc:
            request.error = exc
            self._answer(number, outputs, request)

    def _answer(self, number: int, outputs: TensorCodec, request: Pending) -> None:
        if self._open.pop(number, None) is None:  # the front end has disconnected
            return
        error = request.error
        if error is None:
            shapes = outputs.shapes(request.outputs)
            layout = outputs.layout(shapes)
            at = self._blocks.take(layout.size)
            if at is not None:
                strings = outputs.write(self._memory, at, layout, request.outputs)
                self.send("answer", number, None, at, shapes, strings)
                return
            error = Overloaded(
                "the answer does not fit into the memory shared with the process of the engines",
                hint="try again later, or ask for less at once",
            )
        self.send("answer", number, error, 0, None, None)
