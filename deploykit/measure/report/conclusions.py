"""Conclude from the points of a report, in sentences: from which batch on, whether it pays, why.

Each sentence is about one engine, and holds a figure of a batch that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploykit.measure.report.formatting import SPACE, number
from deploykit.measure.report.report import Report
from deploykit.measure.statistics import FASTER, SLOWER, Interval, difference
from deploykit.measure.timing.crossover import best, crossover
from deploykit.measure.timing.sweep import Point

_INTEGER = ("int8", "uint8", "int4")
_PAYS = 1.1  # times the throughput that larger batches have to give
_FAR = 0.25  # of what the roofline allows: neither arithmetic nor memory is the limit below it


def conclusions(report: Report, candidate: Point, reference: Point) -> list[str]:
    """Of the headline's two points: crossover, precision, batching, bound, SLO and energy."""
    usable = [point for point in report.usable if point.scenario == candidate.scenario]
    own = [point for point in usable if point.label == candidate.label]
    sentences = [
        _crossover(own, _rivals(usable, candidate, reference)),
        _integer(report, usable, candidate),
        _batching(own),
        _bound(report, candidate),
        _within(report, usable, candidate, reference),
        _energy(report, candidate, reference),
    ]
    return [sentence for sentence in sentences if sentence]


def _rivals(usable: Sequence[Point], candidate: Point, reference: Point) -> list[list[Point]]:
    """By batch, what a candidate is compared with: the reference; of a GPU, all on the CPU."""
    if candidate.device == "cpu":
        chosen = [point for point in usable if point.label == reference.label]
    else:
        chosen = [point for point in usable if point.device == "cpu"]
    batches = sorted({point.batch for point in chosen})
    return [[point for point in chosen if point.batch == batch] for batch in batches]


def _crossover(own: Sequence[Point], rivals: Sequence[Sequence[Point]]) -> str:
    batches = {point.batch for point in own} & {each[0].batch for each in rivals}
    if len(batches) < 2:
        return ""
    found = []
    for by in ("throughput", "p50"):
        known = [each for each in rivals if by == "throughput" or each[0].latency.p50_ms]
        chosen = [best(each, by) for each in known]
        if not {point.batch for point in own} & {point.batch for point in chosen}:
            continue
        batch = crossover(own, chosen, by)
        found.append(
            f"by {by} from batch {batch} on"
            if batch is not None
            else f"by {by} at no batch up to {max(batches)}"
        )
    names = {point.label for each in rivals for point in each}
    rival = names.pop() if len(names) == 1 else "the best on the CPU"
    return f"{own[0].label} is ahead of {rival} {', '.join(found)}."


def _integer(report: Report, usable: Sequence[Point], candidate: Point) -> str:
    """Whether INT8 pays, against float32 on the same device with as many sessions and threads."""
    if candidate.precision not in _INTEGER:
        return ""
    found = []
    for point in (point for point in usable if point.label == candidate.label):
        like = [
            each for each in usable if each.precision == "fp32" and _place(each) == _place(point)
        ]
        if like:
            found.append((point.batch, report.speedup(point, max(like, key=_rate))))
    if not found:
        return ""
    name = candidate.precision.upper()
    parts = [f"{number(times.value)}× at batch {batch}" for batch, times in _ends(found)]
    kinds = {difference(times) for _, times in _ends(found)}
    if kinds == {FASTER}:
        return f"{name} pays here: {', '.join(parts)}, against float32."
    if FASTER in kinds:
        return f"{name} pays at some batches only: {', '.join(parts)}, against float32."
    more = " and costs time" if kinds == {SLOWER} else ""
    return f"{name} does not pay here{more}: {', '.join(parts)}, against float32."


def _place(point: Point) -> tuple[object, ...]:
    return point.device, point.sessions, point.threads, point.batch, point.rounds


def _rate(point: Point) -> float:
    return point.throughput_per_s.value


