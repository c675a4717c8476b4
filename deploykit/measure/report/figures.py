"""Choose the charts of a report; each has a caption and a table of the same data.

Nothing is computed that is not in the document of `report.json`; svg.py draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploykit.measure.report.chart import LOOKS, Chart, Mark, Series
from deploykit.measure.report.formatting import MISSING, SPACE, count, number, percent, spread

Json = Mapping[str, Any]
_POINT_COLUMNS = ("setup", "batch", "p50 (ms)", "p99 (ms)", "throughput (inferences/s)")


def charts(document: Json) -> tuple[list[Chart], list[str]]:
    """The charts that have data, and one sentence for each that has none."""
    drawn: list[Chart] = []
    missing: list[str] = []
    points: list[Json] = document["points"]
    scenarios = list(dict.fromkeys(str(point["scenario"]) for point in points))
    for index, scenario in enumerate(scenarios, 1):  # two scenarios never share a chart
        chosen = [point for point in points if point["scenario"] == scenario]
        drawn += [_trade_off(document, chosen, index), _sweep(document, chosen, index)]
    if not points:
        missing.append("Latency and throughput of the engines were not measured.")
    accuracy = _accuracy(document)
    if accuracy is not None:
        drawn.append(accuracy)
    else:
        missing.append("Accuracy against latency is not drawn: one of the two was not measured.")
    served = served_chart(document)
    if served is not None:
        drawn.append(served)
    else:
        missing.append("Latency over HTTP was not measured.")
    return drawn, missing


def looks(document: Json) -> dict[str, int]:
    """Setup -> its look in every chart. The baseline has look 0, whatever its position."""
    labels = list(dict.fromkeys(str(point["label"]) for point in document["points"]))
    others = [label for label in labels if label != document["baseline"]]
    return {document["baseline"]: 0} | {label: i for i, label in enumerate(others, 1)}


def by_label(points: Sequence[Json]) -> dict[str, list[Json]]:
    """The points of each setup, by batch."""
    labels = dict.fromkeys(str(point["label"]) for point in points)
    return {
        label: sorted((p for p in points if p["label"] == label), key=lambda p: int(p["batch"]))
        for label in labels
    }


def _value(parts: Json | None) -> float | None:
    return None if parts is None else float(parts["value"])


def _mark(x: float, parts: Json, text: str = "") -> Mark:
    return Mark(x, parts["value"], parts["low"], parts["high"], text)


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
            series.append(Series(label, tuple(marks), look[label], tuple(upper)))
    best = max(points, key=lambda point: float(point["throughput_per_s"]["value"]))
    p50_ms = _value(best["latency"]["p50_ms"])
    at = f", with a p50 of {number(p50_ms)}{SPACE}ms" if p50_ms is not None else ""
    return Chart(
        name=f"trade-off-{index}",
        title="Latency against throughput",
        finding=f"The highest throughput is {number(best['throughput_per_s']['value'])} "
        f"inferences/s: {best['label']} at batch {best['batch']}{at}. Down and to the right is "
        "better. Heavy line p50, thin line p99; the figures at the marks are batch sizes.",
        x_label=f"throughput (inferences/s), {points[0]['scenario']}",
        y_label="latency of one call (ms)",
        series=tuple(series),
        columns=_POINT_COLUMNS,
        rows=_point_rows(points),
        zero=False,
    )


def _sweep(document: Json, points: Sequence[Json], index: int) -> Chart:
    look = looks(document)
    series = tuple(
        Series(
            label,
            tuple(_mark(float(p["batch"]), p["throughput_per_s"]) for p in chosen),
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
        if c["batch"] is not None
        else f"{c['label']} is not ahead of {c['baseline']} up to batch {batches[-1]}"
        for c in found
    ]
    fastest = max(points, key=lambda point: float(point["throughput_per_s"]["value"]))["label"]
    flags = [
        (float(c["batch"]), f"{c['label']} ahead from batch {c['batch']}")
        for c in found
        if c["label"] == fastest and c["batch"] not in (None, batches[0])
    ]
    return Chart(
        name=f"sweep-{index}",
        title="Throughput against batch size",
        finding=("; ".join(sentences) + ". " if sentences else "") + "Whiskers are 95 % intervals.",
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
    accuracy = {str(row["precision"]): row for row in document["accuracy"]}
    series, rows, sentences = [], [], []
    metric = ""
    points = [p for p in document["points"] if p["scenario"] == document["points"][0]["scenario"]]
    for label, chosen in by_label(points).items():
        point = chosen[0]
        row, p50 = accuracy.get(str(point["precision"])), point["latency"]["p50_ms"]
        if row is None or p50 is None:
            continue
        share = {key: part * 100 for key, part in row["value"].items()}
        series.append(Series(label, (_mark(p50["value"], share),), look[label]))
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


def served_chart(document: Json) -> Chart | None:
    """The percentile spectrum of each load level, to the maximum, on a logarithmic axis."""
    series: list[Series] = []
    rows, sentences, most = [], [], 100.0
    for result in document["serving"]:
        latency, label = result["latency"], load_label(result)
        if result["generator_limited"]:
            label += ", no verdict"
        if latency is None or latency["p50_ms"] is None:
            continue
        marks = [
            _mark(1 / share_left, latency[key])
            for key, share_left in (("p50_ms", 0.5), ("p90_ms", 0.1), ("p99_ms", 0.01))
            if latency[key] is not None
        ]
        if latency["samples"] > 100:
            marks.append(Mark(float(latency["samples"]), latency["max_ms"], text="max"))
        most = max(most, marks[-1].x)
        series.append(Series(label, tuple(marks), (len(series) + 1) % LOOKS))
        p99_ms = _value(latency["p99_ms"])
        rows.append(
            (
                label,
                *(spread(latency[key]) for key in ("p50_ms", "p90_ms", "p99_ms")),
                number(latency["max_ms"]),
                count(latency["samples"]),
            )
        )
        tail = MISSING if p99_ms is None else f"{number(p99_ms)}{SPACE}ms"
        sentences.append(f"{label}: p50 {number(latency['p50_ms']['value'])}{SPACE}ms, p99 {tail}")
    if not series:
        return None
    steps = ((2.0, "50 %"), (10.0, "90 %"), (100.0, "99 %"), (1e3, "99.9 %"), (1e4, "99.99 %"))
    more = ((1e5, "99.999 %"), (1e6, "99.9999 %"))
    return Chart(
        name="served",
        title="Latency over HTTP, by percentile",
        finding="; ".join(sentences) + ". The flatter a line, the steadier the server.",
        x_label="share of requests that were answered by then",
        y_label="latency (ms)",
        series=tuple(series),
        x_ticks=tuple(step for step in (*steps, *more) if step[0] <= most),
        x_log=True,
        columns=("load", "p50 (ms)", "p90 (ms)", "p99 (ms)", "max (ms)", "answers"),
        rows=tuple(rows),
    )


def load_label(result: Json) -> str:
    """How a load level is called: "32 connections" or "450 requests/s"."""
    if result["mode"] == "open":
        return f"{number(result['rate_per_s'])} requests/s"
    connections = int(result["concurrency"])
    return f"{count(connections)} connection{'s' if connections != 1 else ''}"
