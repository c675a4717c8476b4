"""Predict how long a node takes: the longer of its arithmetic and its memory traffic.

Roofline: Williams, Waterman and Patterson, CACM 52(4), 2009. `quantize --to auto` ranks candidates
by it, `plan` predicts latencies, and a report shows where a model lies under it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.core.precision import of_dtype
from deploykit.onnx_graph.cost import NodeCost
from deploykit.onnx_graph.kinds import ARITHMETIC, OTHER

COMPUTE, MEMORY, LAUNCH = "compute", "memory", "launch"


@dataclass(frozen=True)
class Curve(Record):
    """Measured seconds of one node at a few amounts of work, in rising order.

    Between two points a straight line in logarithms; outside of them in proportion to the work.
    """

    work: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, work: float) -> float:
        place = bisect_left(self.work, work)
        if place in (0, len(self.work)):
            nearest = -1 if place else 0
            return self.seconds[nearest] * work / self.work[nearest]
        (w0, w1), (s0, s1) = self.work[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        share = math.log(work / w0) / math.log(w1 / w0)
        return math.exp(math.log(s0) + share * math.log(s1 / s0))


@dataclass(frozen=True)
class Ceilings(Record):
    """What a target does at most: operations/s by "fp32", "fp16", "bf16", "int8", "fp8"; bytes/s.

    A precision that has no peak is taken to run at "fp32". `launch_s`: of a kernel. `curves`:
    measured nodes by precision and kind, "fp32 convolution"; they replace peak and launch, and of
    the traffic only the weights then count apart. Raises BadInput without a peak of fp32 or of the
    memory.
    """

    ops_per_s: Mapping[str, float]
    bytes_per_s: float
    launch_s: float = 0.0
    curves: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.ops_per_s.get("fp32", 0.0) > 0 and self.bytes_per_s > 0):
            raise BadInput(
                "a predicted time needs the peaks of fp32 and of the memory bandwidth, above 0",
                hint="a profile has both: peak_ops_per_s and bandwidth_bytes_per_s",
            )

    def peak(self, dtype: str | None) -> float:
        """Operations/s of a graph's `dtype`."""
        return self.ops_per_s.get(_precision(dtype)) or self.ops_per_s["fp32"]

    def curve(self, cost: NodeCost) -> Curve | None:
        names = (f"{_precision(cost.precision)} {cost.kind}", f"fp32 {cost.kind}", f"fp32 {OTHER}")
        return next((self.curves[name] for name in names if name in self.curves), None)


@dataclass(frozen=True)
class NodeTime(Record):
    """Seconds of a node: of its arithmetic, of its traffic, and of starting it."""

    compute_s: float
    memory_s: float
    launch_s: float

    @property
    def seconds(self) -> float:
        return self.launch_s + max(self.compute_s, self.memory_s)

    @property
    def limit(self) -> str:
        """What most of its time goes to: COMPUTE, MEMORY or LAUNCH."""
        longest = max(self.compute_s, self.memory_s)
        if self.launch_s >= longest:
            return LAUNCH
        return COMPUTE if self.compute_s >= self.memory_s else MEMORY


def node_time(cost: NodeCost, ceilings: Ceilings) -> NodeTime:
    """How long a node takes. One that runs inside another's kernel moves no byte of its own."""
    flops, traffic = cost.flops or 0, cost.traffic_bytes
    launch_s = ceilings.launch_s if traffic else 0.0
    curve = ceilings.curve(cost)
    if curve is None:
        compute_s = flops / ceilings.peak(cost.precision)
        return NodeTime(compute_s, traffic / ceilings.bytes_per_s, launch_s)
    if not traffic:
        return NodeTime(0.0, 0.0, 0.0)
    weights_s = cost.weight_bytes / ceilings.bytes_per_s
    if cost.kind in ARITHMETIC:
        measured_s = cost.steps * curve.at(flops / cost.steps)
        return NodeTime(max(0.0, measured_s - launch_s), weights_s, launch_s)
    measured_s = curve.at(traffic)
    return NodeTime(0.0, max(0.0, measured_s - launch_s), launch_s)


def predicted_s(costs: Iterable[NodeCost], ceilings: Ceilings) -> float:
    """Seconds of one call: each node at the roofline, one after the other.

    With peaks alone a lower bound, whose use is to compare: it leaves out the start of kernels,
    tiles that do not fill, caches, conversions between layouts and nodes whose cost is not known.
    """
    return math.fsum(node_time(cost, ceilings).seconds for cost in costs)


def savings_s(
    before: Iterable[NodeCost], after: Iterable[NodeCost], ceilings: Ceilings
) -> dict[str, float]:
    """Seconds that each node of `after` takes less than the node of that name in `before`."""
    old = {cost.name: node_time(cost, ceilings).seconds for cost in before}
    new = {cost.name: node_time(cost, ceilings).seconds for cost in after}
    return {name: old[name] - new[name] for name in new if name in old}


def _precision(dtype: str | None) -> str:
    known = of_dtype(dtype or "float32")
    return known.name if known else "fp32"
