"""Read untrusted `.npz` and `.npy` files: headers first, then arrays.

A small file can declare, or unpack to, any size; pickled objects are never loaded.
"""

from __future__ import annotations

import contextlib
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from deploykit.core.errors import BadInput, first_line
from deploykit.core.files import check_readable
from deploykit.core.machine import does_not_fit

_DATA = (
    "data is an .npz or .npy file, which numpy.savez and numpy.save write, or a folder of images"
)
_DAMAGED = (
    ValueError,
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Header:
    """The header of one array. `start`: the position in its member where the values begin."""

    shape: tuple[int, ...]
    dtype: np.dtype
    in_rows: bool  # C order: the rows of axis 0 are contiguous
    start: int
    member: str = ""  # the name in the archive; "" for an .npy

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(path: Path) -> dict[str, Header]:
    """Return a file's headers by name; an .npy's is "array". Raises NotFound or BadInput."""
    with damage(path):
        if is_npy(path):
            with path.open("rb") as handle:
                return {"array": _header(f"{path}: the array", handle, path.stat().st_size)}
        found = {}
        with zipfile.ZipFile(path) as archive:
            for info in (each for each in archive.infolist() if not each.is_dir()):
                name = info.filename.removesuffix(".npy")
                with archive.open(info) as member:
                    where = f"{path}: '{name}'"
                    found[name] = _header(where, member, info.file_size, info.filename)
    if not found:
        raise BadInput(f"{path}: contains no arrays")
    return found


def read_arrays(path: Path, headers: Mapping[str, Header]) -> dict[str, np.ndarray]:
    """Return the arrays of a file whose headers were checked."""
    with damage(path), contextlib.ExitStack() as stack:
        return {
            name: npy.read_array(open_array(path, header, stack), allow_pickle=False)
            for name, header in headers.items()
        }


def open_array(path: Path, header: Header, stack: contextlib.ExitStack) -> IO[bytes]:
    """Open the array's member at its start, until `stack` closes. Raises as zipfile does."""
    if not header.member:
        return stack.enter_context(path.open("rb"))
    archive = stack.enter_context(zipfile.ZipFile(path))
    return stack.enter_context(archive.open(header.member))


def is_npy(path: Path) -> bool:
    """Return whether the file is a single array. Raises NotFound or BadInput."""
    with check_readable(path).open("rb") as handle:
        return handle.read(6) == npy.MAGIC_PREFIX


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Turn the errors of zipfile, zlib and numpy on damaged or encrypted files into BadInput."""
    try:
        yield
    except _DAMAGED as exc:
        if isinstance(exc, MemoryError) and "allocate" in str(exc):  # an array, not the parser
            raise does_not_fit(path, first_line(exc)) from exc
        kind = ".npy" if path.suffix == ".npy" else ".npz"
        what = f"{path}: is not a readable {kind} file: {first_line(exc)}"
        raise BadInput(what, hint=_DATA) from exc


def _header(where: str, member: IO[bytes], file_bytes: int, name: str = "") -> Header:
    version = npy.read_magic(member)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_columns, dtype = read_header(member)
    found = Header(shape, dtype, not by_columns or len(shape) < 2, member.tell(), name)
    if dtype.hasobject:
        raise BadInput(
            f"{where} contains Python objects, which are not loaded",
            hint="save numbers: np.savez(path, x=np.asarray(values, dtype='float32'))",
        )
    if found.start + found.nbytes != file_bytes or min(shape, default=0) < 0:
        raise BadInput(
            f"{where}: its header declares {dtype}{list(shape)}, "
            f"but the data has {file_bytes - found.start} bytes"
        )
    return found
