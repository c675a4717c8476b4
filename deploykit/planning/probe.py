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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from deploykit.core.errors import DeploykitError, MissingExtra
from deploykit.core.files import cache_folder, read_json, write_json
from deploykit.core.json_value import Record, from_json
from deploykit.core.machine import default_threads, now, this_machine
from deploykit.engines.engine import load
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.graph import cost as kinds
from deploykit.graph.cost import Curve
from deploykit.graph.graph import Graph

_OPSET, _IR = 17, 8  # the first opset with LayerNormalization
_SEED = 0
_STREAM = "stream"  # kind: one row times stored weights takes as long as reading these


@dataclass(frozen=True)
class Chain:
    """`count` equal nodes in a row, of one float32 input `x` of `shape`.

    Each node reads the one before it, `others` and stored `weights` of these shapes, its own unless
    `shared`. `flops`: operations of a node, which takes so many `steps`.
    """

    kind: str
    operator: str
    shape: tuple[int, ...]
    count: int
    flops: float = 0.0
    weights: tuple[tuple[int, ...], ...] = ()
    others: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    shared: bool = False
    steps: int = 1

    @property
    def work(self) -> float:
        """Operations per step of a node; the bytes that it moves where they are what takes time."""
        if self.kind == _STREAM:
            return 4.0 * sum(map(math.prod, self.weights))
        return self.flops / self.steps or 4.0 * (2 + len(self.others)) * math.prod(self.shape)

    def graph(self) -> Graph:
        """Return the graph; nodes in fp16 are between casts, those in INT8 between Q/DQ pairs."""
        nodes, stored = list[NodeProto](), list[TensorProto]()
        random = np.random.default_rng(_SEED)
        half, int8 = self.precision == "fp16", self.precision == "int8"

        def add(operator: str, inputs: Sequence[str], **options: Any) -> str:
            nodes.append(helper.make_node(operator, inputs, [f"t{len(nodes)}"], **options))
            return f"t{len(nodes) - 1}"

        def store(values: np.ndarray | np.generic) -> str:
            stored.append(numpy_helper.from_array(np.asarray(values), f"w{len(stored)}"))
            return f"w{len(stored) - 1}"

        def weight(shape: Sequence[int]) -> str:
            if int8:
                values = random.integers(-64, 64, shape).astype(np.int8)
                scale = store(np.float32(0.01))
                return add("DequantizeLinear", [store(values), scale, store(np.int8(0))])
            floats = random.standard_normal(shape, np.float32)
            floats *= np.float32(1 / math.sqrt(max(1, math.prod(shape[1:]))))
            return store(floats.astype(np.float16) if half else floats)

        def quantized(name: str) -> str:
            if not int8:
                return name
            scales = [store(np.float32(0.05)), store(np.uint8(128))]
            return add("DequantizeLinear", [add("QuantizeLinear", [name, *scales]), *scales])

        last = add("Cast", ["x"], to=TensorProto.FLOAT16) if half else quantized("x")
        names: list[str] = []
        for _ in range(self.count):
            names = names if names and self.shared else [weight(shape) for shape in self.weights]
            last = quantized(add(self.operator, [last, *self.others, *names], **self.options))
        if half:
            last = add("Cast", [last], to=TensorProto.FLOAT)
        values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)]
        ends = [helper.make_tensor_value_info(last, TensorProto.FLOAT, None)]
        body = helper.make_graph(nodes, "chain", values, ends, stored)
        opsets = [helper.make_opsetid("", _OPSET)]
        return Graph(helper.make_model(body, opset_imports=opsets, ir_version=_IR))


