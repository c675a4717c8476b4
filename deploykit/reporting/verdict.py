"""Summarise a report in a few sentences: unmet gates, the headline and its caveats, serving.

The most important sentence comes first. A ratio is only ever between two points of the same
scenario and batch; where the intervals allow no difference, none is claimed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deploykit.core.evidence import Interval
from deploykit.evaluation.formatting import SPACE, count, number, points, spread
from deploykit.evaluation.statistics import (
    FASTER,
    NO_DIFFERENCE,
    PRACTICALLY_EQUAL,
    SLOWER,
    difference,
)
from deploykit.reporting.load_result import LoadResult
from deploykit.reporting.points import Point, best, crossover, describe_best
from deploykit.reporting.report import Report
from deploykit.reporting.tables import accuracy_of, load_label

# Conclude from the points of a report, in sentences: from which batch on, whether it pays, why.
#
# Each sentence is about one engine, and holds a figure of a batch that was measured.

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


_MOST = 3  # engines, or reasons, that the verdict names


def verdict(report: Report) -> tuple[str, ...]:
    """The sentences for `Report.verdict`; use as `replace(report, verdict=verdict(report))`."""
    unmet = [gate for gate in report.gates if not gate.passed]
    sentences = [f"INVALID: {reason.rstrip('.')}." for reason in report.invalid]
    if unmet:
        named = "; ".join(f"{gate.name}: {gate.detail}" for gate in unmet)
        no_speed_up = " Wrong outputs have no speed-up." * bool(report.wrong)
        sentences.append(
            f"{len(unmet)} of {len(report.gates)} gates NOT met: {named}.{no_speed_up}"
        )
    if report.throttled:
        sentences.append(
            f"The GPU was throttled ({', '.join(report.throttled)}): no speed-up is stated. "
            "Cool it, or lower its clocks to what it can hold, and measure again."
        )
    elif not report.invalid:
        sentences += _headlines(report)
        sentences += describe_best(report.best_cpu, report.usable)
    sentences += _marked(report)
    sentences += _power_mode(report)
    sentences += _scenario_sentences(report)
    sentences += [_serving_sentence(result) for result in report.serving]
    if report.quick:
        sentences.append("Timings are short, so intervals are wider than with 60 s for each point.")
    if report.not_measured:
        gaps: dict[str, list[str]] = {}
        for gap in report.not_measured:
            gaps.setdefault(gap.why, []).append(gap.what)
        named = "; ".join(f"{' and '.join(what)} ({why})" for why, what in gaps.items())
        sentences.append(f"Not measured: {named}.")
    return tuple(sentences)


def _marked(report: Report) -> list[str]:
    """The points that give no verdict, by their reasons."""
    marked = [point for point in report.points if point.marks]
    if not marked or report.invalid:
        return []
    reasons = Counter(mark for point in marked for mark in point.marks)
    why = "; ".join(f"{reason} ({count(n)})" for reason, n in reasons.most_common(_MOST))
    rows = f"{count(len(marked))} of {count(len(report.points))} rows"
    again = "measure them again, for longer or on a quiet machine"
    return [f"{rows} give no verdict: {why}. They are in a table of their own; {again}."]


def _power_mode(report: Report) -> list[str]:
    """A Jetson's figures hold in one power mode, so one that is not known is a warning."""
    modes = [each.power_mode for each in report.conditions if each.power_mode]
    if any("," in mode for mode in modes):
        return [f"THE POWER MODE CHANGED during the run ({modes[0]}): measure again in one."]
    is_jetson = report.machine.get("l4t") or report.machine.get("board")
    is_jetson = is_jetson or any("sysfs" in each.source for each in report.conditions)
    if is_jetson and not modes and not report.machine.get("power_mode"):
        return ["THE POWER MODE IS NOT KNOWN: these figures can be neither repeated nor compared."]
    return []


