"""Inference over HTTP: decode a call's body, encode the outputs as its reply.

Large JSON and compressed bodies are offloaded to another thread.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from functools import partial
from typing import cast

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.tensors import Bytes
from deploykit.serving.http.predict import HttpTaskCall, PipelineRoute, from_base64
from deploykit.serving.models.inference import Inference, Items, ModelRoute
from deploykit.serving.models.offload import Lane
from deploykit.serving.models.pipelines import over_budget
from deploykit.serving.oip import json
from deploykit.serving.oip.json import LARGE_BYTES
from deploykit.serving.oip.request import Request, Result
from deploykit.serving.oip.tensors import array_bytes
from deploykit.serving.options import VERSION
from deploykit.serving.transport import call as compression
from deploykit.serving.transport.call import JSON, Call, Head, reply_exception

_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
_INLINE_BYTES = 4 << 10  # outputs up to this size are compressed on the event loop's thread


class InferRoute(ModelRoute):
    """Answers the inference requests of one model."""

    def __call__(self, call: Call) -> None:
        """Answer a request. Raises BadInput for a wrong header."""
        head, body = call.head, call.body
        try:
            json_bytes = json.header_length(head.json_bytes)
        except BadInput:
            self.model.metrics.count("bad_request")
            raise
        if json_bytes is None and head.content_type is not None and head.encoding is None:
            body = compression.to_utf8(body, head.content_type)
        if self.model.task.ready and _sends_bytes(head, body, json_bytes):
            large = len(body) > LARGE_BYTES or head.encoding is not None
            task = HttpTaskInference(self, call, head.trace)
            call.body = b""
            task.split((body, json_bytes), task.items, large=large)
            return
        call.body = b""
        large = self.model.largest_output_bytes > LARGE_BYTES
        if large and not call.reserve(0):  # checked before the engine runs in vain
            raise over_budget()
        slow = json_bytes is None or len(body) > self.slow_bytes
        slow_bytes = len(body) if slow else json_bytes or 0
        inference = HttpInference(self, call, (body, json_bytes), head.trace)
        del body
        if slow_bytes > LARGE_BYTES or head.encoding is not None:
            inference.set_lane(slow_bytes, LARGE_BYTES)
            inference.start_offloaded()
        else:
            inference.start()


class HttpInference(Inference):
    """One inference call. Its source is the body and the length of the body's JSON part."""

    __slots__ = ()

    client: Call
    route: InferRoute

    def decode(self, source: tuple[Bytes, int | None]) -> Request:
        route = self.route
        return json.decode(*source, route.model.signature, route.memory)

    def decode_large(self) -> Request:
        body, json_bytes = source = self.take_source()
        route, encoding = self.route, self.client.head.encoding
        if encoding is not None:
            limit = route.max_body_bytes
            limit = limit if self.lane else min(limit, LARGE_BYTES)
            try:
                body = compression.decompress(body, encoding, limit)
            except TooLarge:
                if limit < route.max_body_bytes:  # it waits with the large requests
                    self._source, self.lane = source, Lane.LARGE
                raise
        request = json.decode(body, json_bytes, route.model.signature, route.memory)
        if encoding is None:
            return request
        return request._replace(copied_bytes=max(request.copied_bytes, len(body)))

    def encodes_slowly(self) -> bool:
        large = self.route.model.largest_output_bytes > LARGE_BYTES
        slow = large and self.set_lane(self.slow_bytes(), LARGE_BYTES)
        accept = self.client.head.accept_encoding
        if slow or accept is None or compression.choose_encoding(accept) is None:
            return slow
        size = sum(map(array_bytes, self.pending.outputs.values()))
        self.set_lane(size, LARGE_BYTES)
        return size > _INLINE_BYTES

    def encode(self) -> tuple[int, bytes, Sequence[Bytes]]:
        route, request, outputs = self.route, self.request, self.pending.outputs
        name, signature = route.model.name, route.model.signature
        parts, json_bytes = json.encode(name, VERSION, request, outputs, signature, route.memory)
        headers = JSON if json_bytes is None else _BINARY % json_bytes
        accept = self.client.head.accept_encoding
        coding = compression.choose_encoding(accept) if accept else None
        if coding is None:
            return 200, headers, parts
        return 200, headers + compression.COMPRESSED % coding, [compression.compress(parts, coding)]

    def fail(self, error: Exception) -> None:
        reply_exception(self.client, error)


def _sends_bytes(head: Head, body: Bytes, json_bytes: int | None) -> bool:
    """Return whether the JSON part has a BYTES tensor: images or sentences, not a model's input."""
    if head.encoding is not None:  # the tensors are described at its beginning
        with contextlib.suppress(zlib.error):
            start = bytes(body[:LARGE_BYTES])
            return b'"BYTES"' in zlib.decompressobj(47).decompress(start, LARGE_BYTES)
    return b'"BYTES"' in bytes(body[:json_bytes])


def _reply(call: Call, name: str, request: Request, results: Sequence[Result]) -> None:
    parts, json_bytes = json.encode_results(name, VERSION, request.id, results)
    call.reply(200, JSON if json_bytes is None else _BINARY % json_bytes, parts)


class HttpTaskInference(HttpTaskCall):
    """A request with images, which JSON has in base64, or sentences: one BYTES input."""

    route: InferRoute

    def items(self, source: tuple[Bytes, int | None]) -> Items:
        body, json_bytes = source
        body = compression.decompress(body, self.client.head.encoding, self.route.max_body_bytes)
        request = json.decode(body, json_bytes, self.signature, self.route.memory)
        found = self.items_of(request)
        if self.steps.task.image is None:
            return found
        images = cast("Sequence[bytes]", found.items)
        return Items([_from_json(item, number) for number, item in enumerate(images, 1)])

    def reply(self, answers: Sequence[bytes]) -> None:
        _reply(self.client, self.route.model.name, self.request, self.outputs_of(answers))


def _from_json(item: bytes, number: int) -> bytes:
    """Return an image that came as it is, or in base64 where it came as a string of JSON."""
    with contextlib.suppress(UnicodeDecodeError, BadInput):
        return from_base64(item.decode("ascii"), number)
    return item


class PipelineInferRoute(PipelineRoute):
    """Answers inference requests of a pipeline: a BYTES input, or an image's UINT8 pixels."""

    def __call__(self, call: Call) -> None:
        """Start the pipeline. Raises BadInput for a wrong header, Overloaded at the shutdown."""
        pipeline, body = self._pipeline, call.body
        json_bytes = json.header_length(call.head.json_bytes)
        call.body = b""

        def decode() -> Request:
            plain = compression.decompress(body, call.head.encoding, self._max_body_bytes)
            sends_bytes = b'"BYTES"' in bytes(plain[:json_bytes])
            signature = pipeline.signature if sends_bytes else pipeline.tensors
            request = json.decode(plain, json_bytes, signature, pipeline.memory)
            if sends_bytes and pipeline.takes == "image":
                (image,) = request.feeds.values()
                plain_image = image.copy()
                plain_image[0] = _from_json(image[0], 1)
                request = request._replace(feeds={pipeline.input: plain_image})
            return request

        reply, fail = partial(_reply, call, pipeline.name), partial(reply_exception, call)
        pipeline.infer(decode, reply, fail, call, call.head.trace)
