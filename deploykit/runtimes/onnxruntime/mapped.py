"""Copies of models whose weights several processes map, so that they are in memory once.

ONNX Runtime gives each session weights of its own, and packs them for its kernels. Of a model that
it saved optimised and packed, with its weights in another file, it maps that file. Such a copy fits
this CPU and this version alone: it is made when a server starts and goes with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deploykit.runtimes.onnxruntime.file import onnx_files

LEAST_BYTES = 4 << 20  # of a model's files: less is not worth a copy
_LEAST_TENSOR_BYTES = 1024  # smaller ones stay in the graph
_PREFIX = "deploykit-weights-"
_MODEL, _WEIGHTS = "model.onnx", "weights"
_USED, _WRITING = "used", "writing"  # files that are locked
_NEW_S = 60.0  # a folder without a lock may be that of a server that starts


@contextlib.contextmanager
def copies_folder() -> Iterator[Path | None]:
    """A folder for copies, removed at the end; None where no temporary file can be written.

    What servers have left of which all processes were killed at once is removed first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _NEW_S:
                _remove_unused(left, create=True)
    with contextlib.ExitStack() as stack:
        folder = None
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(use_copies(folder))
        yield folder


@contextlib.contextmanager
def use_copies(folder: Path | None) -> Iterator[None]:
    """Keep the folder of another process until the end, and remove it if no other uses it then.

    So it goes with the last process of a server, whichever was killed before.
    """
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.callback(_remove_unused, folder)
            with contextlib.suppress(OSError):  # somebody has removed it
                stack.enter_context(_locked(folder / _USED, fcntl.LOCK_SH))
        yield


def _remove_unused(folder: Path, create: bool = False) -> None:
    """Remove a folder whose lock no process holds.

    `create`: make the lock's file where it is missing; in a folder that is being removed it would
    be left over.
    """
    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    with contextlib.suppress(OSError), _locked(folder / _USED, exclusive, create):
        shutil.rmtree(folder, ignore_errors=True)


def mapped_copy(path: Path, folder: Path, write: Callable[[Path], object]) -> Path:
    """The copy of the model `path` in `folder`; the first process to ask has to `write` it.

    Raises OSError, and as `write`.
    """
    stats = [each.stat() for each in onnx_files(path)]
    known = [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]
    model, version = (
        hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in (path, known)
    )
    place = folder / f"{model}-{version}"
    with _locked(folder / _WRITING, fcntl.LOCK_EX):
        if not place.exists():
            new = folder / "new"  # one of a process that was killed may be there
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            try:
                write(new / _MODEL)
                for old in folder.glob(f"{model}-*"):  # those that are mapped stay in memory
                    shutil.rmtree(old, ignore_errors=True)
                new.rename(place)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    return place / _MODEL


def is_large(path: Path) -> bool:
    """Whether the model's files are worth a copy."""
    return sum(each.stat().st_size for each in onnx_files(path) if each.is_file()) >= LEAST_BYTES


def save_at(copy: Path, options: Any) -> None:
    """Have the session that `options` are for write `copy` and, next to it, its weights."""
    options.optimized_model_filepath = str(copy)
    optimised = "session.optimized_model_external_initializers"
    for name, value in (
        (f"{optimised}_file_name", _WEIGHTS),
        (f"{optimised}_min_size_in_bytes", str(_LEAST_TENSOR_BYTES)),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(name, value)


@contextlib.contextmanager
def _locked(path: Path, flags: int, create: bool = True) -> Iterator[None]:
    """Hold the lock of a file; raises OSError where another process holds it and LOCK_NB is set."""
    number = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(number, flags)
        yield
    finally:
        os.close(number)
