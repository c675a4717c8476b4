"""Send an error as the reply to one message of gRPC."""

from __future__ import annotations

import logging
from typing import Protocol

from deploykit.serving.models.inference import Receiver
from deploykit.serving.transport.call import BUG, refusal_of

log = logging.getLogger(__name__)


class Replying(Receiver, Protocol):
    """The receiver of one reply: a GrpcCall, or a ReplySlot of a streaming call."""

    @property
    def left_us(self) -> int | None: ...
    def reserve(self, size: int) -> bool: ...
    def fail(self, status: str, message: str) -> None: ...


def fail_with(reply_to: Replying, error: Exception) -> None:
    """Send an error as the reply; one that is not a DeploykitError is logged and not sent."""
    exc = refusal_of(error)
    if exc is None:
        log.error("a gRPC call failed", exc_info=error)
        reply_to.fail("INTERNAL", BUG)
    else:
        reply_to.fail(exc.grpc_status, f"{exc.message}; {exc.hint}" if exc.hint else exc.message)
