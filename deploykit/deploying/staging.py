"""Fill a temporary folder next to its destination, then swap it in atomically.

The next run removes what a killed run left. Two concurrent runs fill separate folders; the last
one to end wins.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from deploykit.core.files import temporary_folder, write_errors

_AT_FDCWD, _EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder next to `out`; on a clean exit it takes the place of `out`.

    The old `out` is removed. Raises BadInput when `out` cannot be written, Unsupported when the
    disk is full.
    """
    with write_errors(out), temporary_folder(out) as work:
        folder = work / "folder"
        folder.mkdir(mode=0o755)
        yield folder
        for parent, _, names in os.walk(folder):
            for name in names:
                sync(Path(parent, name))
            sync(Path(parent))
        _put(folder, out)
        sync(out.parent)


def _put(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; the old `out` ends up at `folder`, or next to it."""
    if os.path.lexists(out):
        exchange = ctypes.CDLL(None, use_errno=True).renameat2
        paths = os.fsencode(folder), os.fsencode(out)
        if exchange(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_EXCHANGE)) == 0:
            return
        out.rename(folder.with_name("old"))  # without exchange a kill leaves no `out`
    folder.rename(out)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
