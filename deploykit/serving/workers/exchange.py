"""Records between a front end and the engine process: what to run, and what became of it.

Tensors lie in memory that both share; each writes to its own half, and a record says where.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from abc import abstractmethod
from mmap import mmap
from typing import cast

from deploykit.core.errors import DeploykitError
from deploykit.serving.workers.blocks import BlockAllocator

log = logging.getLogger(__name__)

REQUEST, CANCEL, READ, DONE, FAILED = range(1, 6)  # READ: so many answers, in their order
# kind, priority, model, number, rows, us of decoding, block and its bytes, us of the arrival, of
# the deadline and of giving up, bytes of the traceparent; the layout and the traceparent follow
RECORD = struct.Struct("<BBHIIIQQqqqHI")
_MOST_BYTES = 1 << 24  # after a record

Record = tuple[int, ...]


class RecordConnection(asyncio.Protocol):
    """One end of the connection. `memory`: shared; the blocks from `start` to `end` are ours."""

    def __init__(self, memory: mmap, start: int, end: int) -> None:
        self.memory = memory
        self.arena = BlockAllocator(start, end)
        self.transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._out: list[bytes] = []

    @abstractmethod
    def take(self, record: Record, more: bytes) -> None:
        """A record and what follows it. Raises ValueError, LookupError for a wrong one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        try:
            while len(data) - at >= RECORD.size:
                record = RECORD.unpack_from(data, at)
                start = at + RECORD.size
                if record[-1] > _MOST_BYTES:
                    raise ValueError(f"{record[-1]} bytes after a record")
                if start + record[-1] > len(data):
                    break
                at = start + record[-1]
                self.take(record, data[start:at])
        except (ValueError, LookupError, DeploykitError) as exc:
            log.error("a process of this server sent what it should not: %s", exc)
            if self.transport is not None:
                self.transport.abort()
        self._rest = data[at:]

    def send(self, kind: int, number: int, at: int = 0, size: int = 0, more: bytes = b"") -> None:
        """Write a record without what only requests have."""
        head = RECORD.pack(kind, 0, 0, number, 0, 0, at, size, 0, 0, 0, 0, len(more))
        self.write(head + more)

    def write(self, data: bytes) -> None:
        """Write it with all others of this turn of the loop, which wake the other process once."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.transport is not None:
            self.transport.write(b"".join(out))
