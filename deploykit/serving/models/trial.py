"""Test a replaced file in a separate process, which may hang, crash or use all memory.

The process has a time and a memory limit and a low priority, and is the first that a machine
without memory ends. It sends the model's files of external weights, then the error.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deploykit.core.errors import DeploykitError, Overloaded, first_line, os_reason
from deploykit.core.machine import file_text
from deploykit.core.memory import available_bytes
from deploykit.core.subprocesses import Child
from deploykit.graph.facts import external_files

Check = Callable[[Path], object]  # can be pickled; raises the error of the file

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_LATE_S = 5  # after so long the process ends itself if the server has not ended it
_NICE = 5
_SHARE = 0.9  # share of the available memory


class Trial(Child):
    """Runs `check(path)` in a separate process. Raises Overloaded if that cannot be started."""

    def __init__(self, path: Path, check: Check, limit_s: float) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until `_try` ignores them
        try:
            super().__init__("loading it", _try, path, check, limit_s)
        except OSError as exc:  # the system has no file descriptor or memory left
            raise Overloaded(f"no process can be started to check it: {os_reason(exc)}") from exc
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self, see: Callable[[list[str]], None]) -> None:
        """Wait for the process. Raises the error of the file.

        `see` receives the names of files with weights, relative to the folder of `path`, before
        their content is read.
        """
        try:
            see(self.receive())
            self.send(None)
            problem = self.receive()
        finally:
            self.close()
        if problem is not None:
            raise DeploykitError(problem)

    def end(self) -> None:
        """End the process; `run` returns soon, unless the file system hangs."""
        self._process.kill()


def _try(pipe: Connection[Any, Any], path: Path, check: Check, limit_s: float) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + _LATE_S)
    for number in (signal.SIGINT, *_ENDING):  # the server ends this process
        signal.signal(number, signal.SIG_IGN)
    for file in (1, 2):  # libraries print to them
        os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        os.nice(_NICE)
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    available = available_bytes()
    used = re.search(r"^VmData:\s*(\d+) kB", file_text(Path("/proc/self/status")), re.MULTILINE)
    if available is not None and used:
        most = int(used[1]) * 1024 + int(_SHARE * available)
        with contextlib.suppress(ValueError, OSError):  # the user's limit is lower
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    pipe.send(external_files(path))
    pipe.recv()  # waits until the server has looked at them
    problem: str | None = None
    try:
        check(path)
    except DeploykitError as exc:
        problem = exc.message
    except BaseException as exc:  # noqa: BLE001 - whatever is wrong with the file
        problem = f"{type(exc).__name__}: {first_line(exc)}"
    pipe.send(problem)
    os._exit(0)  # threads of libraries may still run
