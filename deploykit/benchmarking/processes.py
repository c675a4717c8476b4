"""A session in a process of its own: none waits for another's interpreter lock.

The child opens the engine and runs the loop that is timed, so no call crosses a pipe.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from functools import cached_property
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from deploykit.benchmarking.timing import closed_loop, no_garbage_collection
from deploykit.core.errors import DeploykitError
from deploykit.core.subprocesses import module_command, start_blocked
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays, Engine

_POLL_S = 0.2  # between two checks whether to stop


class ProcessEngine(Engine):
    """The engine that `opener`, a picklable function, opens in a child process.

    It is open at its first use, so that several open at once. Raises then what the child raises,
    DeploykitError where the child ends.
    """

    def __init__(self, opener: Callable[[], Engine]) -> None:
        self._sent: Arrays | None = None
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = start_blocked(
                module_command(__name__, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        with contextlib.suppress(BrokenPipeError):  # `_receive` tells why
            self._pipe.send(opener)

    @cached_property
    def _about(self) -> dict[str, Any]:
        found: dict[str, Any] = self._receive()
        return found

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:  # type: ignore[override]  # never set
        specs: tuple[TensorSpec, ...] = self._about["inputs"]
        return specs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:  # type: ignore[override]  # never set
        specs: tuple[TensorSpec, ...] = self._about["outputs"]
        return specs

    @property
    def device(self) -> str:  # type: ignore[override]  # never set
        return str(self._about["device"])

    @property
    def runtime(self) -> str:  # type: ignore[override]  # never set
        return str(self._about["runtime"])

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        self._ask(feeds, None)
        outputs: dict[str, np.ndarray] = self._receive()
        return outputs

    def run_loop(self, feeds: Arrays, length_ns: int, stop: Callable[[], bool]) -> array[int]:
        """`closed_loop` over there, on the child's own clock. Where `stop` says so, it ends."""
        self._ask(feeds, length_ns)
        while not self._pipe.poll(_POLL_S):
            if stop():
                self.close()
                return array("q")
        calls: array[int] = self._receive()
        return calls

    def close(self) -> None:
        self._pipe.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _ask(self, feeds: Arrays, length_ns: int | None) -> None:
        self._about  # noqa: B018 - waits until the engine is open
        with contextlib.suppress(BrokenPipeError):  # `_receive` tells why
            self._pipe.send((None if feeds is self._sent else dict(feeds), length_ns))
        self._sent = feeds

    def _receive(self) -> Any:
        try:
            found = self._pipe.recv()
        except (EOFError, ConnectionResetError) as exc:
            code = self._process.wait()
            raise DeploykitError(f"the process of a session ended with code {code}") from exc
        if isinstance(found, BaseException):
            raise found
        return found


def main() -> None:
    """The child. It ends with its parent, whose end of the pipe closes then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    with Connection(int(sys.argv[1])) as pipe, contextlib.suppress(EOFError, OSError):
        try:
            _serve(pipe)
        except DeploykitError as exc:
            pipe.send(exc)


def _serve(pipe: Connection[Any, Any]) -> None:
    feeds: Arrays = {}
    with pipe.recv()() as engine, no_garbage_collection():
        names = ("inputs", "outputs", "device", "runtime")
        pipe.send({name: getattr(engine, name) for name in names})
        while True:
            new, length_ns = pipe.recv()
            feeds = feeds if new is None else new
            if length_ns is None:
                pipe.send(engine(feeds))
            else:
                pipe.send(closed_loop(engine, feeds, length_ns, time.perf_counter_ns))


if __name__ == "__main__":
    main()
