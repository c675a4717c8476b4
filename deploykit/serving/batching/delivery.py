"""How finished requests go back to their sender: type aliases and the default implementation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from deploykit.core.errors import Expired
from deploykit.serving.batching.policy import Pending

log = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Pending]], None]
CallSoon = Callable[
    [Callable[[], None]], object
]  # runs a function on the event loop's thread, soon


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """A function that returns the seconds left of `timeout_s`."""
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if timeout_s is None else max(0.0, end_s - time.monotonic())


def mark_expired(requests: Sequence[Pending], now_us: int) -> None:
    """Mark requests as finished, past their deadline."""
    for request in requests:
        request.finished = True
        waited_ms = (now_us - request.arrived_us) / 1e3
        request.error = Expired(
            f"the request waited {waited_ms:.0f} ms, past its time limit",
            hint="send fewer requests at once, or allow more time ('timeout', `timeout_ms`)",
        )


def deliver_inline(requests: Sequence[Pending]) -> None:
    """Call each request's `done` on this thread; one that fails does not affect the others."""
    for request in requests:
        try:
            request.done(request)
        except Exception:  # any bug in one reply: the other requests get theirs
            log.exception("delivering the result of a request failed")