def _ends(found: Sequence[tuple[int, Interval]]) -> list[tuple[int, Interval]]:
    """Of the smallest and the largest batch."""
    found = sorted(found, key=lambda pair: pair[0])
    return list(dict.fromkeys((found[0], found[-1])))


def _batching(own: Sequence[Point]) -> str:
    """Whether more rows in a call pay, by the intervals' nearer ends."""
    first = min(own, key=lambda point: point.batch)
    most = max(own, key=_rate)
    if first.batch == max(point.batch for point in own) or not _rate(first):
        return ""
    times = _rate(most) / _rate(first)
    surely = most.throughput_per_s.low / max(first.throughput_per_s.high, 1e-12)
    if most is first or surely < _PAYS:
        return (
            f"Batching does not pay: no batch has {_PAYS}× the throughput of batch {first.batch}."
        )
    text = f"Batching pays: batch {most.batch} has {number(times)}× the throughput of batch"
    if first.latency.p50_ms and most.latency.p50_ms:
        slower = most.latency.p50_ms.value / first.latency.p50_ms.value
        return f"{text} {first.batch}, and calls that take {number(slower)}× as long."
    return f"{text} {first.batch}."


def _bound(report: Report, candidate: Point) -> str:
    """By the share of a call that is not compute, else by the roofline."""
    compute, whole = candidate.compute, candidate.latency.p50_ms
    at = f"{candidate.label} at batch {candidate.batch}"
    if compute and compute.p50_ms and whole and compute.p50_ms.value < whole.value / 2:
        share = 100 * (1 - compute.p50_ms.value / whole.value)
        return f"{at} is bound by copies and launches: {share:.0f}{SPACE}% of a call."
    for found in (report.roofline, report.gpu_roofline):
        for point in found.get("points", ()):
            if (point["label"], point["batch"]) == (candidate.label, candidate.batch):
                return f"{at} {_on_roofline(point, found['ceilings'])}."
    return ""


def _on_roofline(point: Mapping[str, Any], ceilings: Mapping[str, float]) -> str:
    most, by_memory = ceilings["gflops"], point["intensity"] * ceilings["gbytes_per_s"]
    bound = "memory" if by_memory < most else "compute"
    share = point["gflops"] / max(min(most, by_memory), 1e-12)
    reached = f"it reaches {100 * share:.0f}{SPACE}% of what the {bound} of this machine allows"
    if share < _FAR:
        return f"is bound by neither compute nor memory, but by launches and calls: {reached}"
    return f"is {bound}-bound: {reached}"


def _within(report: Report, usable: Sequence[Point], candidate: Point, reference: Point) -> str:
    """The highest throughput of both with a p99 within the wanted latency."""
    if report.slo_ms is None:
        return ""
    parts = []
    for label in dict.fromkeys((candidate.label, reference.label)):
        own = [point for point in usable if point.label == label]
        known = [(point, p99) for point in own if (p99 := point.latency.p99_ms) is not None]
        inside = [point for point, p99 in known if p99.high <= report.slo_ms]
        if inside:
            most = max(inside, key=_rate)
            parts.append(f"{label} {number(_rate(most))} inferences/s at batch {most.batch}")
        else:
            why = "none" if len(known) == len(own) else "not known, as calls were too few for a p99"
            parts.append(f"{label} {why}")
    return f"Within {number(report.slo_ms)}{SPACE}ms at p99: {'; '.join(parts)}."


def _energy(report: Report, candidate: Point, reference: Point) -> str:
    """Of one inference on both, where a meter was there."""
    found = {(each.label, each.batch): each for each in report.energy}
    known = [found.get((point.label, point.batch)) for point in (candidate, reference)]
    parts = [f"{each.label} {number(1e3 * each.joules)}{SPACE}mJ" for each in known if each]
    sources = dict.fromkeys(each.source for each in known if each)
    if known[0] is None:
        return ""
    return (
        f"Energy of one inference at batch {candidate.batch}, of the device alone: "
        f"{'; '.join(parts)} (from {', '.join(sources)})."
    )
