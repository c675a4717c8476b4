"""A pipeline over gRPC: ModelInfer with its input as one BYTES element, answered with one of BYTES.

Where the input is an image, it may be a UINT8 tensor [height, width, 3] instead.
"""

from __future__ import annotations

from functools import partial

from deploykit.serving.grpc.failing import Replying, fail_with
from deploykit.serving.grpc.predict import LARGE_BYTES, Message
from deploykit.serving.models.inference import over_budget
from deploykit.serving.models.offload import Offload, Result
from deploykit.serving.models.pipelines import ServedPipeline
from deploykit.serving.oip import messages
from deploykit.serving.oip.request import Request, fill
from deploykit.serving.options import VERSION


class PipelineMethod:
    """ModelInfer of one pipeline."""

    def __init__(self, pipeline: ServedPipeline, offload: Offload) -> None:
        self._pipeline = pipeline
        self._offload = offload

    def __call__(self, client: Replying, source: Message, trace: str | None) -> None:
        """Raises Overloaded where a large message cannot be read on another thread."""
        read, start = partial(self._read, source), partial(self._start, client, trace)
        if len(source[0]) <= LARGE_BYTES:
            start(read)
        else:
            self._offload(read, start, large=True, limit_s=self._pipeline.options.timeout_ms / 1e3)

    def _read(self, source: Message) -> Request:
        head, data, at, spans = source
        pipeline = self._pipeline
        signature = pipeline.signature if messages.sends_bytes(head) else pipeline.tensors
        return fill(messages.plan_request(head, spans, signature), data, at, pipeline.memory)

    def _start(self, client: Replying, trace: str | None, result: Result[Request]) -> None:
        if client.gone:
            return
        try:
            request = result()
            given = self._pipeline.input_of(request)
            if not client.reserve(len(given)):
                raise over_budget()
            waits_us = [us for us in (request.timeout_us, client.left_us) if us is not None]
            reply = partial(self._reply, client, request._replace(feeds={}))
            timeout_us = max(1, min(waits_us)) if waits_us else None
            client.cancel = self._pipeline.start(
                lambda: given, reply, trace, client.reserve, timeout_us
            )
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            self._pipeline.refuse(exc)
            fail_with(client, exc)

    def _reply(
        self, client: Replying, request: Request, answer: bytes | Exception, _json: bool
    ) -> None:
        client.cancel = None
        try:
            found = self._pipeline.results(request, answer)
            client.reply(messages.encode(self._pipeline.name, VERSION, request.id, found))
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            fail_with(client, exc)
