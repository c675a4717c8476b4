"""Messages between two processes of one server, and tensors in memory that both share.

A message is a pickled tuple. One process alone takes and returns the blocks of a `BlockAllocator`;
it sends the other where a block begins, and the shapes from which `TensorCodec.layout` finds the
tensors in it. Strings are not in the block but in the message.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import socket
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from mmap import mmap
from typing import Any, NamedTuple, cast

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.tensors import PROTOCOL_NAMES, InputKey, TensorSpec, carrier
from deploykit.engines.engine import Arrays

_SIZE_BYTES = 4  # of a message's length
_ALIGN = 64
_CACHED = 4096  # the most cached layouts

Message = tuple[Any, ...]
Shapes = tuple[tuple[int, ...], ...]


class Link(asyncio.Protocol):
    """One end of a connection, on an event loop.

    `receive` gets the messages that the other end sent in one turn of its loop, `lost` is called
    once it has closed.
    """

    def __init__(
        self, receive: Callable[[Sequence[Message]], None], lost: Callable[[], None]
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._data = bytearray()
        self._out: list[Message] = []
        self.transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= _SIZE_BYTES:
            end = _SIZE_BYTES + int.from_bytes(self._data[:_SIZE_BYTES], "little")
            if len(self._data) < end:
                return
            messages = pickle.loads(bytes(self._data[_SIZE_BYTES:end]))  # noqa: S301 - our own
            del self._data[:end]
            self._receive(messages)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._lost()

    def send(self, *message: Any) -> None:
        """Send a message with the others of this turn; do nothing once the other end is closed."""
        if self.transport is not None and not self.transport.is_closing():
            if not self._out:
                asyncio.get_running_loop().call_soon(self._flush, self.transport)
            self._out.append(message)

    def _flush(self, transport: asyncio.Transport) -> None:
        data = pickle.dumps(self._out, 5)
        self._out = []
        transport.write(len(data).to_bytes(_SIZE_BYTES, "little") + data)


class BlockAllocator:
    """Allocates blocks between the bytes `start` and `end`: the first that is free."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)]  # in order, with bytes in use between them

    def take(self, size: int) -> int | None:
        """Return where a block of `size` bytes begins, more than 0; None if none is free."""
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                left = [(start + size, end)] if end - start > size else []
                self._free[number : number + 1] = left
                return start
        return None

    def give(self, at: int, size: int) -> None:
        """Return a block that was taken with this size."""
        free, end = self._free, at + size
        number = bisect(free, (at, end))
        if number < len(free) and free[number][0] == end:
            end = free.pop(number)[1]
        if number and free[number - 1][1] == at:
            number -= 1
            at = free.pop(number)[0]
        free.insert(number, (at, end))


class Place(NamedTuple):
    """The location of a tensor in a block. `dtype` None: strings, which are not in it."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    at: int
    size: int


class Layout(NamedTuple):
    """The locations of a message's tensors in a block of `size` bytes."""

    size: int
    places: tuple[Place, ...]
    key: InputKey


class TensorCodec:
    """Places the inputs, or the outputs, of a model in a block. Both processes have one."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._dtypes = [None if s.dtype == "string" else np.dtype(carrier(s.dtype)) for s in specs]
        self.layout: Callable[[Shapes], Layout] = lru_cache(_CACHED)(self._layout)

    def shapes(self, arrays: Arrays) -> Shapes:
        return tuple([arrays[spec.name].shape for spec in self._specs])

    def write(
        self, memory: mmap, at: int, layout: Layout, arrays: Arrays
    ) -> dict[str, np.ndarray] | None:
        """Write the arrays into the block at `at`; return those of strings, if there are any.

        Raises BadInput for another dtype.
        """
        strings = {}
        for name, dtype, _, offset, size in layout.places:
            start, array = at + offset, arrays[name]
            if dtype is None:
                strings[name] = array
            elif array.dtype != dtype:
                raise BadInput(f"'{name}' is {dtype.name}, got {array.dtype.name}")
            else:
                whole: Any = array if array.flags.c_contiguous else np.ascontiguousarray(array)
                memory[start : start + size] = whole
        return strings or None

    def read(
        self,
        memory: mmap,
        at: int,
        layout: Layout,
        strings: Mapping[str, np.ndarray] | None,
        *,
        copy: bool,
    ) -> dict[str, np.ndarray]:
        """Return the arrays of the block at `at`, as views without `copy`."""
        found = {}
        for name, dtype, shape, offset, _ in layout.places:
            if dtype is None:
                found[name] = (strings or {})[name]
            else:
                array: np.ndarray = np.ndarray(shape, dtype, memory, at + offset)
                found[name] = array.copy() if copy else array
        return found

    def _layout(self, shapes: Shapes) -> Layout:
        """Place tensors of these shapes. Raises BadInput, and ValueError for another model's."""
        places, key, at = [], [], 0
        for spec, dtype, shape in zip(self._specs, self._dtypes, shapes, strict=True):
            if len(shape) != len(spec.shape):
                raise BadInput(f"'{spec.name}' is {spec}, got shape {list(shape)}")
            size = 0 if dtype is None else math.prod(shape) * dtype.itemsize
            places.append(Place(spec.name, dtype, shape, at, size))
            key.append((spec.name, PROTOCOL_NAMES[spec.dtype], shape[1:]))
            at += -(-size // _ALIGN) * _ALIGN
        return Layout(max(_ALIGN, at), tuple(places), tuple(key))
