"""Summarise a report in a few sentences: unmet gates, the headline and its caveats, serving.

The most important sentence comes first. A ratio is only ever between two points of the same
scenario and batch; where the intervals allow no difference, none is claimed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deploykit.measure.load.result import LoadResult
from deploykit.measure.report.conclusions import conclusions
from deploykit.measure.report.formatting import SPACE, count, number, points, spread
from deploykit.measure.report.report import Report
from deploykit.measure.report.rows import accuracy_of, load_label
from deploykit.measure.statistics import NO_DIFFERENCE, PRACTICALLY_EQUAL, difference
from deploykit.measure.timing.cpu_search import describe_best
from deploykit.measure.timing.sweep import Point

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
