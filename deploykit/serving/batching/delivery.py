"""How finished requests go back to their sender: type aliases and the default implementation."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from deploykit.core.errors import Expired
from deploykit.serving.batching.policy import Pending

log = logging.getLogger(__name__)

TURN_US = 10_000
SHORT_US = 500  # after a longer delivery the next one waits for the next turn

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


class TurnDelivery:
    """Delivers on the event loop's thread, for up to TURN_US in one turn of the loop.

    The answers of a batch may be large, and several batches may end within one turn.
    """

    def __init__(self, call_soon: CallSoon, clock_us: Callable[[], int] = monotonic_us) -> None:
        self._call_soon = call_soon
        self._clock_us = clock_us
        self._waiting: deque[Pending] = deque()
        self._next_turn = False  # `_work` will run in the next turn of the loop

    def __call__(self, requests: Sequence[Pending]) -> None:
        self._waiting.extend(requests)
        if not self._next_turn:
            self._work()

    def _work(self) -> None:
        begin_us, clock_us, waiting = self._clock_us(), self._clock_us, self._waiting
        spent_us = 0
        while waiting and spent_us <= TURN_US:
            deliver_inline((waiting.popleft(),))
            spent_us = clock_us() - begin_us
        # what took long was all of this turn, also for batches that end in it
        self._next_turn = bool(waiting) or spent_us > SHORT_US
        if self._next_turn:
            self._call_soon(self._work)


def deliver_inline(requests: Sequence[Pending]) -> None:
    """Call each request's `done` on this thread; one that fails does not affect the others."""
    for request in requests:
        try:
            request.done(request)
        except Exception:
            log.exception("delivering the result of a request failed")
