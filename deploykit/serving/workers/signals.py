"""Install a server's signal handlers, and restore the previous ones at its end."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal has closed
ECHO_S = 1.0  # a second one within this time counts as the same one


class Signals:
    """Calls `act` on the loop for each signal that does not repeat the previous one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
        self.count = 0
        self.interrupted = False  # whether one of them was Ctrl-C
        self._loop, self._act = loop, act
        self._last_s = -math.inf
        self._waiting: set[int] = set()
        self._before: dict[int, Any] = {}

    def handle(self, numbers: Sequence[int]) -> None:
        """Install handlers of `numbers`, except for a SIGHUP that `nohup` has ignored.

        Signals that come before the loop looks count as one: a handler that did more for each
        would be interrupted by the next, and so on until the stack is full.
        """
        kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._before = {n: signal.signal(n, self._receive) for n in numbers if n not in kept}

    def restore(self, ends_process: bool = False) -> None:
        """Restore the previous handlers; with `ends_process`, ignore these signals instead."""
        for number, handler in self._before.items():
            if handler is None:  # the previous handler was not set from Python
                handler = signal.SIG_DFL
            elif ends_process:
                handler = signal.SIG_IGN
            elif number in ENDING and self.count:
                handler = _without_echoes(handler)
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number not in self._waiting:
            self._waiting.add(number)
            self._loop.call_soon_threadsafe(self._add, number)

    def _add(self, number: int) -> None:
        self._waiting.discard(number)
        before_s, self._last_s = self._last_s, time.monotonic()
        if number in ENDING and self._last_s - before_s < ECHO_S:
            return  # `timeout` and a closing terminal signal both the process and its group
        self.count += 1
        self.interrupted = self.interrupted or number == signal.SIGINT
        self._act()


def _without_echoes(handler: Any) -> Callable[[int, FrameType | None], None]:
    """Pass on the first signal that comes a second or more after the one before, then all.

    The first second starts now: no signal was handled while the models were closed.
    """
    last_s = time.monotonic()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        before_s, last_s = last_s, time.monotonic()
        if last_s - before_s < ECHO_S:
            return
        signal.signal(number, handler)
        if callable(handler):
            handler(number, frame)
        else:  # SIG_DFL or SIG_IGN
            signal.raise_signal(number)

    return handle
