"""Summarise a report in a few sentences: unmet gates, the headline and what follows from it.

The most important sentence comes first. A ratio compares two points of the same scenario and batch;
no difference is claimed unless the intervals show one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from deploykit.core.evidence import Interval
from deploykit.evaluation.formatting import SPACE, count, number, percent, spread
from deploykit.evaluation.statistics import (
    FASTER,
    NO_DIFFERENCE,
    PRACTICALLY_EQUAL,
    SLOWER,
    difference,
)
from deploykit.reporting.report import CpuSettings, LoadResult, Point, Report, best, crossover
from deploykit.reporting.tables import accuracy_of, load_label

_MOST = 3  # most engines or reasons to name
_PAYS = 1.1  # factor of throughput that makes larger batches worth it
_FAR = 0.25  # share of the roofline; below it neither arithmetic nor memory is the limit


def verdict(report: Report) -> tuple[str, ...]:
    """Return the sentences for `Report.verdict`: `replace(report, verdict=verdict(report))`."""
    return tuple(_sentences(report))


def _sentences(report: Report) -> Iterator[str]:
    if report.invalid:
        busy = "; ".join(reason.rstrip(".") for reason in report.invalid)
        yield f"The machine was busy: {busy}. The figures are as measured; no speed-up is stated."
    if unmet := [f"{gate.name}: {gate.detail}" for gate in report.gates if not gate.passed]:
        wrong = " Wrong outputs have no speed-up." * bool(report.wrong)
        yield f"{len(unmet)} of {len(report.gates)} gates NOT met: {'; '.join(unmet)}.{wrong}"
    if report.throttled:
        yield (
            f"The GPU was throttled ({', '.join(report.throttled)}): no speed-up is stated. "
            "Cool it, or lower its clocks to what it can hold, and measure again."
        )
    valid = not report.invalid and not report.throttled
    first, *others = list(_headlines(report) if valid else ()) or [""]
    yield from filter(None, [first])
    if (marked := [point for point in report.points if point.marks]) and not report.invalid:
        reasons = Counter(mark for point in marked for mark in point.marks)
        why = "; ".join(f"{reason} ({count(n)})" for reason, n in reasons.most_common(_MOST))
        rows = f"{count(len(marked))} of {count(len(report.points))} rows"
        again = "measure them again, for longer or on a quiet machine"
        yield f"{rows} give no verdict: {why}. They are in a table of their own; {again}."
    modes = [each.power_mode for each in report.conditions if each.power_mode]
    is_jetson = report.machine.get("l4t") or report.machine.get("board")
    is_jetson = is_jetson or any("sysfs" in each.source for each in report.conditions)
    if any("," in mode for mode in modes):
        yield f"THE POWER MODE CHANGED during the run ({modes[0]}): measure again in one."
    elif is_jetson and not modes and not report.machine.get("power_mode"):
        yield "THE POWER MODE IS NOT KNOWN: these figures can be neither repeated nor compared."
    yield from others
    yield from _describe_scenarios(report)
    yield from map(_describe_load, report.serving)
    if report.quick:
        yield "Timings are short, so intervals are wider than with 60 s for each point."
    gaps: dict[str, list[str]] = {}
    for gap in report.not_measured:
        gaps.setdefault(gap.why, []).append(gap.what)
    if gaps:
        named = "; ".join(f"{' and '.join(what)} ({why})" for why, what in gaps.items())
        yield f"Not measured: {named}."


def _describe_scenarios(report: Report) -> list[str]:
    """Return a sentence per scenario, as their values must not be compared."""
    found: dict[str, list[str]] = {}
    for each in report.scenarios:
        metric, _, unit = each.metric.rpartition(" ")  # "p90 ms", "samples/s"
        value = f"{metric} {number(each.value or 0.0)} {unit}".strip()
        value = each.why if each.value is None else value
        slo = f" (p99 within {number(each.slo_ms)} ms)" if each.slo_ms else ""
        found.setdefault(each.scenario.capitalize() + slo, []).append(f"{each.label} {value}")
    return [f"{scenario}: {'; '.join(values)}." for scenario, values in found.items()]


def _describe_load(result: LoadResult) -> str:
    over = "gRPC" if result.protocol == "grpc" else "HTTP"
    load = f"Over {over} at {load_label(result.to_dict())}"
    if result.generator_limited:
        why = "; ".join(result.limits) or "it was late"
        why = f"the load generator was the limit, not the server ({why})"
        return f"{load} there is no verdict: {why}."
    if result.marks:
        return f"{load} there is no verdict: {'; '.join(result.marks)}. Measure it again."
    if result.latency is None:
        return f"{load} no request of {result.sent} had a good answer: {result.first_error}."
    sentence = f"{load}: {spread(result.achieved_per_s.to_dict())} requests/s"
    for name, part in (("p50", result.latency.p50_ms), ("p99", result.latency.p99_ms)):
        none = f"none, as {count(result.latency.lost)} had no good answer"
        few = "too few samples" if f"{name}_ms" in result.latency.needs else none
        sentence += f", {name} {f'{number(part.value)}{SPACE}ms' if part else few}"
    counts = {"refused": result.refused, "expired": result.expired, "failed": result.failed}
    counts["never sent"] = result.unsent
    lost = ", ".join(f"{count(n)} {what}" for what, n in counts.items() if n)
    sentence += f"; {lost} of {count(result.sent)}" if lost else "; none refused or failed"
    if result.sustained is False:
        sentence += "; THE RATE WAS NOT SUSTAINED, so that latencies grow with the duration"
    return sentence + "; client and server shared one machine" * result.same_machine + "."


def _headlines(report: Report) -> Iterator[str]:
    """Yield sentences on each requested engine, else on the fastest; for one model its figures."""
    usable, base, sentences = report.usable, report.baseline, list[str]()
    if not report.points:
        yield from [] if report.serving else ["No engine was timed."]
        return
    own = [point for point in usable if _engine_of(point.label) == base]
    others = [p for p in usable if p not in own] or [p for p in own if p.label != base]
    engines: dict[str, list[Point]] = {_engine_of(each): [] for each in report.asked}
    engines.pop(base, None)
    for point in others:
        if point.label in report.asked and _engine_of(point.label) != base:
            engines[_engine_of(point.label)].append(point)
    if base in report.asked and own:  # a model without anything to compare it with
        first, top = min(own, key=lambda point: point.batch), best(own)
        p50 = first.latency.p50_ms
        at = f"p50 {number(p50.value)}{SPACE}ms at batch {first.batch}; " if p50 else ""
        rate = f"up to {spread(top.throughput_per_s.to_dict())} inferences/s at batch {top.batch}"
        sentences.append(f"{report.artefacts[0]['file']}: {at}{rate}, in {_session_text(top)}.")
    unusable = [name for name, found in engines.items() if not found and name not in report.wrong]
    sentences += [f"No row of {name} gives a verdict." for name in unusable]
    asked = [found for found in engines.values() if found] if engines else [others]
    for found in asked[:_MOST]:
        sentences += _headline(report, found, own)
    if not sentences and not report.wrong and usable:
        top = best(usable)
        rate = f"{top.label}: {spread(top.throughput_per_s.to_dict())} inferences/s"
        why = "nothing else" if base else "no baseline"
        sentences = [f"{rate} at batch {top.batch}; {why} was measured to compare it with."]
    yield from sentences


def _engine_of(label: str) -> str:
    """Return the engine of a column, which may have any number of sessions."""
    return label.partition(", ")[0]


def _headline(report: Report, others: Sequence[Point], own: Sequence[Point]) -> list[str]:
    """Compare an engine with its reference, then with faster columns; then conclude."""
    usable = report.usable
    pairs = [(point, found) for point in others if (found := _reference(point, usable, own))]
    if not pairs:
        return []
    candidate, reference = max(
        pairs, key=lambda pair: (_is_alike(*pair), pair[0].throughput_per_s.value)
    )
    notes = dict.fromkeys(point.note for point in (candidate, reference) if point.note)
    ratio = _ratio(report, candidate, reference, reference in own)
    sentences = ["; ".join([ratio, _accuracy(report, candidate), *notes]) + "."]
    equals = [each for each in usable if _is_comparable(each, candidate) and each is not candidate]
    named = {candidate.label, reference.label}
    for title, rivals in (
        ("the engine to compare with", [p for p in equals if p.label in report.against]),
        ("the fastest column of the baseline", [p for p in equals if p in own]),
        ("the best on the CPU", [p for p in (*equals, candidate) if p.device == "cpu"]),
    ):
        alike = [each for each in rivals if each.label in report.against]
        rivals = [each for each in alike if _is_alike(each, candidate)] or rivals
        if rivals and (rival := best(rivals)).label not in named:
            named.add(rival.label)
            sentences.append(f"Against {title}: {_ratio(report, candidate, rival, rival in own)}.")
    own_batches = [p for p in usable if p.scenario == candidate.scenario]
    conclusions = (
        _crossover(own_batches, candidate, reference),
        _integer(report, own_batches, candidate),
        _batching([point for point in own_batches if point.label == candidate.label]),
        _bound(report, candidate),
        _within_slo(report.slo_ms, own_batches, (candidate.label, reference.label)),
        _energy(report, candidate, reference),
    )
    return sentences + list(filter(None, conclusions))


def _reference(point: Point, usable: Sequence[Point], own: Sequence[Point]) -> Point | None:
    """Return a baseline, with the same settings if any has; for a GPU the fastest on the CPU."""
    if point.device != "cpu":
        cpu = [each for each in usable if each.device == "cpu" and _is_comparable(each, point)]
        return best(cpu) if cpu else None
    rivals = [each for each in own if _is_comparable(each, point) and each.label != point.label]
    return next((each for each in rivals if _is_alike(each, point)), next(iter(rivals), None))


def _is_alike(a: Point, b: Point) -> bool:
    """Return whether both have the same settings, or one of them is on a GPU."""
    settings = [(point.sessions, point.threads, point.settings) for point in (a, b)]
    return not a.device == b.device == "cpu" or settings[0] == settings[1]


def _is_comparable(a: Point, b: Point) -> bool:
    return (a.scenario, a.batch, a.rounds) == (b.scenario, b.batch, b.rounds)


def _ratio(report: Report, candidate: Point, reference: Point, is_baseline: bool) -> str:
    times = report.speedup(candidate, reference)
    text = f"{number(times.value)}× [{number(times.low)}, {number(times.high)}]"
    named = is_baseline and "baseline" not in reference.label.lower()
    rival = f"the {'baseline ' * named}{reference.label}"
    one, other = (_session_text(point) for point in (candidate, reference))
    sessions = f", {one or 'on its GPU'} against {other}" if other else ""
    sessions = (f", each in {one}" if one else "") if one == other else sessions
    where = f"at batch {candidate.batch}, end to end in process{sessions}"
    found = difference(times)
    if found == NO_DIFFERENCE:
        return f"No difference between {candidate.label} and {rival} {where} ({text})"
    if found == PRACTICALLY_EQUAL:
        return f"{candidate.label} and {rival} are practically equal {where} ({text})"
    return f"{candidate.label} is {text} {rival} {where}"


def _session_text(point: Point) -> str:
    if point.settings or point.threads is None:
        return point.settings
    return str(CpuSettings(point.sessions, point.threads, spinning=None))


def _accuracy(report: Report, candidate: Point) -> str:
    rows = [each.to_dict() for each in report.accuracy]
    row = accuracy_of(rows, candidate.label, candidate.precision)
    if row is None:
        return "its accuracy was not measured"
    if row["drop"] is None:
        return f"its accuracy is the reference ({row['metric']}, n = {row['n']})"
    return f"{row['metric']} drop {percent(row['drop'], row['n'], 'pp')}, n = {row['n']}"


def _crossover(usable: Sequence[Point], candidate: Point, reference: Point) -> str:
    """Name the batch from which it is ahead of the reference; a GPU, of all on the CPU."""
    own = [point for point in usable if point.label == candidate.label]
    rivals = [point for point in usable if point.label == reference.label]
    if candidate.device != "cpu":
        rivals = [point for point in usable if point.device == "cpu"]
    batches = {point.batch for point in own} & {point.batch for point in rivals}
    if len(batches) < 2:
        return ""
    found = []
    for by in ("throughput", "p50"):
        timed = [p for p in rivals if by == "throughput" or p.latency.p50_ms]
        known = sorted({point.batch for point in timed})
        chosen = [best([p for p in timed if p.batch == batch], by) for batch in known]
        if batches & set(known):
            batch = crossover(own, chosen, by)
            none = f"at no batch up to {max(batches)}"
            found.append(f"by {by} " + (none if batch is None else f"from batch {batch} on"))
    names = {point.label for point in rivals}
    rival = names.pop() if len(names) == 1 else "the best on the CPU"
    return f"{candidate.label} is ahead of {rival} {', '.join(found)}."


def _integer(report: Report, usable: Sequence[Point], candidate: Point) -> str:
    """State whether INT8 beats float32 on the same device with as many threads."""
    if candidate.precision not in ("int8", "uint8", "int4"):
        return ""
    found: list[tuple[int, Interval]] = []
    for point in (each for each in usable if each.label == candidate.label):
        plain = [
            each for each in usable if each.precision == "fp32" and each.device == point.device
        ]
        plain = [each for each in plain if _is_comparable(each, point) and _is_alike(each, point)]
        found += [(point.batch, report.speedup(point, best(plain)))] if plain else []
    if not found:
        return ""
    ends = dict([min(found, key=lambda each: each[0]), max(found, key=lambda each: each[0])])
    kinds = {difference(times) for times in ends.values()}
    pays = "does not pay here" + " and costs time" * (kinds == {SLOWER})
    if FASTER in kinds:
        pays = "pays here" if kinds == {FASTER} else "pays at some batches only"
    parts = ", ".join(f"{number(times.value)}× at batch {batch}" for batch, times in ends.items())
    return f"{candidate.precision.upper()} {pays}: {parts}, against float32."


def _batching(own: Sequence[Point]) -> str:
    """State whether larger batches pay, by the nearer ends of the intervals."""
    first, most = min(own, key=lambda point: point.batch), best(own)
    least = first.throughput_per_s
    if first.batch == max(point.batch for point in own) or not least.value:
        return ""
    if most is first or most.throughput_per_s.low / max(least.high, 1e-12) < _PAYS:
        no = f"no batch has {_PAYS}× the throughput of batch {first.batch}"
        return f"Batching does not pay: {no}."
    times = number(most.throughput_per_s.value / least.value)
    return f"Batching pays: batch {most.batch} has {times}× the throughput of batch {first.batch}."


def _bound(report: Report, candidate: Point) -> str:
    """Name its limit by the share of a call that is not compute, else by the roofline."""
    compute, whole = candidate.compute, candidate.latency.p50_ms
    at = f"{candidate.label} at batch {candidate.batch} is"
    if compute and compute.p50_ms and whole and compute.p50_ms.value < whole.value / 2:
        share = 100 * (1 - compute.p50_ms.value / whole.value)
        return f"{at} bound by copies and launches: {share:.0f}{SPACE}% of a call."
    for found in (report.roofline, report.gpu_roofline):
        for point in found.get("points", ()):
            if (point["label"], point["batch"]) != (candidate.label, candidate.batch):
                continue
            most = found["ceilings"]["gflops"]
            by_memory = point["intensity"] * found["ceilings"]["gbytes_per_s"]
            kind = "memory" if by_memory < most else "compute"
            share = point["gflops"] / max(min(most, by_memory), 1e-12)
            text = f"it reaches {100 * share:.0f}{SPACE}% of what the {kind} of this machine "
            bound = f"{kind}-bound"
            if share < _FAR:
                bound = "bound by neither compute nor memory, but by launches and calls"
            return f"{at} {bound}: {text}allows."
    return ""


def _within_slo(slo_ms: float | None, usable: Sequence[Point], labels: Sequence[str]) -> str:
    """Name the highest throughput of each label whose p99 is within the wanted latency."""
    if slo_ms is None:
        return ""
    parts = []
    for label in dict.fromkeys(labels):
        known = [(p, p.latency.p99_ms) for p in usable if p.label == label]
        inside = [point for point, p99 in known if p99 and p99.high <= slo_ms]
        text = "none" if all(p99 for _, p99 in known) else "not known, as calls were too few"
        if inside:
            most = best(inside)
            text = f"{number(most.throughput_per_s.value)} inferences/s at batch {most.batch}"
        parts.append(f"{label} {text}")
    return f"Within {number(slo_ms)}{SPACE}ms at p99: {'; '.join(parts)}."


def _energy(report: Report, *points: Point) -> str:
    """Name the energy of one inference of the points, if it was metered."""
    found = {(each.label, each.batch): each for each in report.energy}
    known = [each for point in points if (each := found.get((point.label, point.batch)))]
    if not known or (known[0].label, known[0].batch) != (points[0].label, points[0].batch):
        return ""
    parts = "; ".join(f"{each.label} {number(1e3 * each.joules)}{SPACE}mJ" for each in known)
    return f"Energy of one inference of the device alone: {parts} (from {known[0].source})."
