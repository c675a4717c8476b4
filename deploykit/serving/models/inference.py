"""One inference request from its bytes to its reply, for every protocol.

Decode, queue, encode. Slow work is offloaded to another thread, so that other requests do not wait
for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from deploykit.core.errors import BadInput
from deploykit.serving.batching.delivery import monotonic_us
from deploykit.serving.batching.policy import Pending
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.offload import Offload, Result
from deploykit.serving.oip.request import Request


class Client(Protocol):
    """The receiver of the reply: a call, or one message of a streaming call."""

    cancel: Callable[[], object] | None  # called if the client disconnects

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected."""


class Inference:
    """A protocol subclasses it to parse bytes to a Request and to write a reply.

    `offload(work, then)` runs `work` on another thread, then `then` on the event loop's. All
    methods but `decode` and `encode` run on the event loop's thread.
    """

    __slots__ = (
        "_admitted",
        "_offload",
        "_started_us",
        "client",
        "model",
        "pending",
        "request",
        "trace",
    )

    request: Request
    pending: Pending

    def __init__(
        self, model: ServedModel, client: Client, offload: Offload, trace: str | None
    ) -> None:
        self.model = model
        self.client = client
        self.trace = trace  # the client's W3C traceparent
        self._offload = offload
        self._admitted = False
        self._started_us = monotonic_us()

    # -- for subclasses ----------------------------------------------------------------------------

    @abstractmethod
    def decode(self) -> Request:
        """Parse the request's bytes. Raises BadInput."""

    @abstractmethod
    def encode(self) -> Any:
        """The reply to `request` from the outputs of `pending`."""

    @abstractmethod
    def send(self, reply: Any) -> None: ...

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Send an error reply."""

    @abstractmethod
    def release(self) -> None:
        """Free the request's bytes; arrays keep those that they use."""

    def decode_large(self) -> Request:
        """Decode on another thread; `release` may have been called. Raises BadInput, Overloaded."""
        return self.decode()

    def reserve(self) -> None:
        """Count the memory of an offloaded `request`. Raises Overloaded above the budget."""

    def encodes_slowly(self) -> bool:
        """Whether `encode` takes long enough to be offloaded."""
        return False

    # -- the steps -------------------------------------------------------------------------------

    def start(self) -> None:
        """Decode the request and queue it."""
        self._queue(self.decode)

    def start_offloaded(self) -> None:
        """Decode the request on another thread and queue it then."""
        self._admitted = not self.model.draining
        self.client.cancel = self.release  # else bodies of disconnected clients could pile up
        self._offload(self.decode_large, self._decoded)

    def _decoded(self, result: Result[Request]) -> None:
        self.client.cancel = None
        if not self.client.gone:
            self._queue(result, offloaded=True)

    def _queue(self, result: Result[Request], *, offloaded: bool = False) -> None:
        model = self.model
        try:
            self.request = result()
            self.release()
            if offloaded:
                self.reserve()
            pending = model.submit(
                self.request,
                self._done,
                trace=self.trace,
                decode_us=monotonic_us() - self._started_us,
                admitted=self._admitted,
            )
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            if isinstance(exc, BadInput):
                model.metrics.record_bad_request()
            self.fail(exc)
        else:
            self.client.cancel = partial(model.cancel, pending)
        finally:
            del result  # it refers to the error, whose traceback refers to this frame and the body

    def _done(self, pending: Pending) -> None:
        """The engine has run, or the request has failed."""
        self.client.cancel = None
        if self.client.gone:
            return
        if pending.error is not None:
            self.fail(pending.error)
            return
        self.pending = pending
        self._started_us = monotonic_us()
        if self.encodes_slowly():
            self._offload(self.encode, self._reply)
        else:
            self._reply(self.encode)

    def _reply(self, result: Result[Any]) -> None:
        pending = self.pending
        try:
            self.send(result())
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            self.fail(exc)
        else:
            now_us = monotonic_us()
            self.model.metrics.record_answer(pending, now_us - self._started_us, now_us)
        finally:
            del result, self.pending  # see _queue; the pending request refers back to this
