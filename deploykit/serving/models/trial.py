"""Test a replaced file in a separate process, which may hang, crash or use all memory.

The process has a time and a memory limit and a low priority, and is the first that a machine
without memory ends. It writes two lines of JSON: the model's files of external weights, then the
error.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from deploykit.core.errors import DeploykitError, Overloaded, first_line, os_reason
from deploykit.core.machine import file_text
from deploykit.core.memory import available_bytes
from deploykit.core.subprocesses import module_command, start_blocked
from deploykit.graph.facts import external_files

Check = Callable[[Path], object]  # can be pickled; raises the error of the file

_LATE_S = 5  # after so long the process ends itself if the server has not ended it
_NICE = 5
_SHARE = 0.9  # share of the available memory


class Trial:
    """Runs `check(path)` in a separate process. Raises Overloaded if that cannot be started."""

    def __init__(self, path: Path, check: Check, limit_s: float) -> None:
        self._task = pickle.dumps((path, check, limit_s))
        pipe = subprocess.PIPE
        try:
            self._process = start_blocked(
                module_command(__name__),
                signal.SIGTERM,
                signal.SIGHUP,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
            )
        except OSError as exc:  # the system has no file descriptor or memory left
            raise Overloaded(f"no process can be started to check it: {os_reason(exc)}") from exc

    def run(self, see: Callable[[list[str]], None]) -> None:
        """Wait for the process. Raises the error of the file.

        `see` receives the names of files with weights, relative to the folder of `path`, before
        their content is read.
        """
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # the process has ended
                process.stdin.write(self._task)
                process.stdin.flush()
                line = process.stdout.readline()
                if line:
                    see(json.loads(line))
                process.stdin.write(b"\n")
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise DeploykitError(f"loading it ended the process that checked it ({how})")
        problem = json.loads(line)
        if problem is not None:
            raise DeploykitError(problem)

    def end(self) -> None:
        """End the process; `run` returns soon, unless the file system hangs."""
        self._process.kill()


def main() -> None:
    """Read the task from standard input, try it, and write the result to standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to it
    path, check, limit_s = pickle.load(sys.stdin.buffer)  # noqa: S301 - our server wrote it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + _LATE_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server ends this process
        signal.signal(number, signal.SIG_IGN)
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
    problem: str | None = None
    try:
        out.write(f"{json.dumps(external_files(path))}\n")
        sys.stdin.buffer.readline()  # waits until the server has looked at them
        check(path)
    except DeploykitError as exc:
        problem = exc.message
    except Exception as exc:  # noqa: BLE001 - whatever is wrong with the file
        problem = f"{type(exc).__name__}: {first_line(exc)}"
    out.write(f"{json.dumps(problem)}\n")
    os._exit(0)  # threads of libraries may still run


if __name__ == "__main__":
    main()
