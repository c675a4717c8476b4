"""Predict what a model needs and how fast it runs on each target, before touching one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, GateFailed, MissingExtra, did_you_mean
from deploykit.core.json_value import Record
from deploykit.core.machine import now, this_machine
from deploykit.core.profile import Profile, load_profile, profile_names
from deploykit.core.task import Task
from deploykit.evaluation.artefacts import Progress
from deploykit.graph import cost as kinds
from deploykit.graph.cost import NodeCost
from deploykit.graph.graph import Graph
from deploykit.graph.preflight import find_mismatch
from deploykit.graph.shapes import TensorShapes
from deploykit.planning import probe
from deploykit.planning.capacity import BYTE_S, REQUEST_S, Capacity, capacity, served_s
from deploykit.planning.predict import (
    Inferred,
    Prediction,
    Target,
    infer,
    misplaced,
    precisions,
    predict_call,
    target_of,
    unknown_nodes,
)
from deploykit.planning.probe import CpuCalibration

# Give each dynamic axis of a graph the size that `plan` predicts for.

MOST_SIZE = 1 << 31  # of an axis: more elements in one direction than any runtime indexes


def sizes_of_axes(
    graph: Graph, where: Artefact, given: Mapping[str, int]
) -> tuple[dict[str, int], list[str], list[str]]:
    """Sizes of the dynamic axes but the batch, the names of the batch axis, and notes."""
    batch = [
        spec.shape[0] for spec in graph.inputs if spec.shape and isinstance(spec.shape[0], str)
    ]
    names = [axis for spec in graph.inputs for axis in spec.shape if isinstance(axis, str)]
    others = [name for name in dict.fromkeys(names) if name not in batch]
    given = {**_sizes_of(where.task, graph), **given}
    for name, size in given.items():
        if name not in others:
            known = ", ".join(others) or "none but the batch"
            hint = "`batches` sets the batch" if name in batch else did_you_mean(name, others)
            raise BadInput(f"{where}: no dynamic axis '{name}'; it has: {known}", hint=hint)
        if not 1 <= size <= MOST_SIZE:
            raise BadInput(f"`axes` {name}={size}: must be 1 or more, and fit into 31 bits")
    sizes = {name: given.get(name, 1) for name in others}
    notes = [
        f"axis {name} is taken as 1, as no size was given: `axes` {name}=128"
        for name in others
        if name not in given
    ]
    return sizes, list(dict.fromkeys(batch)), notes


def _sizes_of(task: Task | None, graph: Graph) -> dict[str, int]:
    """Of an image of any ratio: the square that a folder of them is cut to."""
    image = task.image if task else None
    if image is None or image.height:
        return {}
    side = math.ceil(image.resize_to / image.multiple) * image.multiple
    return {axis: side for axis in graph.inputs[0].shape[1:3] if isinstance(axis, str)}


def fixed_batch(graph: Graph) -> int:
    """Of a model without a dynamic axis 0."""
    fixed = (spec.shape[0] for spec in graph.inputs if spec.shape)
    return next((size for size in fixed if isinstance(size, int) and size > 0), 1)


log = logging.getLogger(__name__)

BATCHES = (1, 8, 32)
_LEAST, _MOST = 1e-9, 1e15  # of a latency, a rate and a price
_NAMED = 5  # nodes in a note
_FACTOR = 1.4  # times: how far predictions for the CPU are off at most (plan-accuracy.md)


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
    why: str
    basis: str
    checked: bool
    predictions: tuple[Prediction, ...]
    best: Prediction | None
    capacity: Capacity | None


@dataclass(frozen=True)
class Planned(Record):
    """What `plan` predicts.

    `axes`: the sizes of dynamic axes. `flops`, `nodes`: at the first of `batches`. `unknown`:
    operators that no formula is known for, counted by the bytes they move. `hints`: sizes that
    leave Tensor Cores idle. `notes`: what was assumed.
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
    hints: tuple[Hint, ...]
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
    prices: Mapping[str, float] | None = None,
    calibrate: bool = False,
    on_progress: Progress | None = None,
) -> Planned:
    """Predict memory, latency and throughput of an ONNX `model` on `profiles`; by default on all.

    A float32 model is predicted in each precision that a target offers, another one as it is.
    `axes`: sizes of dynamic axes by name; the batch axis takes `batches`, any other not named is 1,
    with a note. `slo_ms`: the latency to meet; with `rate_per_s` also how many replicas carry that
    many requests/s with their p99 within it. `prices`: per hour by profile, "" for any.

    The CPU's ceilings are measured by a probe that takes some seconds, once: the result is kept in
    the cache folder. `calibrate`: measure them again. Weights are not read. Raises BadInput for a
    file that is no ONNX model or that a profile cannot take, for unknown axes, for wrong values.
    """

    _check_options(batches, slo_ms, rate_per_s, prices or {})
    chosen = [load_profile(each) if isinstance(each, str) else each for each in profiles]
    chosen = chosen or [load_profile(name) for name in profile_names()]
    _check_prices(prices or {}, chosen)
    artefact = Artefact.open(model)
    if artefact.format != "onnx":
        raise wrong_format(artefact, artefact.format, "an ONNX file")
    graph = Graph.open(artefact.path)
    refused = _refused(artefact, graph, chosen, named=bool(profiles))
    sizes, batch_axes, notes = sizes_of_axes(graph, artefact, axes or {})
    batches = batches if batch_axes else [fixed_batch(graph)]
    found = [infer(graph, n, sizes | dict.fromkeys(batch_axes, n)) for n in dict.fromkeys(batches)]
    formula, shapeless = unknown_nodes(found[0].compiled)
    calibration, more = _calibration(chosen, calibrate, on_progress)
    alone = next((each for each in found if each.batch == 1 or not batch_axes), None)
    if alone is None and rate_per_s is not None:
        alone = infer(graph, 1, sizes | dict.fromkeys(batch_axes, 1))
    request = _Request(slo_ms, rate_per_s, prices or {}, alone, bool(batch_axes), refused)
    targets = tuple(_target(profile, found, calibration, request) for profile in chosen)
    return Planned(
        model=str(artefact),
        batches=tuple(each.batch for each in found),
        axes=sizes,
        flops=found[0].flops,
        parameters=sum(cost.weights for cost in found[0].compiled),
        weight_bytes=found[0].weight_bytes,
        unknown=formula,
        slo_ms=slo_ms,
        rate_per_s=rate_per_s,
        targets=targets,
        hints=_hints(found[0], chosen),
        nodes=found[0].compiled,
        notes=(*notes, *_left_out(formula, shapeless), *more, *_of_targets(targets, found[0])),
    )


