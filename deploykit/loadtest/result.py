"""What a load test found: counts, rate, percentiles, and whether they are the server's own."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deploykit.core.evidence import Interval
from deploykit.evaluation.latency import Latency
from deploykit.evaluation.statistics import throughput
from deploykit.loadtest.check import AnswerCheck

# What one process of the load generator is given, and what it gives back.

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


SLICES = 60  # the measured time is cut into these, for the interval of the rate
REFUSED, EXPIRED = (429, 503), 504
BUSY_CORE = 0.9  # a closed-loop generator that used more of its core was the limit itself
MOST_LAG_MS, MOST_LAG, SEEN_LAG_MS = 1.0, 0.1, 0.2
MOST_BEHIND = 0.1  # of the time of a connection, spent in the generator
MOST_BACKLOG = 0.02  # of the requests, by which a server may fall behind an open loop


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
