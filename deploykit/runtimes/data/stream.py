"""Read samples from beginning to end, a batch at a time, in bounded memory.

Archives are unpacked and images decoded as they are needed. A digest of all that was read so far
tells later whether the same samples come again.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.files import sha256
from deploykit.core.machine import usable_cores
from deploykit.core.memory import check_memory
from deploykit.runtimes.data.archives import damage, open_array, read_arrays
from deploykit.runtimes.data.sources import LABELS, DataSource
from deploykit.runtimes.engine import Closing

_DECODERS = 8  # threads at most; each decodes some hundred images per second
_AHEAD = 2  # batches that are ready before they are asked for
_SKIPPED = 1024  # samples at a time that are read to be compared only

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """Inputs by name, how many `samples` they are, and the digest of all samples up to here."""

    feeds: Mapping[str, np.ndarray]
    samples: int
    digest: str


class SampleStream(Closing):
    """The samples of a `source`, from the first to the last, once; closed when they were read."""

    def __init__(self, source: DataSource) -> None:
        self.source = source
        self.at = 0  # how many samples were read
        self._stack = ExitStack()
        self._digests = {name: hashlib.sha256() for name in source.names}  # by input
        with ExitStack() as stack:
            if source.images is None:
                names = source.names.items()
                self._rows = {name: _Rows(source, own, stack) for name, own in names}
            else:
                workers = min(usable_cores(), _DECODERS)
                self._decoders = stack.enter_context(ThreadPoolExecutor(workers))
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def batches(self, size: int) -> Iterator[Batch]:
        """The samples that are left, `size` at a time; the last batch may be smaller.

        Raises BadInput naming the file, where one is damaged.
        """
        while count := min(size, self.source.count - self.at):
            yield Batch(self._read(count), count, self.digest)

    def skip(self, count: int) -> str:
        """The digest of the next `count` samples, or as many as there are; none is decoded."""
        while left := min(count - self.at, self.source.count - self.at, _SKIPPED):
            self._read(left, decode=False)
        return self.digest

    @property
    def digest(self) -> str:
        """Of the samples so far, in their order, however they were cut into batches."""
        return hashlib.sha256(b"".join(d.digest() for d in self._digests.values())).hexdigest()

    def read_labels(self) -> np.ndarray | None:
        """All labels: they are small."""
        if LABELS in self.source.headers:
            return self.source.read([LABELS])[LABELS]
        return self.source.classes

    def _read(self, count: int, *, decode: bool = True) -> dict[str, np.ndarray]:
        begin, self.at = self.at, self.at + count
        images = self.source.images
        if images is None:
            return {
                name: rows.read(count, self._digests[name]) for name, rows in self._rows.items()
            }
        files, (name,) = self.source.files[begin : self.at], self._digests
        for file, content in zip(files, self._decoders.map(sha256, files), strict=True):
            self._digests[name].update(f"{file.parent.name}/{file.name} {content}\n".encode())
        if not decode:
            return {}
        return {name: np.stack(list(self._decoders.map(images.decode, files)))}


class _Rows:
    """One array of a source, read in order from all files."""

    def __init__(self, source: DataSource, name: str, stack: ExitStack) -> None:
        self._left = deque(
            (f, part[name]) for f, part in zip(source.files, source.parts, strict=True)
        )
        self._stack = stack
        header = source.headers[name]
        self._shape, self._dtype = header.shape[1:], header.dtype
        self._row_bytes = math.prod(self._shape) * header.dtype.itemsize
        self._file, self._handle = self._open_next()

    def read(self, count: int, digest: hashlib._Hash) -> np.ndarray:
        """The next `count` rows, of which the bytes go into `digest` too."""
        raw = bytearray(count * self._row_bytes)
        view = memoryview(raw)
        while view:
            with damage(self._file):
                got = self._handle.readinto(view)  # type: ignore[attr-defined]
            if not got and not self._left:
                raise BadInput(f"{self._file}: ends before its last sample")
            if not got:
                self._handle.close()
                self._file, self._handle = self._open_next()
            view = view[got:]
        digest.update(raw)
        if not raw:
            return np.zeros((count, *self._shape), self._dtype)
        rows = np.frombuffer(raw, self._dtype).reshape(count, *self._shape)
        return rows.astype(self._dtype.newbyteorder("="), copy=False)

    def _open_next(self) -> tuple[Path, IO[bytes]]:
        file, header = self._left.popleft()
        with damage(file):
            if not header.in_rows:  # axis 0 is the last in the file, so that all of it is needed
                check_memory(str(file), 2 * header.nbytes)
                return file, io.BytesIO(read_arrays(file, {"": header})[""].tobytes())
            handle = open_array(file, header, self._stack)
            handle.read(header.start)
        return file, handle


def read_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """The same items; a thread makes the next ones meanwhile."""
    rest = iter(items)
    with ThreadPoolExecutor(1) as thread:
        ready = deque(thread.submit(next, rest, None) for _ in range(_AHEAD))
        while (item := ready.popleft().result()) is not None:
            ready.append(thread.submit(next, rest, None))
            yield item
