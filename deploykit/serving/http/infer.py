"""Inference over HTTP: decode a call's body, encode the outputs as its reply.

Large JSON and compressed bodies are offloaded to another thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.json_value import ONE_JSON
from deploykit.core.tensors import Bytes
from deploykit.serving.models.inference import Inference, ModelRoute, array_bytes, over_budget
from deploykit.serving.models.offload import Lane
from deploykit.serving.oip import json
from deploykit.serving.oip.request import Request
from deploykit.serving.options import VERSION
from deploykit.serving.transport import call as compression
from deploykit.serving.transport.call import JSON, Call, reply_exception

_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
_COMPRESSED = b"Content-Encoding: %s\r\nVary: Accept-Encoding\r\n"
LARGE_BYTES = 256 << 10  # JSON of a request or a reply from this size on is offloaded to a thread
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
        call.body = b""
        large = self.model.largest_output_bytes > LARGE_BYTES
        if large and not call.reserve(0):  # checked before the engine runs in vain
            raise over_budget()
        slow = json_bytes is None or len(body) > self.slow_bytes
        slow_bytes = len(body) if slow else json_bytes or 0
        inference = HttpInference(self, call, (body, json_bytes), head.trace)
        del body
        if inference.set_lane(slow_bytes, LARGE_BYTES) or head.encoding is not None:
            inference.start_offloaded()
        else:
            inference.start()


class HttpInference(Inference):
    """One inference call. Its source is the body and the length of the body's JSON part."""

    __slots__ = ("_decoded_bytes",)
    _decoded_bytes: int

    client: Call
    route: InferRoute

    def decoded_bytes(self) -> int:
        return self._decoded_bytes

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
        with ONE_JSON:
            request = json.decode(body, json_bytes, route.model.signature, route.memory)
        self._decoded_bytes = sum(map(array_bytes, request.feeds.values()))
        return request

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
        return 200, headers + _COMPRESSED % coding, [compression.compress(parts, coding)]

    def fail(self, error: Exception) -> None:
        reply_exception(self.client, error)
