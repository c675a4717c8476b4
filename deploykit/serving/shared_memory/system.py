"""The shared-memory extensions: tensors in memory that a client shares instead of in messages.

In: regions that a client on this machine registered, each a span of an object below /dev/shm, or
GPU memory (`cuda_shm`). Out: copies of their bytes, and outputs written into them. An object is
not mapped: a client may truncate it at any time, which ends a process that reads a mapping of it
(SIGBUS), and it cannot be sealed against that. The one copy also keeps a client from changing an
input after it was checked. Error texts name regions, which are the client's own words, and never a
file.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from deploykit.core.errors import BadInput, NotFound, TooLarge, os_reason
from deploykit.runtimes.engine import Closing
from deploykit.serving.oip.request import Region
from deploykit.serving.oip.tensors import Bytes, show
from deploykit.serving.shared_memory.cuda import Gpus

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory lies on Linux
MAX_REGIONS = 256  # each holds a file descriptor, or a mapping of the GPU's
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
# semaphores, and what servers keep for themselves: never a client's tensor
_INTERNAL = ("deploykit", "triton_python_backend", "sem.")
_CREATE = "create it before it is registered, and give its key as in shm_open: /NAME"


class _Kept(Protocol):
    """A registered region of either kind. Bounds are checked by who calls."""

    @property
    def kind(self) -> str: ...
    @property
    def byte_size(self) -> int: ...
    def status(self) -> dict[str, Any]: ...
    def read(self, name: str, at: int, into: np.ndarray) -> None: ...
    def write(self, name: str, at: int, data: memoryview) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _SystemRegion:
    """A span of an object below /dev/shm; `file` is open until `close`. Sizes are bytes."""

    kind: ClassVar[str] = "system"
    key: str
    offset: int
    byte_size: int
    file: int

    def status(self) -> dict[str, Any]:
        return {"key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def read(self, name: str, at: int, into: np.ndarray) -> None:
        left, at = into.data, self.offset + at
        while left:
            try:
                count = os.preadv(self.file, [left], at)
            except OSError as exc:
                raise BadInput(f"region '{name}': {os_reason(exc)}") from exc
            if count == 0:
                raise _shrunk(name)
            left, at = left[count:], at + count

    def write(self, name: str, at: int, data: memoryview) -> None:
        left, at = data, self.offset + at
        if os.fstat(self.file).st_size < at + left.nbytes:  # writing would make it larger again
            raise _shrunk(name)
        while left:
            try:
                count = os.pwrite(self.file, left, at)
            except OSError as exc:  # full, or not ours to write to
                raise BadInput(f"region '{name}': {os_reason(exc)}") from exc
            left, at = left[count:], at + count

    def close(self) -> None:
        os.close(self.file)


class SharedMemory(Closing):
    """The regions of both kinds by name, which is one namespace. Safe from any thread.

    `max_bytes`: the largest single read. `gpus`: what opens CUDA's regions; none of them unless
    given.
    """

    def __init__(self, max_bytes: int = 64 << 20, gpus: Gpus | None = None) -> None:
        self._max_bytes = max_bytes
        self.gpus = gpus or Gpus()
        self._regions: dict[str, _Kept] = {}
        # so that nothing is closed, and its number or address reused, in a read
        self._lock = threading.Lock()

    def register(self, name: object, key: object, offset: object, byte_size: object) -> None:
        """Open the object `key` ("/NAME") and call `byte_size` bytes at `offset` of it `name`.

        The values may be whatever a client sent. Raises BadInput, also when the name is taken.
        """
        checked, where = _named(name)
        bare = key.removeprefix("/") if type(key) is str else ""
        if not _NAME.fullmatch(bare) or bare in (".", "..") or bare.startswith(_INTERNAL):
            raise BadInput(f"{where}: {show(key)} cannot be the key of a region", hint=_CREATE)
        start, size = _size(where, "offset", offset, 0), _size(where, "byte_size", byte_size, 1)
        with self._lock:
            self._check_room(checked, where)
            file = _open(where, bare)
            try:
                _check_size(where, file, start + size)
            except BaseException:
                os.close(file)
                raise
            self._regions[checked] = _SystemRegion(str(key), start, size, file)

    def register_cuda(
        self, name: object, raw_handle: object, device_id: object, byte_size: object
    ) -> None:
        """Open the memory of a CUDA IPC handle and call `byte_size` bytes of it `name`.

        The values may be whatever a client sent. Raises BadInput, also when the name is taken,
        and Unsupported where this is not offered.
        """
        self.gpus.check()
        checked, where = _named(name)
        number = _size(where, "device_id", device_id, 0)
        size = _size(where, "byte_size", byte_size, 1)
        with self._lock:
            self._check_room(checked, where)
            self._regions[checked] = self.gpus.open(where, raw_handle, number, size)

    def unregister(self, name: str | None = None, *, kind: str = "system") -> None:
        """Forget one region of a kind, or all for None. As in Triton, an unknown one is no error.

        Nor is a kind that is not offered: NVIDIA's examples begin by forgetting both.
        """
        with self._lock:
            self._forget(
                [n for n, r in self._regions.items() if r.kind == kind and name in (None, n)]
            )

    def status(self, name: str | None = None, *, kind: str = "system") -> list[dict[str, Any]]:
        """What is registered of a kind: name, byte_size; key and offset, or device_id.

        Raises NotFound for a name that is not there.
        """
        with self._lock:
            found = [
                {"name": n, **r.status()}
                for n, r in self._regions.items()
                if r.kind == kind and name in (None, n)
            ]
        if name is not None and not found:
            which = "CUDA region" if kind == "cuda" else "region"
            raise NotFound(f"there is no {which} {show(name)}")
        return found

    def read(self, region: Region) -> memoryview:
        """A copy of the bytes, read-only.

        Raises BadInput, TooLarge above `max_bytes`, DeviceLost.
        """
        if region.byte_size > self._max_bytes:
            raise TooLarge(
                f"region {show(region.name)}: {show(region.byte_size)} bytes are above the limit "
                f"of {self._max_bytes}",
                hint="start the server with a larger --max-body-bytes",
            )
        with self._lock:
            found = self._find(region)
            copy = np.empty(region.byte_size, np.uint8)
            found.read(region.name, region.offset, copy)
        copy.flags.writeable = False
        return copy.data

    def write(self, region: Region, data: Bytes) -> None:
        """Put `data`, contiguous bytes, at the region's offset.

        Raises BadInput if they are too long, DeviceLost.
        """
        view = memoryview(data).cast("B")
        with self._lock:
            found = self._find(region)
            if view.nbytes > region.byte_size:
                raise BadInput(
                    f"region '{region.name}': the output is {view.nbytes} bytes, "
                    f"{region.byte_size} were given for it"
                )
            found.write(region.name, region.offset, view)

    def close(self) -> None:
        with self._lock:
            self._forget(list(self._regions))

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._regions.pop(name).close()

    def _check_room(self, name: str, where: str) -> None:
        if name in self._regions:
            raise BadInput(f"{where} is registered already", hint="unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise BadInput(f"{where}: {MAX_REGIONS} regions are registered, no more are taken")

    def _find(self, region: Region) -> _Kept:
        """What holds the region's bytes, all inside it; Python integers do not overflow."""
        found = self._regions.get(region.name)
        if found is None:
            raise BadInput(f"there is no region {show(region.name)}", hint="register it first")
        end = region.offset + region.byte_size
        if region.offset < 0 or region.byte_size < 0 or end > found.byte_size:
            raise BadInput(
                f"region '{region.name}' is {found.byte_size} bytes, {show(region.byte_size)} at "
                f"offset {show(region.offset)} lie outside"
            )
        return found


def _named(name: object) -> tuple[str, str]:
    """A name that a region may have, and how errors call it. Raises BadInput."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise BadInput(
            f"{show(name)} cannot be the name of a region",
            hint="1 to 128 letters, digits, '.', '_' or '-'",
        )
    return name, f"region '{name}'"


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


def _shrunk(name: str) -> BadInput:
    return BadInput(f"region '{name}': its shared memory is smaller than was registered")