@dataclass(frozen=True)
class _Request:
    """`alone`: a call for one request. `joined`: requests become a batch.

    `refused`: the reason for each profile that cannot take the file.
    """

    slo_ms: float | None
    rate_per_s: float | None
    prices: Mapping[str, float]
    alone: Inferred | None
    joined: bool
    refused: Mapping[str, str]


def _check_options(
    batches: Sequence[int],
    slo_ms: float | None,
    rate_per_s: float | None,
    prices: Mapping[str, float],
) -> None:
    if not batches or any(not 1 <= size <= MOST_SIZE for size in batches):
        raise BadInput(f"`batches` must be from 1 to {MOST_SIZE}, got {list(batches)}")
    costs = [("prices", price) for price in prices.values()]
    for name, value in (("slo_ms", slo_ms), ("rate_per_s", rate_per_s), *costs):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise BadInput(f"`{name}` must be a number above 0, got {value:g}")
        if value is not None and not _LEAST <= value <= _MOST:
            raise BadInput(f"`{name}` must be {_LEAST:g} to {_MOST:g}, got {value:g}")
    if rate_per_s is not None and slo_ms is None:
        raise BadInput("`rate_per_s` needs the latency that its p99 is to meet", hint="`slo_ms` 50")


def _check_prices(prices: Mapping[str, float], profiles: Sequence[Profile]) -> None:
    """Each is of a profile, of this plan or not, so that one list serves all plans."""
    known = {"", *profile_names(), *(each.name for each in profiles)}
    for name in prices:
        if name.partition("@")[0] not in known:
            hint = did_you_mean(name, sorted(known))
            raise BadInput(f"`prices` {name}: is no profile", hint=hint)


def _name(profile: Profile) -> str:
    return profile.name + (f"@{profile.power_mode}" if profile.power_mode else "")


