"""Run a session in a separate process, so that none waits for another's interpreter lock.

The child opens the engine and runs the timed loop, so no call crosses a pipe.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from deploykit.benchmarking.timing import closed_loop, no_garbage_collection
from deploykit.core.subprocesses import Child
from deploykit.engines.engine import Arrays, Engine

_POLL_S = 0.2  # interval of checks whether to stop
_ABOUT = ("inputs", "outputs", "device", "runtime")


class ProcessEngine(Engine):
    """The engine that `opener` opens in a child process; the first use waits until it is open."""

    def __init__(self, opener: Callable[[], Engine]) -> None:
        self._sent: Arrays | None = None
        self._child = Child("a session", _serve, opener)

    def __getattr__(self, name: str) -> Any:
        if name not in _ABOUT:
            raise AttributeError(name)
        vars(self).update(self._child.receive())
        return vars(self)[name]

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        self._ask(feeds, None)
        outputs: dict[str, np.ndarray] = self._child.receive()
        return outputs

    def run_loop(self, feeds: Arrays, length_ns: int, stop: Callable[[], bool]) -> array[int]:
        """Run `closed_loop` in the child, on the child's own clock, until `stop` returns True."""
        self._ask(feeds, length_ns)
        while not self._child.poll(_POLL_S):
            if stop():
                self.close()
                return array("q")
        calls: array[int] = self._child.receive()
        return calls

    def close(self) -> None:
        self._child.close()

    def _ask(self, feeds: Arrays, length_ns: int | None) -> None:
        self.inputs  # noqa: B018 - waits until the engine is open
        self._child.send((None if feeds is self._sent else dict(feeds), length_ns))
        self._sent = feeds


def _serve(pipe: Connection[Any, Any], opener: Callable[[], Engine]) -> None:
    """Run the child. It ends with its parent, whose end of the pipe closes then."""
    feeds: Arrays = {}
    with contextlib.suppress(EOFError), opener() as engine, no_garbage_collection():
        about = {name: getattr(engine, name) for name in _ABOUT}
        pipe.send({**about, "options": dict(engine.options)})
        while True:
            new, length_ns = pipe.recv()
            feeds = feeds if new is None else new
            if length_ns is None:
                pipe.send(engine(feeds))
            else:
                pipe.send(closed_loop(engine, feeds, length_ns, time.perf_counter_ns))
