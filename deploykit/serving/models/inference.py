"""One inference request from its bytes to its reply, for every protocol.

Decode, queue, encode. Slow work is offloaded to another thread, so that other requests do not wait
for it. An image or a sentence is one request: decoded on another thread, then batched, counted and
limited as all others are. A `TaskCall` is a message with several of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import orjson

from deploykit.core.errors import BadInput, Expired, Overloaded, TooLarge
from deploykit.core.task import SEGMENT
from deploykit.core.tensors import TensorSpec
from deploykit.engines.tasks import RLE, Item, TaskSteps, answer
from deploykit.pipelines.threads import Peer
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.offload import HUGE_BYTES, Lane, Offload, Result
from deploykit.serving.models.pipelines import Receiver, over_budget
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import (
    Request,
    Signature,
    array_bytes,
    collect_results,
    make_slot,
)
from deploykit.serving.oip.request import Result as Output

_LEAST_ENCODE_S = 0.1  # the least time for outputs that were computed just in time
_FEW_STRINGS = 32 << 10  # few enough to add up their sizes; each may be long
_SLOW_BYTES = {"BYTES": 32 << 10, "BF16": 1 << 20}
_REGION_SPEED = 16  # shared memory is written this many times as fast as JSON
ANSWER = "answer"  # the output of a request of the protocol
MOST_ITEMS = 256  # the most items of one request
# the largest images of each lane, in pixels times scans: about 10 and 100 ms of decoding
_LANE_PIXELS = {Lane.SMALL: 1 << 20, Lane.LARGE: 1 << 22, Lane.HUGE: None}
_SMALL_TEXT = 16 << 10  # characters or bytes


class ModelRoute:
    """State that the inference requests of one model share.

    `offload(work, then)` runs `work` on another thread, then `then` on the event loop's, within
    `limit_us` from the arrival of a request.
    """

    def __init__(self, repository: ModelRepository, model: ServedModel, offload: Offload) -> None:
        self.model = model
        self.offload = offload
        self.memory = repository.memory
        self.limit_us = repository.options.timeout_ms * 1000
        self.max_body_bytes = repository.options.max_body_bytes
        # bytes of tensors from which their decoding is slow; other numbers are read in place
        kinds = [slot.datatype for slot in model.signature.inputs.values()]
        self.slow_bytes = min(_SLOW_BYTES.get(kind, math.inf) for kind in kinds)


class Inference:
    """One inference request; a protocol's subclass parses the request and writes the reply.

    `source`: the request as it was received. All methods but `decode`, `decode_large` and `encode`
    run on the event loop's thread.
    """

    __slots__ = (
        "_admitted", "_source", "_started_us", "client", "lane", "pending", "request", "route",
        "trace",
    )  # fmt: skip

    request: Request
    pending: Pending
    lane: Lane  # where it waits if it is offloaded; set before

    def __init__(self, route: ModelRoute, client: Receiver, source: Any, trace: str | None) -> None:
        self.route = route
        self.client = client
        self.trace = trace  # the client's W3C traceparent
        self._source = source
        self._admitted = False
        self._started_us = monotonic_us()

    # -- for subclasses ----------------------------------------------------------------------------

    @abstractmethod
    def decode(self, source: Any) -> Request:
        """Parse the request's bytes. Raises BadInput."""

    @abstractmethod
    def encode(self) -> tuple[Any, ...]:
        """Return the reply, from the outputs of `pending`, as the arguments of `client.reply`."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Send an error reply."""

    def decode_large(self) -> Request:
        """Decode on another thread. Raises BadInput, Overloaded."""
        return self.decode(self.take_source())

    def take_source(self) -> Any:
        """Return the source and forget it, so that nothing else refers to it. Raises Overloaded."""
        source, self._source = self._source, None
        if source is None:
            raise Overloaded("the client has disconnected")
        return source

    def reserve(self, size: int) -> None:
        """Count `size` bytes more until the reply. Raises Overloaded above the memory budget."""
        if not self.client.reserve(size):
            raise over_budget()

    def encodes_slowly(self) -> bool:
        """Return whether `encode` takes long enough to be offloaded; sets `lane`."""
        return False

    def slow_bytes(self) -> int:
        """Return the bytes of the largest output that is slow to encode; raw numbers are fast."""
        most = 0
        for wanted in self.request.outputs:
            array = self.pending.outputs[wanted.name]
            if not wanted.binary or wanted.classes or array.dtype.kind == "O":
                few = array.dtype.kind == "O" and array.size <= _FEW_STRINGS
                most = max(most, array_bytes(array) if few else array.nbytes)
            elif wanted.region is not None:
                most = max(most, array.nbytes // _REGION_SPEED)
            elif self.route.model.signature.outputs[wanted.name].datatype == "BF16":
                most = max(most, array.nbytes)
        return most

    def set_lane(self, size: int, large: int) -> bool:
        """Choose the lane of `size` bytes; return whether they are above `large`."""
        self.lane = Lane.HUGE if size > HUGE_BYTES else Lane.LARGE if size > large else Lane.SMALL
        return size > large

    def left_s(self) -> float:
        """Return the seconds until a request that is being decoded is past its time limit."""
        return max(0.0, (self._started_us + self.route.limit_us - monotonic_us()) / 1e6)

    # -- the steps -------------------------------------------------------------------------------

    def start(self, decoded: Result[Request] | None = None) -> None:
        """Queue the request, which another thread may have `decoded`."""
        model, trace = self.route.model, self.trace
        name, began_us = None, self._started_us
        try:
            request = self.decode(self._source) if decoded is None else decoded()
            if decoded is not None:
                limit_us = self.route.limit_us
                left_us = min(request.timeout_us or limit_us, limit_us) + began_us
                request = request._replace(timeout_us=max(1, left_us - monotonic_us()))
            self.request, name = request, request.id
            self.client.about = name, request.rows
            self._source = None  # frees the source; arrays keep the bytes that they use
            if request.copied_bytes:
                self.reserve(request.copied_bytes)
            pending = model.submit(
                request,
                self._on_run,
                trace=trace,
                started_us=began_us,
                admitted=self._admitted,
                sender=self.client,
            )
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            if isinstance(exc, (BadInput, Expired)):
                self.client.about = self.client.about or (None, 0)
                model.refuse(exc, began_us, trace, name)
            self.fail(exc)
        else:
            self.client.cancel = partial(model.batcher.cancel, pending)
        finally:
            del decoded  # the error's traceback refers to this frame and the body

    def start_offloaded(self) -> None:
        """Decode the request on another thread and queue it then."""
        self._admitted = not self.route.model.draining
        self.client.cancel = self._discard  # else bodies of disconnected clients could pile up
        self._offload_decoding()

    def _offload_decoding(self) -> None:
        lane, peer = self.lane, self.client.peer
        self.route.offload(
            self.decode_large, self._on_decode, lane=lane, peer=peer, limit_s=self.left_s()
        )

    def _discard(self) -> None:
        self._source = None

    def _on_decode(self, result: Result[Request]) -> None:
        if self._source is not None and not self.client.gone and self.left_s():
            try:
                self._offload_decoding()  # the request turned out to be large
            except Overloaded as exc:
                self.fail(exc)
            return
        self._discard()  # drops what was not taken in time
        self.client.cancel = None
        if not self.client.gone:
            self.start(result)

    def _on_run(self, pending: Pending) -> None:
        """Reply after the engine has run, or after the request has failed."""
        client = self.client
        client.cancel = None
        if client.gone:
            return
        if pending.error is not None:
            self.fail(pending.error)
            return
        self.pending = pending
        self._started_us = monotonic_us()
        if not self.encodes_slowly():
            self._reply()
            return
        try:
            self.reserve(self._answer_bytes())
            # once the client has disconnected its outputs are not counted any more
            client.cancel = partial(setattr, pending, "outputs", {})
            left_s = max(_LEAST_ENCODE_S, (pending.give_up_us - monotonic_us()) / 1e6)
            self.route.offload(
                self.encode, self._reply, lane=self.lane, peer=client.peer, limit_s=left_s
            )
        except Overloaded as exc:
            self.fail(exc)

    def _answer_bytes(self) -> int:
        """Return the bytes of the outputs, and at most those of their numbers in JSON."""
        size = sum(array.nbytes for array in self.pending.outputs.values())
        for wanted in self.request.outputs:
            array = self.pending.outputs[wanted.name]
            if not (wanted.binary or wanted.classes or array.dtype.kind == "O"):
                size += array.size * (3 * array.itemsize + 3)
        return size

    def _reply(self, encoded: Result[Any] | None = None) -> None:
        pending, client = self.pending, self.client
        client.cancel = None
        try:
            if client.gone or not pending.outputs:  # this may have changed since the offload
                return
            client.reply(*(self.encode() if encoded is None else encoded()))
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            self.fail(exc)
        else:
            now_us = monotonic_us()
            self.route.model.metrics.record_answer(pending, now_us - self._started_us, now_us)
        finally:
            del encoded, self.pending  # see `start`; the pending request refers back to this one


class Items(NamedTuple):
    """The items of a request; `several`: the answer is a list, even for a single item."""

    items: Sequence[Item]
    several: bool = True


@cache
def item_signature(takes: str, most_bytes: int) -> Signature:
    """Return the tensors of a request with items: the BYTES input `takes`, the output "answer"."""
    item = make_slot(TensorSpec(takes, "string", ("N",)))
    outputs = {ANSWER: make_slot(TensorSpec(ANSWER, "string", ("N",)))}
    return Signature({takes: replace(item, raw=True)}, outputs, 0, most_bytes)


def too_many(count: int) -> TooLarge:
    hint = "send several requests: they are joined all the same"
    return TooLarge(f"the request has {count} items, {MOST_ITEMS} are possible", hint=hint)


class TaskCall:
    """One request; its first item that fails determines the answer. Raises as `ModelTask.steps`.

    A protocol subclasses it to reply. All methods run on the event loop's thread.
    """

    def __init__(self, route: ModelRoute, client: Receiver, trace: str | None) -> None:
        self.route = route
        self.client = client
        self.trace = trace
        self.steps: TaskSteps = route.model.task.steps
        self.task = self.steps.task  # the task with this request's options
        self.kind = "text" if self.task.image is None else "image"
        self.signature = item_signature(self.kind, route.max_body_bytes)
        self.mask = RLE
        self.request = Request({}, 1, (), ())  # its id, priority and time limit
        self.several = True
        self.admitted = not route.model.draining
        self.started_us = monotonic_us()
        self.done = False
        self._items: Iterator[tuple[int, Item]] = iter(())  # those that have not begun
        self._answers: list[bytes] = []
        self._slots: set[_Slot] = set()  # the items that have begun and are not answered
        self._left = 0

    @abstractmethod
    def reply(self, answers: Sequence[bytes]) -> None:
        """Send the answers, each a JSON value."""

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Send an error reply."""

    def items_of(self, request: Request) -> Items:
        """Return the items of a request of the protocol, which has `signature`."""
        self.request = request._replace(feeds={})
        return Items([item for array in request.feeds.values() for item in array.tolist()])

    def outputs_of(self, answers: Sequence[bytes]) -> list[Output]:
        """Return the outputs that a request of the protocol asked for."""
        array = np.empty(len(answers), object)
        array[:] = answers
        return collect_results(self.request, {ANSWER: array}, self.signature, self.route.memory)

    def split(self, source: Any, split: Callable[[Any], Items], *, large: bool) -> None:
        """Split a large `source` into items on another thread, then start them."""
        held = [source]  # empty once it is split, or the client has disconnected
        self.client.cancel = held.clear

        def work() -> Items:
            if not held:
                raise Overloaded("the client has disconnected")
            return split(held.pop())

        def start(result: Result[Items]) -> None:
            held.clear()
            self.client.cancel = None
            if self.client.gone:
                return
            try:
                found = result()
                if not self.client.reserve(sum(map(len, found.items))):
                    raise over_budget()
            except Exception as exc:  # noqa: BLE001 - every error is a reply
                self.fail(exc)
            else:
                self.start(found)

        lane, peer = Lane.LARGE if large else Lane.SMALL, self.client.peer
        try:
            self.route.offload(work, start, lane=lane, peer=peer, limit_s=self.route.limit_us / 1e6)
        except Overloaded as exc:
            self.fail(exc)

    def start(self, found: Items) -> None:
        """Begin each item once the engine is about to have time for it."""
        count = len(found.items)
        if not 0 < count <= MOST_ITEMS:
            self.fail(too_many(count) if count else BadInput("the request has no items"))
            return
        self.several = found.several
        self.client.about = self.request.id, count
        self.client.cancel = self._abandon
        self._items = enumerate(found.items)
        self._answers, self._left = [b""] * count, count
        for _ in range(count):
            self.route.model.items.enter(self._begin_next, self.client.peer)

    def _begin_next(self, leave: Callable[[], None]) -> None:
        limit_us = min(self.request.timeout_us or self.route.limit_us, self.route.limit_us)
        if not self.done and monotonic_us() > self.started_us + limit_us:
            waiting = sum(1 for _ in self._items)
            of = f"{waiting} of {len(self._answers)} {self.kind}s"
            hint = "send fewer at once, or allow more time ('timeout', `timeout_ms`)"
            self.fail(Expired(f"{of} waited for others past the time limit", hint=hint))
        if self.done:
            leave()
            return
        number, item = next(self._items)
        count = len(self._answers)
        where = f"{self.kind} {number + 1} of {count}" if count > 1 else f"the {self.kind}"
        slot = _Slot(self, number, leave)
        self._slots.add(slot)
        _ItemInference(self.route, slot, (item, where), self.trace).begin()

    def take(self, slot: _Slot, answer: bytes) -> None:
        self._slots.discard(slot)
        self._answers[slot.number] = answer
        self._left -= 1
        slot.leave()
        if self._left or self.done:
            return
        self.done = True
        self.client.cancel = None
        try:
            self.reply(self._answers)
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            self.refuse(exc)

    def fail(self, error: Exception) -> None:
        """Reply with an error, unless another one was sent already."""
        if not self.done:
            self._abandon()
            self.client.cancel = None
            self.refuse(error)

    def _abandon(self) -> None:
        self.done, self._items = True, iter(())
        slots, self._slots = self._slots, set()
        for slot in slots:
            if slot.cancel is not None:
                slot.cancel()
            slot.leave()


class _Slot:
    __slots__ = ("about", "call", "cancel", "leave", "number")

    def __init__(self, call: TaskCall, number: int, leave: Callable[[], None]) -> None:
        self.call = call
        self.leave = leave  # lets the next item begin
        self.cancel: Callable[[], object] | None = None
        self.about: tuple[str | None, int] | None = None
        self.number = number

    @property
    def gone(self) -> bool:
        return self.call.done or self.call.client.gone

    @property
    def peer(self) -> Peer:
        return self.call.client.peer

    def reserve(self, size: int) -> bool:
        return self.call.client.reserve(size)

    def reply(self, answer: bytes) -> None:
        self.call.take(self, answer)


class _ItemInference(Inference):
    """The inference of one item. Its source is the item with its name in errors."""

    __slots__ = ("_placed",)

    client: _Slot

    def begin(self) -> None:
        """Decode on another thread. Its time counts from the request's arrival."""
        call = self.client.call
        self._started_us, self._admitted = call.started_us, call.admitted
        long = call.kind == "text" and len(self._source[0]) > _SMALL_TEXT
        self.lane = Lane.LARGE if long else Lane.SMALL
        self.client.cancel = self._discard
        try:
            self._offload_decoding()
        except Overloaded as exc:
            self.fail(exc)

    def decode(self, source: tuple[Item, str]) -> Request:
        call, model = self.client.call, self.route.model
        item, where = source
        prepared = call.steps.read(item, where, most_pixels=_LANE_PIXELS[self.lane])
        self._placed = prepared.placed
        slots = model.signature.inputs
        feeds = {name: prepared.feeds[name] for name in slots}  # in the model's order
        key = tuple((n, slot.datatype, feeds[n].shape[1:]) for n, slot in slots.items())
        size = sum(array.nbytes for array in feeds.values())
        return call.request._replace(feeds=feeds, rows=1, key=key, outputs=(), copied_bytes=size)

    def decode_large(self) -> Request:
        source = self.take_source()
        try:
            return self.decode(source)
        except TooLarge:
            if self.lane is not Lane.HUGE:  # it waits with larger ones
                self._source, self.lane = source, Lane(self.lane + 1)
            raise

    def encodes_slowly(self) -> bool:
        self.lane = Lane.LARGE
        return self.client.call.steps.task.kind == SEGMENT

    def encode(self) -> tuple[bytes]:
        call = self.client.call
        (found,) = answer(call.task, self.pending.outputs, [self._placed], mask=call.mask)
        return (orjson.dumps(found),)

    def fail(self, error: Exception) -> None:
        self.client.call.fail(error)
