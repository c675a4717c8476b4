"""Compute a load test's figures, and whether they describe the server or the generator.

It also parses and applies the conditions of failure: "p99>20ms, errors>0, throughput<500".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.evaluation.statistics import Latency, throughput
from deploykit.loadtest.check import short_bound
from deploykit.loadtest.schedule import NO_ANSWER, UNSENT, Load, RunRecord
from deploykit.reporting.points import LoadResult

SLICES = 60  # parts of the measured time, for the interval of the rate
REFUSED, EXPIRED = (429, 503), 504
BUSY_CORE = 0.9  # a closed-loop generator that used more of its core was the limit
MOST_LAG_MS, MOST_LAG, SEEN_LAG_MS = 1.0, 0.1, 0.2
MOST_BEHIND = 0.1  # share of a connection's time spent in the generator
MOST_BACKLOG = 0.02  # share of the requests by which a server may fall behind


def summarise(load: Load, records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the figures of a `LoadResult` from the records of all processes."""
    record = RunRecord.join(records)
    order = np.argsort(record.starts_s, kind="stable")
    start_s, end_s = np.asarray(record.starts_s)[order], np.asarray(record.ends_s)[order]
    status = np.asarray(record.statuses)[order]
    chosen = _measured(load, start_s, end_s, status)
    success, refused = status == 200, np.isin(status, REFUSED)
    lost = chosen & ~success & ~refused
    taken_s = np.where(success, end_s - start_s, np.inf)
    within = success & (taken_s * 1e3 <= (load.slo_ms or 0.0))
    latency = Latency.of(taken_s[chosen & ~refused]) if (chosen & success).any() else None
    lags_ms = {
        "sent requests": _p99_ms(record.send_lags_s),
        "read answers": _p99_ms(np.repeat(record.read_lags_s, record.reads)),
    }
    behind = record.behind_s / max(record.opened * load.duration_s, 1e-9)
    p50_s = float(np.median((end_s - start_s)[chosen & success])) if latency else 0.0
    limits = _limits(load, record, lags_ms, behind, p50_s * 1e3)
    closed = load.rate_per_s is None
    sustained = None if closed else _kept_up(load, start_s, end_s)
    return {
        "mode": "closed" if closed else "open",
        "concurrency": load.connections if closed else None,
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
        "client_busy": record.busy,
        "generator_limited": bool(limits),
        "limits": limits,
        "behind": min(behind, 1.0),
        "sustained": sustained,
        "notes": _notes(load, record, sustained),
        "connections": record.opened,
        "processes": len(records),
        "slo_ms": load.slo_ms,
        "goodput_per_s": _rate(load, end_s[within]) if load.slo_ms else None,
        "errors": record.errors,
    }


def _measured(load: Load, start_s: np.ndarray, end_s: np.ndarray, status: np.ndarray) -> np.ndarray:
    """Return which requests count: those open, or in the open loop due, in the measured time."""
    if load.rate_per_s is None:
        return (end_s >= load.warmup_s) & (start_s < load.end_s)
    hung = (end_s >= load.warmup_s) & np.isin(status, (NO_ANSWER, UNSENT))
    return (start_s >= load.warmup_s) | hung


def _rate(load: Load, end_s: np.ndarray) -> Interval:
    edges_s = np.linspace(load.warmup_s, load.end_s, SLICES + 1)
    per_slice, _ = np.histogram(end_s, edges_s)
    return throughput(per_slice.tolist(), [load.duration_s / SLICES] * SLICES)


def _p99_ms(lags_s: Sequence[float] | np.ndarray) -> float:
    return float(np.percentile(lags_s, 99)) * 1e3 if len(lags_s) else 0.0


def _limits(
    load: Load, record: RunRecord, lags_ms: Mapping[str, float], behind: float, p50_ms: float
) -> tuple[str, ...]:
    """Return why the figures are the generator's, as when its p99 lag exceeds its bound.

    The bound is 10 % of the median, at most 1 ms, and at least 0.2 ms, as any thread needs some
    time to wake.
    """
    bound_ms = min(MOST_LAG_MS, max(MOST_LAG * p50_ms, SEEN_LAG_MS))
    limits = [
        f"it {what} late: p99 {lag_ms:.2f} ms, where {bound_ms:.2g} ms is the most"
        for what, lag_ms in lags_ms.items()
        if lag_ms > bound_ms
    ]
    if load.rate_per_s is None and behind > MOST_BEHIND:
        limits.append(f"connections waited for it {min(behind, 1.0):.0%} of the time")
    if load.rate_per_s is None and record.busy > BUSY_CORE:
        limits.append(f"it used {record.busy:.0%} of its core")
    if record.limit:
        limits.append(f"it could open no more than {record.opened:,} connections: {record.limit}")
    elif record.waited and record.opened < load.connections:
        limits.append(f"{record.waited:,} requests waited for one of its connections")
    return tuple(limits)


