"""Run a command as a process of its own: its time, its peak memory and what it said.

The caller imports little: Linux counts what a process held before `exec` as its child's peak.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEPLOYKIT = (sys.executable, "-m", "deploykit")


@dataclass(frozen=True)
class Ran:
    """How a process ended. `code` is negative for a signal; `peak_bytes`: its largest RSS.

    `cpu_s`: of it and of the children that it waited for.
    """

    code: int
    seconds: float
    peak_bytes: int
    out: str
    err: str
    cpu_s: float = 0.0

    @property
    def document(self) -> dict[str, Any]:
        """The JSON on stdout; empty where there is none."""
        try:
            found = json.loads(self.out)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def error(self) -> str:
        """Why it failed, in one line; empty if it did not."""
        if self.code == 0:
            return ""
        if self.code == -signal.SIGKILL:
            return "killed: over its time, or out of memory"
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (named or lines[-1:] or [f"exit {self.code}"])[0]


def run(command: Sequence[object], *, limit_s: float = 3600, cwd: Path = ROOT) -> Ran:
    """Run to the end, or kill after `limit_s`. `cwd` decides which checkout `-m` imports."""
    words = [str(word) for word in command]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(words, cwd=cwd, stdout=out, stderr=err)
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)  # as subprocess has no way to the usage
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Ran(
            process.returncode,
            seconds,
            usage.ru_maxrss * 1024,
            out.read().decode(errors="replace"),
            err.read().decode(errors="replace"),
            usage.ru_utime + usage.ru_stime,
        )


def deploykit(*words: object, limit_s: float = 3600) -> Ran:
    return run([*DEPLOYKIT, *words], limit_s=limit_s)


def file_bytes(path: Path) -> int:
    """The size of an ONNX file and of the weights beside it."""
    beside = path.with_name(f"{path.name}.data")
    return sum(part.stat().st_size for part in (path, beside) if part.is_file())


def header(title: str) -> str:
    """What made a result, and on what: the command, the date, the machine and the versions."""
    from deploykit.core.machine import this_machine

    machine = this_machine()
    others = run([sys.executable, "-c", _VERSIONS]).document
    versions = {**machine.packages, **others}
    command = shlex.join(["python", *sys.argv])
    features = ", ".join(machine.cpu_features)
    return (
        f"# {title}\n\n`{command}`, {datetime.date.today().isoformat()}, "
        f"load average {os.getloadavg()[0]:.1f} at the start\n\n"
        f"{machine.cpu}, {machine.usable_cores} cores, {(machine.memory_bytes or 0) / 2**30:.0f} "
        f"GiB, {machine.system}, {features}; Python {machine.python}; "
        f"{', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}\n"
    )


_VERSIONS = """
import importlib.metadata, json
found = {}
for name in ("torchvision", "transformers", "safetensors", "onnxslim"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    import tensorrt
    found["tensorrt"] = tensorrt.__version__
except ImportError:
    pass
print(json.dumps(found))
"""


@contextlib.contextmanager
def listening(command: Sequence[str]) -> Iterator[int]:
    """A process that `command` and `--port PORT` start; yields its port once it accepts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, "--port", str(port)])
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait(30)
