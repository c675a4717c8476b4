"""Place tensors in memory that two processes share, and exchange records about them.

One process alone takes and returns the blocks of a `BlockAllocator`; it sends the other where a
block begins, and `Layout.head`, from which `TensorCodec.parse` finds the tensors in it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from mmap import mmap
from typing import Any, NamedTuple, cast

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.tensors import PROTOCOL_NAMES, InputKey, TensorSpec, carrier
from deploykit.engines.engine import Arrays

_ALIGN = 64
_SIZES = 4  # significant bits of a block's size: rounding loses an eighth of it at most
_CACHED = 4096  # the most cached layouts


class BlockAllocator:
    """Allocates blocks between the bytes `start` and `end`, of sizes that `Layout` has.

    A block that was used before is taken first: its pages are in memory.
    """

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)]  # in order, with bytes in use between them
        self._used: dict[int, list[int]] = {}  # returned blocks by their size

    def take(self, size: int) -> int | None:
        """Return where a block of `size` bytes begins; None if none is free."""
        used = self._used.get(size)
        if used:
            return used.pop()
        at = self._cut(size)
        if at is None and self._used:
            self._join()
            at = self._cut(size)
        return at

    def give(self, at: int, size: int) -> None:
        """Return a block that was taken with this size."""
        used = self._used.get(size)
        if used is None:
            used = self._used[size] = []
        used.append(at)

    def _cut(self, size: int) -> int | None:
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[number] = (start + size, end)
                return start
        return None

    def _join(self) -> None:
        """Merge returned blocks into free memory for blocks of any size."""
        given = [(at, at + size) for size, places in self._used.items() for at in places]
        self._used.clear()
        joined: list[tuple[int, int]] = []
        for start, end in sorted([*self._free, *given]):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            elif end > start:
                joined.append((start, end))
        self._free = joined


def rounded(size: int) -> int:
    """Round up the size of a block: few different sizes let blocks be reused."""
    step = max(_ALIGN, 1 << max(0, size.bit_length() - _SIZES))
    return max(_ALIGN, -(-size // step) * step)


class Place(NamedTuple):
    """The location of a tensor in a block. `dtype` None: strings, as a list in JSON."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    at: int
    size: int


class Layout(NamedTuple):
    """The locations of a message's tensors in a block of `size`; `head` encodes them."""

    head: bytes
    size: int
    places: tuple[Place, ...]
    key: InputKey  # equal keys are one object