def _kept_up(load: Load, start_s: np.ndarray, end_s: np.ndarray) -> bool:
    """Return whether the number of open requests did not grow over the measured time.

    Its means over the first and the last fifth are compared. It may grow by 2 % of the requests
    plus what chance explains.
    """
    fifth_s, open_requests = load.duration_s / 5, []
    for low_s in (load.warmup_s, load.end_s - fifth_s):
        overlap_s = np.minimum(end_s, low_s + fifth_s) - np.maximum(start_s, low_s)
        open_requests.append(float(np.maximum(overlap_s, 0.0).sum()) / fifth_s)
    first, last = open_requests
    due = int(((start_s >= load.warmup_s) & (start_s < load.end_s)).sum())
    return bool(last - first <= max(MOST_BACKLOG * due, 5 * (first + 1) ** 0.5))


def _notes(load: Load, record: RunRecord, sustained: bool | None) -> tuple[str, ...]:
    notes = []
    if sustained is False:
        notes.append(
            f"the server did not sustain {load.rate_per_s:,.6g} requests/s: open requests piled "
            "up, so that percentiles grow with the duration"
        )
    if record.waited and record.opened >= load.connections:
        notes.append(
            f"{record.waited:,} requests were due while all {load.connections:,} connections that "
            "the generator opens waited for the server: the wait is in their latency"
        )
    if record.resent:
        notes.append(
            f"{record.resent:,} requests were sent again, with the time of both: the server had "
            "closed their connection before it read them"
        )
    return tuple(notes)


_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_MS: Mapping[str, float] = {"ms": 1.0, "s": 1e3, "us": 1e-3}
_PERCENTILES, _RATES = ("p50", "p90", "p99", "max"), ("throughput", "goodput")
_COUNTS = ("errors", "refused", "expired", "failed", "unsent")
_CONDITION = re.compile(r"\s*([a-z0-9]+)\s*(>=|<=|>|<)\s*([0-9]*\.?[0-9]+)\s*([a-z/%]*)\s*")


@dataclass(frozen=True)
class Condition:
    """One condition of failure, such as "p99>20ms"; `bound` is in `unit`."""

    text: str
    metric: str
    operator: str
    bound: float
    unit: str

    def failure(self, result: LoadResult) -> str | None:
        """Return why the run fails (the condition holds or is not known); None if it does not."""
        value = self._value(result)
        if value is None:
            return f"{self.text}: {self.metric} is not known"
        value /= max(result.sent + result.unsent, 1) / 100 if self.unit == "%" else 1.0
        value /= _MS.get(self.unit, 1.0)
        if not _OPERATORS[self.operator](value, self.bound):
            return None
        return f"{self.text}: {short_bound(value)} {self.unit}".rstrip()

    def _value(self, result: LoadResult) -> float | None:
        """Return the value, None if unknown. Percentiles that no answer reached are infinite."""
        if self.metric == "errors":
            return float(result.failed + result.expired + result.unsent)
        if self.metric in _COUNTS:
            return float(getattr(result, self.metric))
        if self.metric in _RATES:
            rate = result.achieved_per_s if self.metric == "throughput" else result.goodput_per_s
            return rate.value if rate else None
        if result.latency is None:
            return math.inf
        if self.metric == "max":
            return math.inf if result.latency.lost else result.latency.max_ms
        percentile = getattr(result.latency, f"{self.metric}_ms")
        if percentile is None:
            return None if f"{self.metric}_ms" in result.latency.needs else math.inf
        return float(percentile.value)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Parse conditions separated by commas. Raises BadInput."""
    units = {metric: tuple(_MS) for metric in _PERCENTILES}
    units |= dict.fromkeys(_RATES, ("/s", "")) | dict.fromkeys(_COUNTS, ("%", ""))
    hint = f"such as 'p99>20ms' or 'errors>1%'; metrics are {', '.join(units)}"
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        metric, compare, number, unit = match.groups() if match else ("", "", "", "")
        if unit not in units.get(metric, ()):
            known = " or ".join(each or "no unit" for each in units.get(metric, ()))
            why = f"needs {known}" if known else "is not a condition"
            raise BadInput(f"`fail_on`: '{part.strip()}' {why}", hint=hint)
        name = f"{metric}{compare}{number}{unit}"
        conditions.append(Condition(name, metric, compare, float(number), unit))
    return tuple(conditions)


def apply_conditions(result: LoadResult, conditions: Sequence[Condition]) -> LoadResult:
    """Return the result with its unmet conditions: all, if the generator or others disturbed it."""
    doubts = [f"the generator was the limit: {why}" for why in result.limits[:1]]
    doubts += result.marks
    if doubts:
        unmet = [f"{each.text}: not known, as {'; '.join(doubts)}" for each in conditions]
    else:
        unmet = [why for each in conditions if (why := each.failure(result)) is not None]
    return replace(result, unmet=tuple(unmet))
