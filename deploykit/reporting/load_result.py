"""The result of a load test: counts, rate, percentiles, and whether they are the server's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from deploykit.core.errors import GateFailed
from deploykit.core.evidence import Interval
from deploykit.core.json_value import Record
from deploykit.evaluation.latency import Latency
from deploykit.reporting.html import load_html
from deploykit.reporting.machine_load import Outside


@dataclass(frozen=True)
class LoadResult(Record):
    """Result of a load test. Counts are of requests that were open in the measured time.

    `latency` is of successes and, as infinitely late, of what failed or expired: in the open loop
    from the intended time to the answer, in the closed loop from the sending. Refusals are apart.
    `lag_p99_ms`: how late the generator was itself in sending (open loop) or reading. `behind`:
    share of a connection's time that the generator took. `limits`: why the figures describe the
    generator, not the server; `generator_limited` where there is any. `sustained`: whether the
    server kept up with an open loop. `server`: what it says of itself, with the model's file and
    hash; `options`: the model's, as it is served. `outside`: the load of other processes on this
    machine, the generator's and those of a server here left out; `marks`: why there is no verdict
    for it.
    """

    url: str
    model: str
    mode: str  # "closed" | "open"
    concurrency: int | None
    rate_per_s: float | None  # requested
    batch: int
    seed: int
    warmup_s: float
    duration_s: float
    achieved_per_s: Interval  # requests answered with success
    latency: Latency | None  # None: no good answer
    sent: int
    ok: int
    refused: int  # 503, 429
    expired: int  # 504
    failed: int  # any other status, a wrong answer, a broken connection, no answer
    lag_p99_ms: float | None
    client_busy: float  # share of one core that the generator used
    generator_limited: bool
    same_machine: bool
    errors: Mapping[str, int] = field(default_factory=dict)  # the first few messages: counts
    unsent: int = 0  # due when every connection that the generator may open was in use
    limits: tuple[str, ...] = ()
    behind: float = 0.0
    sustained: bool | None = None
    notes: tuple[str, ...] = ()
    connections: int = 0  # open at once, at most
    processes: int = 1
    protocol: str = "http"
    capacity_per_s: float | None = None  # of the closed loop that chose the rate
    slo_ms: float | None = None
    goodput_per_s: Interval | None = None  # answered with success `slo_ms`
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # inputs of a request
    sends: str = ""  # what requests hold that are not tensors
    server: Mapping[str, str] = field(default_factory=dict)  # what it says of itself
    options: Mapping[str, Any] = field(default_factory=dict)
    outside: Outside | None = None
    marks: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()  # conditions by which the run fails, with the figures

    shown: ClassVar[tuple[str, ...]] = ("first_error",)

    @property
    def first_error(self) -> str | None:
        return next(iter(self.errors), None)

    def raise_if_unmet(self) -> None:
        """Raises GateFailed where the run fails by one of its conditions."""
        if self.unmet:
            raise GateFailed("; ".join(self.unmet))

    def _repr_html_(self) -> str:
        return load_html(self.to_dict())
