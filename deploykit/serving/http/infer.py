"""The route that infers: a call's body to a request, the engine's outputs to a reply.

In: calls for one model. Out: their replies. What takes long to read or to write, large JSON and
compressed bodies, is done aside: other calls would wait for it. On another thread if it is short,
in another process if it would keep Python's lock for long.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Overloaded
from deploykit.core.tensors import Bytes
from deploykit.serving.batching.delivery import monotonic_us
from deploykit.serving.batching.policy import Pending
from deploykit.serving.http.json_worker import Reader
from deploykit.serving.models.repository import VERSION, ServedModel, Service
from deploykit.serving.oip import json
from deploykit.serving.oip.request import Request
from deploykit.serving.transport import compression
from deploykit.serving.transport.call import JSON, Call, reply_bug, reply_exception

log = logging.getLogger(__name__)

_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
_COMPRESSED = b"Content-Encoding: %s\r\nVary: Accept-Encoding\r\n"
LARGE_BYTES = 256 << 10  # of JSON, in or out
_LONG_BYTES = 1 << 20  # some 20 ms of it
_REGION = b"shared_memory_region"

T = TypeVar("T")
Then = Callable[[Callable[[], T]], None]
Aside = Callable[[Callable[[], Any], Then[Any]], None]
Reply = tuple[bytes, Sequence[Bytes]]  # headers, body


def at_once(work: Callable[[], T], then: Then[T]) -> None:
    """An `Aside` without a thread. `then` gets a function: what `work` gave, or raised."""
    then(work)


class Inference:
    """The route of one model. `aside` runs work elsewhere and calls back on the loop's thread."""

    def __init__(
        self, service: Service, model: ServedModel, aside: Aside, reader: Reader | None
    ) -> None:
        self._service = service
        self._reader = reader
        self._model = model
        self._aside = aside
        self._large = _may_be_large(model)
        slots = model.signature.inputs.values()
        self._texts = any(slot.datatype == "BYTES" for slot in slots)  # read one by one

    def __call__(self, call: Call) -> None:
        """Raises BadInput or Overloaded for a call that cannot be queued."""
        head, body, begun_us = call.head, call.body, monotonic_us()
        try:
            json_bytes = json.header_length(head.json_bytes)
            slow = len(body) if json_bytes is None or self._texts else json_bytes
            if head.encoding is not None or slow > LARGE_BYTES:
                call.body = b""
                unread = [body]
                call.cancel = unread.clear  # else bodies nobody waits for could pile up there
                work = partial(self._read, unread, json_bytes, head.encoding)
                admitted = not self._service.draining
                self._aside(work, partial(self._was_read, call, begun_us, admitted))
                return
            request = json.decode(body, json_bytes, self._model.signature, self._service.memory)
        except BadInput:
            self._model.metrics.bad_request()
            raise
        self._queue(call, request, begun_us)

    def _read(
        self, unread: list[Bytes], json_bytes: int | None, encoding: bytes | None
    ) -> tuple[Request, int]:
        """The request and how many bytes it takes."""
        try:
            body = unread.pop()
        except IndexError:
            raise Overloaded("the client has gone") from None
        request = self._decoded(body, json_bytes, encoding)
        return request, sum(map(_size, request.feeds.values()))

    def _decoded(self, body: Bytes, json_bytes: int | None, encoding: bytes | None) -> Request:
        if encoding is not None:
            body = compression.decompress(body, encoding, self._service.options.max_body_bytes)
        signature, size = self._model.signature, len(body) if json_bytes is None else json_bytes
        memory = self._service.memory
        elsewhere = self._reader is not None and size > _LONG_BYTES
        if elsewhere and memory is not None:  # which only this process has
            elsewhere = _REGION not in bytes(body[:size])
        if self._reader is not None and elsewhere:
            # as an array: Python 3.11's collector crashes on a memoryview that others hold
            array = np.frombuffer(body, np.uint8)
            found: Request = self._reader.run(json.decode, array, json_bytes, signature)
            return found
        return json.decode(body, json_bytes, signature, memory)

    def _was_read(
        self, call: Call, begun_us: int, admitted: bool, result: Callable[[], tuple[Request, int]]
    ) -> None:
        call.cancel = None
        if call.gone:
            return
        try:
            try:
                request, size = result()
            except BadInput:
                self._model.metrics.bad_request()
                raise
            if not call.hold(size):
                raise Overloaded("the server holds too many bytes of requests already")
            self._queue(call, request, begun_us, admitted=admitted)
        except DeploykitError as exc:
            reply_exception(call, exc)
        except Exception:
            log.exception("a request to model '%s' could not be read", self._model.name)
            reply_bug(call)
        finally:
            del result  # it holds the error, which holds this frame, which holds the body

    def _queue(
        self, call: Call, request: Request, begun_us: int, *, admitted: bool = False
    ) -> None:
        head, model = call.head, self._model
        call.body = b""  # the arrays hold what they need of it
        trace = None if head.trace is None else head.trace.decode("latin-1")
        done = partial(self._answer, call, request)
        pending = self._service.infer(
            model,
            request,
            done,
            trace=trace,
            decode_us=monotonic_us() - begun_us,
            admitted=admitted,
        )
        call.cancel = partial(model.cancel, pending)

    def _answer(self, call: Call, request: Request, pending: Pending) -> None:
        """The engine has run; called on the loop's thread."""
        call.cancel = None
        if call.gone:
            return
        if pending.error is not None:
            reply_exception(call, pending.error)
            return
        begun_us = monotonic_us()
        accept = call.head.accept_encoding
        encode = partial(self._encode, request, pending, accept)
        if accept is None and not (self._large and self._is_large(request, pending, LARGE_BYTES)):
            self._send(call, pending, begun_us, encode)
        else:
            self._aside(encode, partial(self._send, call, pending, begun_us))

    def _encode(self, request: Request, pending: Pending, accept: bytes | None) -> Reply:
        model, outputs, memory = self._model, pending.outputs, self._service.memory
        name, signature = model.name, model.signature
        here = any(wanted.region for wanted in request.outputs)
        if (
            self._reader is not None
            and self._large
            and not here
            and self._is_large(request, pending, _LONG_BYTES)
        ):
            asked = request._replace(feeds={})
            parts, json_bytes = self._reader.run(
                json.encode, name, VERSION, asked, outputs, signature
            )
        else:
            parts, json_bytes = json.encode(name, VERSION, request, outputs, signature, memory)
        headers = JSON if json_bytes is None else _BINARY % json_bytes
        coding = compression.chosen(accept) if accept else None
        if coding is None:
            return headers, parts
        return headers + _COMPRESSED % coding, [compression.compress(parts, coding)]

    def _send(
        self, call: Call, pending: Pending, begun_us: int, result: Callable[[], Reply]
    ) -> None:
        try:
            headers, parts = result()
            call.reply(200, headers, parts)
        except DeploykitError as exc:
            reply_exception(call, exc)
        except Exception:
            log.exception("an answer of model '%s' could not be sent", self._model.name)
            reply_bug(call)
        else:
            now_us = monotonic_us()
            self._model.metrics.answered(pending, now_us - begun_us, now_us)
        finally:
            del result  # see _was_read

    def _is_large(self, request: Request, pending: Pending, limit_bytes: int) -> bool:
        """Whether this answer takes long to write: numbers as they are do not."""
        for wanted in request.outputs:
            array = pending.outputs[wanted.name]
            plain = wanted.binary and not wanted.classes and array.dtype.kind != "O"
            if array.nbytes > limit_bytes and not plain:
                return True
        return False


def _size(array: np.ndarray) -> int:
    """Bytes of memory, those of its texts too."""
    texts = sum(map(sys.getsizeof, array.flat)) if array.dtype.kind == "O" else 0
    return array.nbytes + texts


def _may_be_large(model: ServedModel) -> bool:
    """Whether any answer can be: not if every output is small at the largest batch."""
    for slot in model.signature.outputs.values():
        axes = list(slot.spec.shape)
        if model.max_batch:
            axes[0] = model.max_batch
        sizes = [axis for axis in axes if isinstance(axis, int)]
        if len(sizes) < len(axes) or math.prod(sizes) * slot.dtype.itemsize > LARGE_BYTES:
            return True
    return False
