"""Run a function in a process of its own.

What it allocated is free again when it has ended; where the system ends a process for want of
memory, or a library crashes, that process alone ends. It ends with this one, too.
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
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn

from deploykit.core.errors import DeploykitError, OutOfMemory
from deploykit.core.memory import does_not_fit

# without it Python 3.13 imports `linecache` from the current folder before a program's first line
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
_PATIENCE_S = 30  # TensorRT asks between kernels whether to stop
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def run_apart(
    what: str,
    function: Callable[..., Any],
    *arguments: Any,
    on_progress: Callable[[str, float], None] | None = None,
    inherit: Sequence[int] = (),
) -> Any:
    """`function(*arguments, on_progress)` in another process; both have to be picklable.

    `what` begins a message. `inherit`: file descriptors that stay open there. Raises what the
    function raises, OutOfMemory if the system killed it, DeploykitError if it crashed.
    """
    pipe = subprocess.PIPE
    command = module_command("deploykit.core.subprocesses")
    with start_blocked(command, stdin=pipe, stdout=pipe, pass_fds=tuple(inherit)) as process:
        try:
            with contextlib.suppress(BrokenPipeError):
                _send_job(process, (function, arguments))
            while (message := _receive(process)) is not None:
                kind, *content = message
                if kind == "progress" and on_progress is not None:
                    on_progress(*content)
                elif kind == "error":
                    raise content[0]
                elif kind == "result":
                    return content[0]
        except BaseException:
            _stop(process)
            raise
        code = process.wait()
    if code == -signal.SIGKILL:
        raise OutOfMemory(
            f"{what}: the system ended it, as it does where memory runs out",
            hint="a smaller `workspace` or batch; stop other programs, the desktop first; add swap",
        )
    raise DeploykitError(f"{what}: its process ended with code {code}")


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that does what `python -m module` does, but imports from where we do.

    `-m` imports from the current folder first: a `types.py` next to a stranger's model would run.
    """
    path = [str(folder) for folder in map(Path, sys.path) if folder.is_absolute()]
    path.append(str(Path(__file__).absolute().parents[2]))  # we may be imported by way of ""
    program = f"import sys; sys.path[:] = {path!a}; import runpy; "
    program += f"runpy.run_module({module!a}, run_name='__main__', alter_sys=True)"
    return [sys.executable, *_SAFE_PATH, "-c", program, *arguments]


def start_blocked(
    command: Sequence[str], *signals: signal.Signals, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a child that neither Ctrl-C nor `signals` end before it says what it does with them.

    A terminal, and many a supervisor, sends them to all processes. `options`: of Popen.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *signals})
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send_job(process: subprocess.Popen[bytes], job: object) -> None:
    if process.stdin is not None:
        with process.stdin as pipe:
            pickle.dump(job, pipe)


def _receive(process: subprocess.Popen[bytes]) -> Any:
    """The next message of our own child; None at its end."""
    try:
        return pickle.load(process.stdout) if process.stdout else None  # noqa: S301 - of `main`
    except (EOFError, pickle.UnpicklingError):
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the function as Ctrl-C does; end its process if it does not stop."""
    if process.stdout is not None:
        process.stdout.close()  # a child that reports progress ends by that, too
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> None:
    """The child: a job on stdin, messages on stdout, where no library may write."""
    with contextlib.suppress(AttributeError, OSError):  # else it would build for nobody
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(1), "wb", buffering=0) as pipe:
        os.dup2(2, 1)

        def send(*message: object) -> None:
            pipe.write(pickle.dumps(message))

        kind, content = "error", None
        try:
            signal.signal(signal.SIGINT, _interrupt)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            function, arguments = _receive_job()
            content = function(*arguments, lambda what, share: send("progress", what, share))
            kind = "result"
        except MemoryError as exc:
            content = does_not_fit("", str(exc))
        except (DeploykitError, OSError, KeyboardInterrupt, SystemExit) as exc:
            content = exc
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is sent makes our parent interrupt us
        with contextlib.suppress(BrokenPipeError):
            send(kind, content)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """The first; after Ctrl-C in a terminal our parent sends another, in the midst of clean-up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _receive_job() -> Any:
    try:
        return pickle.load(sys.stdin.buffer)  # noqa: S301 - of our parent
    except (EOFError, pickle.UnpicklingError):  # which was ended meanwhile
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()


# Python ends a daemon thread when it comes back from native code, which torch and ONNX Runtime
# answer with abort(); a library's destructors run while the thread is still inside, which TensorRT
# for RTX 1.7 answers with a segmentation fault. So at exit no thread begins another call, those
# inside get `LIMIT_S` to come out, and where one does not, no destructor runs.

LIMIT_S = 2.0

_depth: dict[int, int] = {}  # thread -> how many `INSIDE` blocks it is in
_ending = False


class _Inside:
    """Stands around calls of native libraries in threads that the process does not wait for."""

    def __enter__(self) -> None:
        thread = get_ident()
        if thread in _depth:
            _depth[thread] += 1
            return
        _depth[thread] = 1
        if _ending and threading.current_thread().daemon:
            del _depth[thread]
            threading.Event().wait()  # until the process has ended

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        if _depth[thread] == 1:
            del _depth[thread]
        else:
            _depth[thread] -= 1


INSIDE = _Inside()  # `with INSIDE:`, also within another


@atexit.register
def _leave() -> None:
    global _ending
    _ending = True
    me, end_s = get_ident(), time.monotonic() + LIMIT_S
    while any(thread != me for thread in list(_depth)):
        if time.monotonic() > end_s:
            _skip_destructors()
            return
        time.sleep(0.002)  # `INSIDE` is on each call's path: an event would cost all of them


def _skip_destructors() -> None:
    """Have exit() call _exit() first, with the same code (glibc's on_exit; others lack it)."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


os.register_at_fork(after_in_child=_depth.clear)  # a child has none of these threads
