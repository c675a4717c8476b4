"""The signal handlers of a server, and what it puts back at its end, after which it cleans up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal has closed
ECHO_S = 1.0  # a second one of them within it counts as the same one


def handle(numbers: Sequence[int], handler: Callable[..., None]) -> dict[int, Any]:
    """Set the handler of signals, not of a SIGHUP that `nohup` has ignored; those before."""
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return {each: signal.signal(each, handler) for each in numbers if each not in kept}


def restore_handlers(handlers: Mapping[int, Any], signals: int, ends_process: bool = False) -> None:
    """Put back `handlers` after so many signals; none is to interrupt what `ends_process`."""
    for number, handler in handlers.items():
        if handler is None:  # it was not set from Python
            handler = signal.SIG_DFL
        elif ends_process:
            handler = signal.SIG_IGN
        elif number in ENDING and signals:
            handler = _without_echoes(handler)
        signal.signal(number, handler)


def _without_echoes(handler: Any) -> Callable[[int, FrameType | None], None]:
    """Pass on the first signal that comes a second or more after the one before, then all.

    The second starts now: while the models were closed, no signal was looked at.
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
