"""Measure the highest rates of this machine's CPU or GPU by a short probe in ONNX Runtime.

It times chains of equal nodes, in a few sizes of each kind, with the usual session options. The
highest rate of all is the ceiling of a roofline; the times of a kind are the curve that predictions
for the CPU follow.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import DeploykitError, MissingExtra
from deploykit.core.files import cache_folder, read_json, write_json
from deploykit.core.json_value import Record, from_json
from deploykit.core.machine import Machine, default_threads, now, this_machine
from deploykit.engines.engine import load
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.graph import cost as kinds
from deploykit.graph.cost import Curve
from deploykit.graph.graph import Graph

_OPSET, _IR = 17, 8  # the first opset with LayerNormalization
_SEED = 0


@dataclass(frozen=True)
class Chain:
    """A graph of `count` nodes of one `kind`. `work`: operations per step of a node, else bytes.

    `flops` and `weight_bytes` are per node. The graph has one float32 input, `x` of `shape`.
    """

    kind: str
    precision: str
    graph: Graph
    shape: tuple[int, ...]
    count: int
    work: float
    flops: float = 0.0
    weight_bytes: float = 0.0
    steps: int = 1


def convolution(
    kind: str, channels: int, size: int, kernel: int, *, precision: str = "fp32"
) -> Chain:
    """Make convolutions that keep `channels`; a stem is one with three inputs and stride 2."""
    stem, depthwise = kind == kinds.STEM, kind == kinds.DEPTHWISE
    inputs = 3 if stem else channels
    count, stride = (1, 2) if stem else (3, 1)
    weight, shape = (channels, 1 if depthwise else inputs, kernel, kernel), (1, inputs, size, size)
    group = channels if depthwise else 1
    flops, nbytes = 2.0 * math.prod(weight) * (size // stride) ** 2, 4.0 * math.prod(weight)
    made = _Builder(precision)
    for _ in range(count):
        made.add("Conv", weight, pads=[kernel // 2] * 4, strides=[stride] * 2, group=group)
    return Chain(kind, precision, made.graph(shape), shape, count, flops, flops, nbytes)


def product(rows: int, width: int, *, count: int = 3, precision: str = "fp32") -> Chain:
    """Make products of (rows, width) by stored (width, width) weights; more than 3 share them."""
    made = _Builder(precision)
    shared = made.weight((width, width)) if count > _UNSHARED else ""
    for _ in range(count):
        if shared:
            made.plain("MatMul", [made.last, shared])
        else:
            made.add("MatMul", (width, width))
    shape, flops, weights = (rows, width), 2.0 * rows * width * width, 4.0 * width * width
    return Chain(kinds.PRODUCT, precision, made.graph(shape), shape, count, flops, flops, weights)


def attention(heads: int, rows: int) -> Chain:
    """Make products of activations: (1, heads, rows, rows) by itself."""
    made, count = _Builder("fp32"), 2
    for _ in range(count):
        made.plain("MatMul", [made.last, "x"])
    flops = 2.0 * heads * rows**3
    shape = (1, heads, rows, rows)
    return Chain(kinds.ATTENTION, "fp32", made.graph(shape), shape, count, flops, flops)


def recurrent(width: int, steps: int, batch: int) -> Chain:
    """Make an LSTM of `width` over `steps`."""
    made = _Builder("fp32")
    names = [made.weight((1, 4 * width, width)) for _ in range(2)]
    made.plain("LSTM", ["x", *names], hidden_size=width)
    flops, weights = 2.0 * batch * 8 * width * width, 4.0 * 8 * width * width
    shape = (steps, batch, width)
    return Chain(
        kinds.RECURRENT, "fp32", made.graph(shape), shape, 1, flops, flops * steps, weights, steps
    )


def passing(kind: str, elements: int, *, count: int = 4) -> Chain:
    """Make nodes with little arithmetic on `elements` values; `work` is the bytes moved."""
    side, (operator, others, options) = 32, _PASSING[kind]
    shape, made = (1, elements // side**2 or 1, side, side), _Builder("fp32")
    for _ in range(count):
        made.plain(operator, [made.last, *others], **options)
    moved = 4.0 * (2 + len(others)) * math.prod(shape)
    return Chain(kind, "fp32", made.graph(shape), shape, count, moved)


class _Builder:
    """Builds a chain; the next node reads tensor `last`. "fp16" nodes are between casts."""

    def __init__(self, precision: str) -> None:
        self.last = "x"
        self._int8, self._half = precision == "int8", precision == "fp16"
        self._nodes: list[onnx.NodeProto] = []
        self._stored: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(_SEED)
        if self._half:
            self.plain("Cast", ["x"], to=TensorProto.FLOAT16)

    def add(self, operator: str, weight: Sequence[int], **options: Any) -> None:
        """Add a node with stored weights; in INT8 it is between pairs of quantization nodes."""
        if self._int8:
            self._quantize()
            values = self._random.integers(-64, 64, weight).astype(np.int8)
            stored = [self._store(values), self._store(np.float32(0.01)), self._store(np.int8(0))]
            name = f"{stored[0]}_float"
            self._nodes.append(helper.make_node("DequantizeLinear", stored, [name]))
        else:
            name = self.weight(weight)
        self.plain(operator, [self.last, name], **options)
        if self._int8:
            self._quantize()

    def weight(self, shape: Sequence[int]) -> str:
        scale = np.float32(1 / math.sqrt(max(1, math.prod(shape[1:]))))
        values = self._random.standard_normal(shape, np.float32) * scale
        return self._store(values.astype(np.float16) if self._half else values)

    def plain(self, operator: str, inputs: Sequence[str], **options: Any) -> None:
        self.last = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [self.last], **options))

    def graph(self, shape: Sequence[int]) -> Graph:
        if self._half:
            self.plain("Cast", [self.last], to=TensorProto.FLOAT)
        values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        ends = [helper.make_tensor_value_info(self.last, TensorProto.FLOAT, None)]
        body = helper.make_graph(self._nodes, "chain", values, ends, self._stored)
        opsets = [helper.make_opsetid("", _OPSET)]
        return Graph(helper.make_model(body, opset_imports=opsets, ir_version=_IR))

    def _quantize(self) -> None:
        if self._nodes and self._nodes[-1].op_type == "DequantizeLinear":
            return  # one pair between two nodes is enough
        scale, zero = self._store(np.float32(0.05)), self._store(np.uint8(128))
        self.plain("QuantizeLinear", [self.last, scale, zero])
        self.plain("DequantizeLinear", [self.last, scale, zero])

    def _store(self, values: np.ndarray | np.generic) -> str:
        name = f"w{len(self._stored)}"
        self._stored.append(numpy_helper.from_array(np.asarray(values), name))
        return name


VERSION = 3  # version of the probe; older results are measured again
Clock = Callable[[], int]  # nanoseconds

BUDGET_S = 0.03  # per chain
_LEAST_RUNS = 5
_QUIET_SPREAD = 1.25
_CONVOLUTIONS = {  # kind: channels, size, kernel
    kinds.CONVOLUTION: ((16, 16, 3), (64, 28, 3), (64, 56, 3), (256, 28, 3)),
    kinds.POINTWISE: ((32, 14, 1), (256, 14, 1), (256, 28, 1)),
    kinds.DEPTHWISE: ((32, 14, 3), (96, 28, 3), (96, 56, 3)),
    kinds.STEM: ((16, 28, 3), (16, 224, 3), (64, 224, 7)),
}
_PRODUCTS = ((16, 64), (32, 256), (128, 512), (256, 1024))  # rows, width
_UNSHARED = 3  # products with weights of their own
_PASSING: Mapping[str, tuple[str, Sequence[str], dict[str, Any]]] = {  # operator, inputs, options
    kinds.SIMPLE: ("Add", ["x"], {}),
    kinds.FUNCTION: ("Tanh", [], {}),
    kinds.NORMALISATION: ("Softmax", [], {"axis": -1}),
    kinds.POOLING: ("AveragePool", [], {"kernel_shape": [3, 3], "pads": [1] * 4}),
    kinds.MOVEMENT: ("Transpose", [], {"perm": [0, 2, 3, 1]}),  # a cycle of two would be removed
}
_ELEMENTS = (1 << 10, 1 << 15, 1 << 19)
_MANY = 1 << 22  # 16 MiB per tensor, more than most caches hold
GPU_ROWS, GPU_WIDTH, GPU_ELEMENTS = 8192, 4096, 1 << 25  # 128 MiB per tensor


@dataclass(frozen=True)
class CpuCalibration(Record):
    """The figures of one probe. `created`: ISO 8601. `runtime`: "onnxruntime 1.32.0".

    `call_s`: of a call whose graph is one tiny node; `launch_s`: of each further node. `curves`:
    seconds of a node by precision and kind. `stream`: seconds to read weights once, by bytes.
    `ops_per_s`: the highest seen, by precision; `bytes_per_s` from memory, `cache_bytes_per_s`
    the highest at any size. `spread`: of a chain's calls the median by the fastest, usually.
    """

    version: int
    cpu: str
    threads: int
    runtime: str
    created: str
    call_s: float
    launch_s: float
    curves: Mapping[str, Curve]
    stream: Curve
    ops_per_s: Mapping[str, float]
    bytes_per_s: float
    cache_bytes_per_s: float
    spread: float

    @property
    def doubt(self) -> str:
        """The reason why the calibration may be wrong, or ""."""
        if self.spread <= _QUIET_SPREAD:
            return ""
        return (
            f"the probe of the CPU ran next to other work: calls took {self.spread:.1f} times "
            "their least; the next plan measures again"
        )


@dataclass(frozen=True)
class GpuCeilings(Record):
    """The highest rates of chains on a GPU, without the copies there and back.

    `ops_per_s`: of matrix products, by precision; "fp32" as ONNX Runtime multiplies it, in TF32
    where the GPU has that. `bytes_per_s`: of its memory.
    """

    device: str
    runtime: str
    ops_per_s: Mapping[str, float]
    bytes_per_s: float

    @property
    def cache_bytes_per_s(self) -> float:
        return self.bytes_per_s


def measure_gpu(device: str) -> GpuCeilings:
    """Measure a GPU for some seconds. Raises Unsupported, OutOfMemory, as engines do."""
    clock, ops = time.perf_counter_ns, dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="deploykit-probe-") as folder:
        for precision in ("fp32", "fp16"):
            chain = product(GPU_ROWS, GPU_WIDTH, count=8, precision=precision)
            seconds, _ = _time(chain, Path(folder), None, clock, BUDGET_S, device)
            ops[precision] = chain.flops * chain.count / seconds[0]
        chain = passing(kinds.SIMPLE, GPU_ELEMENTS)
        seconds, runtime = _time(chain, Path(folder), None, clock, BUDGET_S, device)
    return GpuCeilings(device, runtime, ops, chain.work * chain.count / seconds[0])


def measure_cpu(
    *,
    threads: int | None = None,
    clock: Clock = time.perf_counter_ns,
    budget_s: float = BUDGET_S,
    on_progress: Progress = no_progress,
) -> CpuCalibration:
    """Run the probe, `budget_s` per chain on `clock`. Raises MissingExtra without ONNX Runtime."""
    threads = threads or default_threads()
    every = _chains()
    timed: list[tuple[Chain, list[float]]] = []
    runtime = ""
    with tempfile.TemporaryDirectory(prefix="deploykit-probe-") as folder:
        for number, make in enumerate(every):
            on_progress("calibrate", number / len(every))
            chain = make()
            seconds, runtime = _time(chain, Path(folder), threads, clock, budget_s)
            timed.append((chain, seconds))
    on_progress("calibrate", 1.0)
    return _conclude(timed, threads, runtime)


def _conclude(
    timed: Sequence[tuple[Chain, list[float]]], threads: int, runtime: str
) -> CpuCalibration:
    """Conclude from the sorted seconds of each chain's calls, the tiny chains first.

    A chain's usual time is its lower quartile: other work only makes calls longer.
    """
    (tiny, tiny_s), (longer, longer_s), *measured = (
        (chain, statistics.quantiles(seconds, n=4)[0]) for chain, seconds in timed
    )
    least_s = [seconds[0] for _, seconds in timed[2:]]
    launch_s = max(1e-8, (longer_s - tiny_s) / (longer.count - tiny.count))
    call_s = max(0.0, tiny_s - launch_s)
    points: dict[str, dict[float, float]] = defaultdict(dict)
    ops: dict[str, float] = defaultdict(float)
    rates: list[tuple[float, float]] = []
    stream: dict[float, float] = {}
    for (chain, usual_s), fastest_s in zip(measured, least_s, strict=True):
        each_s = max(launch_s, (usual_s - call_s) / chain.count)
        if chain.weight_bytes and chain.shape[0] == 1 and chain.kind == kinds.PRODUCT:
            stream[chain.weight_bytes] = each_s
            rates.append((chain.weight_bytes, chain.weight_bytes * chain.count / fastest_s))
            continue
        points[f"{chain.precision} {chain.kind}"][chain.work] = each_s / chain.steps
        if chain.flops:
            rate = chain.flops * chain.count / fastest_s
            ops[chain.precision] = max(ops[chain.precision], rate)
        else:
            rates.append((chain.work, chain.work * chain.count / fastest_s))
    return CpuCalibration(
        version=VERSION,
        cpu=this_machine().cpu,
        threads=threads,
        runtime=runtime,
        created=now(),
        call_s=call_s,
        launch_s=launch_s,
        curves={name: _curve(each) for name, each in points.items()},
        stream=_curve(stream),
        ops_per_s=dict(ops),
        bytes_per_s=max(rate for work, rate in rates if work >= max(stream)),
        cache_bytes_per_s=max(rate for _, rate in rates),
        spread=statistics.median(statistics.median(each) / each[0] for _, each in timed),
    )


def _curve(points: Mapping[float, float]) -> Curve:
    """Return a curve without disturbed points, at which more work takes less time."""
    work = sorted(points)
    seconds = [min(points[later] for later in work[place:]) for place in range(len(work))]
    return Curve(tuple(work), tuple(seconds))


def _chains() -> list[Callable[[], Chain]]:
    """Return makers of the chains, so that not all large weights are in memory at once."""
    chains: list[Callable[[], Chain]] = [
        partial(passing, kinds.SIMPLE, 1, count=count) for count in (1, 33)
    ]
    for kind, sizes in _CONVOLUTIONS.items():
        in_int8 = sizes if kind == kinds.STEM else sizes[:2]
        chains += [partial(convolution, kind, *each) for each in sizes]
        chains += [partial(convolution, kind, *each, precision="int8") for each in in_int8]
    chains += [partial(product, *each) for each in _PRODUCTS]
    chains += [partial(product, *each, precision="int8") for each in _PRODUCTS[1:3]]
    chains += [partial(attention, 2, 24), partial(attention, 8, 192)]
    chains += [
        partial(recurrent, width, 16, batch) for width, batch in ((64, 1), (64, 8), (256, 8))
    ]
    chains += [partial(passing, kind, elements) for kind in _PASSING for elements in _ELEMENTS]
    chains.append(partial(passing, kinds.SIMPLE, _MANY))
    # products with one row take as long as reading the weights of these widths
    chains += [partial(product, 1, width, count=1) for width in (128, 512, 2048, 4096)]
    return chains


def _time(
    chain: Chain,
    folder: Path,
    threads: int | None,
    clock: Clock,
    budget_s: float,
    device: str = "cpu",
) -> tuple[list[float], str]:
    """Return the sorted seconds of calls without their copies, and the runtime."""
    path = folder / "chain.onnx"
    chain.graph.save(path, temporary=True)
    feeds = {"x": np.random.default_rng(0).standard_normal(chain.shape, np.float32)}
    with load(path, device, threads=threads) as engine:
        engine(feeds)
        engine(feeds)
        seconds: list[float] = []
        while len(seconds) < _LEAST_RUNS or sum(seconds) < budget_s:
            began = clock()
            engine(feeds)
            copies_s = sum(engine.last_copies_us) / 1e6
            seconds.append(max(1e-9, (clock() - began) / 1e9 - copies_s))
        return sorted(seconds), engine.runtime


def cpu_calibration(
    *, threads: int | None = None, only_kept: bool = False, on_progress: Progress = no_progress
) -> tuple[CpuCalibration | None, list[str]]:
    """Return the stored calibration, else a new probe's, and notes; None without ONNX Runtime."""
    machine, threads = this_machine(), threads or default_threads()
    path = cache_folder() / f"cpu-calibration-{threads}.json"
    found, notes = _read_calibration(path, machine, threads), []
    if not only_kept and (found is None or found.doubt):
        try:
            new = measure_cpu(threads=threads, on_progress=on_progress)
        except MissingExtra:
            return None, []
        found = min((each for each in (found, new) if each), key=lambda each: each.spread)
        notes += store_calibration(found)
    return found, [*notes, *([found.doubt] if found and found.doubt else [])]


def _read_calibration(path: Path, machine: Machine, threads: int) -> CpuCalibration | None:
    """Read the result of an earlier probe; None if it is another CPU's or damaged."""
    try:
        found: CpuCalibration = from_json(CpuCalibration, read_json(path), str(path))
    except DeploykitError:
        return None
    runtime = f"onnxruntime {machine.packages.get('onnxruntime', '')}"
    same = (found.version, found.cpu, found.threads, found.runtime)
    return found if same == (VERSION, machine.cpu, threads, runtime) else None


def store_calibration(found: CpuCalibration) -> list[str]:
    """Store the calibration for the next plan; return a note if that is not possible."""
    path = cache_folder() / f"cpu-calibration-{found.threads}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found.to_dict())
    except (DeploykitError, OSError) as exc:
        return [f"the calibration is measured again next time: {exc}"]
    return []
