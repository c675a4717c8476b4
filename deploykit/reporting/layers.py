"""The layers that a runtime made of a graph, their time, and how much they compute in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploykit.core.json_value import Record

LayerKey = tuple[str, str, str]  # name, operator, number


@dataclass(frozen=True)
class LayerTime(Record):
    """A node as the runtime runs it, and `ms` of a call.

    It may be several of the file's: then it has the name of the one that multiplies. `gflops`:
    billions of operations per second, in `precision`, of convolutions, matrix products and
    recurrent layers; None of others, of unknown sizes and below 0.01 ms.
    """

    name: str
    op: str
    ms: float
    gflops: float | None = None
    precision: str = ""


@dataclass(frozen=True)
class LayerTimes(Record):
    """`layers`: those that take most, of `count`, which take `sum_ms` together.

    `call_ms` without and `profiled_ms` with the profiler. Each, as each layer's `ms`, is the mean
    of the middle half of its values in `calls` calls. `ceilings`: by precision the highest `gflops`
    of a probe of the CPU with as many threads, or of a layer if that is higher; empty where there
    was no probe.
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
    ceilings: Mapping[str, float] = field(default_factory=dict)


def middle(values: Sequence[float]) -> list[int]:
    """Where the middle half of the values is: what neither other work nor a cold start made."""
    ranked, quarter = sorted(range(len(values)), key=values.__getitem__), len(values) // 4
    return ranked[quarter : len(ranked) - quarter]