class TensorCodec:
    """Encodes the inputs, or the outputs, of a model as bytes. Both processes have one."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        dtypes = [None if s.dtype == "string" else np.dtype(carrier(s.dtype)) for s in specs]
        self._dtypes = dtypes
        self._strings = [s.name for s, dtype in zip(specs, dtypes, strict=True) if dtype is None]
        self._head = struct.Struct("<" + "".join(f"{1 + len(s.shape)}q" for s in specs))
        self._no_strings = (0,) * len(specs)
        self._layout = lru_cache(_CACHED)(self._make)
        self._parsed = lru_cache(_CACHED)(self._parse)
        self._same: Callable[[InputKey], InputKey] = lru_cache(_CACHED)(lambda key: key)

    def encode(self, arrays: Arrays) -> tuple[Layout, dict[str, bytes]]:
        """Return the layout for these arrays, and the bytes of string arrays. Raises BadInput."""
        shapes = tuple([arrays[spec.name].shape for spec in self._specs])
        if self._strings:
            strings = {name: json.dumps(arrays[name].tolist()).encode() for name in self._strings}
            sizes = tuple([len(strings.get(spec.name, b"")) for spec in self._specs])
            return self._make(shapes, sizes), strings
        return self._layout(shapes, self._no_strings), {}

    def write(
        self, memory: mmap, at: int, layout: Layout, arrays: Arrays, strings: dict[str, bytes]
    ) -> None:
        """Write the arrays into the block at `at`. Raises BadInput for another dtype."""
        for name, dtype, _, offset, size in layout.places:
            start, array = at + offset, arrays[name]
            if dtype is None:
                memory[start : start + size] = strings[name]
            elif array.dtype != dtype:
                raise BadInput(f"'{name}' is {dtype.name}, got {array.dtype.name}")
            else:
                whole: Any = array if array.flags.c_contiguous else np.ascontiguousarray(array)
                memory[start : start + size] = whole

    def parse(self, head: bytes) -> Layout:
        """Return the layout that `head` describes. Raises ValueError for that of another model."""
        return (self._parse if self._strings else self._parsed)(head)

    def _parse(self, head: bytes) -> Layout:
        if len(head) != self._head.size:
            raise ValueError("the tensors are described in another way")
        numbers = iter(self._head.unpack(head))
        lengths, shapes = [], []
        for spec in self._specs:
            lengths.append(next(numbers))
            shapes.append(tuple([next(numbers) for _ in spec.shape]))
        return self._make(shapes, lengths)

    def read(self, memory: mmap, at: int, layout: Layout, *, copy: bool) -> dict[str, np.ndarray]:
        """Return the arrays of the block at `at`, as views without `copy`; strings are copied."""
        found = {}
        for name, dtype, shape, offset, size in layout.places:
            start = at + offset
            if dtype is None:
                values = json.loads(memory[start : start + size])
                found[name] = np.array(values, object).reshape(shape)
            else:
                array: np.ndarray = np.ndarray(shape, dtype, memory, start)
                found[name] = array.copy() if copy else array
        return found

    def _make(self, shapes: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> Layout:
        """Make a layout. `lengths`: bytes of the tensors of strings."""
        places, numbers, key, at = [], [], [], 0
        for spec, dtype, shape, length in zip(
            self._specs, self._dtypes, shapes, lengths, strict=True
        ):
            if len(shape) != len(spec.shape):
                raise BadInput(f"'{spec.name}' is {spec}, got shape {list(shape)}")
            size = length if dtype is None else math.prod(shape) * dtype.itemsize
            places.append(Place(spec.name, dtype, shape, at, size))
            numbers += [size, *shape]
            key.append((spec.name, PROTOCOL_NAMES[spec.dtype], shape[1:]))
            at += -(-size // _ALIGN) * _ALIGN
        head = self._head.pack(*numbers)
        return Layout(head, rounded(at), tuple(places), self._same(tuple(key)))


# Records between a front end and the engine process: requests, and their results.
#
# Tensors lie in shared memory; each process writes to one half, and a record has their location.

log = logging.getLogger(__name__)

REQUEST, CANCEL, READ, DONE, FAILED = range(1, 6)  # READ: so many answers, in their order
# kind, priority, model, number, rows, µs of decoding, block, µs of the arrival, of the deadline and
# of giving up, bytes of the traceparent and the id; the layout and those two follow
RECORD = struct.Struct("<BBHIIIQqqqHI")

Record = tuple[int, ...]


class RecordConnection(asyncio.Protocol):
    """One end of the connection. It writes to the bytes `start` to `end` of shared `memory`."""

    def __init__(self, memory: mmap, start: int, end: int) -> None:
        self.memory = memory
        self.arena = BlockAllocator(start, end)
        self.transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._out: list[bytes] = []

    @abstractmethod
    def take(self, record: Record, more: bytes) -> None:
        """Process a record and what follows it. Raises ValueError for tensors of another model."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        try:
            while len(data) - at >= RECORD.size:
                record = RECORD.unpack_from(data, at)
                start = at + RECORD.size
                if start + record[-1] > len(data):
                    break
                at = start + record[-1]
                self.take(record, data[start:at])
        except (ValueError, LookupError, DeploykitError) as exc:
            log.error("a process of this server sent what it should not: %s", exc)
            if self.transport is not None:
                self.transport.abort()
        self._rest = data[at:]

    def send(self, kind: int, number: int, at: int = 0, more: bytes = b"") -> None:
        """Write a record without the fields that only requests have."""
        head = RECORD.pack(kind, 0, 0, number, 0, 0, at, 0, 0, 0, 0, len(more))
        self.write(head + more)

    def write(self, data: bytes) -> None:
        """Write `data` with the rest of this turn, which wakes the other process only once."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.transport is not None:
            self.transport.write(b"".join(out))
