"""The cache of engines on a device: two slots, of which `state.json` names the one that serves.

    DIR/lock            held by the process that decides or builds
    DIR/state.json      `CacheState`, replaced as a whole
    DIR/timing.cache    TensorRT's measurements of kernels, for the next build
    DIR/a-DIGEST/       an engine with its manifest and golden samples
    DIR/a-DIGEST/slot.json   its key and the SHA-256 of each file, written last

A slot counts once its `slot.json` is there and on the disk; what a kill or a power cut left before
that is removed by the next build. Nothing depends on the time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deploykit.bundling.decide import CacheState, EngineKey
from deploykit.bundling.staging import sync
from deploykit.core.errors import BadInput, DeploykitError, Unsupported, os_reason
from deploykit.core.files import check_inside, make_folder, read_json, sha256, write_json
from deploykit.core.json_value import Record
from deploykit.core.manifest import from_json

CACHE_VERSION = 1
LOCK_FILE, STATE_FILE, SLOT_FILE = "lock", "state.json", "slot.json"
TIMING_FILE = "timing.cache"
_SLOT = re.compile(r"[ab]-[0-9a-f]{16}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_T = TypeVar("_T")


@dataclass(frozen=True)
class SlotRecord(Record):
    """What `slot.json` holds: the engine's file, its key, and the SHA-256 of each file by name."""

    engine: str
    key: EngineKey
    files: Mapping[str, str]


class EngineCache:
    """The folder of a cache; read it and write it between `lock` and its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def lock(self, on_wait: Callable[[], None]) -> Iterator[int]:
        """Hold the cache alone; yields the descriptor that does, for a child to inherit.

        `on_wait` is called once if another process has it. A kill releases it.
        """
        with self.errors():
            if not self.folder.is_dir():
                make_folder(self.folder)
            handle = self._open_lock()
        try:
            with self.errors():
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    on_wait()
                    fcntl.flock(handle, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):
                for path in self.folder.glob(f".{STATE_FILE}.*"):  # of a process that was killed
                    path.unlink()
            yield handle
        finally:
            os.close(handle)

    def _open_lock(self) -> int:
        path, flags = self.folder / LOCK_FILE, os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
        except OSError as exc:  # a read-only cache can still be served from
            if exc.errno == errno.EROFS and not os.path.lexists(path):
                return os.open(self.folder, os.O_RDONLY | flags)
            if not path.is_file():
                raise
            return os.open(path, os.O_RDONLY | flags)

    def state(self) -> CacheState:
        """What `state.json` says; an empty state where it is missing or damaged."""
        path = self.folder / STATE_FILE
        with contextlib.suppress(DeploykitError):
            return _read(CacheState, path)
        return CacheState()

    def save(self, state: CacheState) -> None:
        """Replace `state.json`: the switch from one slot to the other."""
        with self.errors():
            write_json(self.folder / STATE_FILE, {"cache": CACHE_VERSION, **state.to_dict()})
            sync(self.folder)

    def slots(self) -> dict[str, EngineKey]:
        """The folders of complete engines, with their keys; their files are not yet checked."""
        found = {}
        for name in self._folders():
            with contextlib.suppress(DeploykitError):
                found[name] = _read(SlotRecord, self.folder / name / SLOT_FILE).key
        return found

    def _folders(self) -> list[str]:
        with self.errors():
            names = [each.name for each in self.folder.iterdir()]
        return sorted(name for name in names if _SLOT.fullmatch(name))

    def check(self, slot: str) -> Path:
        """The engine of a slot. Raises BadInput unless every file is what was built."""
        folder = self.folder / slot
        record = _read(SlotRecord, folder / SLOT_FILE)
        if record.engine not in record.files:
            raise BadInput(f"{folder / SLOT_FILE}: names no engine")
        for name, digest in record.files.items():
            check_inside(folder, name, str(folder))
            if sha256(folder / name) != digest:
                raise BadInput(f"{folder / name}: was changed or damaged (SHA-256 differs)")
        return folder / record.engine

    def empty(self, slot: str) -> Path:
        """An empty folder for a build into `slot`; what that slot held before is removed."""
        with self.errors():
            for path in list(self.folder.iterdir()):
                if path.name.startswith(f"{slot[0]}-"):
                    _remove(path)
            (self.folder / slot).mkdir()
        return self.folder / slot

    def drop(self, slot: str) -> None:
        """Remove a slot as far as that can be done."""
        with contextlib.suppress(OSError):
            _remove(self.folder / slot)

    def seal(self, slot: str, engine: str, key: EngineKey) -> None:
        """Record a proven engine as complete, once all that it consists of is on the disk."""
        folder = self.folder / slot
        with self.errors():
            files = sorted(path for path in folder.iterdir() if path.is_file())
            for path in files:
                sync(path)
            sync(folder)
            record = SlotRecord(engine, key, {path.name: sha256(path) for path in files})
            write_json(folder / SLOT_FILE, {"cache": CACHE_VERSION, **record.to_dict()})
            sync(folder)
            sync(self.folder)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of the operating system as ours, with what to do about them."""
        try:
            yield
        except OSError as exc:
            raise self._error_of(exc) from exc

    def _error_of(self, exc: OSError) -> DeploykitError:
        if exc.errno in _FULL:
            return Unsupported(
                f"{self.folder}: no space left on the disk of the cache",
                hint="free some space, or give another `cache`",
            )
        return BadInput(
            f"{exc.filename or self.folder}: cannot be used: {os_reason(exc)}",
            hint=f"`cache` has to be a folder that user {os.getuid()} may write to",
        )


def _read(kind: type[_T], path: Path) -> _T:
    """A JSON document of the cache. Raises BadInput, NotFound."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("cache") != CACHE_VERSION:
        raise BadInput(f"{path}: does not have version {CACHE_VERSION}")
    found: _T = from_json(kind, values, str(path))
    return found


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)