def _headlines(report: Report) -> list[str]:
    """Of each engine that was asked for, else of the fastest; of one model alone its figures."""
    if not report.points:
        return [] if report.serving else ["No engine was timed."]
    usable = report.usable
    own = [point for point in usable if _is_baseline(point, report.baseline)]
    others = [point for point in usable if point not in own]
    others = others or [point for point in own if point.label != report.baseline]
    engines: dict[str, list[Point]] = {}
    for label in report.asked:
        if not f"{label}, ".startswith(f"{report.baseline}, "):
            engines.setdefault(label.partition(", ")[0], []).extend(
                point for point in others if point.label == label
            )
    sentences = _figures(report, own) if report.baseline in report.asked else []
    sentences += [
        f"No row of {name} gives a verdict."
        for name, found in engines.items()
        if not found and name not in report.wrong
    ]
    asked = [found for found in engines.values() if found] if engines else [others]
    for found in asked[:_MOST]:
        sentences += _headline(report, found, usable, own)
    if not sentences and not report.wrong and usable:
        best = _fastest(usable)
        rate = f"{best.label}: {spread(best.throughput_per_s.to_dict())} inferences/s"
        why = "nothing else" if report.baseline else "no baseline"
        return [f"{rate} at batch {best.batch}; {why} was measured to compare it with."]
    return sentences


def _figures(report: Report, own: Sequence[Point]) -> list[str]:
    """What a model reaches that nothing was given to compare with."""
    if not own:
        return []
    first, best = min(own, key=lambda point: point.batch), _fastest(own)
    p50 = first.latency.p50_ms
    at = f"p50 {number(p50.value)}{SPACE}ms at batch {first.batch}; " if p50 else ""
    rate = f"up to {spread(best.throughput_per_s.to_dict())} inferences/s at batch {best.batch}"
    return [f"{report.artefacts[0]['file']}: {at}{rate}, in {_session_text(best)}."]


def _headline(
    report: Report, others: Sequence[Point], usable: Sequence[Point], own: Sequence[Point]
) -> list[str]:
    """An engine against its like, then against faster columns; then what follows for its use."""
    pairs = [(point, found) for point in others if (found := _reference(point, usable, own))]
    if not pairs:
        return []
    candidate, reference = max(
        pairs, key=lambda pair: (_alike(*pair), pair[0].throughput_per_s.value)
    )
    what = _ratio(report, candidate, reference, reference in own)
    notes = dict.fromkeys(point.note for point in (candidate, reference) if point.note)
    sentences = ["; ".join([what, _accuracy(report, candidate), *notes]) + "."]
    equals = [each for each in usable if _comparable(each, candidate) and each is not candidate]
    named = {candidate.label, reference.label}
    for title, rivals in (
        ("the fastest column of the baseline", [point for point in equals if point in own]),
        ("the best on the CPU", [p for p in (*equals, candidate) if p.device == "cpu"]),
    ):
        if rivals and (rival := _fastest(rivals)).label not in named:
            named.add(rival.label)
            sentences.append(f"Against {title}: {_ratio(report, candidate, rival, rival in own)}.")
    return sentences + _own_best(report, candidate) + conclusions(report, candidate, reference)


def _own_best(report: Report, candidate: Point) -> list[str]:
    base = [point for point in report.usable if point.label == report.baseline]
    base = [point for point in base if point.scenario == candidate.scenario]
    if not base or (own := _fastest(base)).batch == candidate.batch:
        return []
    rates = [number(point.throughput_per_s.value) for point in (own, candidate)]
    at = f"{own.label} {rates[0]} inferences/s at {own.batch}"
    return [f"Each at its own best batch: {at}, {candidate.label} {rates[1]} at {candidate.batch}."]


def _is_baseline(point: Point, baseline: str) -> bool:
    """Whether it is the baseline's model on the CPU, in any number of sessions."""
    return bool(baseline) and (point.label == baseline or point.label.startswith(f"{baseline}, "))


def _reference(point: Point, usable: Sequence[Point], own: Sequence[Point]) -> Point | None:
    """What a point is compared with: the baseline with the same sessions and threads.

    A GPU's: the fastest on the CPU. One of the baseline itself, or without its like: the baseline.
    """
    rivals = [each for each in own if _comparable(each, point) and each.label != point.label]
    if point.device != "cpu":
        cpu = [each for each in usable if each.device == "cpu" and _comparable(each, point)]
        return _fastest(cpu) if cpu else None
    return next((each for each in rivals if _alike(each, point)), rivals[0] if rivals else None)


def _alike(a: Point, b: Point) -> bool:
    """A GPU is compared with the best of the CPU, whatever its sessions."""
    both_cpu = a.device == b.device == "cpu"
    return not both_cpu or _settings(a) == _settings(b)


def _settings(point: Point) -> tuple[object, ...]:
    return point.sessions, point.threads, point.settings


