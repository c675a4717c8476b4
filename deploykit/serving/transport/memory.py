"""The memory budget for requests, over all connections of both protocols.

Each connection has its limits, but thousands of them together could use all memory.
"""

from __future__ import annotations

from deploykit.core.machine import memory_bytes

_UNKNOWN_MEMORY = 4 << 30


class MemoryBudget:
    """`bytes` of requests that were received and not yet answered, up to `limit`."""

    def __init__(self, limit: int | None, max_body_bytes: int) -> None:
        """`limit` None: a quarter of this machine's memory, but at least one largest body."""
        if limit is None:
            limit = max(max_body_bytes, (memory_bytes() or _UNKNOWN_MEMORY) // 4)
        self.limit = limit
        self.bytes = 0

    def add(self, size: int, own: int) -> bool:
        """Count `size` more bytes of a request, which has `own` in total then; whether they fit.

        A request that is alone in the server may exceed the budget; its own limit bounds it.
        """
        self.bytes += size
        return self.bytes <= self.limit or self.bytes == own

    @property
    def message(self) -> str:
        """The error message for a request that does not fit."""
        return f"the server holds {self.limit} bytes of requests already"
