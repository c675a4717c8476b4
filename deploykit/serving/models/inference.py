"""One inference request from its bytes to its reply, for every protocol.

Decode, queue, encode. Slow work is offloaded to another thread, so that other requests do not wait
for it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any

from deploykit.core.errors import BadInput, Expired, Overloaded
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.offload import HUGE_BYTES, Lane, Offload, Result
from deploykit.serving.models.pipelines import Receiver, over_budget
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request
from deploykit.serving.oip.tensors import array_bytes

_LEAST_ENCODE_S = 0.1  # the least time for outputs that were computed just in time
_FEW_STRINGS = 32 << 10  # few enough to add up their sizes; each may be long
_SLOW_BYTES = {"BYTES": 32 << 10, "BF16": 1 << 20}
_REGION_SPEED = 16  # shared memory is written this many times as fast as JSON


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

    def decoded_bytes(self) -> int:
        """Return the bytes of memory of an offloaded `request`."""
        return self.request.copied_bytes

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
            if decoded is None:
                self.request = request = self.decode(self._source)
                size = request.copied_bytes
            else:
                self.request = request = decoded()
                size, limit_us = self.decoded_bytes(), self.route.limit_us
                left_us = min(request.timeout_us or limit_us, limit_us) + began_us
                request = request._replace(timeout_us=max(1, left_us - monotonic_us()))
                self.request = request
            name = request.id
            self.client.about = name, request.rows
            self._source = None  # frees the source; arrays keep the bytes that they use
            if size:
                self.reserve(size)
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
            self.client.cancel = partial(model.cancel, pending)
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
