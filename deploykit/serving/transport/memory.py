"""How many bytes of requests a server holds, over all connections of both protocols.

In: sizes, as bodies come and as they are unpacked. Out: whether there is room. Each connection has
limits of its own, but thousands of them, each within its own, could together take all memory.
"""

from __future__ import annotations

from deploykit.core.machine import memory_bytes

_UNKNOWN_MEMORY = 4 << 30


class MemoryBudget:
    """`bytes` of requests that were read and not yet answered; `limit` of them may be."""

    def __init__(self, limit: int | None, max_body_bytes: int) -> None:
        """`limit` None: a quarter of this machine's memory, but at least one largest body."""
        if limit is None:
            limit = max(max_body_bytes, (memory_bytes() or _UNKNOWN_MEMORY) // 4)
        self.limit = limit
        self.bytes = 0

    def add(self, size: int, own: int) -> bool:
        """Count `size` more bytes of a request, which has `own` with them; whether there is room.

        There is for a request that holds all that is held: who is alone is bound by his own limit.
        """
        self.bytes += size
        return self.bytes <= self.limit or self.bytes == own

    @property
    def message(self) -> str:
        """Why there is no room."""
        return f"the server holds {self.limit} bytes of requests already"
