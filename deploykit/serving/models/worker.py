"""A process for decoding and encoding that would block the event loop, on whatever thread it ran.

Decoding 62 MB of JSON in a thread stops the event loop for 0.5 s, and for 2 s on a busy
machine (benchmarks/README.md); four gRPC clients that send 4 million numbers each as typed contents
did for 2.5 s. The process starts on first use and ends with the server. Arrays and bodies are sent
without a copy; the pipe carries only our own pickles.
"""

from __future__ import annotations

import contextlib
import copyreg
import logging
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any, Protocol, TypeVar

import numpy as np

from deploykit.core.errors import DeploykitError, Expired, Overloaded, os_reason
from deploykit.core.subprocesses import module_command, start_blocked
from deploykit.engines.engine import Closing

log = logging.getLogger(__name__)

T = TypeVar("T")
_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")
CLOSE_S = 1.0
HUNG_S = 10.0  # the least time for a process to start and to do its work


class WorkerProcess(Closing):
    """The process. Thread-safe; runs one function at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, limit_s: float, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` there. Raises what it raises.

        Overloaded if the process cannot start or ends. Expired if others use it for `limit_s`, or
        if it does not return within the longer of `limit_s` and HUNG_S: then it is killed.
        """
        if not self._lock.acquire(timeout=limit_s):
            raise _expired()
        try:
            end_s = time.monotonic() + max(limit_s, HUNG_S)
            process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(_Timed(process.stdin, end_s), (function, args))
                result: T | DeploykitError = _receive(_Timed(process.stdout, end_s))
            except TimeoutError as exc:
                self._end(process)
                log.error("the process that reads large requests took too long and was ended")
                raise _expired() from exc
            except (OSError, EOFError) as exc:
                self._end(process)
                log.error("the process that reads large requests ended (%s)", process.returncode)
                raise Overloaded("a large request could not be read; try again later") from exc
        finally:
            self._lock.release()
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
            command, pipe = module_command(__name__), subprocess.PIPE
            try:
                pipes = {"stdin": pipe, "stdout": pipe}
                process = start_blocked(command, signal.SIGTERM, signal.SIGHUP, bufsize=0, **pipes)
            except OSError as exc:  # no file descriptor or memory left
                log.error("the process for large requests cannot start: %s", os_reason(exc))
                raise Overloaded("a large request cannot be read now; try again later") from exc
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
            self._process = process
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system frees its memory
            process.wait(CLOSE_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


class _Timed:
    """A pipe to the process. Raises TimeoutError after `end_s`, whatever the process does."""

    def __init__(self, stream: IO[bytes], end_s: float) -> None:
        self._stream = stream
        self._end_s = end_s
        self._poll = select.poll()  # unlike select.select, for any number of descriptors
        self._poll.register(stream, select.POLLIN if stream.readable() else select.POLLOUT)

    def write(self, data: memoryview) -> int:
        self._wait()
        return self._stream.write(data) or 0

    def readinto(self, data: memoryview) -> int | None:
        self._wait()
        count: int | None = self._stream.readinto(data)  # type: ignore[attr-defined]
        return count

    def flush(self) -> None:
        pass

    def _wait(self) -> None:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or not self._poll.poll(left_s * 1000):
            raise TimeoutError


def _expired() -> Expired:
    return Expired(
        "the request was not read, or its answer not written, within its time limit",
        hint="send smaller requests or fewer at once, or allow more time (`timeout_ms`)",
    )


class _Pipe(Protocol):
    def write(self, data: memoryview, /) -> int | None: ...
    def flush(self) -> object: ...


def _send(stream: _Pipe, value: object) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, 5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = _COUNT.pack(len(parts)) + b"".join(_SIZE.pack(len(part)) for part in parts)
    for part in (memoryview(sizes), *parts):
        left = part
        while left:
            left = left[stream.write(left) or 0 :]
    stream.flush()


def _receive(stream: object) -> Any:
    (count,) = _COUNT.unpack(_read(stream, _COUNT.size))
    sizes = [_SIZE.unpack(_read(stream, _SIZE.size))[0] for _ in range(count)]
    head, *buffers = [_read(stream, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - our own process wrote it


def _read(stream: Any, size: int) -> memoryview:
    data = np.empty(size, np.uint8).data
    left = data
    while left:
        count = stream.readinto(left)
        if not count:
            raise EOFError
        left = left[count:]
    return data


def main() -> None:
    """Run functions from standard input, write results to standard output, until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server ends this process
        signal.signal(number, signal.SIG_IGN)
    copyreg.pickle(memoryview, lambda view: (memoryview, (pickle.PickleBuffer(view),)))
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
