"""The memory budget for requests and answers, over all connections of both protocols.

Each connection has its limits, but thousands of them together could use all memory.
"""

from __future__ import annotations

from deploykit.core.machine import memory_bytes

_UNKNOWN_MEMORY = 4 << 30


class MemoryBudget:
    """`bytes` of requests that wait for their answer, and of answers that wait for their client.

    Counted: what was received, decompressed, or copied from shared memory, then the answer until
    the client has taken it. Call all methods on the event loop's thread.
    """

    def __init__(self, limit: int | None, max_body_bytes: int, parts: int = 1) -> None:
        """`limit` None: a quarter of this machine's memory, but at least one largest body.

        `parts`: processes that have one budget together.
        """
        if limit is None:
            limit = max(max_body_bytes, (memory_bytes() or _UNKNOWN_MEMORY) // 4 // parts)
        self.limit = limit
        self.bytes = 0

    def add(self, size: int, own: int) -> bool:
        """Count `size` more bytes of a request or answer, which has `own` in total then.

        Returns whether they fit; they are counted in any case, until `release`. One that is alone
        in the server may exceed the budget; its own limit bounds it.
        """
        self.bytes += size
        return self.bytes <= self.limit or self.bytes == own

    def release(self, size: int) -> None:
        """No longer count `size` bytes."""
        self.bytes -= size

    @property
    def message(self) -> str:
        """The error message for a request or answer that does not fit."""
        return f"the server holds {self.limit} bytes of requests and answers already"
