"""The layers that a runtime made of a graph, and their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploykit.core.json_value import Record

LayerKey = tuple[str, str, str]  # name, operator, number


@dataclass(frozen=True)
class LayerTime(Record):
    """A node as the runtime runs it, which may be several of the file's, and `ms` of a call."""

    name: str
    op: str
    ms: float


@dataclass(frozen=True)
class LayerTimes(Record):
    """`layers`: those that take most, of `count`, which take `sum_ms` together.

    `call_ms` without and `profiled_ms` with the profiler. All are means over the middle half of
    `calls` calls.
    """

    label: str
    batch: int
    runtime: str
    calls: int
    call_ms: float
    profiled_ms: float
    sum_ms: float
    count: int
    layers: tuple[LayerTime, ...]


def middle(values: Sequence[float]) -> list[int]:
    """Where the middle half of the values is: what neither other work nor a cold start made."""
    ranked, quarter = sorted(range(len(values)), key=values.__getitem__), len(values) // 4
    return ranked[quarter : len(ranked) - quarter]
