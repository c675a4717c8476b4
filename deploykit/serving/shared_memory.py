"""The system shared-memory extension: tensors in POSIX shared memory instead of in messages.

A client on this machine registers a span of an object below /dev/shm under a name; inputs are
copied from it and outputs are written into it. The object is never mapped: a client may truncate
it at any time, which would kill a process that reads a mapping of it (SIGBUS). The copy also keeps
a client from changing an input after it was checked. Error messages name regions, never files.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, NotFound, Overloaded, TooLarge, os_reason, quote
from deploykit.core.tensors import Bytes
from deploykit.engines.engine import Closing

FOLDER = "/dev/shm"  # noqa: S108 - where Linux keeps POSIX shared memory
MAX_REGIONS = 256  # each keeps a file descriptor open
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
# prefixes of semaphores and of servers' own objects: never a client's tensor
_INTERNAL = ("deploykit", "triton_python_backend", "sem.")
_CREATE_HINT = "create it before registering it, and give its key as in shm_open: /NAME"


@dataclass(frozen=True)
class Region:
    """A span of a shared-memory region that the client has registered."""

    name: str
    offset: int
    byte_size: int


@dataclass(frozen=True)
class _OpenRegion(Region):
    """A registered span of the object `key`, which is open as `file`."""

    key: str
    file: int

    def read(self, at: int, into: np.ndarray) -> None:
        self._move(lambda file, left, at: os.preadv(file, [left], at), into.data, at)

    def write(self, at: int, data: memoryview) -> None:
        if os.fstat(self.file).st_size < self.offset + at + data.nbytes:
            raise self._shrunk()  # writing would enlarge the object again
        self._move(os.pwrite, data, at)

    def _move(self, move: Callable[[int, memoryview, int], int], left: memoryview, at: int) -> None:
        at += self.offset
        while left:
            try:
                count = move(self.file, left, at)
            except OSError as exc:  # /dev/shm is full, or the object is read-only for the server
                raise _problem(f"region '{self.name}'", exc) from exc
            if count == 0:
                raise self._shrunk()
            left, at = left[count:], at + count

    def _shrunk(self) -> BadInput:
        what = f"region '{self.name}': its shared memory"
        return BadInput(f"{what} is smaller than when it was registered")


class SharedMemory(Closing):
    """The registered regions by name. Thread-safe. `max_bytes` bounds a single read."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._regions: dict[str, _OpenRegion] = {}
        # held during reads, so that no descriptor is closed and reused meanwhile
        self._lock = threading.Lock()

    def register(self, name: object, key: object, offset: object, byte_size: object) -> None:
        """Open the object `key` ("/NAME") and call `byte_size` bytes at `offset` of it `name`.

        The values come from a client. Raises BadInput, also if the name is taken, and Overloaded if
        the server has no file descriptor left.
        """
        if type(name) is not str or not _NAME.fullmatch(name):
            hint = "use 1 to 128 letters, digits, '.', '_' or '-'"
            raise BadInput(f"{quote(name)} cannot be the name of a region", hint=hint)
        region, where = name, f"region '{name}'"
        bare = key.removeprefix("/") if type(key) is str else ""
        if not _NAME.fullmatch(bare) or bare in (".", "..") or bare.startswith(_INTERNAL):
            raise BadInput(f"{where}: {quote(key)} cannot be the key", hint=_CREATE_HINT)
        start = _integer(where, "offset", offset, 0)
        size = _integer(where, "byte_size", byte_size, 1)
        with self._lock:
            if region in self._regions:
                raise BadInput(f"{where} is already registered", hint="unregister it first")
            if len(self._regions) >= MAX_REGIONS:
                raise BadInput(f"{where}: {MAX_REGIONS} regions are registered, the maximum")
            file = _open(where, bare)
            end, most = start + size, os.fstat(file).st_size  # 0 of what is no regular file
            if end > most:
                os.close(file)
                raise BadInput(f"{where}: it would end at byte {end}, the object has {most}")
            self._regions[region] = _OpenRegion(region, start, size, str(key), file)

    def unregister(self, name: str | None = None) -> None:
        """Close one region, or all for None. As in Triton, an unknown name is ignored."""
        with self._lock:
            for region in [each for each in self._regions if name in (None, each)]:
                os.close(self._regions.pop(region).file)

    def status(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return name, key, offset and byte_size of one region, or of all. Raises NotFound."""
        with self._lock:
            found = [
                {"name": each, "key": r.key, "offset": r.offset, "byte_size": r.byte_size}
                for each, r in self._regions.items()
                if name in (None, each)
            ]
        if name is not None and not found:
            raise NotFound(f"there is no region {quote(name)}")
        return found

    def read(self, region: Region) -> memoryview:
        """Return a read-only copy of the bytes. Raises BadInput, TooLarge above `max_bytes`."""
        if region.byte_size > self._max_bytes:
            text = f"{quote(region.byte_size)} bytes are above the limit of {self._max_bytes}"
            hint = "start the server with a larger `max_body_bytes`"
            raise TooLarge(f"region {quote(region.name)}: {text}", hint=hint)
        with self._lock:
            found = self._find(region)
            copy = np.empty(region.byte_size, np.uint8)
            found.read(region.offset, copy)
        copy.flags.writeable = False
        return copy.data

    def write(self, region: Region, data: Bytes) -> None:
        """Write `data`, contiguous, at the region's offset. Raises BadInput if it is too long."""
        view = memoryview(data).cast("B")
        with self._lock:
            found = self._find(region)
            if view.nbytes > region.byte_size:
                sizes = f"{view.nbytes} bytes, the request reserved {region.byte_size}"
                raise BadInput(f"region '{region.name}': the output has {sizes}")
            found.write(region.offset, view)

    def close(self) -> None:
        self.unregister()

    def _find(self, region: Region) -> _OpenRegion:
        """Return the open region that contains all of `region`. Raises BadInput."""
        found = self._regions.get(region.name)
        if found is None:
            raise BadInput(f"there is no region {quote(region.name)}", hint="register it first")
        end = region.offset + region.byte_size
        if region.offset < 0 or region.byte_size < 0 or end > found.byte_size:
            raise BadInput(
                f"region '{region.name}' has {found.byte_size} bytes: {quote(region.byte_size)} "
                f"bytes at offset {quote(region.offset)} are out of bounds"
            )
        return found


def _integer(where: str, field: str, value: object, least: int) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise BadInput(f"{where}: '{field}' must be an integer >= {least}, got {quote(value)}")
    return value


def _open(where: str, name: str) -> int:
    """Open an object for reading and writing, or for reading if the permissions allow no more."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO must not block
    path = f"{FOLDER}/{name}"
    try:
        try:
            return os.open(path, flags | os.O_RDWR)
        except PermissionError:
            return os.open(path, flags | os.O_RDONLY)
    except OSError as exc:
        raise _problem(f"{where}: its shared memory cannot be opened", exc, _CREATE_HINT) from exc


def _problem(what: str, exc: OSError, hint: str | None = None) -> BadInput | Overloaded:
    text = f"{what}: {os_reason(exc)}"
    if exc.errno in _FULL:  # not the client's fault
        return Overloaded(text, hint="try again later")
    return BadInput(text, hint=hint)
