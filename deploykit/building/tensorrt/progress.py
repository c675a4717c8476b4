"""Report the progress of a TensorRT build, and stop it on a signal.

TensorRT's phases nest, and each has a number of steps; the share reported never falls.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

OnProgress = Callable[[str, float], None]


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """The open phases of one build; `stop`: a signal received, `failure`: a callback's exception.

    TensorRT prints and drops an exception in a callback, so `raise_if_stopped` raises it once the
    build has ended.
    """

    def __init__(self, on_progress: OnProgress | None) -> None:
        self.on_progress = on_progress
        self.stop: int | None = None
        self.failure: BaseException | None = None
        self.share = 0.0
        self._phases: dict[str, _Phase] = {}
        self._lock = threading.RLock()  # TensorRT calls its monitor from several threads

    def start(self, name: str, parent: str | None, steps: int) -> None:
        with self._lock:
            self._phases[name] = _Phase(parent, max(1, steps))
            self.report(name)

    def step(self, name: str, number: int) -> bool:
        """Step `number`, from 0, of phase `name` is done; False stops TensorRT."""
        with self._lock:
            if name in self._phases:
                self._phases[name].done = number + 1
                self.report(name)
        return self.stop is None and self.failure is None

    def finish(self, name: str) -> None:
        with self._lock:
            self._phases.pop(name, None)

    def report(self, phase: str) -> None:
        """Call `on_progress` with the share of all open phases."""
        with self._lock:
            self.share = min(1.0, max(self.share, self._share(None)))
            if self.on_progress is None or self.failure is not None:
                return
            try:
                self.on_progress(phase, self.share)
            except BaseException as exc:  # noqa: BLE001 - raised after the build, which drops it
                self.failure = exc

    def complete(self, phase: str) -> None:
        """Report the share 1.0; the callback's exceptions propagate."""
        if self.on_progress is not None:
            self.on_progress(phase, 1.0)

    def raise_if_stopped(self) -> None:
        """Raise a callback's exception, or after a signal run its own handler."""
        if self.failure is not None:
            raise self.failure
        if self.stop is not None:
            signal.raise_signal(self.stop)
            raise KeyboardInterrupt

    def _share(self, parent: str | None) -> float:
        """Share of the newest phase below `parent`; its current step counts in part."""
        for name, phase in reversed(self._phases.items()):
            if phase.parent == parent:
                inner = self._share(name) if phase.done < phase.steps else 0.0
                return min(1.0, (phase.done + inner) / phase.steps)
        return 0.0


def monitor(nv: Any, progress: BuildProgress) -> Any:
    """An IProgressMonitor that updates `progress`; keep it alive until the build has ended."""
    base: Any = nv.IProgressMonitor

    class Monitor(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            progress.start(name, parent, steps)

        def step_complete(self, name: str, number: int) -> bool:
            return progress.step(name, number)

        def phase_finish(self, name: str) -> None:
            progress.finish(name)

    return Monitor()


@contextlib.contextmanager
def interruptible(progress: BuildProgress) -> Iterator[None]:
    """Store Ctrl-C and SIGTERM in `progress.stop` during the block, in the main thread.

    Their handlers would raise inside TensorRT's callback, where the exception is lost. Signals with
    the system's default or ignored stay as they are.
    """

    def keep(number: int, _frame: FrameType | None) -> None:
        progress.stop = number

    kept = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                kept[number] = signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
