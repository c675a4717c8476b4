"""Requests of images or sentences: each item becomes one row of a batch.

An item is decoded on another thread and queued as a separate inference request, so that it is
batched, counted and limited as all others are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import orjson

from deploykit.core.errors import BadInput, Expired, Overloaded, TooLarge
from deploykit.core.task import SEGMENT
from deploykit.core.tensors import TensorSpec
from deploykit.engines.tasks.engine import RLE, Item, TaskSteps, answer
from deploykit.pipelines.threads import Peer
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.models.inference import Inference, ModelRoute
from deploykit.serving.models.offload import Lane, Result
from deploykit.serving.models.pipelines import Receiver, over_budget
from deploykit.serving.oip.request import Request, Signature, collect_results
from deploykit.serving.oip.request import Result as Output
from deploykit.serving.oip.tensors import make_slot

ANSWER = "answer"  # the output of a request of the protocol
MOST_ITEMS = 256  # the most items of one request
# the largest images of each lane, in pixels times scans: about 10 and 100 ms of decoding
_LANE_PIXELS = {Lane.SMALL: 1 << 20, Lane.LARGE: 1 << 22, Lane.HUGE: None}
_SMALL_TEXT = 16 << 10  # characters or bytes


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
        return call.request._replace(feeds=feeds, rows=1, key=key, outputs=())

    def decode_large(self) -> Request:
        source = self.take_source()
        try:
            return self.decode(source)
        except TooLarge:
            if self.lane is not Lane.HUGE:  # it waits with larger ones
                self._source, self.lane = source, Lane(self.lane + 1)
            raise

    def decoded_bytes(self) -> int:
        return sum(array.nbytes for array in self.request.feeds.values())

    def encodes_slowly(self) -> bool:
        self.lane = Lane.LARGE
        return self.client.call.steps.task.kind == SEGMENT

    def encode(self) -> tuple[bytes]:
        call = self.client.call
        (found,) = answer(call.task, self.pending.outputs, [self._placed], mask=call.mask)
        return (orjson.dumps(found),)

    def fail(self, error: Exception) -> None:
        self.client.call.fail(error)
