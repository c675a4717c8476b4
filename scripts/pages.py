"""Run the fenced code blocks of a Markdown page in their order, in one folder.

`sh` and `python` blocks run. `console` blocks show what a person types elsewhere (on a GPU, on a
Jetson, in a fresh checkout) and what comes back: scripts/shown_lines.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.cli.command import Run

_ROOT = Path(__file__).resolve().parents[1]
# Most pages begin with these two, which take 12 s of CPU time.
BEGIN = [
    ["deploykit", "train", "mnist-cnn", "-o", "model.pt", "--epochs", "4", "--save-splits", "data"],
    ["deploykit", "export", "model.pt"],
]
_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """The fenced blocks in one of `languages`, in order: (language, text)."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [(language, text) for language, text in found if language in languages]


def commands(page: Path) -> list[list[str]]:
    """What the page's `sh` and `python` blocks run, in order."""
    found = []
    for language, text in blocks(page, "sh", "python"):
        if language == "python":
            found.append([sys.executable, "-c", text])
        else:
            lines = text.replace("\\\n", " ").splitlines()
            found += filter(None, (shlex.split(line, comments=True) for line in lines))
    return found


def begun(folder: Path) -> Path:
    """Return a folder in which the commands of BEGIN ran: once for all who share DK_ZOO."""
    place = Path(os.environ.get("DK_ZOO", folder)) / "begun"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            work = Path(tempfile.mkdtemp(dir=place.parent))
            for command in BEGIN:
                run(command, work)
            work.rename(place)
    return place


def run_page(
    page: Path, folder: Path, done: Sequence[list[str]] = (), process: Run | None = None
) -> None:
    """Run the page's commands in `folder`, but for those of `done`, which ran there before.

    Each in a process of its own, or all in `process`, which takes less time. A server that a block
    starts is there for the blocks after it, on a free port that replaces the page's 8000. What is
    timed takes a tenth of the page's time. Fails on the first command that does not exit with 0.
    """
    address = "127.0.0.1:8000"
    with ExitStack() as stack:
        for written in commands(page):
            if written in done:
                continue
            command = [word.replace("127.0.0.1:8000", address) for word in written]
            for name in {"--seconds", "--duration"} & {*command}:
                value = command.index(name) + 1
                command[value] = str(float(command[value]) / 10)
            if command[:2] == ["deploykit", "serve"]:
                address = stack.enter_context(server(command, folder))
            elif process is None or command[0] not in ("deploykit", sys.executable):
                run(command, folder)
            else:
                ran = process(*command[1:], folder=folder)
                assert ran.code == 0, (command, ran)


def run(command: list[str], folder: Path) -> None:
    """Run one command in `folder`, and fail if it does not exit with 0."""
    done = subprocess.run(
        command, cwd=folder, env=place(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)


@contextmanager
def server(command: list[str], folder: Path) -> Iterator[str]:
    """Start `deploykit serve` on free ports; its HTTP address."""
    command = [word if word not in ("8000", "8001") else "0" for word in command]
    ports = {"DEPLOYKIT_HTTP_PORT": "0", "DEPLOYKIT_GRPC_PORT": "0"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=place() | ports,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, f"{command}: exit {process.wait()}"
        yield json.loads(ready)["http"]
    finally:
        process.terminate()
        process.communicate()


def place() -> dict[str, str]:
    """The environment with this interpreter's programs first, and a torchvision that imports."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = os.environ.get("PYTHONPATH", "")  # NVIDIA's parser and builder are there
    modules = filter(None, [str(_ROOT / "tests" / "support" / "site"), str(_ROOT), given])
    return {**os.environ, "PATH": programs, "PYTHONPATH": os.pathsep.join(modules)}
