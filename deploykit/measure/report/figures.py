"""Choose the charts of a report; each has a caption and a table of the same data.

Nothing is computed that is not in the document of `report.json`; svg.py draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploykit.measure.report.chart import Chart, Figure, Mark, Series
from deploykit.measure.report.formatting import SPACE, count, number, percent, spread
from deploykit.measure.report.layer_figures import layers_chart
from deploykit.measure.report.limit_figures import (
    GPU_ROOFLINE,
    gpu_charts,
    request_waterfall,
    roofline,
    waterfall,
)
from deploykit.measure.report.percentile_figures import calls_chart, served_chart
from deploykit.measure.report.rows import (
    Json,
    accuracy_of,
    at_smallest,
    by_label,
    limit_line,
    looks,
    mark,
    name_in_charts,
    value,
    why_not,
)

_POINT_COLUMNS = ("setup", "batch", "p50 (ms)", "p99 (ms)", "throughput (inferences/s)")


def charts(document: Json) -> tuple[list[Figure], list[str]]:
    """The charts that have data, and one sentence for each that has none.

    The speed of wrong outputs is drawn in none.
    """
    wrong = document["wrong"]
    points: list[Json] = [point for point in document["points"] if point["label"] not in wrong]
    document = {**document, "points": points}
    scenarios = list(dict.fromkeys(str(point["scenario"]) for point in points))
    drawn: list[Figure] = []
    for index, scenario in enumerate(scenarios, 1):  # two scenarios never share a chart
        chosen = [point for point in points if point["scenario"] == scenario]
        drawn += [_trade_off(document, chosen, index), _sweep(document, chosen, index)]
    others = {make: make(document) for make in _MISSING}
    drawn += [figure for figure in others.values() if figure]
    on_gpu = roofline(document, GPU_ROOFLINE)
    drawn += [*([on_gpu] if on_gpu else []), *layers_chart(document), *gpu_charts(document)]
    missing = [
        _MISSING[make]
        for make, figure in others.items()
        if not figure and (make is not request_waterfall or document["serving"])
    ]
    if not points:
        missing.insert(0, "Latency and throughput of the engines were not measured.")
    if wrong:
        missing.insert(0, f"Not drawn, as the outputs are wrong: {'; '.join(wrong)}.")
    if any(why_not(document, point) for point in points):
        missing.insert(0, "✗ in a chart: rows of this setup give no verdict, for reasons below.")
    if not gpu_charts(document):
        missing.append("Clocks, power and temperature are not drawn: no GPU was watched.")
    return drawn, missing


def _point_rows(points: Sequence[Json]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            str(point["label"]),
            count(point["batch"]),
            spread(point["latency"]["p50_ms"]),
            spread(point["latency"]["p99_ms"]),
            spread(point["throughput_per_s"]),
        )
        for chosen in by_label(points).values()
        for point in chosen
    )


def _trade_off(document: Json, points: Sequence[Json], index: int) -> Chart:
    look = looks(document)
    series = []
    for label, chosen in by_label(points).items():
        rates = [float(point["throughput_per_s"]["value"]) for point in chosen]
        marks, upper = [], []
        for rate, point in zip(rates, chosen, strict=True):
            p50, p99 = point["latency"]["p50_ms"], point["latency"]["p99_ms"]
            if p50 is not None:
                marks.append(Mark(rate, p50["value"], text=str(point["batch"])))
            if p99 is not None:
                upper.append(Mark(rate, p99["value"]))
        if marks:
            name = name_in_charts(document, label, chosen)
            series.append(Series(name, tuple(marks), look[label], tuple(upper)))
    usable = [point for point in points if not why_not(document, point)]
    best = max(usable or points, key=lambda point: float(point["throughput_per_s"]["value"]))
    p50_ms = value(best["latency"]["p50_ms"])
    doubt = "" if usable else "None of these rows gives a verdict. "
    at = f", with a p50 of {number(p50_ms)}{SPACE}ms" if p50_ms is not None else ""
    return Chart(
        name=f"trade-off-{index}",
        title="Latency against throughput",
        finding=f"{doubt}The highest throughput is {number(best['throughput_per_s']['value'])} "
        f"inferences/s: {best['label']} at batch {best['batch']}{at}. Down and to the right is "
        "better. Heavy line p50, thin line or small mark p99; figures at marks are batch sizes.",
        x_label=f"throughput (inferences/s), {points[0]['scenario']}",
        y_label="latency of one call (ms)",
        series=tuple(series),
        limit=limit_line(document.get("slo_ms"), " at p99"),
        columns=_POINT_COLUMNS,
        rows=_point_rows(points),
        zero=False,
    )


def _sweep(document: Json, points: Sequence[Json], index: int) -> Chart:
    look = looks(document)
    series = tuple(
        Series(
            name_in_charts(document, label, chosen),
            tuple(mark(float(p["batch"]), p["throughput_per_s"]) for p in chosen),
            look[label],
        )
        for label, chosen in by_label(points).items()
    )
    batches = sorted({int(point["batch"]) for point in points})
    found = [c for c in document["crossovers"] if c["by"] == "throughput"]
    scenario = points[0]["scenario"]
    found = [c for c in found if c["scenario"] == scenario]
    sentences = [
        f"{c['label']} is ahead of {c['baseline']} from batch {c['batch']} on"
        for c in found
        if c["batch"] is not None
    ]
    behind = [c["label"] for c in found if c["batch"] is None]
    if behind:
        sentences.append(
            f"Not ahead of {document['baseline']} up to batch {batches[-1]}: {'; '.join(behind)}"
        )
    usable = [point for point in points if not why_not(document, point)]
    best = max(usable or points, key=lambda point: float(point["throughput_per_s"]["value"]))
    flags = [
        (float(c["batch"]), f"{c['label']} ahead from batch {c['batch']}")
        for c in found
        if c["label"] == best["label"] and c["batch"] not in (None, batches[0])
    ]
    return Chart(
        name=f"sweep-{index}",
        title="Throughput against batch size",
        finding=(". ".join(sentences) + ". " if sentences else "") + "Whiskers are 95 % intervals.",
        x_label=f"batch size (inferences per call), {scenario}",
        y_label="throughput (inferences/s)",
        series=series,
        x_ticks=tuple((float(batch), str(batch)) for batch in batches),
        x_log=len(batches) > 1,
        flag=flags[0] if flags else None,
        columns=_POINT_COLUMNS,
        rows=_point_rows(points),
    )


def _accuracy(document: Json) -> Chart | None:
    """Accuracy of each precision against the p50 latency of its setups at the smallest batch."""
    look = looks(document)
    series, rows, sentences = [], [], []
    metric = ""
    points = [p for p in document["points"] if p["scenario"] == document["points"][0]["scenario"]]
    points = at_smallest(points)
    for label, chosen in by_label(points).items():
        point = chosen[0]
        row = accuracy_of(document["accuracy"], label, str(point["precision"]))
        p50 = point["latency"]["p50_ms"]
        if row is None or p50 is None or why_not(document, point) == "wrong outputs":
            continue
        share = {key: part * 100 for key, part in row["value"].items()}
        series.append(Series(label, (mark(p50["value"], share),), look[label]))
        share_text = percent(row["value"], row["n"])
        rows.append((label, str(row["precision"]), share_text, count(row["n"]), spread(p50)))
        sentences.append(f"{label}: {share_text} at {number(p50['value'])}{SPACE}ms")
        metric = str(row["metric"])
    if not series:
        return None
    return Chart(
        name="accuracy",
        title="Accuracy against latency",
        finding="; ".join(sentences)
        + ". Up and to the left is better. Whiskers are 95 % intervals.",
        x_label=f"p50 latency (ms) at the smallest batch, {document['points'][0]['scenario']}",
        y_label=f"{metric} (%)",
        series=tuple(series),
        zero=False,
        columns=("setup", "precision", f"{metric}", "samples", "p50 (ms)"),
        rows=tuple(rows),
    )


_MISSING: Mapping[Callable[[Json], Figure | None], str] = {  # charts, and what to say without data
    calls_chart: "The latency of calls by percentile is not drawn: no calls were kept.",
    waterfall: "Where the time of a call goes is not drawn: compute alone was not timed.",
    roofline: "The roofline is not drawn: the limits of the machine were not measured.",
    _accuracy: "Accuracy against latency is not drawn: one of the two was not measured.",
    served_chart: "The latency of requests was not measured.",
    request_waterfall: "Where the time of a request goes is not drawn: no server reported it.",
}
