"""Inference over HTTP: decode a call's body, encode the outputs as its reply.

Large JSON and compressed bodies are offloaded to another thread, very large JSON, which would hold
the GIL for long, to another process.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Overloaded
from deploykit.core.tensors import Bytes
from deploykit.serving.http.json_worker import JsonWorker
from deploykit.serving.models.inference import Inference
from deploykit.serving.models.offload import Offload
from deploykit.serving.models.repository import VERSION, ModelRepository, ServedModel
from deploykit.serving.oip import json
from deploykit.serving.oip.request import Request
from deploykit.serving.transport import compression
from deploykit.serving.transport.call import JSON, Call, reply_bug, reply_exception

log = logging.getLogger(__name__)

_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
_COMPRESSED = b"Content-Encoding: %s\r\nVary: Accept-Encoding\r\n"
LARGE_BYTES = 256 << 10  # of JSON, of a request or a reply: offloaded to a thread
_LONG_BYTES = 1 << 20  # about 20 ms of JSON: offloaded to the process
_REGION = b"shared_memory_region"

Reply = tuple[bytes, Sequence[Bytes]]  # headers, body


class InferRoute:
    """The route of one model."""

    def __init__(
        self,
        repository: ModelRepository,
        model: ServedModel,
        offload: Offload,
        worker: JsonWorker | None,
    ) -> None:
        self.model = model
        self.offload = offload
        self.worker = worker
        self.memory = repository.memory
        self.max_body_bytes = repository.options.max_body_bytes
        self.large_replies = _may_be_large(model)
        slots = model.signature.inputs.values()
        self._strings = any(
            slot.datatype == "BYTES" for slot in slots
        )  # decoded one by one, which is slow

    def __call__(self, call: Call) -> None:
        """Raises BadInput for a wrong header."""
        try:
            json_bytes = json.header_length(call.head.json_bytes)
        except BadInput:
            self.model.metrics.record_bad_request()
            raise
        slow = len(call.body) if json_bytes is None or self._strings else json_bytes
        inference = HttpInference(self, call, json_bytes)
        if call.head.encoding is not None or slow > LARGE_BYTES:
            inference.start_offloaded()
        else:
            inference.start()


class HttpInference(Inference):
    """One inference call."""

    __slots__ = ("_call", "_decoded_bytes", "_route", "body", "json_bytes")

    def __init__(self, route: InferRoute, call: Call, json_bytes: int | None) -> None:
        trace = call.head.trace
        text = None if trace is None else trace.decode("latin-1")
        super().__init__(route.model, call, route.offload, text)
        self._route = route
        self._call = call
        self.json_bytes = json_bytes
        self.body: Bytes | None = call.body
        call.body = b""

    def release(self) -> None:
        self.body = None

    def reserve(self) -> None:
        if not self._call.reserve(self._decoded_bytes):
            raise Overloaded("the server holds too many bytes of requests already")

    def decode(self) -> Request:
        body = self.body
        if body is None:
            raise Overloaded("the client has disconnected")
        return json.decode(body, self.json_bytes, self.model.signature, self._route.memory)

    def decode_large(self) -> Request:
        body, self.body = self.body, None
        if body is None:
            raise Overloaded("the client has disconnected")
        route, json_bytes, encoding = self._route, self.json_bytes, self._call.head.encoding
        if encoding is not None:
            body = compression.decompress(body, encoding, route.max_body_bytes)
        signature, size = self.model.signature, len(body) if json_bytes is None else json_bytes
        in_process = size > _LONG_BYTES
        if in_process and route.memory is not None:  # the worker process has no shared memory
            in_process = _REGION not in bytes(body[:size])
        if route.worker is not None and in_process:
            # as an array: Python 3.11's garbage collector crashes on a shared memoryview
            array = np.frombuffer(body, np.uint8)
            request: Request = route.worker.run(json.decode, array, json_bytes, signature)
        else:
            request = json.decode(body, json_bytes, signature, route.memory)
        self._decoded_bytes = sum(map(_memory_bytes, request.feeds.values()))
        return request

    def encodes_slowly(self) -> bool:
        route = self._route
        if self._call.head.accept_encoding is not None:
            return True
        return route.large_replies and self._json_bytes_above(LARGE_BYTES)

    def encode(self) -> Reply:
        route, model, request = self._route, self.model, self.request
        outputs, signature = self.pending.outputs, model.signature
        in_memory = any(wanted.region for wanted in request.outputs)
        in_process = route.large_replies and not in_memory and self._json_bytes_above(_LONG_BYTES)
        if route.worker is not None and in_process:
            small = request._replace(feeds={})
            parts, json_bytes = route.worker.run(
                json.encode, model.name, VERSION, small, outputs, signature
            )
        else:
            parts, json_bytes = json.encode(
                model.name, VERSION, request, outputs, signature, route.memory
            )
        headers = JSON if json_bytes is None else _BINARY % json_bytes
        accept = self._call.head.accept_encoding
        coding = compression.choose_encoding(accept) if accept else None
        if coding is None:
            return headers, parts
        return headers + _COMPRESSED % coding, [compression.compress(parts, coding)]

    def send(self, reply: Reply) -> None:
        headers, parts = reply
        self._call.reply(200, headers, parts)

    def fail(self, error: Exception) -> None:
        if isinstance(error, DeploykitError):
            reply_exception(self._call, error)
        else:
            log.error("a request to model '%s' failed", self.model.name, exc_info=error)
            reply_bug(self._call)

    def _json_bytes_above(self, limit_bytes: int) -> bool:
        """Whether an output sent as JSON, strings or classes is larger; raw numbers are fast."""
        for wanted in self.request.outputs:
            array = self.pending.outputs[wanted.name]
            raw = wanted.binary and not wanted.classes and array.dtype.kind != "O"
            if array.nbytes > limit_bytes and not raw:
                return True
        return False


def _memory_bytes(array: np.ndarray) -> int:
    """Bytes of memory including its strings."""
    strings = sum(map(sys.getsizeof, array.flat)) if array.dtype.kind == "O" else 0
    return array.nbytes + strings


def _may_be_large(model: ServedModel) -> bool:
    """Whether any output can be large, at the largest batch."""
    for slot in model.signature.outputs.values():
        axes = list(slot.spec.shape)
        if model.max_batch:
            axes[0] = model.max_batch
        sizes = [axis for axis in axes if isinstance(axis, int)]
        if len(sizes) < len(axes) or math.prod(sizes) * slot.dtype.itemsize > LARGE_BYTES:
            return True
    return False
