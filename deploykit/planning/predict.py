"""Predict a graph's time, memory, energy and bottleneck on a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deploykit.core.json_value import Record
from deploykit.core.machine import builder_bytes
from deploykit.core.machine import memory_bytes as this_memory
from deploykit.core.precision import BY_NAME, narrowest
from deploykit.core.profile import Profile
from deploykit.graph import cost as kinds
from deploykit.graph.cost import (
    COMPUTE,
    LAUNCH,
    MEMORY,
    Ceilings,
    NodeCost,
    TensorShapes,
    costs_of,
    fixed_shapes,
    node_time,
    peak_bytes,
)
from deploykit.graph.graph import Graph
from deploykit.graph.parse import dtype_name
from deploykit.planning.probe import CpuCalibration

# Assumptions about a target: ceilings, precisions, and how well these are known.

# ResNet-50 in INT8 reaches 0.84 of the vendor's peaks on an A100, 0.71 on an H200 and 1.34 on an
# L4, whose cache holds traffic that the roofline counts. This is about their geometric mean;
# benchmarks/plan-accuracy.md shows the effect of leaving one of them out.
REACHED = 0.9
LAUNCH_S = 1e-6  # per kernel; fitted on ResNet-50 in INT8 at batch 1 on an L4
COPY_S = 6e-6  # per small tensor: 5 to 7 us were measured (arXiv:2602.21548, section 5.2)
LINK_BYTES_PER_S = 31.5e9  # PCIe 4.0 x16, one way, if CPU and GPU share no memory

_LANE_OPS = 256  # float32 operations per SM and clock: 128 lanes, multiply and add
_TENSOR_CORES = ("fp32", "fp16", "bf16", "int8", "fp8")  # precisions to convert a graph to


@dataclass(frozen=True)
class Target:
    """A profile with all that predictions need. `calibration`: that of this machine's CPU.

    `basis`: the source of the figures. `checked`: whether a prediction for it was compared with a
    measurement on this target. `precisions`: those to offer a float32 model. `power_w`: the limit
    of the power mode, else of the target. `peaks`: a GPU's roofline.
    """

    profile: Profile
    calibration: CpuCalibration | None
    basis: str
    checked: bool
    precisions: tuple[str, ...]
    memory_bytes: int | None
    power_w: float | None
    peaks: Ceilings | None = None

    def copies_s(self, sizes: Sequence[int]) -> float:
        """Return the seconds to copy tensors of these sizes between host and GPU, one by one."""
        if self.calibration:
            return 0.0
        shared = self.profile.unified_memory and self.profile.bandwidth_bytes_per_s
        return len(sizes) * COPY_S + sum(sizes) / ((shared or LINK_BYTES_PER_S) * REACHED)

    def ceilings(self, weight_bytes: float) -> Ceilings:
        """Return the roofline; a cache that holds all `weight_bytes` reads them faster."""
        cpu = self.calibration
        if cpu is None:
            assert self.peaks is not None
            return self.peaks
        weights = max(weight_bytes, cpu.stream.work[0])
        bytes_per_s = weights / cpu.stream.at(weights)
        return Ceilings(cpu.ops_per_s, bytes_per_s, cpu.launch_s, curves=cpu.curves)


def target_of(profile: Profile, calibration: CpuCalibration | None) -> Target | str:
    """Return the target, or why nothing can be predicted for it."""
    mode = next((each for each in profile.power_modes if each.name == profile.power_mode), None)
    power_w = (mode.watts if mode else None) or profile.max_power_w
    if profile.device == "cpu":
        if profile.runtime != "onnxruntime":
            return "the probe measures only ONNX Runtime: `deploykit bench` measures others"
        if calibration is None:
            return "its ceilings are not measured: onnxruntime is not installed"
        basis = "one probe of this machine's CPU" + ", next to other work" * bool(calibration.doubt)
        measured = {name.split(" ")[0] for name in calibration.curves}  # halves run in float32
        offered = tuple(name for name in profile.precisions if name in measured)
        return Target(profile, calibration, basis, True, offered, this_memory(), power_w)
    peaks, bandwidth = dict(profile.peak_ops_per_s), profile.bandwidth_bytes_per_s
    lacks = ["peak_ops_per_s.fp32"] * (not peaks.get("fp32"))
    lacks += ["bandwidth_bytes_per_s"] * (not bandwidth)
    if lacks or bandwidth is None:
        return f"the profile has no {' and no '.join(lacks)}"
    share, sms = REACHED, profile.sm_count
    if mode is not None and sms:  # what its clock and SMs leave of the peaks
        full_hz = peaks["fp32"] / (sms * _LANE_OPS)
        clock_hz = mode.gpu_mhz * 1e6 if mode.gpu_mhz else full_hz
        share *= min(1.0, clock_hz * (mode.sms or sms) / (full_hz * sms))
    peaks["fp32"] = peaks.get("tf32", peaks["fp32"])  # TensorRT's default is TF32
    reached = {name: peak * share for name, peak in peaks.items()}
    roofline = Ceilings(reached, bandwidth * REACHED, LAUNCH_S)
    offered = tuple(name for name in profile.precisions if name in _TENSOR_CORES)
    basis, memory_bytes = "the vendor's figures; not yet checked on this GPU", profile.memory_bytes
    return Target(profile, None, basis, False, offered, memory_bytes, power_w, roofline)


_CONVERTIBLE = (kinds.CONVOLUTION, kinds.POINTWISE, kinds.DEPTHWISE, kinds.STEM, kinds.PRODUCT)
_FLOAT32_BITS = 32
COPIES = "copies"
_LOAD_COPIES = 2  # copies of the weights while ONNX Runtime opens a file


@dataclass(frozen=True)
class Prediction(Record):
    """One precision at one batch. None: not known.

    `latency_ms`: with the copies of inputs and outputs between host and GPU, `compute_ms`: without.
    `limit`: what most of the time goes to, "compute", "memory", "launch" or "copies", and `shares`
    how the time divides. `memory_bytes`: weights and activations; `build_bytes`: to build or to
    load the engine. `joules`: per inference at most, at the target's full power.
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


