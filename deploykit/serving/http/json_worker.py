"""A process for JSON work that would block the event loop.

On any thread, decoding 62 MB of JSON stops the event loop for 0.5 s, and for 2 s on a busy machine
(benchmarks/json_stall.py). The process starts on first use and ends with the server. Arrays and
bodies are sent without a copy; the pipe carries only our own pickles.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, TypeVar

import numpy as np

from deploykit.core.errors import DeploykitError, Overloaded
from deploykit.runtimes.engine import Closing

log = logging.getLogger(__name__)

T = TypeVar("T")
_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")
CLOSE_S = 1.0


class JsonWorker(Closing):
    """The process. Thread-safe; runs one function at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` there. Raises what it raises, Overloaded if the process ended."""
        with self._lock:
            process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(process.stdin, (function, args))
                result: T | DeploykitError = _receive(process.stdout)
            except (OSError, EOFError) as exc:
                self._end(process)
                log.error("the process that reads large requests ended (%s)", process.returncode)
                raise Overloaded("a large request could not be read; try again later") from exc
        if isinstance(result, DeploykitError):
            raise result
        return result

    def close(self) -> None:
        """Kill the process."""
        self._closed = True
        if self._process is not None:
            self._end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise Overloaded("the server is shutting down", hint="send the request elsewhere")
        if self._process is None:
            command = [sys.executable, "-m", __name__]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe)
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        process.wait(CLOSE_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _send(stream: IO[bytes], value: object) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, 5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = _COUNT.pack(len(parts)) + b"".join(_SIZE.pack(len(part)) for part in parts)
    for part in (memoryview(sizes), *parts):
        left = part
        while left:
            left = left[stream.write(left) :]
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    (count,) = _COUNT.unpack(_read(stream, _COUNT.size))
    sizes = [_SIZE.unpack(_read(stream, _SIZE.size))[0] for _ in range(count)]
    head, *buffers = [_read(stream, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - our own process wrote it


def _read(stream: IO[bytes], size: int) -> memoryview:
    data = np.empty(size, np.uint8).data
    left = data
    while left:
        count = stream.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        left = left[count:]
    return data


def main() -> None:
    """Run functions from standard input, write results to standard output, until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ends this process
        signal.signal(number, signal.SIG_IGN)
    work, results = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):  # the server has ended
        while True:
            function, args = _receive(work)
            try:
                result = function(*args)
            except DeploykitError as exc:
                result = exc
            _send(results, result)


if __name__ == "__main__":
    main()
