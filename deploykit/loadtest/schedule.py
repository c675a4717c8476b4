"""Define when the load generator sends, and what it records of each request.

Times are seconds since the start of the run.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

NO_ANSWER, UNSENT, WRONG = 0, -1, -2  # statuses besides those of HTTP


@dataclass(frozen=True)
class Load:
    """The load on a server. If `rate_per_s` is None, it is a closed loop of `connections`."""

    rate_per_s: float | None
    connections: int
    warmup_s: float
    duration_s: float
    drain_s: float = 5.0
    slo_ms: float | None = None

    @property
    def end_s(self) -> float:
        return self.warmup_s + self.duration_s

    def due_s(self, seed: int) -> array[float] | None:
        """Return the ascending send times of an open loop, a Poisson process."""
        if self.rate_per_s is None:
            return None
        random = np.random.default_rng(seed)
        count = random.poisson(self.rate_per_s * self.end_s)
        return array("d", np.sort(random.uniform(0.0, self.end_s, count)).tobytes())


@dataclass
class RunRecord:
    """The record of one process. The first three fields have an item per request, by end.

    `read_lags_s`: how long answers were readable before the generator woke, per wake-up; `reads`
    has the number of answers of each. `behind_s`: time that connections waited for the generator,
    summed over connections. Lags and busy times cover the measured time.
    """

    starts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    statuses: array[int] = field(default_factory=lambda: array("h"))
    send_lags_s: array[float] = field(default_factory=lambda: array("d"))
    read_lags_s: array[float] = field(default_factory=lambda: array("d"))
    reads: array[int] = field(default_factory=lambda: array("l"))
    behind_s: float = 0.0
    busy: float = 0.0  # share of one core
    waited: int = 0  # requests that were due when all allowed connections were in use
    opened: int = 0  # most connections at once
    limit: str = ""  # why no more were opened
    resent: int = 0  # requests whose connection the server had closed before it read them
    errors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def join(cls, records: Sequence[RunRecord]) -> RunRecord:
        whole = cls(
            behind_s=sum(each.behind_s for each in records),
            busy=max(each.busy for each in records),
            waited=sum(each.waited for each in records),
            resent=sum(each.resent for each in records),
            opened=sum(each.opened for each in records),
            limit=next((each.limit for each in records if each.limit), ""),
            errors=dict(sum((Counter(each.errors) for each in records), Counter())),
        )
        for each in records:
            for name in ("starts_s", "ends_s", "statuses", "send_lags_s", "read_lags_s", "reads"):
                getattr(whole, name).extend(getattr(each, name))
        return whole

    def progress(self) -> str:
        """Describe the number of answered requests and the percentiles of the last 1,000."""
        lists = self.starts_s, self.ends_s, self.statuses
        last = zip(*(each[-1000:] for each in lists), strict=True)
        taken_s = sorted(end_s - start_s for start_s, end_s, status in last if status == 200)
        text = f"{len(self.ends_s):,} requests"
        if taken_s:
            p50, p99 = (taken_s[int(len(taken_s) * share)] * 1e3 for share in (0.5, 0.99))
            text += f", p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        return text