def _ratio(report: Report, candidate: Point, reference: Point, is_baseline: bool) -> str:
    times = report.speedup(candidate, reference)
    text = f"{number(times.value)}× [{number(times.low)}, {number(times.high)}]"
    named = is_baseline and "baseline" not in reference.label.lower()
    rival = f"the {'baseline ' * named}{reference.label}"
    where = f"at batch {candidate.batch}, end to end in process{_sessions(candidate, reference)}"
    found = difference(times)
    if found == NO_DIFFERENCE:
        return f"No difference between {candidate.label} and {rival} {where} ({text})"
    if found == PRACTICALLY_EQUAL:
        return f"{candidate.label} and {rival} are practically equal {where} ({text})"
    return f"{candidate.label} is {text} {rival} {where}"


def _sessions(candidate: Point, reference: Point) -> str:
    """ ", each in 1 session of 2 threads", where threads are known."""
    one, other = (_session_text(point) for point in (candidate, reference))
    if one == other:
        return f", each in {one}" if one else ""
    return f", {one or 'on its GPU'} against {other}" if other else ""


def _session_text(point: Point) -> str:
    if point.settings or point.threads is None:
        return point.settings
    sessions = f"{point.sessions} session{'s' * (point.sessions > 1)}"
    return f"{sessions} of {point.threads} thread{'s' * (point.threads > 1)}"


def _comparable(a: Point, b: Point) -> bool:
    return (a.scenario, a.batch, a.rounds) == (b.scenario, b.batch, b.rounds)


def _fastest(found: Sequence[Point]) -> Point:
    return max(found, key=lambda point: point.throughput_per_s.value)


def _accuracy(report: Report, candidate: Point) -> str:
    rows = [each.to_dict() for each in report.accuracy]
    row = accuracy_of(rows, candidate.label, candidate.precision)
    if row is None:
        return "its accuracy was not measured"
    if row["drop"] is None:
        return f"its accuracy is the reference ({row['metric']}, n = {row['n']})"
    drop = points(row["drop"], row["n"])
    return f"{row['metric']} drop {drop.removesuffix(')')}, n = {row['n']})"


def _scenario_sentences(report: Report) -> list[str]:
    """Values of different scenarios are never compared, so each has a sentence."""
    found: dict[str, list[str]] = {}
    for each in report.scenarios:
        value = f"{number(each.value)} {each.metric}" if each.value is not None else each.why
        if each.value is not None and not each.metric.endswith("/s"):
            metric, _, unit = each.metric.partition(" ")
            value = f"{metric} {number(each.value)} {unit}"
        slo = f" (p99 within {number(each.slo_ms)} ms)" if each.slo_ms else ""
        found.setdefault(each.scenario.capitalize() + slo, []).append(f"{each.label} {value}")
    return [f"{scenario}: {'; '.join(values)}." for scenario, values in found.items()]


def _serving_sentence(result: LoadResult) -> str:
    over = "gRPC" if result.protocol == "grpc" else "HTTP"
    load = f"Over {over} at {load_label(result.to_dict())}"
    if result.generator_limited:
        why = "; ".join(result.limits) or "it was late"
        return (
            f"{load} there is no verdict: the load generator was the limit, not the server ({why})."
        )
    if result.marks:
        return f"{load} there is no verdict: {'; '.join(result.marks)}. Measure it again."
    if result.latency is None:
        return f"{load} no request of {result.sent} had a good answer: {result.first_error}."
    sentence = f"{load}: {spread(result.achieved_per_s.to_dict())} requests/s"
    for name, part in (("p50", result.latency.p50_ms), ("p99", result.latency.p99_ms)):
        sentence += f", {name} "
        if part:
            sentence += f"{number(part.value)}{SPACE}ms"
        elif f"{name}_ms" in result.latency.needs:
            sentence += "too few samples"
        else:
            sentence += f"none, as {count(result.latency.lost)} had no good answer"
    counts = {"refused": result.refused, "expired": result.expired, "failed": result.failed}
    counts["never sent"] = result.unsent
    lost = [f"{count(n)} {what}" for what, n in counts.items() if n]
    sentence += "; " + (
        f"{', '.join(lost)} of {count(result.sent)}" if lost else "none refused or failed"
    )
    if result.sustained is False:
        sentence += "; THE RATE WAS NOT SUSTAINED, so that latencies grow with the duration"
    if result.same_machine:
        sentence += "; client and server shared one machine"
    return sentence + "."
