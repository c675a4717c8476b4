"""Fill a folder next to its place, then put it there in one step: whole or not at all.

What a killed run left is removed by the next one. Two runs at once each fill a folder of their
own; the last one stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from deploykit.core.errors import BadInput, Unsupported, os_reason

_AT_FDCWD, _EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder next to `out`; on a clean exit it takes the place of `out`.

    What was at `out` goes. Raises BadInput when `out` cannot be written, Unsupported when the disk
    is full.
    """
    try:
        with _locked(out.parent):
            _remove_left_behind(out)
            work = Path(tempfile.mkdtemp(dir=out.parent, prefix=_prefix(out)))
            held = _lock(work)
        try:
            folder = work / "folder"
            folder.mkdir(mode=0o755)
            yield folder
            sync_tree(folder)
            with _locked(out.parent):
                _put(folder, out)
            sync(out.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            os.close(held)
    except OSError as exc:
        if exc.errno == errno.ENOSPC:
            raise Unsupported(f"{out}: no space left on the disk") from exc
        raise BadInput(f"{out}: cannot be written: {os_reason(exc)}") from exc


def _prefix(out: Path) -> str:
    return f".{out.name[:100]}.bundle-"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; without one where the file system has none."""
    held = _lock(folder)
    try:
        yield
    finally:
        os.close(held)


def _lock(folder: Path, flags: int = 0) -> int:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        os.close(number)
        raise
    except OSError:  # NFS without locks
        pass
    return number


def _remove_left_behind(out: Path) -> None:
    """Remove the folders of runs that were killed: nobody holds their locks."""
    for left in out.parent.glob(f"{glob.escape(_prefix(out))}*"):
        try:
            held = _lock(left, fcntl.LOCK_NB)
        except OSError:  # another run fills it, or has just removed it
            continue
        shutil.rmtree(left, ignore_errors=True)
        os.close(held)


def _put(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; what was there ends up at `folder`."""
    if not os.path.lexists(out):
        folder.rename(out)
    elif not _exchange(folder, out):
        old = folder.with_name("old")
        out.rename(old)  # where the file system cannot exchange two names, a kill here leaves none
        folder.rename(out)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; false where the system cannot."""
    swap: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    done = swap(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_EXCHANGE))
    return done == 0


def sync_tree(folder: Path) -> None:
    """Write a folder and all below it to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
