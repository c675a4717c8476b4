"""Predict a model's memory, speed and replicas on each target, without access to one."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, DeploykitError, GateFailed, did_you_mean
from deploykit.core.json_value import Record
from deploykit.core.profile import Profile, load_profile, profile_names
from deploykit.core.tensors import batch_axes, dynamic_sizes
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import load
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.evaluation.feeds import random_inputs
from deploykit.evaluation.golden import find_samples, open_samples
from deploykit.graph import cost as kinds
from deploykit.graph.cost import NodeCost
from deploykit.graph.graph import Graph
from deploykit.graph.preflight import find_mismatch
from deploykit.planning.predict import (
    Inferred,
    Prediction,
    Target,
    infer,
    precisions,
    predict_call,
    target_of,
    unknown_nodes,
)
from deploykit.planning.probe import cpu_calibration

BATCHES = (1, 8, 32)
MOST_SIZE = 1 << 31  # axes of this size exceed the index of any runtime
_LEAST, _MOST = 1e-9, 1e15  # bounds of a latency and a rate
_NAMED = 5  # nodes in a note
# A matrix instruction takes 16 bytes of a row: NVIDIA, Deep Learning Performance Guide, "Tensor
# Core requirements".
_ALIGNED, _LEAST_SHARE = 16, 0.005
_TENSOR_CORES = "Tensor Cores want multiples of 8 in fp16, and of 16 in int8"
_DENSE = (kinds.CONVOLUTION, kinds.POINTWISE, kinds.STEM, kinds.PRODUCT)
_FACTOR = 1.4  # largest error factor of CPU predictions (plan-accuracy.md)


@dataclass(frozen=True)
class TargetPlan(Record):
    """One target. `why`: nothing was predicted, and the reason; "" otherwise.

    `basis`: where its figures are from; `checked`: whether predictions were compared with
    measurements on this target. `best`: of those that meet `slo_ms` the one with most throughput,
    None where none does or none was asked for.
    """

    profile: str
    summary: str
    memory_bytes: int | None
    why: str = ""
    basis: str = ""
    checked: bool = False
    predictions: tuple[Prediction, ...] = ()
    best: Prediction | None = None
    capacity: Capacity | None = None


@dataclass(frozen=True)
class Planned(Record):
    """The predictions of `plan`.

    `axes`: the sizes of dynamic axes. `flops`, `nodes`: at the first of `batches`. `unknown`:
    operators that no formula is known for, counted by the bytes they move. `notes`: what was
    assumed.
    """

    model: str
    batches: tuple[int, ...]
    axes: Mapping[str, int]
    flops: int
    parameters: int
    weight_bytes: int
    unknown: tuple[str, ...]
    slo_ms: float | None
    rate_per_s: float | None
    targets: tuple[TargetPlan, ...]
    nodes: tuple[NodeCost, ...]
    notes: tuple[str, ...]

    def raise_if_none_meets(self) -> None:
        """Raise GateFailed where `slo_ms` was asked for and no target is predicted to meet it."""
        if self.slo_ms is None or any(target.best for target in self.targets):
            return
        if not any(target.predictions for target in self.targets):
            raise GateFailed(f"{self.model}: nothing is predicted, on no target", result=self)
        raise GateFailed(
            f"{self.model}: no target is predicted to answer within {self.slo_ms:g} ms",
            hint="a smaller batch, a lower precision (`quantize`), or another `profile`",
            result=self,
        )


@checked
def plan(
    model: ArtefactLike,
    *,
    profiles: Sequence[str | Profile] = (),
    batches: Sequence[int] = BATCHES,
    axes: Mapping[str, int] | None = None,
    slo_ms: float | None = None,
    rate_per_s: float | None = None,
    on_progress: Progress = no_progress,
) -> Planned:
    """Predict memory, latency and throughput of an ONNX `model` on hardware targets.

    A float32 model is predicted in each precision that a target offers, other models as they are.
    A probe of some seconds measures the CPU's ceilings once and stores them in the cache folder.
    Weights are not read.

    Args:
        profiles: the targets, by default all.
        batches: sizes of the batch axis.
        axes: sizes of other dynamic axes by name. One not named has its size in the golden samples
            next to the model; else it is 1, or the first size tried at which a small model runs on
            this machine's CPU, with a note.
        slo_ms: the latency to meet.
        rate_per_s: with `slo_ms`: how many replicas carry that many requests/s with their p99
            within it.

    Raises:
        BadInput: the file is not an ONNX model or a profile cannot run it; unknown axes, invalid
            values.
    """
    _check_options(batches, slo_ms, rate_per_s)
    chosen = [load_profile(each) if isinstance(each, str) else each for each in profiles]
    chosen = chosen or [load_profile(name) for name in profile_names()]
    artefact = Artefact.open(model)
    if artefact.format != "onnx":
        raise wrong_format(artefact, artefact.format, "an ONNX file")
    graph = Graph.open(artefact.path)
    refused = {profile.name: find_mismatch(artefact, graph, profile) for profile in chosen}
    for error in refused.values():
        if error and profiles:
            raise error
    sizes, batch, notes = sizes_of_axes(graph, artefact, axes or {})
    if not batch:
        fixed = (spec.shape[0] for spec in graph.inputs if spec.shape)
        batches = [next((size for size in fixed if isinstance(size, int) and size > 0), 1)]
    inferred = {n: infer(graph, n, sizes | dict.fromkeys(batch, n)) for n in batches}
    calls, first = list(inferred.values()), inferred[batches[0]]
    single = None
    if rate_per_s is not None:
        single = inferred.get(1) or (
            infer(graph, 1, sizes | dict.fromkeys(batch, 1)) if batch else first
        )
    calibration = None
    if any((each.device, each.runtime) == ("cpu", "onnxruntime") for each in chosen):
        calibration, probe_notes = cpu_calibration(on_progress=on_progress)
        notes += probe_notes
    targets = []
    for profile in chosen:
        error = refused[profile.name]
        target = error.message if error else target_of(profile, calibration)
        targets.append(_plan_target(profile, target, calls, single, slo_ms, rate_per_s))
    return Planned(
        model=str(artefact),
        batches=tuple(inferred),
        axes=sizes,
        flops=first.flops,
        parameters=sum(cost.weights for cost in first.compiled),
        weight_bytes=first.weight_bytes,
        unknown=unknown_nodes(first.compiled)[0],
        slo_ms=slo_ms,
        rate_per_s=rate_per_s,
        targets=tuple(targets),
        nodes=first.compiled,
        notes=(*notes, *_notes(first, targets)),
    )


def _check_options(batches: Sequence[int], slo_ms: float | None, rate_per_s: float | None) -> None:
    if not batches or any(not 1 <= size <= MOST_SIZE for size in batches):
        raise BadInput(f"`batches` must be from 1 to {MOST_SIZE}, got {list(batches)}")
    for name, value in (("slo_ms", slo_ms), ("rate_per_s", rate_per_s)):
        if value is not None and not _LEAST <= value <= _MOST:
            raise BadInput(f"`{name}` must be {_LEAST:g} to {_MOST:g}, got {value:g}")
    if rate_per_s is not None and slo_ms is None:
        raise BadInput("`rate_per_s` needs the latency that its p99 is to meet", hint="`slo_ms` 50")


def sizes_of_axes(
    graph: Graph, where: Artefact, axes: Mapping[str, int]
) -> tuple[dict[str, int], list[str], list[str]]:
    """Return sizes of dynamic axes except the batch, the names of the batch axis, and notes."""
    batch, notes = list(batch_axes(graph.inputs)), list[str]()
    dynamic = [axis for spec in graph.inputs for axis in spec.shape if isinstance(axis, str)]
    names = [name for name in dict.fromkeys(dynamic) if name not in batch]
    for name, size in axes.items():
        if name not in names:
            known = ", ".join(names) or "none but the batch"
            hint = "`batches` sets the batch" if name in batch else did_you_mean(name, names)
            raise BadInput(f"{where}: no dynamic axis '{name}'; it has: {known}", hint=hint)
        if not 1 <= size <= MOST_SIZE:
            raise BadInput(f"`axes` {name}={size}: must be 1 or more, and fit into 31 bits")
    sizes, image = dict(axes), where.task.image if where.task else None
    if image is not None and not image.height:  # image folders are cropped to this square
        side = math.ceil(image.resize_to / image.multiple) * image.multiple
        sides = graph.inputs[0].shape[1:3]
        sizes = {axis: side for axis in sides if isinstance(axis, str)} | sizes
    golden = find_samples(where.path, where.manifest) if where.manifest else None
    if golden is not None:
        feeds = open_samples(golden, where.path, graph.inputs, graph.outputs)[0]
        shapes = {name: feed.shape for name, feed in feeds.items()}
        recorded = dynamic_sizes(graph.inputs, shapes)
        for name in [name for name in names if name in recorded and name not in sizes]:
            sizes[name] = max(1, recorded[name])  # a first step's cache is empty
            notes.append(f"axis {name} is taken as {sizes[name]}, as in the golden samples")
    missing = [name for name in names if name not in sizes]
    runs_at = _first_size(where, graph, sizes) if missing else {}
    for name in missing:
        sizes[name] = size = runs_at.get(name, 1)
        why = "at which the model runs" if size > 1 else "as no size was given"
        notes.append(f"axis {name} is taken as {size}, {why}: `axes` {name}=128")
    return {name: sizes[name] for name in names}, batch, notes


_MOST_BYTES = 256 << 20  # a larger model is not opened to find sizes


def _first_size(where: Artefact, graph: Graph, known: Mapping[str, int]) -> dict[str, int]:
    """Return sizes at which the model runs; none where it runs at 1, is large or does not run."""
    if graph.summary.weight_bytes > _MOST_BYTES:
        return {}
    with contextlib.suppress(DeploykitError), load(where, "cpu") as engine:
        try:
            engine(random_feeds(engine.inputs, known))
        except DeploykitError:
            return random_inputs(engine, known).sizes[0]
    return {}


def _plan_target(
    profile: Profile,
    target: Target | str,
    calls: Sequence[Inferred],
    single: Inferred | None,
    slo_ms: float | None,
    rate_per_s: float | None,
) -> TargetPlan:
    """Predict all precisions at all batches, or say why not. `single`: a call of one request."""
    name = profile.name + (f"@{profile.power_mode}" if profile.power_mode else "")
    about, stored = TargetPlan(name, profile.summary, profile.memory_bytes), calls[0].stored
    if isinstance(target, str):
        return replace(about, why=target)
    about = replace(about, basis=target.basis, checked=target.checked)
    if stored not in {*profile.precisions, "fp32"}:
        why = f"it does not run {stored} natively, and the graph is in {stored}"
        return replace(about, why=why)
    predictions = tuple(
        predict_call(call, target, precision)
        for precision in precisions(calls[0], target)
        for call in calls
    )
    about = replace(about, memory_bytes=target.memory_bytes, predictions=predictions)
    if slo_ms is None:
        return about
    meet = [p for p in predictions if p.fits is not False and p.latency_ms <= slo_ms]
    best = max(meet, key=lambda p: p.throughput_per_s or 0.0, default=None)
    about = replace(about, best=best)
    if rate_per_s is None or single is None:
        return about
    return replace(about, capacity=_replicas(about, target, single, slo_ms, rate_per_s))


def _replicas(
    found: TargetPlan, target: Target, single: Inferred, slo_ms: float, rate_per_s: float
) -> Capacity:
    """Return the replicas that carry the rate, in the best precision, else in the fastest."""
    fitting = [p for p in found.predictions if p.fits is not False]
    if not fitting:
        return Capacity(rate_per_s, slo_ms, why="it does not fit into the memory")
    precision = (found.best or min(fitting, key=lambda p: p.latency_ms)).precision
    joined = [p for p in fitting if p.precision == precision and single.batch == 1]
    service_s = {p.batch: served_s(p.latency_ms / 1e3) for p in joined}
    service_s[1] = served_s(predict_call(single, target, precision).latency_ms / 1e3)
    request_s, overlaps = REQUEST_S + BYTE_S * sum(single.end_bytes), target.calibration is None
    load = capacity(rate_per_s, slo_ms / 1e3, service_s, request_s=request_s, overlaps=overlaps)
    return replace(load, precision=precision)


def _notes(found: Inferred, targets: Sequence[TargetPlan]) -> Iterator[str]:
    """Yield what was left out of the predictions, and how far those of the targets hold."""
    formula, shapeless = unknown_nodes(found.compiled)
    if formula:
        yield (
            f"no formula for {', '.join(formula)}: counted by the bytes they move; "
            "bodies of If, Loop and Scan are not counted"
        )
    if shapeless:
        count, names = len(shapeless), ", ".join(shapeless[:_NAMED])
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        sizes = f"sizes of {count} node{'s' * (count > 1)} depend on values"
        yield f"{sizes}, and are not counted: {names}{more}"
    shown = [target for target in targets if target.predictions]
    cpus = [target for target in shown if target.checked]
    if len(cpus) < len(shown):
        yield (
            "GPU figures are predictions from vendors' peaks, not yet checked on these GPUs; "
            "copies between host and GPU go over PCIe 4.0 where they share no memory"
        )
        yield from _unaligned(found)
    if any(len({each.precision for each in target.predictions}) > 1 for target in cpus):
        yield (
            f"cpu: predictions are off by up to {_FACTOR:g} times: where two precisions are closer "
            "than that, `bench` of the built files tells which is faster"
        )


def _unaligned(found: Inferred) -> list[str]:
    """Name dense nodes whose sizes leave parts of a Tensor Core idle, those of most operations."""
    nodes, hints = {node.name: node for node in found.known.nodes}, list[tuple[float, str]]()
    for cost in found.compiled:
        if cost.kind not in _DENSE or not cost.flops or cost.name not in nodes:
            continue
        weight = found.known.shapes.get((*nodes[cost.name].input, "", "")[1], ())
        sizes = weight[-2:] if cost.kind == kinds.PRODUCT else weight[:2]
        if wrong := [size for size in sizes if size % _ALIGNED]:
            share = cost.flops / found.flops
            what = f"{cost.name} ({cost.operator}, {share:.0%} of the operations) has a size of"
            hints.append((share, f"hint: {what} {wrong[0]}: {_TENSOR_CORES}"))
    largest = sorted(hint for hint in hints if hint[0] >= _LEAST_SHARE)[::-1]
    return [text for _, text in largest[:_NAMED]]


# How many replicas of a target carry a rate of requests within a bound on p99. Requests arrive at
# random (Poisson) and are spread over the replicas at random, so that each sees Poisson arrivals. A
# replica works like our server: an idle engine never waits, and takes all queued requests up to the
# largest batch; a full queue refuses. This is a bulk-service queue (N. T. J. Bailey, "On queueing
# processes with bulk service", J. R. Stat. Soc. B 16, 1954). Its waiting times have no closed form
# if the service depends on the batch, so it is simulated, with arrivals from a fixed seed. With
# batches of one it is M/D/1, and the tests compare it with that distribution (A. K. Erlang, 1909)
# and with the server's own queue.

QUEUE = 1024  # requests that may wait: the server's default
# The server's processor time for an empty call, for each of its requests and for each byte of their
# tensors (sockets, HTTP, JSON, copies). An engine that used the caches makes the server's work
# longer, in proportion to its time up to 2 ms. See benchmarks/plan_capacity.py.
CALL_S, REQUEST_S, BYTE_S = 40e-6, 20e-6, 0.6e-9
_COLD, _COLD_UNTIL_S = 0.045, 2e-3
QUANTILE = 0.99

_ARRIVALS, _WARM_UP, _SEED = 40_000, 4_000, 0
_STEPS, _PRECISION = 12, 0.005  # of the bisection: most steps, relative precision
_LARGEST_BATCH = 4096  # larger batches are not joined from single requests
_BETTER = 1.01  # factor of the rate that justifies a smaller largest batch
_QUIETEST = 1e-6  # share of a replica's rate, below which requests never meet


@dataclass(frozen=True)
class ReplicaModel:
    """A model of one server. `service_s`: seconds of a call with 1, 2, 3, ... requests.

    `request_s`: the server's processor time for a request. `overlaps`: that time overlaps with the
    engine's, as on a GPU; on a CPU both share the cores.
    """

    service_s: tuple[float, ...]
    request_s: float = 0.0
    overlaps: bool = False
    queue: int = QUEUE

    @property
    def most_per_s(self) -> float:
        """The highest possible rate, whatever the latency."""
        own_s = 0.0 if self.overlaps else self.request_s
        rate = max(n / (seconds + n * own_s) for n, seconds in enumerate(self.service_s, start=1))
        return min(rate, 1 / self.request_s) if self.request_s else rate


@dataclass(frozen=True)
class Capacity(Record):
    """`replicas` carry `rate_per_s` within `bound_ms` at p99; None where no number of them does.

    `rate_each_per_s`: the most that one carries; the server's own work then takes `server_busy` of
    a core. `p99_ms`: with that many replicas. `why`: the reason where there is none. `max_batch`:
    requests that one call takes, the server's `max_batch`.
    """

    rate_per_s: float
    bound_ms: float
    replicas: int | None = None
    rate_each_per_s: float | None = None
    p99_ms: float | None = None
    why: str = ""
    max_batch: int = 1
    server_busy: float = 0.0
    precision: str = ""


def capacity(
    rate_per_s: float,
    bound_s: float,
    service_s: Mapping[int, float],
    *,
    request_s: float = 0.0,
    overlaps: bool = False,
) -> Capacity:
    """Return how many replicas carry `rate_per_s` with their p99 within `bound_s`.

    `service_s`: seconds of a call by batch size, from 1 on, interpolated linearly. The largest
    batch is the size whose call is within the bound and with which a replica carries most.
    `request_s`, `overlaps`: see `ReplicaModel`.
    """
    least = min(service_s)
    sizes = sorted(n for n, seconds in service_s.items() if seconds <= bound_s or n == least)
    every = np.arange(1, min(sizes[-1], _LARGEST_BATCH) + 1)
    seconds = np.interp(every, sizes, [service_s[size] for size in sizes])
    whole = ReplicaModel(tuple(seconds.tolist()), request_s, overlaps)
    nothing, alone_s = Capacity(rate_per_s, bound_s * 1e3), whole.service_s[0] + request_s
    if alone_s > bound_s:
        return replace(nothing, why=f"a request alone takes {alone_s * 1e3:.3g} ms")
    best, most = whole, 0.0
    for size in sorted({min(each, _LARGEST_BATCH) for each in sizes}, reverse=True):
        tried = replace(whole, service_s=whole.service_s[:size])
        more = most * _BETTER
        if not most or (more < tried.most_per_s and p99_s(more, tried) <= bound_s):
            best, most = tried, _most_within(bound_s, tried)
    if not most:
        return replace(nothing, why="a second request that waits for the first is late")
    replicas = max(1, math.ceil(rate_per_s / most))
    return replace(
        nothing,
        replicas=replicas,
        rate_each_per_s=most,
        p99_ms=p99_s(max(rate_per_s / replicas, most * _QUIETEST), best) * 1e3,
        max_batch=len(best.service_s),
        server_busy=most * request_s,
    )


def served_s(engine_s: float) -> float:
    """Return the seconds of an engine's call including the server's work for it."""
    return engine_s + CALL_S + _COLD * min(engine_s, _COLD_UNTIL_S)


def p99_s(rate_per_s: float, replica: ReplicaModel) -> float:
    """Return the 99th percentile of waiting and service; infinite if 1 % is refused."""
    taken_s = latencies_s((_unit_arrivals() / rate_per_s).tolist(), replica)
    return float(np.quantile(taken_s[_WARM_UP:], QUANTILE, method="inverted_cdf"))


def latencies_s(arrivals_s: Sequence[float], replica: ReplicaModel) -> list[float]:
    """Return the time from each arrival to its answer; infinite for a refused request."""
    taken_s = [math.inf] * len(arrivals_s)
    waiting: deque[int] = deque()
    engine_s = server_s = 0.0  # when each is free
    service_s, arrived, most = replica.service_s, 0, len(replica.service_s)
    while waiting or arrived < len(arrivals_s):
        begin_s = engine_s if waiting else max(engine_s, arrivals_s[arrived])
        until = bisect_right(arrivals_s, begin_s, arrived)
        waiting.extend(range(arrived, min(until, arrived + replica.queue - len(waiting))))
        arrived = until
        size = min(most, len(waiting))
        engine_s = begin_s + service_s[size - 1]
        server_s = max(server_s, engine_s) + size * replica.request_s
        if not replica.overlaps:
            engine_s = server_s
        for _ in range(size):
            request = waiting.popleft()
            taken_s[request] = server_s - arrivals_s[request]
    return taken_s


def _most_within(bound_s: float, replica: ReplicaModel) -> float:
    """Return the highest rate whose p99 is within the bound; 0.0 if there is none."""
    low, high = 0.0, replica.most_per_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if p99_s(middle, replica) <= bound_s else (low, middle)
        if high - low <= _PRECISION * low:
            break
    return low


@cache
def _unit_arrivals() -> np.ndarray:
    return np.cumsum(np.random.default_rng(_SEED).exponential(size=_ARRIVALS))
