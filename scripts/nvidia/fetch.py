"""Get a pinned wheel of NVIDIA's from PyPI into a folder, and compile the small libraries it needs.

In: requirements for pip, C text. Out: a folder that is whole or absent. What this machine cannot
get (another system, no compiler, no network, no such wheel) raises `Unobtainable`, whose text is
the reason to print. Standard library and pip only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

STAMP = ".made-with"
_LIMIT_S = 900  # for pip; 150 MB on a slow line
_TRIES = ["--retries", "1", "--timeout", "20"]  # offline, it shall say so soon


class Unobtainable(Exception):  # noqa: N818 - no error: the reason why something is skipped
    """What was wanted cannot be had on this machine; the message says why."""


def check_machine() -> None:
    """Raise Unobtainable where NVIDIA's x86-64 Linux wheels do not run, or nothing compiles."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise Unobtainable(
            f"needs Linux on x86-64, this is {platform.system()} on {platform.machine()}"
        )
    compiler()


def compiler() -> str:
    """The C compiler: $CC, else cc, gcc or clang."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise Unobtainable("no C compiler (cc, gcc or clang) on this machine")


def install(folder: Path, *requirements: str) -> None:
    """`pip install --target folder`, wheels only and without what they depend on."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-deps", "--no-compile", "--only-binary=:all:", *_TRIES]
    done = _run([*command, "--target", str(folder), *requirements], limit_s=_LIMIT_S)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        why = (said or done.stderr.splitlines() or [f"exit {done.returncode}"])[-1]
        raise Unobtainable(f"pip: {why.removeprefix('ERROR:').strip()}")


def library(path: Path, source: str, *, needs: Path | None = None) -> None:
    """Compile C `source` into a shared library called as `path` is.

    `needs`: a library that loading it loads too, found again by its folder relative to `path`.
    """
    command = [compiler(), "-shared", "-fPIC", "-O1", "-o", str(path), f"-Wl,-soname,{path.name}"]
    command += ["-x", "c", "-", "-x", "none"]
    if needs is not None:
        beside = os.path.relpath(needs.parent, path.parent)
        command += ["-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined", str(needs)]
        command += [f"-Wl,-rpath,$ORIGIN/{beside}"]
    done = _run(command, limit_s=120, text=source)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise Unobtainable(f"{command[0]} could not make {path.name}: {last}")


def made_with(folder: Path) -> str:
    """The stamp of a finished folder; empty if it is not there."""
    try:
        return (folder / STAMP).read_text(encoding="utf-8")
    except OSError:
        return ""


@contextlib.contextmanager
def whole(folder: Path, stamp: str) -> Iterator[Path]:
    """A folder beside `folder` that takes its place, with its stamp, when the block has passed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / ".gitignore").write_text("*\n", encoding="utf-8")  # none of it is ours
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        work.mkdir()
        yield work
        (work / STAMP).write_text(stamp, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(
    command: Sequence[str], *, limit_s: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise Unobtainable(f"{Path(command[0]).name} took more than {limit_s:.0f} s") from exc