@dataclass(frozen=True)
class Inferred:
    """A graph with the sizes of its axes fixed for one batch."""

    batch: int
    inputs: tuple[str, ...]
    known: TensorShapes
    flops: int
    weight_bytes: int
    stored: str  # the narrowest precision that it computes in; "fp32" if it can be converted
    compiled: tuple[NodeCost, ...]
    interpreted: tuple[NodeCost, ...]

    @property
    def end_bytes(self) -> list[int]:
        """Bytes of each input and output; 0 if its size is not known."""
        return [self.known.bytes(name) or 0 for name in (*self.inputs, *self.known.outputs)]

    def costs(self, target: Target) -> tuple[NodeCost, ...]:
        """Return the costs of nodes as the target's runtime fuses them."""
        return self.interpreted if target.calibration else self.compiled


def infer(graph: Graph, batch: int, sizes: Mapping[str, int]) -> Inferred:
    """Infer shapes and costs. Raises BadInput as `fixed_shapes` does."""
    known = fixed_shapes(graph, sizes)
    compiled, interpreted = costs_of(known), costs_of(known, on_cpu=True)
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
    """Return the precisions to predict: the target's for a float32 graph, else the graph's."""
    if found.stored != "fp32":
        return (found.stored,)
    return ("fp32", *(name for name in target.precisions if name != "fp32"))


def predict_call(found: Inferred, target: Target, precision: str) -> Prediction:
    """Predict one call of `found` on `target`, whose nodes run one after the other."""
    costs = [in_precision(cost, precision, found.stored, target) for cost in found.costs(target)]
    weights = sum(cost.weight_bytes for cost in costs)
    ceilings = target.ceilings(weights)
    times = [node_time(cost, ceilings) for cost in costs]
    call_s = target.calibration.call_s if target.calibration else 0.0
    compute_s = call_s + math.fsum(each.seconds for each in times)
    copies_s = target.copies_s(found.end_bytes)
    seconds = compute_s + copies_s
    spent = dict.fromkeys((COMPUTE, MEMORY, LAUNCH), 0.0) | {COPIES: copies_s}
    for each in times:
        spent[COMPUTE if each.compute_s > each.memory_s else MEMORY] += each.seconds - each.launch_s
        spent[LAUNCH] += each.launch_s
    spent[LAUNCH] += call_s
    converted = found.stored == "fp32" and precision != "fp32" and not target.calibration

    def scale(name: str) -> float:
        """Return the share of a tensor's bytes after the conversion: 0.5 for float32 on a GPU."""
        kind = found.known.types.get(name)
        is_float = kind is not None and dtype_name(kind) == "float32"
        return 0.5 if converted and is_float else 1.0

    activations = peak_bytes(found.known, scale)
    build, shared = _LOAD_COPIES * weights, target.profile.unified_memory
    if not target.calibration:
        workspace = target.profile.workspace_bytes or 0
        build = builder_bytes(weights, shared) + workspace + activations
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
    )


def in_precision(cost: NodeCost, precision: str, stored: str, target: Target) -> NodeCost:
    """Return a node's cost in `precision`: 8 bits only for stored weights, else fp16 on a GPU."""
    if stored != "fp32" or precision == "fp32" or cost.precision != "float32":
        return cost
    to = BY_NAME[precision]
    if to.bits == 8 and cost.kind not in _CONVERTIBLE:
        if target.calibration:
            return cost
        to = BY_NAME["fp16"]
    moved = (cost.read_bytes, cost.write_bytes)
    read, write = (None if n is None else n * to.bits // _FLOAT32_BITS for n in moved)
    weights = cost.weight_bytes * to.bits // _FLOAT32_BITS
    return replace(
        cost, precision=to.dtype, read_bytes=read, write_bytes=write, weight_bytes=weights
    )


def unknown_nodes(costs: Sequence[NodeCost]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return operators without a formula, counted by traffic, and nodes of unknown size."""
    formula = sorted({cost.operator for cost in costs if cost.flops is None})
    shapeless = [cost.name for cost in costs if None in (cost.read_bytes, cost.write_bytes)]
    return tuple(formula), tuple(shapeless)
