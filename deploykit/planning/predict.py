"""Predict what a graph takes on a target: time, memory, energy and what limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deploykit.core.json_value import Record
from deploykit.core.memory import BuildMemory
from deploykit.core.precision import BY_NAME, narrowest
from deploykit.onnx_graph import kinds
from deploykit.onnx_graph.cost import COMPILED, INTERPRETED, NodeCost, costs_of
from deploykit.onnx_graph.graph import Graph, dtype_name
from deploykit.onnx_graph.liveness import peak_bytes
from deploykit.onnx_graph.roofline import COMPUTE, LAUNCH, MEMORY, node_time
from deploykit.onnx_graph.shapes import TensorShapes, fixed_shapes
from deploykit.planning.targets import Target

_CONVERTIBLE = (kinds.CONVOLUTION, kinds.POINTWISE, kinds.DEPTHWISE, kinds.STEM, kinds.PRODUCT)
_FLOAT32_BITS = 32
COPIES = "copies"
_LOAD_COPIES = 2  # of the weights while ONNX Runtime opens a file: its own and the file's


@dataclass(frozen=True)
class Prediction(Record):
    """One precision at one batch. None: not known.

    `latency_ms`: with the copies of inputs and outputs between host and GPU, `compute_ms`: without.
    `limit`: what most of the time goes to, "compute", "memory", "launch" or "copies", and `shares`
    how the time divides. `memory_bytes`: weights and activations; `build_bytes`: to build or to
    load the engine. `joules`: per inference at most, at the target's full power. `per_million`: the
    price of a million inferences at this batch, one after the other.
    """

    precision: str
    batch: int
    latency_ms: float
    compute_ms: float
    throughput_per_s: float | None
    limit: str
    shares: Mapping[str, float]
    weight_bytes: int
    activation_bytes: int
    memory_bytes: int
    build_bytes: int
    fits: bool | None
    joules: float | None
    per_million: float | None


@dataclass(frozen=True)
class Inferred:
    """A graph with its axes at the sizes of one batch."""

    batch: int
    inputs: tuple[str, ...]
    known: TensorShapes
    flops: int
    weight_bytes: int
    stored: str  # the narrowest precision that it computes in; "fp32" of one to convert
    compiled: tuple[NodeCost, ...]
    interpreted: tuple[NodeCost, ...]

    @property
    def end_bytes(self) -> list[int]:
        """Of each input and output; 0 of one whose size is not known."""
        return [self.known.bytes(name) or 0 for name in (*self.inputs, *self.known.outputs)]

    def costs(self, target: Target) -> tuple[NodeCost, ...]:
        """As the target's runtime fuses nodes."""
        return self.interpreted if target.fusion is INTERPRETED else self.compiled


def infer(graph: Graph, batch: int, sizes: Mapping[str, int]) -> Inferred:
    """Shapes and costs; raises BadInput as `fixed_shapes` does."""
    known = fixed_shapes(graph, sizes)
    compiled, interpreted = costs_of(known, COMPILED), costs_of(known, INTERPRETED)
    return Inferred(
        batch=batch,
        inputs=tuple(v.name for v in graph.model.graph.input if v.name not in known.constants),
        known=known,
        flops=sum(cost.flops or 0 for cost in compiled),
        weight_bytes=sum(cost.weight_bytes for cost in compiled),
        stored=narrowest({cost.precision for cost in compiled if cost.precision}),
        compiled=compiled,
        interpreted=interpreted,
    )


def precisions(found: Inferred, target: Target) -> tuple[str, ...]:
    """What to predict: all that the target offers for a float32 graph, else what the graph has."""
    if found.stored != "fp32":
        return (found.stored,)
    return ("fp32", *(name for name in target.precisions if name != "fp32"))


