"""What runs a pipeline for many clients at once: an event loop, models in batches, counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from deploykit.core.errors import DeploykitError
from deploykit.runtimes.engine import Arrays

Ran = Callable[["Arrays | None", "DeploykitError | None"], None]


class Counts(Protocol):
    """Of a pipeline or of one of its stages. Thread-safe, but for `in_flight`."""

    in_flight: int

    def record(self, outcome: str, us: int = 0) -> None: ...


class Host(Protocol):
    """A server. `limit`: requests at a time in a stage that has no limit of its own.

    `processes`: how many share the limits that a pipeline sets.
    """

    loop: asyncio.AbstractEventLoop
    timeout_ms: float
    limit: int
    processes: int

    @property
    def draining(self) -> bool: ...

    def counts(self, labels: Mapping[str, str], waiting: Callable[[], int] | None = None) -> Counts:
        """New counters, which the server shows; `waiting`: for a thread of the stage."""
        ...

    def max_rows(self, model: str) -> int:
        """Of one call; 0 where rows may not be joined."""
        ...

    def submit(
        self, model: str, feeds: Arrays, rows: int, left_us: int, trace: str | None, ran: Ran
    ) -> Callable[[], object]:
        """Queue a call; returns what cancels it. `ran` gets the outputs or the error, later."""
        ...

    def encode(self, answer: Any) -> bytes:
        """JSON values as bytes. Raises TypeError for an integer above 64 bits."""
        ...
