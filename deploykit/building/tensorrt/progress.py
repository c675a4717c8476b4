"""Report the progress of a TensorRT build, and stop it on Ctrl-C.

TensorRT's phases nest, and each has a number of steps; the share reported never falls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from deploykit.core.subprocesses import INSIDE
from deploykit.evaluation.artefacts import Progress, no_progress

_T = TypeVar("_T")
_POLL_S = 0.05


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """The open phases of one build; `failure`: a callback's exception.

    TensorRT prints and drops an exception in a callback, so `raise_failure` raises it once the
    build has ended.
    """

    def __init__(self, on_progress: Progress) -> None:
        self.on_progress = on_progress
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
        return self.failure is None

    def finish(self, name: str) -> None:
        with self._lock:
            self._phases.pop(name, None)

    def report(self, phase: str) -> None:
        """Call `on_progress` with the share of all open phases."""
        with self._lock:
            self.share = min(1.0, max(self.share, self._share(None)))
            if self.failure is None:
                try:
                    self.on_progress(phase, self.share)
                except BaseException as exc:  # noqa: BLE001 - raised after the build, which drops it
                    self.failure = exc

    def raise_failure(self) -> None:
        """Raise a callback's exception."""
        if self.failure is not None:
            raise self.failure

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
        phase_start, step_complete = progress.start, progress.step
        phase_finish = progress.finish

        def __init__(self) -> None:
            base.__init__(self)

    return Monitor()


def interruptible(function: Callable[[Progress], _T], on_progress: Progress | None) -> _T:
    """Return `function(on_progress)`, run in another thread so that Ctrl-C acts during its calls.

    An interrupt, or another exception of a signal's handler, is raised once TensorRT has stopped,
    which it does at its next step; a second one does not wait for that.
    """
    show, interrupted, last = on_progress or no_progress, threading.Event(), 0.0
    found: Future[_T] = Future()

    def report(phase: str, share: float) -> None:
        nonlocal last
        last = share
        if interrupted.is_set():
            raise KeyboardInterrupt
        show(phase, share)

    def run() -> None:
        with INSIDE:
            try:
                found.set_result(function(report))
            except BaseException as exc:  # noqa: BLE001 - raised in the thread that waits
                found.set_exception(exc)

    def wait_for_it() -> None:
        while not found.done():
            wait([found], _POLL_S)  # a signal that another thread got wakes no lock

    threading.Thread(target=run, daemon=True).start()
    try:
        wait_for_it()
    except BaseException:
        interrupted.set()
        show("stopping at TensorRT's next step; Ctrl-C again ends it at once", last)
        wait_for_it()
        raise
    return found.result()
