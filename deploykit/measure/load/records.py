"""What one process of the load generator is given, and what it gives back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from deploykit.measure.load.check import AnswerCheck

NO_ANSWER, UNSENT, WRONG = 0, -1, -2  # statuses besides those of HTTP


@dataclass(frozen=True)
class SendPlan:
    """What one process sends. Times are seconds since the start of the run.

    `due_s`: when requests are due, ascending; None is the closed loop. Requests start before
    `end_s`; `begin_s` is where the warm-up ends.
    """

    address: str
    port: int
    requests: Sequence[bytes]
    check: AnswerCheck
    connections: int  # that may be open at once
    due_s: Sequence[float] | None
    begin_s: float
    end_s: float
    drain_s: float
    block: bytes = b""  # gRPC: the header block of a call; none: HTTP/1.1


@dataclass
class RunRecord:
    """What came of it. The first three have an item for each request, in order of their ends.

    `read_lags_s`: how long an answer was readable before the generator woke, for each time it did,
    with the number of answers in `reads`. `behind_s`: time in which a connection waited for the
    generator, summed over connections. Lags and busy times are of the measured time.
    """

    starts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    statuses: array[int] = field(default_factory=lambda: array("h"))
    send_lags_s: array[float] = field(default_factory=lambda: array("d"))
    read_lags_s: array[float] = field(default_factory=lambda: array("d"))
    reads: array[int] = field(default_factory=lambda: array("l"))
    behind_s: float = 0.0
    busy: float = 0.0  # share of one core
    waited: int = 0  # requests that were due when all connections that may be open were in use
    opened: int = 0  # connections at once, at most
    limit: str = ""  # why no more could be opened
    errors: dict[str, int] = field(default_factory=dict)

    def progress(self, recent: int) -> str:
        """How many requests were answered, with percentiles of the last ones."""
        starts_s, ends_s, statuses = (
            each[-recent:] for each in (self.starts_s, self.ends_s, self.statuses)
        )
        last = zip(starts_s, ends_s, statuses, strict=True)
        taken_s = sorted(end_s - start_s for start_s, end_s, status in last if status == 200)
        text = f"{len(self.ends_s):,} requests"
        if taken_s:
            p50, p99 = (taken_s[int(len(taken_s) * share)] * 1e3 for share in (0.5, 0.99))
            text += f", p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        return text
