"""What a load test found: counts, rate, percentiles, and whether they are the server's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from deploykit.core.errors import GateFailed
from deploykit.core.json_value import Record
from deploykit.measure.latency import Latency
from deploykit.measure.load.records import NO_ANSWER, UNSENT, WRONG, RunRecord
from deploykit.measure.outside import Outside
from deploykit.measure.statistics import Interval, throughput

SLICES = 60  # the measured time is cut into these, for the interval of the rate
REFUSED, EXPIRED = (429, 503), 504
BUSY_CORE = 0.9  # a closed-loop generator that used more of its core was the limit itself
MOST_LAG_MS, MOST_LAG, SEEN_LAG_MS = 1.0, 0.1, 0.2
MOST_BEHIND = 0.1  # of the time of a connection, spent in the generator
MOST_BACKLOG = 0.02  # of the requests, by which a server may fall behind an open loop


@dataclass(frozen=True)
class LoadResult(Record):
    """Result of a load test. Counts are of requests that were open in the measured time.

    `latency` is of successes and, as infinitely late, of what failed or expired: in the open loop
    from the intended time to the answer, in the closed loop from the sending. Refusals are apart.
    `lag_p99_ms`: how late the generator was itself in sending (open loop) or reading. `behind`:
    share of a connection's time that the generator took. `limits`: why the figures describe the
    generator, not the server; `generator_limited` where there is any. `sustained`: whether the
    server kept up with an open loop. `server`: what it says of itself, with the model's file and
    hash; `options`: the model's, as it is served. `stages_ms`: "decode", "queue", "compute" and
    "encode" as the server's own statistics have them, those that it has, and "wire", the rest of
    what the client measured, with the warm-up; {} where they are not of this run. `outside`: the
    load of other processes on this machine, the generator's and those of a server here left out;
    `marks`: why there is no verdict for it.
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
    errors: Mapping[str, int] = field(
        default_factory=dict
    )  # the first few messages, with their count
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
    stages_ms: Mapping[str, float] = field(default_factory=dict)  # mean, of requests with success
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
        from deploykit.measure.report.notebook import load_html

        return load_html(self)


@dataclass(frozen=True)
class Load:
    """What was asked of a server. `rate_per_s` None: a closed loop of `connections`."""

    rate_per_s: float | None
    connections: int
    warmup_s: float
    duration_s: float
    drain_s: float = 5.0
    slo_ms: float | None = None

    @property
    def end_s(self) -> float:
        return self.warmup_s + self.duration_s


def summarise(load: Load, outcomes: Sequence[RunRecord]) -> dict[str, Any]:
    """The figures of a `LoadResult`, from what each process recorded."""
    start_s, end_s, status = (
        np.concatenate([np.asarray(getattr(each, name)) for each in outcomes])
        for name in ("starts_s", "ends_s", "statuses")
    )
    order = np.argsort(start_s, kind="stable")
    start_s, end_s, status = start_s[order], end_s[order], status[order]
    chosen = _measured(load, start_s, end_s, status)
    success, refused = status == 200, np.isin(status, REFUSED)
    lost = chosen & ~success & ~refused
    taken_s = np.where(success, end_s - start_s, np.inf)
    within = success & (taken_s * 1e3 <= (load.slo_ms or 0.0))
    latency = Latency.of(taken_s[chosen & ~refused]) if (chosen & success).any() else None
    lags_ms = _lags_ms(outcomes)
    p50_s = float(np.median((end_s - start_s)[chosen & success])) if latency else 0.0
    limits = _limits(load, outcomes, lags_ms, p50_s * 1e3)
    sustained = None
    if load.rate_per_s is not None:
        sustained = _kept_up(load, start_s, end_s)
    return {
        "mode": "closed" if load.rate_per_s is None else "open",
        "concurrency": load.connections if load.rate_per_s is None else None,
        "rate_per_s": load.rate_per_s,
        "warmup_s": load.warmup_s,
        "duration_s": load.duration_s,
        "achieved_per_s": _rate(load, end_s[success]),
        "latency": latency,
        "sent": int((chosen & (status != UNSENT)).sum()),
        "ok": int((chosen & success).sum()),
        "refused": int((chosen & refused).sum()),
        "expired": int((chosen & (status == EXPIRED)).sum()),
        "failed": int((lost & (status != EXPIRED) & (status != UNSENT)).sum()),
        "unsent": int((chosen & (status == UNSENT)).sum()),
        "lag_p99_ms": max(lags_ms.values()),
        "client_busy": max(each.busy for each in outcomes),
        "generator_limited": bool(limits),
        "limits": limits,
        "behind": _behind(load, outcomes),
        "sustained": sustained,
        "notes": _notes(load, outcomes, sustained),
        "connections": sum(each.opened for each in outcomes),
        "processes": len(outcomes),
        "slo_ms": load.slo_ms,
        "goodput_per_s": _rate(load, end_s[within]) if load.slo_ms else None,
        "errors": _errors(outcomes),
    }


