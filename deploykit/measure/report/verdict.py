"""Summarise a report in a few sentences: unmet gates, the headline and its caveats, serving.

The most important sentence comes first. A ratio is only ever between two points of the same
scenario and batch; where the intervals allow no difference, none is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence

from deploykit.measure.load.generator import LoadResult
from deploykit.measure.report.figures import load_label
from deploykit.measure.report.formatting import SPACE, count, number, points, spread
from deploykit.measure.report.report import Report, speedup
from deploykit.measure.timing.sweep import Point


def verdict(report: Report) -> tuple[str, ...]:
    """The sentences for `Report.verdict`; use as `replace(report, verdict=verdict(report))`."""
    unmet = [gate for gate in report.gates if not gate.passed]
    sentences = []
    if unmet:
        named = "; ".join(f"{gate.name}: {gate.detail}" for gate in unmet)
        sentences.append(f"{len(unmet)} of {len(report.gates)} gates NOT met: {named}.")
    if report.throttled:
        sentences.append(
            f"The GPU was throttled ({', '.join(report.throttled)}): no speed-up is stated. "
            "Cool it, or lower its clocks to what it can hold, and measure again."
        )
    else:
        sentences += _headline(report)
    sentences += [_served(result) for result in report.serving]
    if report.quick:
        sentences.append("Timings are short, so intervals are wider than with 60 s for each point.")
    if report.not_measured:
        gaps = "; ".join(f"{gap.what} ({gap.why})" for gap in report.not_measured)
        sentences.append(f"Not measured: {gaps}.")
    return tuple(sentences)


def _headline(report: Report) -> list[str]:
    baseline = [point for point in report.points if point.label == report.baseline]
    others = [point for point in report.points if point.label != report.baseline]
    paired = [(a, b) for a in others for b in baseline if _comparable(a, b)]
    if not report.points:
        return ["No engine was timed."]
    if not paired:
        best = _fastest(report.points)
        rate = f"{best.label}: {spread(best.throughput_per_s.to_dict())} inferences/s"
        return [f"{rate} at batch {best.batch}; no baseline was measured to compare it with."]
    candidate, reference = max(paired, key=lambda pair: pair[0].throughput_per_s.value)
    times = speedup(candidate, reference)
    times_text = f"{number(times.value)}× [{number(times.low)}, {number(times.high)}]"
    where = f"at batch {candidate.batch}, end to end in process"
    if times.low <= 1 <= times.high:
        sentence = f"No difference between {candidate.label} and {_with_article(reference)} {where}"
        sentence += f" ({times_text})"
    else:
        sentence = f"{candidate.label} is {times_text} {_with_article(reference)} {where}"
    sentence += f"; {_accuracy(report, candidate.precision)}"
    notes = dict.fromkeys(point.note for point in (candidate, reference) if point.note)
    sentences = ["; ".join([sentence, *notes]) + "."]
    own = _fastest([point for point in baseline if point.scenario == candidate.scenario])
    if own.batch != candidate.batch:
        rates = [number(point.throughput_per_s.value) for point in (own, candidate)]
        sentences.append(
            f"Each at its own best batch: {own.label} {rates[0]} inferences/s at {own.batch}, "
            f"{candidate.label} {rates[1]} at {candidate.batch}."
        )
    return sentences


def _with_article(baseline: Point) -> str:
    already = "baseline" in baseline.label.lower()
    return f"the {baseline.label}" if already else f"the baseline {baseline.label}"


def _comparable(a: Point, b: Point) -> bool:
    return (a.scenario, a.batch, a.rounds) == (b.scenario, b.batch, b.rounds)


def _fastest(found: Sequence[Point]) -> Point:
    return max(found, key=lambda point: point.throughput_per_s.value)


def _accuracy(report: Report, precision: str) -> str:
    for row in report.accuracy:
        if row.precision == precision and row.drop is not None:
            drop = points(row.drop.to_dict(), row.n)
            return f"{row.metric} drop {drop.removesuffix(')')}, n = {row.n})"
        if row.precision == precision:
            return f"its accuracy is the reference ({row.metric}, n = {row.n})"
    return "its accuracy was not measured"


def _served(result: LoadResult) -> str:
    load = f"Over HTTP at {load_label(result.to_dict())}"
    if result.generator_limited:
        return f"{load} there is no verdict: the load generator was the limit, not the server."
    if result.latency is None:
        return f"{load} no request of {result.sent} was answered: {result.first_error}."
    sentence = f"{load}: {spread(result.achieved_per_s.to_dict())} requests/s"
    for name, part in (("p50", result.latency.p50_ms), ("p99", result.latency.p99_ms)):
        sentence += (
            f", {name} {number(part.value)}{SPACE}ms" if part else f", {name} too few samples"
        )
    counts = {"refused": result.refused, "expired": result.expired, "failed": result.failed}
    lost = [f"{count(n)} {what}" for what, n in counts.items() if n]
    sentence += "; " + (
        f"{', '.join(lost)} of {count(result.sent)}" if lost else "none refused or failed"
    )
    if result.same_machine:
        sentence += "; client and server shared one machine"
    return sentence + "."
