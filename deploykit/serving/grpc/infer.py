"""Inference over gRPC, as one call or as a stream: decode messages, encode replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from deploykit.core.errors import quote
from deploykit.core.tensors import Bytes
from deploykit.pipelines.threads import Peer
from deploykit.serving.grpc.call import GrpcCall, Replying, fail_with
from deploykit.serving.models.inference import Inference, Items, ModelRoute, TaskCall
from deploykit.serving.models.offload import Lane, Offload
from deploykit.serving.models.pipelines import ServedPipeline
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip import messages
from deploykit.serving.oip.request import Request, Result, collect_results
from deploykit.serving.options import VERSION
from deploykit.serving.transport.connection import About

log = logging.getLogger(__name__)

LARGE_BYTES = 32 << 10  # what is slow to decode is decoded on another thread above this size
_LONG_BYTES = 128 << 10  # above this size, together with other long ones
_LARGE_ITEMS_BYTES = 256 << 10  # images or sentences above this size are split on another thread
Message = tuple[messages.Split, bytes, int]  # the arguments of `messages.decode`


def _timeout_us(request: Request, client: Replying) -> int | None:
    """Return how long a request may wait: by its parameter and by the deadline of its call."""
    waits_us = [us for us in (request.timeout_us, client.left_us) if us is not None]
    return max(1, min(waits_us)) if waits_us else None


class GrpcTaskCall(TaskCall):
    """ModelInfer of a model with images or sentences: one BYTES input, answered with JSON.

    The input is "image" or "text", of shape [N]; the output is "answer", of the same shape.
    """

    client: Replying

    def items(self, source: Message) -> Items:
        request = messages.decode(*source, self.signature, self.route.memory)
        return self.items_of(request._replace(timeout_us=_timeout_us(request, self.client)))

    def reply(self, answers: Sequence[bytes]) -> None:
        found, name = self.outputs_of(answers), self.route.model.name
        self.client.reply(messages.encode(name, VERSION, self.request.id, found))

    def refuse(self, error: Exception) -> None:
        fail_with(self.client, error)


def infer_pipeline(
    pipeline: ServedPipeline, client: Replying, source: Message, trace: str | None
) -> None:
    """Answer ModelInfer of a pipeline, with one BYTES element, with one of BYTES.

    An input image may be a UINT8 tensor [height, width, 3] instead. Raises Overloaded.
    """

    def decode() -> Request:
        sends_bytes = messages.sends_bytes(source[0].head)
        signature = pipeline.signature if sends_bytes else pipeline.tensors
        return messages.decode(*source, signature, pipeline.memory)

    def reply(request: Request, found: list[Result]) -> None:
        client.reply(messages.encode(pipeline.name, VERSION, request.id, found))

    pipeline.infer(decode, reply, partial(fail_with, client), client, trace, client.left_us)


class InferMethods:
    """The methods ModelInfer and ModelStreamInfer."""

    def __init__(self, repository: ModelRepository, offload: Offload) -> None:
        self._repository = repository
        self.routes = {
            name: ModelRoute(repository, model, offload)
            for name, model in repository.models.items()
        }

    def stream(self, call: GrpcCall, data: bytes, at: int) -> None:
        slot = ReplySlot(call)
        call.slots.append(slot)
        if call.cancel is None:

            def cancel(slots: list[ReplySlot] = call.slots) -> None:
                for each in slots:
                    if each.cancel is not None:
                        each.cancel()
                slots.clear()

            call.cancel = cancel
        self.infer(call, data, at, slot)

    def end_stream(self, call: GrpcCall) -> None:
        """End a call after the client's last message."""
        if not call.slots:
            call.complete()

    def infer(self, call: GrpcCall, data: bytes, at: int, slot: ReplySlot | None = None) -> None:
        """Start one message of a call; `slot` takes the answer if the call is a stream."""
        client: Replying = call if slot is None else slot
        trace = call.head.trace
        try:
            split = messages.split_request(data, at)
            head, _, name, version = split
            source = (split, data, at)
            if name in self._repository.pipelines and version in ("", VERSION):
                pipeline = self._repository.pipelines[name]
                infer_pipeline(pipeline, client, source, trace)
                return
            model = self._repository.find(name, version or VERSION)
            route = self.routes[model.name]
            if model.task.ready and messages.sends_bytes(head):
                task = GrpcTaskCall(route, client, trace)
                task.split(source, task.items, large=len(data) > _LARGE_ITEMS_BYTES)
                return
            inference = GrpcInference(route, client, source, trace)
            slow = len(head) > LARGE_BYTES or len(data) > route.slow_bytes
            if slow or (route.memory is not None and messages.names_regions(head)):
                large = not slow or len(data) > _LONG_BYTES
                inference.lane = Lane.LARGE if large else Lane.SMALL
                del split, head, data, source
                inference.start_offloaded()
                return
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            fail_with(client, exc)
            return
        inference.start()


class GrpcInference(Inference):
    """One inference message. Its source is the message with the result of `split_request`."""

    __slots__ = ()

    client: Replying

    def decode(self, source: Message) -> Request:
        request = messages.decode(*source, self.route.model.signature, self.route.memory)
        if self.client.left_us is None:
            return request
        return request._replace(timeout_us=_timeout_us(request, self.client))

    def encodes_slowly(self) -> bool:
        large = self.route.model.largest_output_bytes > _LONG_BYTES
        return large and self.set_lane(self.slow_bytes(), _LONG_BYTES)

    def encode(self) -> tuple[list[Bytes]]:
        model, request = self.route.model, self.request
        found = collect_results(request, self.pending.outputs, model.signature, self.route.memory)
        return (messages.encode(model.name, VERSION, request.id, found),)

    def fail(self, error: Exception) -> None:
        fail_with(self.client, error)


class ReplySlot:
    """The place of one reply in a streaming call: replies keep the order of the messages."""

    __slots__ = ("_call", "about", "cancel", "parts")

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self.parts: list[Bytes] | None = None
        self.about: About | None = None
        self.cancel: Callable[[], object] | None = None

    @property
    def gone(self) -> bool:
        return self._call.gone or self._call.trailers is not None  # both end the slot

    @property
    def peer(self) -> Peer:
        return self._call.peer

    @property
    def left_us(self) -> int | None:
        return self._call.left_us

    def reserve(self, size: int) -> bool:
        return self._call.reserve(size, self._call.slots.index(self))

    def reply(self, parts: list[Bytes]) -> None:
        self._put(messages.wrap_in_stream(parts))

    def fail(self, status: str, message: str) -> None:
        log.info("%s: %s %s", quote(self._call.head.path), status, quote(message))
        self._put(messages.stream_error(message))

    def _put(self, parts: list[Bytes]) -> None:
        self.parts = parts
        call = self._call
        slots = call.slots
        if not slots or slots[0].parts is None:
            return
        while slots and slots[0].parts is not None:
            call.send_message(slots.pop(0).parts)
        call.read()  # reads messages that waited for this reply, or ends the call
