"""Images or sentences over gRPC: ModelInfer with one BYTES input, answered with BYTES of JSON.

The input is "image" or "text", of shape [N]; the output is "answer", of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.core.tensors import TensorSpec
from deploykit.serving.grpc.failing import Replying, fail_with
from deploykit.serving.models.inference import ModelRoute
from deploykit.serving.models.task_call import Items, TaskCall
from deploykit.serving.oip import messages
from deploykit.serving.oip.request import RequestedOutput, Signature, fill
from deploykit.serving.oip.response import Result
from deploykit.serving.oip.tensors import make_slot
from deploykit.serving.options import VERSION

ANSWER = "answer"
LARGE_BYTES = 256 << 10  # of a message: taken apart on another thread

Message = tuple[bytes, bytes, int, tuple[messages.Span, ...]]  # see `messages.split_request`


class TaskMethod:
    """ModelInfer of one model with images or sentences."""

    def __init__(self, route: ModelRoute, max_bytes: int) -> None:
        self._route = route
        names = ("image", "text", ANSWER)
        slots = {name: make_slot(TensorSpec(name, "string", ("N",))) for name in names}
        given = {ANSWER: slots.pop(ANSWER)}
        self._signatures = {
            name: Signature({name: replace(slot, raw=True)}, given, 0, max_bytes)
            for name, slot in slots.items()
        }

    def __call__(self, client: Replying, source: Message, trace: str | None) -> None:
        try:
            call = GrpcTaskCall(self._route, client, trace)
        except DeploykitError as exc:
            fail_with(client, exc)
        else:
            call.split(source, partial(self._items, call), large=len(source[1]) > LARGE_BYTES)

    def _items(self, call: GrpcTaskCall, source: Message) -> Items:
        head, data, at, spans = source
        signature = self._signatures[self._route.model.task.parameters["takes"]]
        planned = messages.plan_request(head, spans, signature)
        request = fill(planned, data, at, self._route.memory)
        call.request_id, call.priority = request.id, request.priority
        waits_us = [us for us in (request.timeout_us, call.client.left_us) if us is not None]
        call.timeout_us = max(1, min(waits_us)) if waits_us else None
        return Items([item for array in request.feeds.values() for item in array.tolist()])


class GrpcTaskCall(TaskCall):
    """One message."""

    client: Replying

    def __init__(self, route: ModelRoute, client: Replying, trace: str | None) -> None:
        super().__init__(route, client, trace)
        self.request_id: str | None = None

    def reply(self, answers: Sequence[bytes]) -> None:
        array = np.empty(len(answers), object)
        array[:] = answers
        found = Result(ANSWER, "BYTES", array.shape, array, RequestedOutput(ANSWER, True))
        name = self.route.model.name
        self.client.reply(messages.encode(name, VERSION, self.request_id, [found]))

    def refuse(self, error: Exception) -> None:
        fail_with(self.client, error)
