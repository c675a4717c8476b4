"""Charts of latency by percentile, to the slowest call: of engines, and of a served model."""

from __future__ import annotations

from collections.abc import Sequence

from deploykit.measure.histogram import percentile_ms
from deploykit.measure.report.chart import Chart, Mark, Series
from deploykit.measure.report.formatting import MISSING, SPACE, count, number, spread
from deploykit.measure.report.rows import (
    Json,
    after_setups,
    at_smallest,
    by_label,
    limit_line,
    load_label,
    looks,
    mark,
    name_in_charts,
    value,
)

_TICKS = (
    (2.0, "50 %"),
    (10.0, "90 %"),
    *((1e2 * 10**n, f"{100 - 10.0**-n:g} %") for n in range(5)),
)
NEVER = "∞"  # an answer that did not come
_SHARES_LEFT = tuple(m * 10.0**-k for k in range(1, 8) for m in (5, 2.5, 1))  # of slower calls


def calls_chart(document: Json) -> Chart | None:
    """The calls of each setup at the smallest batch, out of their histograms."""
    points = [p for p in document["points"] if p["histogram"] and p["histogram"]["counts"]]
    points = at_smallest([p for p in points if p["scenario"] == points[0]["scenario"]])
    look, series, rows = looks(document), [], []
    for label, chosen in by_label(points).items():
        point, histogram = chosen[0], chosen[0]["histogram"]
        calls = sum(histogram["counts"])
        shares = [share for share in _SHARES_LEFT if share * calls >= 1]
        marks = [Mark(1 / share, percentile_ms(histogram, 100 - 100 * share)) for share in shares]
        slowest = percentile_ms(histogram, 100)
        if marks:
            marks.append(Mark(max(float(calls), marks[-1].x), slowest))
            name = name_in_charts(document, label, [point])
            series.append(Series(name, tuple(marks), look[label], plain=True))
            asked = (percentile_ms(histogram, q) for q in (50, 90, 99))
            cells = (number(ms) if calls >= 20 else MISSING for ms in asked)
            rows.append((label, count(point["batch"]), *cells, number(slowest), count(calls)))
    if not series:
        return None
    widest = max(series, key=lambda one: one.marks[-1].y / one.marks[0].y)
    times = widest.marks[-1].y / widest.marks[0].y
    return Chart(
        name="calls",
        title="Latency of calls, by percentile",
        finding=f"The slowest call of {widest.label} took {number(times)} times its median, the "
        "most of all. The flatter a line, the steadier the engine; its right end is the slowest.",
        x_label=f"share of calls that took no longer, {points[0]['scenario']}, smallest batch",
        y_label="latency of one call (ms)",
        series=tuple(series),
        x_ticks=_ticks(series),
        x_log=True,
        zero=False,
        columns=("setup", "batch", "p50 (ms)", "p90 (ms)", "p99 (ms)", "max (ms)", "calls"),
        rows=tuple(rows),
    )


def _ticks(series: Sequence[Series]) -> tuple[tuple[float, str], ...]:
    most = max(mark.x for one in series for mark in one.marks)
    return tuple(tick for tick in _TICKS if tick[0] <= max(most, 100.0))


def served_chart(document: Json) -> Chart | None:
    """The percentile spectrum of each load level, to the maximum, on a logarithmic axis."""
    series: list[Series] = []
    rows, sentences = [], []
    first = after_setups(document)
    wanted = {result.get("slo_ms") for result in document["serving"]}
    for result in document["serving"]:
        latency, label = result["latency"], load_label(result)
        if result["generator_limited"] or result["marks"]:
            label += ", no verdict"
        if latency is None or latency["p50_ms"] is None:
            continue
        marks = [
            mark(1 / share_left, latency[key])
            for key, share_left in (("p50_ms", 0.5), ("p90_ms", 0.1), ("p99_ms", 0.01))
            if latency[key] is not None
        ]
        if latency["samples"] > 100 and latency["max_ms"] is not None:
            marks.append(Mark(float(latency["samples"]), latency["max_ms"], text="max"))
        series.append(Series(label, tuple(marks), first + len(series)))
        p99_ms = value(latency["p99_ms"])
        rows.append(
            (
                label,
                *(spread(latency[key]) for key in ("p50_ms", "p90_ms", "p99_ms")),
                NEVER if latency["max_ms"] is None else number(latency["max_ms"]),
                count(latency["samples"]),
            )
        )
        tail = MISSING if p99_ms is None else f"{number(p99_ms)}{SPACE}ms"
        sentences.append(f"{label}: p50 {number(latency['p50_ms']['value'])}{SPACE}ms, p99 {tail}")
    if not series:
        return None
    return Chart(
        name="served",
        title="Latency of requests, by percentile",
        finding="; ".join(sentences) + ". The flatter a line, the steadier the server.",
        x_label="share of requests that were answered by then",
        y_label="latency (ms)",
        series=tuple(series),
        x_ticks=_ticks(series),
        limit=limit_line(wanted.pop(), "") if len(wanted) == 1 else None,
        x_log=True,
        columns=("load", "p50 (ms)", "p90 (ms)", "p99 (ms)", "max (ms)", "answers"),
        rows=tuple(rows),
    )
