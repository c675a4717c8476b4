"""What a load test found: counts, rate, percentiles, and whether they are the server's own.

Also the conditions under which a load test fails: "p99>20ms, errors>0, throughput<500".
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
from deploykit.evaluation.latency import Latency
from deploykit.evaluation.statistics import throughput
from deploykit.loadtest.schedule import NO_ANSWER, UNSENT, Load, RunRecord
from deploykit.reporting.load_result import LoadResult

SLICES = 60  # the measured time is cut into these, for the interval of the rate
REFUSED, EXPIRED = (429, 503), 504
BUSY_CORE = 0.9  # a closed-loop generator that used more of its core was the limit itself
MOST_LAG_MS, MOST_LAG, SEEN_LAG_MS = 1.0, 0.1, 0.2
MOST_BEHIND = 0.1  # of the time of a connection, spent in the generator
MOST_BACKLOG = 0.02  # of the requests, by which a server may fall behind an open loop


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
    """`bound`: in ms for latencies, per second for rates, requests or a share of them."""

    text: str
    metric: str
    operator: str
    bound: float
    is_share: bool = False

    def failure(self, result: LoadResult) -> str | None:
        """Why the run fails by it: it holds, or nobody can tell. None: the run does not."""
        value = self._value(result)
        if value is None:
            return f"{self.text}: {self.metric} is not known"
        if not _OPERATORS[self.operator](value, self.bound):
            return None
        if self.is_share:
            return f"{self.text}: {value:.2%}"
        unit = " ms" if self.metric in _PERCENTILES else "/s" if self.metric in _RATES else ""
        shown = f"{value:,.2f}" if unit else f"{value:,.0f}"
        return f"{self.text}: {shown}{unit}"

    def _value(self, result: LoadResult) -> float | None:
        """None where it is not known. Percentiles that no answer reached are infinite."""
        if self.metric in _COUNTS:
            errors = result.failed + result.expired + result.unsent
            found = errors if self.metric == "errors" else int(getattr(result, self.metric))
            return found / max(result.sent + result.unsent, 1) if self.is_share else float(found)
        if self.metric in _RATES:
            rate = result.achieved_per_s if self.metric == "throughput" else result.goodput_per_s
            return rate.value if rate else None
        if result.latency is None:
            return math.inf
        if self.metric == "max":
            return math.inf if result.latency.lost else result.latency.max_ms
        found_ms = getattr(result.latency, f"{self.metric}_ms")
        if found_ms is None:
            return None if f"{self.metric}_ms" in result.latency.needs else math.inf
        return float(found_ms.value)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Read conditions with commas between them. Raises BadInput."""
    return tuple(_parse(part) for part in text.split(","))


def _parse(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    metrics = (*_PERCENTILES, *_RATES, *_COUNTS)
    hint = f"such as 'p99>20ms' or 'errors>1%'; metrics are {', '.join(metrics)}"
    if match is None or match[1] not in metrics:
        raise BadInput(f"`fail_on`: '{text.strip()}' is not a condition", hint=hint)
    metric, compare, number, unit = match.groups()
    wanted = tuple(_MS) if metric in _PERCENTILES else ("/s", "")
    wanted = ("%", "") if metric in _COUNTS else wanted
    if unit not in wanted:
        units = " or ".join(each or "no unit" for each in wanted)
        raise BadInput(f"`fail_on`: '{text.strip()}' needs {units}", hint=hint)
    bound = float(number) * _MS.get(unit, 0.01 if unit == "%" else 1.0)
    return Condition(f"{metric}{compare}{number}{unit}", metric, compare, bound, unit == "%")


def apply_conditions(result: LoadResult, conditions: tuple[Condition, ...]) -> LoadResult:
    """The result with what it fails by.

    A run that the generator limited, or other processes disturbed, fails: it proves nothing.

    The conditions hold for the values, not for the ends of their intervals.
    """
    if result.limits or result.marks:
        limited = [f"the generator was the limit: {why}" for why in result.limits[:1]]
        why = "; ".join([*limited, *result.marks])
        return replace(
            result, unmet=tuple(f"{each.text}: not known, as {why}" for each in conditions)
        )
    failures = (each.failure(result) for each in conditions)
    return replace(result, unmet=tuple(why for why in failures if why is not None))
