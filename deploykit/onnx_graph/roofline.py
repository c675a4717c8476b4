"""Predict how long a node takes: the longer of its arithmetic and its memory traffic.

Roofline: Williams, Waterman and Patterson, CACM 52(4), 2009. `quantize --to auto` ranks candidates
by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.core.precision import of_dtype
from deploykit.onnx_graph.cost import NodeCost


@dataclass(frozen=True)
class Ceilings(Record):
    """What a target does at most: operations/s by "fp32", "fp16", "bf16", "int8", "fp8"; bytes/s.

    A precision that has no peak is taken to run at "fp32". Raises BadInput where that is missing.
    """

    ops_per_s: Mapping[str, float]
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.ops_per_s.get("fp32", 0.0) > 0 and self.bytes_per_s > 0):
            raise BadInput(
                "a predicted time needs the peaks of fp32 and of the memory bandwidth, above 0",
                hint="a profile has both: peak_ops_per_s and bandwidth_bytes_per_s",
            )

    def peak(self, dtype: str | None) -> float:
        """Operations/s of a graph's `dtype`."""
        known = of_dtype(dtype or "float32")
        return self.ops_per_s.get(known.name if known else "fp32") or self.ops_per_s["fp32"]


def node_s(cost: NodeCost, ceilings: Ceilings) -> float:
    """Seconds of one node; see `predicted_s`."""
    compute_s = (cost.flops or 0) / ceilings.peak(cost.precision)
    return max(compute_s, cost.traffic_bytes / ceilings.bytes_per_s)


def predicted_s(costs: Iterable[NodeCost], ceilings: Ceilings) -> float:
    """Seconds of one call: each node at the roofline, one after the other.

    A lower bound, whose use is to compare: it leaves out the start of kernels, tiles that do not
    fill, caches, conversions between layouts and nodes whose cost is not known.
    """
    return math.fsum(node_s(cost, ceilings) for cost in costs)


def savings_s(
    before: Iterable[NodeCost], after: Iterable[NodeCost], ceilings: Ceilings
) -> dict[str, float]:
    """Seconds that each node of `after` takes less than the node of that name in `before`."""
    old = {cost.name: node_s(cost, ceilings) for cost in before}
    new = {cost.name: node_s(cost, ceilings) for cost in after}
    return {name: old[name] - new[name] for name in new if name in old}
