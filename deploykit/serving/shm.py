"""The system shared-memory extension: tensors in POSIX shared memory instead of in messages.

In: regions that a client on this machine registered, each a span of an object below /dev/shm. Out:
copies of their bytes, and outputs written into them. Nothing is mapped: a client may truncate its
object at any time, which ends a process that reads a mapping of it (SIGBUS), and such an object
cannot be sealed against that. The one copy also keeps a client from changing an input after it was
checked. Error texts name regions, which are the client's own words, and never a file.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, NotFound, TooLarge, os_reason
from deploykit.runtimes.engine import Closing
from deploykit.serving.payload import Bytes, show
from deploykit.serving.request import Region

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory lies on Linux
MAX_REGIONS = 256  # each holds a file descriptor
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
# semaphores, and what servers keep for themselves: never a client's tensor
_INTERNAL = ("deploykit", "triton_python_backend", "sem.")
_CREATE = "create it before it is registered, and give its key as in shm_open: /NAME"


@dataclass(frozen=True)
class _Registered:
    """One region; `file` is open until it is unregistered. Sizes are bytes."""

    key: str
    offset: int
    byte_size: int
    file: int


class SharedMemory(Closing):
    """The regions by name. Safe from any thread. `max_bytes`: the largest single read."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._regions: dict[str, _Registered] = {}
        self._lock = threading.Lock()  # so that no file is closed, and its number reused, in a read

    def register(self, name: object, key: object, offset: object, byte_size: object) -> None:
        """Open the object `key` ("/NAME") and call `byte_size` bytes at `offset` of it `name`.

        The values may be whatever a client sent. Raises BadInput, also when the name is taken.
        """
        if type(name) is not str or not _NAME.fullmatch(name):
            raise BadInput(
                f"{show(name)} cannot be the name of a region",
                hint="1 to 128 letters, digits, '.', '_' or '-'",
            )
        where = f"region '{name}'"
        bare = key.removeprefix("/") if type(key) is str else ""
        if not _NAME.fullmatch(bare) or bare in (".", "..") or bare.startswith(_INTERNAL):
            raise BadInput(f"{where}: {show(key)} cannot be the key of a region", hint=_CREATE)
        start, size = _size(where, "offset", offset, 0), _size(where, "byte_size", byte_size, 1)
        with self._lock:
            if name in self._regions:
                raise BadInput(f"{where} is registered already", hint="unregister it first")
            if len(self._regions) >= MAX_REGIONS:
                raise BadInput(f"{where}: {MAX_REGIONS} regions are registered, no more are taken")
            file = _open(where, bare)
            try:
                _check_size(where, file, start + size)
            except BaseException:
                os.close(file)
                raise
            self._regions[name] = _Registered(str(key), start, size, file)

    def unregister(self, name: str | None = None) -> None:
        """Forget one region, or all for None. As in Triton, an unknown one is no error."""
        with self._lock:
            for each in list(self._regions) if name is None else [name]:
                found = self._regions.pop(each, None)
                if found is not None:
                    os.close(found.file)

    def status(self, name: str | None = None) -> list[dict[str, Any]]:
        """What is registered: name, key, offset, byte_size. Raises NotFound for an unknown name."""
        with self._lock:
            if name is not None and name not in self._regions:
                raise NotFound(f"there is no region {show(name)}")
            return [
                {"name": n, "key": r.key, "offset": r.offset, "byte_size": r.byte_size}
                for n, r in self._regions.items()
                if name in (None, n)
            ]

    def read(self, region: Region) -> memoryview:
        """A copy of the bytes, read-only. Raises BadInput, TooLarge above `max_bytes`."""
        if region.byte_size > self._max_bytes:
            raise TooLarge(
                f"region {show(region.name)}: {show(region.byte_size)} bytes are above the limit "
                f"of {self._max_bytes}",
                hint="start the server with a larger --max-body-bytes",
            )
        with self._lock:
            file, at = self._find(region)
            copy = np.empty(region.byte_size, np.uint8)
            left = copy.data
            while left:
                try:
                    count = os.preadv(file, [left], at)
                except OSError as exc:
                    raise BadInput(f"region '{region.name}': {os_reason(exc)}") from exc
                if count == 0:
                    raise _shrunk(region)
                left, at = left[count:], at + count
        copy.flags.writeable = False
        return copy.data

    def write(self, region: Region, data: Bytes) -> None:
        """Put `data`, contiguous bytes, at the region's offset. Raises BadInput if too long."""
        left = memoryview(data).cast("B")
        with self._lock:
            file, at = self._find(region)
            if left.nbytes > region.byte_size:
                raise BadInput(
                    f"region '{region.name}': the output is {left.nbytes} bytes, "
                    f"{region.byte_size} were given for it"
                )
            if os.fstat(file).st_size < at + left.nbytes:  # writing would make it larger again
                raise _shrunk(region)
            while left:
                try:
                    count = os.pwrite(file, left, at)
                except OSError as exc:  # full, or not ours to write to
                    raise BadInput(f"region '{region.name}': {os_reason(exc)}") from exc
                left, at = left[count:], at + count

    def close(self) -> None:
        self.unregister()

    def _find(self, region: Region) -> tuple[int, int]:
        """The file, and where in it the region's bytes begin; Python integers do not overflow."""
        found = self._regions.get(region.name)
        if found is None:
            raise BadInput(f"there is no region {show(region.name)}", hint="register it first")
        end = region.offset + region.byte_size
        if region.offset < 0 or region.byte_size < 0 or end > found.byte_size:
            raise BadInput(
                f"region '{region.name}' is {found.byte_size} bytes, {show(region.byte_size)} at "
                f"offset {show(region.offset)} lie outside"
            )
        return found.file, found.offset + region.offset


def _size(where: str, field: str, value: object, least: int) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise BadInput(f"{where}: '{field}' must be a whole number from {least}, got {show(value)}")
    return value


def _open(where: str, name: str) -> int:
    """Open an object for reading and writing, for reading alone where no more is allowed."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hold us
    path = f"{FOLDER}/{name}"
    try:
        try:
            return os.open(path, flags | os.O_RDWR)
        except PermissionError:
            return os.open(path, flags | os.O_RDONLY)
    except OSError as exc:
        raise BadInput(
            f"{where}: its shared memory cannot be opened: {os_reason(exc)}", hint=_CREATE
        ) from exc


def _check_size(where: str, file: int, end: int) -> None:
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
        raise BadInput(f"{where}: its key is not that of shared memory", hint=_CREATE)
    if end > info.st_size:
        raise BadInput(f"{where}: it would end at byte {end}, the object has {info.st_size}")


def _shrunk(region: Region) -> BadInput:
    return BadInput(f"region '{region.name}': its shared memory is smaller than was registered")