def _calibration(
    profiles: Sequence[Profile], anew: bool, on_progress: Progress | None
) -> tuple[CpuCalibration | None, list[str]]:
    """Of this machine's CPU, if a profile needs it: what is kept, else a probe."""
    if not anew and not any(profile.device == "cpu" for profile in profiles):
        return None, []
    return probe_cpu(anew=anew, on_progress=on_progress)


def probe_cpu(
    *,
    threads: int | None = None,
    anew: bool = False,
    only_kept: bool = False,
    on_progress: Progress | None = None,
) -> tuple[CpuCalibration | None, list[str]]:
    """The kept calibration of this machine's CPU, else one probe; and notes on it.

    None without ONNX Runtime, and with `only_kept` where none is kept. `threads`: by default one
    per core.
    """

    machine = this_machine()
    found = None if anew else probe.find_calibration(machine, threads)
    if found is not None or only_kept:
        return found, [found.doubt] if found and found.doubt else []
    try:
        found = probe.measure_cpu(machine.cpu, now(), threads=threads, on_progress=on_progress)
    except MissingExtra:
        return None, []
    problem = probe.store_calibration(found)
    return found, [text for text in (problem, found.doubt) if text]


def _refused(
    source: Artefact, graph: Graph, profiles: Sequence[Profile], *, named: bool
) -> dict[str, str]:
    """Return why each profile that cannot take the file does not.

    Raises the first reason as BadInput if the user `named` the profiles.
    """

    refused = {}
    for profile in profiles:
        if error := find_mismatch(source, graph, profile):
            if named:
                raise error
            refused[profile.name] = error.message
    return refused


def _target(
    profile: Profile,
    found: Sequence[Inferred],
    calibration: CpuCalibration | None,
    request: _Request,
) -> TargetPlan:

    name = _name(profile)
    target = request.refused.get(profile.name) or target_of(profile, calibration)
    if isinstance(target, str):
        return TargetPlan(
            name, profile.summary, profile.memory_bytes, target, "", False, (), None, None
        )
    price = request.prices.get(name, request.prices.get(profile.name, request.prices.get("")))
    predictions, why = _predictions(found, target, price)
    best, load = _choose(predictions, target, request)
    if load is not None and price is not None and load.replicas:
        per_hour = load.replicas * price
        load = replace(load, per_million=per_hour / 3600e-6 / load.rate_per_s)
    return TargetPlan(
        profile=name,
        summary=profile.summary,
        memory_bytes=target.memory_bytes,
        why=why,
        basis=target.basis,
        checked=target.checked,
        predictions=predictions,
        best=best,
        capacity=load,
    )


def _predictions(
    found: Sequence[Inferred], target: Target, price: float | None
) -> tuple[tuple[Prediction, ...], str]:
    """All precisions at all batches; a graph in a type that the target lacks has none, and why."""

    stored = found[0].stored
    offered = {*target.profile.precisions, "fp32"}
    if stored not in offered:
        return (), f"it does not run {stored} natively, and the graph is in {stored}"
    kinds = precisions(found[0], target)
    return tuple(predict_call(each, target, kind, price) for kind in kinds for each in found), ""


def _choose(
    predictions: Sequence[Prediction], target: Target, request: _Request
) -> tuple[Prediction | None, Capacity | None]:
    """The prediction that meets the bound with most throughput, and the replicas for the rate."""

    slo_ms, rate_per_s, alone = request.slo_ms, request.rate_per_s, request.alone
    if slo_ms is None:
        return None, None
    fitting = [p for p in predictions if p.fits is not False]
    meet = [p for p in fitting if p.latency_ms <= slo_ms]
    best = max(meet, key=lambda p: p.throughput_per_s or 0.0, default=None)
    if rate_per_s is None or alone is None or not predictions:
        return best, None
    if not fitting:
        why = "it does not fit into the memory"
        return best, Capacity(rate_per_s, slo_ms, None, None, None, why)
    precision = (best or min(fitting, key=lambda p: p.latency_ms)).precision
    joined = [p for p in fitting if p.precision == precision and request.joined]
    service_s = {p.batch: served_s(p.latency_ms / 1e3) for p in joined}
    service_s[1] = served_s(predict_call(alone, target, precision).latency_ms / 1e3)
    request_s, overlaps = REQUEST_S + BYTE_S * sum(alone.end_bytes), target.profile.device != "cpu"
    found = capacity(rate_per_s, slo_ms / 1e3, service_s, request_s=request_s, overlaps=overlaps)
    return best, replace(found, precision=precision)