def convolution(
    kind: str, channels: int, size: int, kernel: int, *, precision: str = "fp32"
) -> Chain:
    """Return convolutions that keep `channels`; a stem is one with three inputs and stride 2."""
    inputs, count, stride = (3, 1, 2) if kind == kinds.STEM else (channels, 3, 1)
    group = channels if kind == kinds.DEPTHWISE else 1
    weight, shape = (channels, inputs // group, kernel, kernel), (1, inputs, size, size)
    flops = 2.0 * math.prod(weight) * (size // stride) ** 2
    options = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": group}
    return Chain(kind, "Conv", shape, count, flops, (weight,), (), options, precision)


def product(rows: int, width: int, count: int = 3, **options: Any) -> Chain:
    """Return products of (rows, width) by stored (width, width) weights."""
    flops, weights = 2.0 * rows * width * width, ((width, width),)
    return Chain(kinds.PRODUCT, "MatMul", (rows, width), count, flops, weights, **options)


def attention(heads: int, rows: int) -> Chain:
    """Return products of activations: (1, heads, rows, rows) by itself."""
    shape, flops = (1, heads, rows, rows), 2.0 * heads * rows**3
    return Chain(kinds.ATTENTION, "MatMul", shape, 2, flops, others=("x",))


def recurrent(width: int, steps: int, batch: int) -> Chain:
    """Return an LSTM of `width` over `steps`."""
    shape, weights = (steps, batch, width), ((1, 4 * width, width),) * 2
    flops, options = 2.0 * steps * batch * 8 * width * width, {"hidden_size": width}
    return Chain(kinds.RECURRENT, "LSTM", shape, 1, flops, weights, options=options, steps=steps)


def passing(kind: str, elements: int, count: int = 4) -> Chain:
    """Return nodes with little arithmetic on `elements` values."""
    side, (operator, others, options) = 32, _PASSING[kind]
    shape = (1, elements // side**2 or 1, side, side)
    return Chain(kind, operator, shape, count, others=others, options=options)


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
_PASSING: Mapping[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {  # operator, others, options
    kinds.SIMPLE: ("Add", ("x",), {}),
    kinds.FUNCTION: ("Tanh", (), {}),
    kinds.NORMALISATION: ("Softmax", (), {"axis": -1}),
    kinds.POOLING: ("AveragePool", (), {"kernel_shape": [3, 3], "pads": [1] * 4}),
    kinds.MOVEMENT: ("Transpose", (), {"perm": [0, 2, 3, 1]}),  # a cycle of two would be removed
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
    where the GPU has that. `bytes_per_s`: of its memory, and so `cache_bytes_per_s`.
    """

    ops_per_s: Mapping[str, float]
    bytes_per_s: float
    cache_bytes_per_s: float


def measure_gpu(device: str) -> GpuCeilings:
    """Measure a GPU for some seconds. Raises Unsupported, OutOfMemory, as engines do."""
    shape, precisions = (GPU_ROWS, GPU_WIDTH, 8), ("fp32", "fp16")
    chains = [product(*shape, precision=precision, shared=True) for precision in precisions]
    chains.append(passing(kinds.SIMPLE, GPU_ELEMENTS))
    timed, _ = _time(chains, device, budget_s=BUDGET_S)
    *ops_per_s, bytes_per_s = (chain.work * chain.count / took[0] for chain, took in timed)
    by_precision = dict(zip(precisions, ops_per_s, strict=True))
    return GpuCeilings(by_precision, bytes_per_s, bytes_per_s)


def measure_cpu(
    *,
    threads: int | None = None,
    clock: Clock = time.perf_counter_ns,
    budget_s: float = BUDGET_S,
    on_progress: Progress = no_progress,
) -> CpuCalibration:
    """Run the probe, `budget_s` per chain on `clock`. Raises MissingExtra without ONNX Runtime.

    A chain's usual time is its lower quartile: other work only makes calls longer.
    """
    threads = threads or default_threads()
    timed, runtime = _time(_chains(), "cpu", threads, clock, budget_s, on_progress)
    usual_s = [statistics.quantiles(seconds, n=4)[0] for _, seconds in timed]
    (tiny, _), (longer, _), *measured = timed
    launch_s = max(1e-8, (usual_s[1] - usual_s[0]) / (longer.count - tiny.count))
    call_s = max(0.0, usual_s[0] - launch_s)
    points: dict[str, dict[float, float]] = defaultdict(dict)
    ops: dict[str, float] = defaultdict(float)
    rates: list[tuple[float, float]] = []
    for (chain, seconds), chain_s in zip(measured, usual_s[2:], strict=True):
        node_s = max(launch_s, (chain_s - call_s) / chain.count)
        points[f"{chain.precision} {chain.kind}"][chain.work] = node_s / chain.steps
        rate = chain.work * chain.steps * chain.count / seconds[0]
        if chain.flops:
            ops[chain.precision] = max(ops[chain.precision], rate)
        else:
            rates.append((chain.work, rate))
    curves = {name: _curve(part) for name, part in points.items()}
    stream = curves.pop(f"fp32 {_STREAM}")
    return CpuCalibration(
        version=VERSION,
        cpu=this_machine().cpu,
        threads=threads,
        runtime=runtime,
        created=now(),
        call_s=call_s,
        launch_s=launch_s,
        curves=curves,
        stream=stream,
        ops_per_s=dict(ops),
        bytes_per_s=max(rate for work, rate in rates if work >= stream.work[-1]),
        cache_bytes_per_s=max(rate for _, rate in rates),
        spread=statistics.median(statistics.median(each) / each[0] for _, each in timed),
    )


def _curve(points: Mapping[float, float]) -> Curve:
    """Return a curve without disturbed points, at which more work takes less time."""
    work = sorted(points)
    seconds = [min(points[later] for later in work[place:]) for place in range(len(work))]
    return Curve(tuple(work), tuple(seconds))


def _chains() -> list[Chain]:
    chains = [passing(kinds.SIMPLE, 1, count) for count in (1, 33)]
    for kind, sizes in _CONVOLUTIONS.items():
        in_int8 = sizes if kind == kinds.STEM else sizes[:2]
        chains += [convolution(kind, *size) for size in sizes]
        chains += [convolution(kind, *size, precision="int8") for size in in_int8]
    chains += [product(*size) for size in _PRODUCTS]
    chains += [product(*size, precision="int8") for size in _PRODUCTS[1:3]]
    chains += [attention(2, 24), attention(8, 192)]
    chains += [recurrent(64, 16, 1), recurrent(64, 16, 8), recurrent(256, 16, 8)]
    chains += [passing(kind, elements) for kind in _PASSING for elements in _ELEMENTS]
    chains.append(passing(kinds.SIMPLE, _MANY))
    streams = [product(1, width, 1) for width in (128, 512, 2048, 4096)]
    return chains + [replace(chain, kind=_STREAM, flops=0.0) for chain in streams]


def _time(
    chains: Sequence[Chain],
    device: str,
    threads: int | None = None,
    clock: Clock = time.perf_counter_ns,
    budget_s: float = BUDGET_S,
    on_progress: Progress = no_progress,
) -> tuple[list[tuple[Chain, list[float]]], str]:
    """Return the sorted seconds of each chain's calls without their copies, and the runtime."""
    timed, runtime = list[tuple[Chain, list[float]]](), ""
    with tempfile.TemporaryDirectory(prefix="deploykit-probe-") as folder:
        for number, chain in enumerate(chains):
            on_progress("calibrate", number / len(chains))
            path = chain.graph().save(Path(folder) / "chain.onnx", temporary=True).path
            feeds = {"x": np.random.default_rng(0).standard_normal(chain.shape, np.float32)}
            with load(path, device, threads=threads) as engine:
                engine(feeds)
                engine(feeds)
                seconds, runtime = list[float](), engine.runtime
                while len(seconds) < _LEAST_RUNS or sum(seconds) < budget_s:
                    began = clock()
                    engine(feeds)
                    copies_s = sum(engine.last_copies_us) / 1e6
                    seconds.append(max(1e-9, (clock() - began) / 1e9 - copies_s))
            timed.append((chain, sorted(seconds)))
    on_progress("calibrate", 1.0)
    return timed, runtime


def cpu_calibration(
    *, threads: int | None = None, only_kept: bool = False, on_progress: Progress = no_progress
) -> tuple[CpuCalibration | None, list[str]]:
    """Return the stored calibration, else a new probe's, and notes; None without ONNX Runtime."""
    machine, threads = this_machine(), threads or default_threads()
    found, notes = None, list[str]()
    with suppress(DeploykitError):  # none there, or a damaged one
        path = cache_folder() / f"cpu-calibration-{threads}.json"
        kept: CpuCalibration = from_json(CpuCalibration, read_json(path), str(path))
        runtime = f"onnxruntime {machine.packages.get('onnxruntime', '')}"
        here = (VERSION, machine.cpu, threads, runtime)
        found = kept if (kept.version, kept.cpu, kept.threads, kept.runtime) == here else None
    if not only_kept and (found is None or found.doubt):
        try:
            new = measure_cpu(threads=threads, on_progress=on_progress)
        except MissingExtra:
            return None, []
        found = min((each for each in (found, new) if each), key=lambda each: each.spread)
        notes += store_calibration(found)
    return found, [*notes, *([found.doubt] if found and found.doubt else [])]


def store_calibration(found: CpuCalibration) -> list[str]:
    """Store the calibration for the next plan; return a note if that is not possible."""
    path = cache_folder() / f"cpu-calibration-{found.threads}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found.to_dict())
    except (DeploykitError, OSError) as exc:
        return [f"the calibration is measured again next time: {exc}"]
    return []
