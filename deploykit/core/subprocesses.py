"""Run a function in a process of its own.

Its memory is free again once it has ended. If the system kills a process for want of memory, or a
library crashes, only the child ends. The child also ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn

from deploykit.core.errors import DeploykitError, OutOfMemory
from deploykit.core.machine import does_not_fit, lacks_memory

# Without -P, Python 3.13 imports `linecache` from the current folder before the first line runs.
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
_PATIENCE_S = 30  # TensorRT checks only between kernels whether to stop
_PR_SET_PDEATHSIG = 1  # see prctl(2)


class Child:
    """A process of its own that runs `function(pipe, *arguments)`; all must be picklable.

    `what` begins a message. `inherit`: file descriptors that stay open there. What the function
    prints goes to standard error. Ctrl-C does not reach it until it unblocks SIGINT; it ends with
    this process, and `close` ends it at once.
    """

    def __init__(
        self,
        what: str,
        function: Callable[..., object],
        *arguments: Any,
        inherit: Sequence[int] = (),
    ) -> None:
        self._what = what
        self._pipe, theirs = Pipe()
        # a terminal, and many a supervisor, sends Ctrl-C to all processes
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with theirs:
            number, nothing = theirs.fileno(), subprocess.DEVNULL
            command = module_command("deploykit.core.subprocesses", str(number))
            try:
                descriptors = (number, *inherit)
                self._process = subprocess.Popen(command, stdin=nothing, pass_fds=descriptors)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.send((function, arguments))

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` raises the reason
            self._pipe.send(message)

    def poll(self, timeout_s: float) -> bool:
        """Return whether `receive` returns, or raises, without waiting."""
        return self._pipe.poll(timeout_s)

    def receive(self) -> Any:
        """Return the next message. Raises what the function raised.

        Raises OutOfMemory if the system killed the process, DeploykitError if it ended otherwise.
        """
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionResetError, pickle.UnpicklingError):
            code = self._process.wait()
        else:
            if isinstance(message, BaseException):
                raise message
            return message
        if code == -signal.SIGKILL:
            raise OutOfMemory(
                f"{self._what}: the system ended it, as it does where memory runs out",
                hint="a smaller `workspace` or batch; stop other programs, the desktop first; "
                "add swap",
            )
        raise DeploykitError(f"{self._what}: its process ended with code {code}")

    def interrupt(self) -> None:
        """Interrupt the function as Ctrl-C does; end its process if it does not stop."""
        self._pipe.close()  # this also ends a child that reports progress
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self.close()

    def wait(self) -> None:
        """Let the process end by itself."""
        self._pipe.close()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()


def run_apart(
    what: str,
    function: Callable[..., Any],
    *arguments: Any,
    on_progress: Callable[[str, float], None] | None = None,
    inherit: Sequence[int] = (),
) -> Any:
    """Run `function(*arguments, on_progress)` in a `Child`. Raises what the function raises."""
    child = Child(what, _answer, function, arguments, inherit=inherit)
    try:
        while True:
            kind, *content = child.receive()
            if kind == "result":
                child.wait()
                return content[0]
            if on_progress is not None:
                on_progress(*content)
    except BaseException:
        child.interrupt()
        raise


def _answer(
    pipe: Connection[Any, Any], function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Run the function in the child of `run_apart`. SIGINT ends it."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sends a second one, in clean-up
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def report(what: str, share: float) -> None:
        pipe.send(("progress", what, share))

    pipe.send(("result", function(*arguments, report)))


def module_command(module: str, *arguments: str) -> list[str]:
    """Return a command that works as `python -m module` but imports from this process's path.

    `-m` imports from the current folder first: it would run a `types.py` next to a model.
    """
    path = [str(folder) for folder in map(Path, sys.path) if folder.is_absolute()]
    path.append(str(Path(__file__).absolute().parents[2]))  # sys.path may hold "" for it
    program = f"import sys; sys.path[:] = {path!a}; import runpy; "
    program += f"runpy.run_module({module!a}, run_name='__main__', alter_sys=True)"
    return [sys.executable, *_SAFE_PATH, "-c", program, *arguments]


def main() -> None:
    """Run the child process."""
    with contextlib.suppress(AttributeError, OSError):  # else it would outlive its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # a library's output must not mix with the command's
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with pipe:
        failure: BaseException | None = None
        try:
            try:
                function, arguments = pipe.recv()
            except (EOFError, pickle.UnpicklingError):  # the parent has ended
                raise SystemExit(1) from None
            function(pipe, *arguments)
        except (DeploykitError, OSError, KeyboardInterrupt, SystemExit) as exc:
            failure = exc
        except Exception as exc:
            if not lacks_memory(exc):
                raise
            failure = does_not_fit("", str(exc))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on `send` the parent interrupts
        with contextlib.suppress(OSError):
            if failure is not None:
                pipe.send(failure)


if __name__ == "__main__":
    main()


# Python ends a daemon thread when it returns from native code, on which torch and ONNX Runtime
# abort(). If a library's destructors run while a thread is still inside, TensorRT for RTX 1.7 has a
# segmentation fault. So at exit no thread begins another call, those inside have `LIMIT_S` to
# return, and if one does not, no destructor runs.

LIMIT_S = 2.0

_depth: dict[int, int] = {}  # thread -> the number of `INSIDE` blocks it is in
_ending = False


class _Inside:
    """Marks calls of native libraries in threads that the process does not wait for."""

    def __enter__(self) -> None:
        thread = get_ident()
        depth = _depth[thread] = _depth.get(thread, 0) + 1
        if depth == 1 and _ending and threading.current_thread().daemon:
            del _depth[thread]
            threading.Event().wait()  # wait until the process has ended

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        _depth[thread] -= 1
        if not _depth[thread]:
            del _depth[thread]


INSIDE = _Inside()  # use `with INSIDE:`, which may be nested


@atexit.register
def _leave() -> None:
    global _ending
    _ending = True
    me, end_s = get_ident(), time.monotonic() + LIMIT_S
    while any(thread != me for thread in list(_depth)):
        if time.monotonic() > end_s:
            libc = ctypes.CDLL(None)
            with contextlib.suppress(AttributeError):  # glibc's: exit() calls _exit() first
                libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
            return
        time.sleep(0.002)  # an event would slow down every call inside `INSIDE`


os.register_at_fork(after_in_child=_depth.clear)  # a forked child has no other threads