def _hints(found: Inferred, profiles: Sequence[Profile]) -> tuple[Hint, ...]:

    gpus = any(profile.device == "cuda" for profile in profiles)
    return alignment(found.known, found.compiled) if gpus else ()


def _left_out(formula: Sequence[str], shapeless: Sequence[str]) -> list[str]:
    notes = []
    if formula:
        notes.append(
            f"no formula for {', '.join(formula)}: counted by the bytes they move; "
            "bodies of If, Loop and Scan are not counted"
        )
    if shapeless:
        count, names = len(shapeless), ", ".join(shapeless[:_NAMED])
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        sizes = f"sizes of {count} node{'s' * (count > 1)} depend on values"
        notes.append(f"{sizes}, and are not counted: {names}{more}")
    return notes


def _of_targets(targets: Sequence[TargetPlan], found: Inferred) -> list[str]:

    shown = [target for target in targets if target.predictions]
    notes = []
    if not all(target.checked for target in shown):
        notes.append(
            "GPU figures are predictions from vendors' peaks, not yet checked on these GPUs; "
            "copies between host and GPU go over PCIe 4.0 where they share no memory"
        )
    of_cpu = [each for target in shown if target.checked for each in target.predictions]
    return [*notes, *_close(of_cpu), *(misplaced(found) if of_cpu else ())]


def _close(every: Sequence[Prediction]) -> list[str]:
    """Precisions of the CPU whose order predictions cannot tell, as they are off by that much."""
    times = {(each.precision, each.batch): each.latency_ms for each in every}
    close = [
        f"{precision} at batch {batch}"
        for (precision, batch), ms in times.items()
        if precision != "fp32" and ("fp32", batch) in times
        if 1 / _FACTOR < ms / times["fp32", batch] < _FACTOR
    ]
    if not close:
        return []
    start = f"cpu: predictions are off by up to {_FACTOR:g} times, so that {', '.join(close)} may "
    return [start + "be faster or slower than fp32: `bench` of the built file tells"]


# Sizes that leave parts of a Tensor Core idle.

# A matrix instruction takes 16 bytes of a row at a time: NVIDIA, Deep Learning Performance Guide,
# "Tensor Core requirements": multiples of 8 in half precision, of 16 in INT8.
ALIGNED = {"fp16": 8, "bf16": 8, "int8": 16, "fp8": 16}
_DENSE = (kinds.CONVOLUTION, kinds.POINTWISE, kinds.STEM, kinds.PRODUCT)


@dataclass(frozen=True)
class Hint(Record):
    """`node` has `size` where a multiple of `multiple` fills the hardware in `precision`.

    `what`: "input channels", "output channels" or "features". `share`: of the model's operations.
    """

    node: str
    operator: str
    what: str
    size: int
    precision: str
    multiple: int
    share: float


def alignment(known: TensorShapes, costs: Sequence[NodeCost]) -> tuple[Hint, ...]:
    """The dense nodes with sizes that are no multiple, those with most operations first.

    Each is named once, with the coarsest multiple that it misses: of 8, else of 16.
    """
    whole = sum(cost.flops or 0 for cost in costs) or 1
    nodes = {node.name: node for node in known.nodes}
    found = []
    for cost in costs:
        if cost.kind not in _DENSE or not cost.flops or cost.name not in nodes:
            continue
        weight = known.shapes.get((*nodes[cost.name].input, "", "")[1], ())
        if len(weight) < 2:
            continue
        convolves = cost.kind != kinds.PRODUCT
        names = ("output channels", "input channels") if convolves else ("features", "features")
        sizes = weight[:2] if convolves else weight[-2:]
        for precision in ("fp16", "int8"):
            wrong = [(n, s) for n, s in zip(names, sizes, strict=True) if s % ALIGNED[precision]]
            if wrong:
                (what, size), share = wrong[0], cost.flops / whole
                multiple = ALIGNED[precision]
                found.append(Hint(cost.name, cost.operator, what, size, precision, multiple, share))
                break
    return tuple(sorted(found, key=lambda hint: -hint.share))