def predict_call(
    found: Inferred, target: Target, precision: str, price_per_hour: float | None = None
) -> Prediction:
    """One call of `found` on `target`, its nodes one after the other."""
    costs = [in_precision(cost, precision, found.stored, target) for cost in found.costs(target)]
    weights = sum(cost.weight_bytes for cost in costs)
    ceilings = target.ceilings(weights)
    times = [node_time(cost, ceilings) for cost in costs]
    compute_s = target.call_s + math.fsum(each.seconds for each in times)
    copies_s = target.copies_s(found.end_bytes)
    seconds = compute_s + copies_s
    spent = dict.fromkeys((COMPUTE, MEMORY, LAUNCH), 0.0) | {COPIES: copies_s}
    for each in times:
        spent[COMPUTE if each.compute_s > each.memory_s else MEMORY] += each.seconds - each.launch_s
        spent[LAUNCH] += each.launch_s
    spent[LAUNCH] += target.call_s
    activations = peak_bytes(found.known, lambda name: _scale(found, name, precision, target))
    build = _build_bytes(target, weights, activations)
    memory, limit_bytes = weights + activations, target.memory_bytes
    rate = found.batch / seconds if seconds else None
    watts = target.power_w
    return Prediction(
        precision=precision,
        batch=found.batch,
        latency_ms=seconds * 1e3,
        compute_ms=compute_s * 1e3,
        throughput_per_s=rate,
        limit=max(spent, key=lambda name: spent[name]),
        shares={name: part / seconds if seconds else 0.0 for name, part in spent.items()},
        weight_bytes=weights,
        activation_bytes=activations,
        memory_bytes=memory,
        build_bytes=build,
        fits=None if limit_bytes is None else max(memory, build) <= limit_bytes,
        joules=None if watts is None or rate is None else watts / rate,
        per_million=None if price_per_hour is None or not rate else price_per_hour / 3600e-6 / rate,
    )


def in_precision(cost: NodeCost, precision: str, stored: str, target: Target) -> NodeCost:
    """What the node costs where a float32 graph is converted to `precision`.

    8 bits are for convolutions and products with stored weights; the others are in half precision
    on a GPU, in float32 on a CPU. A graph that is not float32 stays as it is.
    """
    if stored != "fp32" or precision == "fp32" or cost.precision != "float32":
        return cost
    to = BY_NAME[precision]
    if to.bits == 8 and cost.kind not in _CONVERTIBLE:
        if target.calibration:
            return cost
        to = BY_NAME["fp16"]
    return replace(
        cost,
        precision=to.dtype,
        read_bytes=_part(cost.read_bytes, to.bits),
        write_bytes=_part(cost.write_bytes, to.bits),
        weight_bytes=cost.weight_bytes * to.bits // _FLOAT32_BITS,
    )


def _part(count: int | None, bits: int) -> int | None:
    return None if count is None else count * bits // _FLOAT32_BITS


def _scale(found: Inferred, name: str, precision: str, target: Target) -> float:
    """What the conversion makes of a tensor: half of a float32 one on a GPU, at least."""
    if found.stored != "fp32" or precision == "fp32" or target.calibration:
        return 1.0
    kind = found.known.types.get(name)
    return 0.5 if kind is not None and dtype_name(kind) == "float32" else 1.0


def _build_bytes(target: Target, weights: int, activations: int) -> int:
    profile = target.profile
    if target.calibration:
        return _LOAD_COPIES * weights
    workspace = profile.workspace_bytes or 0
    return BuildMemory(weights, workspace, activations, profile.unified_memory).total


def unknown_nodes(costs: Sequence[NodeCost]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Operators without a formula, which count by their traffic, and nodes without a known byte."""
    formula = sorted({cost.operator for cost in costs if cost.flops is None})
    shapeless = [cost.name for cost in costs if None in (cost.read_bytes, cost.write_bytes)]
    return tuple(formula), tuple(shapeless)


def misplaced(found: Inferred) -> list[str]:
    """A note on INT8 nodes that ONNX Runtime's CPU has no kernel for, as pairs are placed there."""
    every = found.compiled, found.interpreted
    whole, run = (sum(cost.precision == "int8" for cost in costs) for costs in every)
    text = (
        f"cpu: ONNX Runtime runs {whole - run} of the {whole} INT8 nodes of this file in float32, "
        "as its pairs are placed for another runtime, and may take longer than predicted: "
        "`build --profile cpu` moves them"
    )
    return [text] if run < whole else []