def mean_answer_ms(outcomes: Sequence[RunRecord]) -> tuple[int, float]:
    """How many requests the server answered with success, the warm-up's too, and their mean ms."""
    statuses = np.concatenate([np.asarray(each.statuses) for each in outcomes])
    taken_s = np.concatenate(
        [np.asarray(each.ends_s) - np.asarray(each.starts_s) for each in outcomes]
    )[np.isin(statuses, (200, WRONG))]
    return len(taken_s), float(taken_s.mean()) * 1e3 if len(taken_s) else 0.0


def _measured(load: Load, start_s: np.ndarray, end_s: np.ndarray, status: np.ndarray) -> np.ndarray:
    """Which requests count: those that were open while it was measured.

    In the open loop those due in that time; one that was due before and never answered counts, too.
    """
    if load.rate_per_s is None:
        return (end_s >= load.warmup_s) & (start_s < load.end_s)
    hung = (end_s >= load.warmup_s) & np.isin(status, (NO_ANSWER, UNSENT))
    return (start_s >= load.warmup_s) | hung


def _rate(load: Load, end_s: np.ndarray) -> Interval:
    edges_s = np.linspace(load.warmup_s, load.end_s, SLICES + 1)
    per_slice, _ = np.histogram(end_s, edges_s)
    return throughput(per_slice.tolist(), [load.duration_s / SLICES] * SLICES)


def _lags_ms(outcomes: Sequence[RunRecord]) -> dict[str, float]:
    """The 99th percentile of how late the generator sent and read."""
    sent = np.concatenate([np.asarray(each.send_lags_s) for each in outcomes])
    read = np.concatenate(
        [np.repeat(np.asarray(each.read_lags_s), np.asarray(each.reads)) for each in outcomes]
    )
    return {
        name: float(np.percentile(lags, 99)) * 1e3 if len(lags) else 0.0
        for name, lags in (("sent requests", sent), ("read answers", read))
    }


def _behind(load: Load, outcomes: Sequence[RunRecord]) -> float:
    """Share of the time of all connections in which they waited for the generator."""
    connections = sum(each.opened for each in outcomes)
    behind_s = sum(each.behind_s for each in outcomes)
    return min(behind_s / (connections * load.duration_s), 1.0) if connections else 0.0


def _limits(
    load: Load, outcomes: Sequence[RunRecord], lags_ms: Mapping[str, float], p50_ms: float
) -> tuple[str, ...]:
    """Why the figures are the generator's: 1 ms or 10 % of the median late, by the 99th percentile.

    Below 0.2 ms lag cannot be separated from the time that any thread needs to wake.
    """
    bound_ms = min(MOST_LAG_MS, max(MOST_LAG * p50_ms, SEEN_LAG_MS))
    found = [
        f"it {what} late: p99 {lag_ms:.2f} ms, where {bound_ms:.2g} ms is the most"
        for what, lag_ms in lags_ms.items()
        if lag_ms > bound_ms
    ]
    behind, busy = _behind(load, outcomes), max(each.busy for each in outcomes)
    if load.rate_per_s is None and behind > MOST_BEHIND:
        found.append(f"connections waited for it {behind:.0%} of the time")
    if load.rate_per_s is None and busy > BUSY_CORE:
        found.append(f"it used {busy:.0%} of its core")
    waited = sum(each.waited for each in outcomes)
    reason = next((each.limit for each in outcomes if each.limit), "")
    if reason:
        opened = sum(each.opened for each in outcomes)
        found.append(f"it could open no more than {opened:,} connections: {reason}")
    elif waited and sum(each.opened for each in outcomes) < load.connections:
        found.append(f"{waited:,} requests waited for one of its connections")
    return tuple(found)


def _kept_up(load: Load, start_s: np.ndarray, end_s: np.ndarray) -> bool:
    """Whether the number of open requests did not grow over the measured time.

    Compared are its means over the first and the last fifth; it may grow by 2 % of the requests,
    and by what chance explains.
    """
    fifth_s = load.duration_s / 5
    first, last = (
        _mean_open(start_s, end_s, at_s, at_s + fifth_s)
        for at_s in (load.warmup_s, load.end_s - fifth_s)
    )
    due = int(((start_s >= load.warmup_s) & (start_s < load.end_s)).sum())
    return bool(last - first <= max(MOST_BACKLOG * due, 5 * (first + 1) ** 0.5))


def _mean_open(start_s: np.ndarray, end_s: np.ndarray, low_s: float, high_s: float) -> float:
    """How many requests are open at a time, on average."""
    overlap_s = np.minimum(end_s, high_s) - np.maximum(start_s, low_s)
    return float(np.maximum(overlap_s, 0.0).sum()) / (high_s - low_s)


def _notes(load: Load, outcomes: Sequence[RunRecord], sustained: bool | None) -> tuple[str, ...]:
    found = []
    if sustained is False:
        found.append(
            f"the server did not sustain {load.rate_per_s:,.6g} requests/s: open requests piled "
            "up, so that percentiles grow with the duration"
        )
    waited = sum(each.waited for each in outcomes)
    if waited and sum(each.opened for each in outcomes) >= load.connections:
        found.append(
            f"{waited:,} requests were due while all {load.connections:,} connections that the "
            "generator opens waited for the server: the wait is in their latency"
        )
    return tuple(found)


def _errors(outcomes: Sequence[RunRecord]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in outcomes:
        for text, count in each.errors.items():
            found[text] = found.get(text, 0) + count
    return found
