"""Conditions under which a load test fails: "p99>20ms, errors>0, throughput<500"."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from deploykit.core.errors import BadInput
from deploykit.measure.load.result import LoadResult

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
