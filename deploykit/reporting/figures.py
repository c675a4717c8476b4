"""Choose the charts of a report; each has a caption, and its data in a table of the report.

All figures come from the document of `report.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from deploykit.evaluation.formatting import MISSING, SPACE, Json, number
from deploykit.evaluation.statistics import percentile_ms
from deploykit.reporting.charts import BOUND, Chart, Mark, Series
from deploykit.reporting.tables import (
    accuracy_of,
    at_smallest,
    by_label,
    load_label,
    part_of,
    rate_of,
    why_not,
)

_NAME = 24  # characters of a layer's name
GPU_ROOFLINE = "gpu_roofline"
_SHARES_LEFT = tuple(m * 10.0**-k for k in range(1, 8) for m in (5, 2.5, 1))  # slower calls
_TICKS = (
    (2.0, "50 %"),
    (10.0, "90 %"),
    *((1e2 * 10**n, f"{100 - 10.0**-n:g} %") for n in range(5)),
)
_TRACES = (
    ("clock_mhz", "clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "°C"),
)


def _looks(document: Json) -> dict[str, int]:
    """Return the unique look of each setup in all charts; the baseline has 0."""
    labels = dict.fromkeys([document["baseline"], *(str(p["label"]) for p in document["points"])])
    return {label: number for number, label in enumerate(labels)}


def _name_in_charts(document: Json, label: str, points: Sequence[Json]) -> str:
    """Return a label, with a warning if some of its points are not used for conclusions."""
    marked = any(why_not(document, point) for point in points)
    return f"✗ {label}" if marked else label


def _mark(x: float, parts: Json) -> Mark:
    return Mark(x, parts["value"], parts["low"], parts["high"])


def _limit_line(slo_ms: float | None, of: str) -> tuple[float, str] | None:
    return (slo_ms, f"wanted{of}: {number(slo_ms)}{SPACE}ms") if slo_ms else None


def charts(document: Json) -> tuple[list[Chart], list[str]]:
    """Return the charts that have data, of right outputs, and a sentence for each without."""
    wrong = document["wrong"]
    points: list[Json] = [point for point in document["points"] if point["label"] not in wrong]
    document = {**document, "points": points}
    drawn: list[Chart] = []
    missing = [f"Not drawn, as the outputs are wrong: {'; '.join(wrong)}."] * bool(wrong)
    if any(why_not(document, point) for point in points):
        missing += ["✗ in a chart: rows of this setup give no verdict, for reasons below."]
    if not points:
        missing += ["Latency and throughput of the engines were not measured."]
    scenarios = dict.fromkeys(str(point["scenario"]) for point in points)
    for scenario in scenarios:  # scenarios never share a chart
        chosen = [point for point in points if point["scenario"] == scenario]
        drawn += [_trade_off(document, chosen), _sweep(document, chosen)]
    others = (
        (calls_chart, "The latency of calls by percentile is not drawn: no calls were kept."),
        (roofline, "The roofline is not drawn: the limits of the machine were not measured."),
        (_accuracy, "Accuracy against latency is not drawn: one of the two was not measured."),
        (served_chart, "The latency of requests was not measured."),
        (partial(roofline, name=GPU_ROOFLINE), ""),
    )
    for make, sentence in others:
        chart = make(document)
        drawn += [chart] if chart else []
        missing += [sentence] if sentence and not chart else []
    layers = [each for each in document.get("layers") or () if each["sum_ms"]]
    drawn += [_waterfall(document, each) for each in layers] + _traces(document)
    return drawn, missing


def _trade_off(document: Json, points: Sequence[Json]) -> Chart:
    look, series = _looks(document), []
    for label, chosen in by_label(points).items():
        rates = [(rate_of(point), point, point["latency"]) for point in chosen]
        marks = [
            Mark(rate, latency["p50_ms"]["value"], text=str(point["batch"]))
            for rate, point, latency in rates
            if latency["p50_ms"] is not None
        ]
        upper = [Mark(rate, ms["p99_ms"]["value"]) for rate, _, ms in rates if ms["p99_ms"]]
        if marks:
            name = _name_in_charts(document, label, chosen)
            series.append(Series(name, tuple(marks), look[label], tuple(upper)))
    usable = [point for point in points if not why_not(document, point)]
    best = max(usable or points, key=rate_of)
    p50 = best["latency"]["p50_ms"]
    doubt = "" if usable else "None of these rows gives a verdict. "
    at = f", with a p50 of {number(p50['value'])}{SPACE}ms" if p50 is not None else ""
    return Chart(
        title="Latency against throughput",
        finding=f"{doubt}The highest throughput is {number(rate_of(best))} "
        f"inferences/s: {best['label']} at batch {best['batch']}{at}. Down and to the right is "
        "better. Heavy line p50, thin line or small mark p99; figures at marks are batch sizes.",
        x_label=f"throughput (inferences/s), {points[0]['scenario']}",
        y_label="latency of one call (ms)",
        series=tuple(series),
        limit=_limit_line(document.get("slo_ms"), " at p99"),
        zero=False,
    )


def _sweep(document: Json, points: Sequence[Json]) -> Chart:
    look, scenario = _looks(document), points[0]["scenario"]
    batches = sorted({int(point["batch"]) for point in points})
    wanted = ("throughput", scenario)
    found = [c for c in document["crossovers"] if (c["by"], c["scenario"]) == wanted]
    overtakes = {(c["label"], c["batch"]) for c in found if c["batch"] != batches[0]}
    sentences = [
        f"{c['label']} is ahead of {c['baseline']} from batch {c['batch']} on"
        for c in found
        if c["batch"] is not None
    ]
    if behind := [c["label"] for c in found if c["batch"] is None]:
        sentences.append(
            f"Not ahead of {document['baseline']} up to batch {batches[-1]}: {'; '.join(behind)}"
        )
    return Chart(
        title="Throughput against batch size",
        finding=". ".join([*sentences, "Whiskers are 95 % intervals."]),
        x_label=f"batch size (inferences per call), {scenario}",
        y_label="throughput (inferences/s)",
        series=tuple(
            Series(
                _name_in_charts(document, label, chosen),
                tuple(
                    replace(
                        _mark(float(p["batch"]), p["throughput_per_s"]),
                        text="ahead from here" * ((label, p["batch"]) in overtakes),
                    )
                    for p in chosen
                ),
                look[label],
            )
            for label, chosen in by_label(points).items()
        ),
        x_ticks=tuple((float(batch), str(batch)) for batch in batches),
        x_log=len(batches) > 1,
    )


def calls_chart(document: Json) -> Chart | None:
    """Draw the calls of each setup at the smallest batch from their histograms."""
    points = [p for p in document["points"] if p["histogram"] and p["histogram"]["counts"]]
    points = at_smallest([p for p in points if p["scenario"] == points[0]["scenario"]])
    look, series = _looks(document), []
    for label, (point, *_) in by_label(points).items():
        histogram = point["histogram"]
        calls, slowest = sum(histogram["counts"]), percentile_ms(histogram, 100)
        shares = [share for share in _SHARES_LEFT if share * calls >= 1]
        marks = [Mark(1 / share, percentile_ms(histogram, 100 - 100 * share)) for share in shares]
        if marks:
            marks.append(Mark(max(float(calls), marks[-1].x), slowest))
            name = _name_in_charts(document, label, [point])
            series.append(Series(name, tuple(marks), look[label], plain=True))
    if not series:
        return None
    times = {one.label: one.marks[-1].y / one.marks[0].y for one in series}
    widest = max(times, key=times.__getitem__)
    return Chart(
        title="Latency of calls, by percentile",
        finding=f"The slowest call of {widest} took {number(times[widest])} times its median, the "
        "most of all. The flatter a line, the steadier the engine; its right end is the slowest.",
        x_label=f"share of calls that took no longer, {points[0]['scenario']}, smallest batch",
        y_label="latency of one call (ms)",
        series=tuple(series),
        x_ticks=_ticks(series),
        x_log=True,
        zero=False,
    )


def _ticks(series: Sequence[Series]) -> tuple[tuple[float, str], ...]:
    most = max(mark.x for one in series for mark in one.marks)
    return tuple(tick for tick in _TICKS if tick[0] <= max(most, 100.0))


def roofline(document: Json, name: str = "roofline") -> Chart | None:
    """Draw the performance of each setup under the machine's roofline (Williams et al., 2009)."""
    found = document.get(name) or {}
    points = [p for p in found.get("points") or [] if p["intensity"] > 0 and p["gflops"] > 0]
    ceilings = found.get("ceilings") or {}
    most, fastest = (float(ceilings.get(key, 0)) for key in ("gflops", "gbytes_per_s"))
    if not points or not (most > 0 and fastest > 0):
        return None
    ridge = most / fastest
    xs = [float(point["intensity"]) for point in points]
    low, high = min(*xs, ridge) / 2, max(*xs, ridge) * 2
    roof = tuple(Mark(x, min(most, x * fastest)) for x in (low, ridge, high))
    look, series = _looks(document), [Series("measured limit", roof, BOUND, plain=True)]
    shares: list[tuple[float, str, str, str]] = []
    rows = []
    for label, chosen in by_label(points).items():
        marks = tuple(
            Mark(float(p["intensity"]), float(p["gflops"]), text=str(p["batch"])) for p in chosen
        )
        series.append(Series(label, marks, look.get(label, len(look))))
        for x, y, batch in ((one.x, one.y, one.text) for one in marks):
            bound, limit = "memory" if x < ridge else "arithmetic", min(most, x * fastest)
            shares.append((y / limit, label, batch, bound))
            rows.append((label, batch, number(x), number(y), bound, part_of(y, limit)))
    share, label, batch, bound = max(shares)
    return Chart(
        title="Roofline: what limits the speed" + " on the GPU" * (name == GPU_ROOFLINE),
        finding=f"{label} at batch {batch} comes closest to the limit of its {bound}: "
        f"{part_of(share, 1)} of it. Left of the bend memory is the limit, right of it "
        "arithmetic; far below the line it is neither, but launches and calls. The figures at the "
        "marks are batch sizes.",
        x_label="operations per byte that is moved (FLOP/byte)",
        y_label="speed (GFLOP/s)",
        series=tuple(series),
        x_log=True,
        y_log=True,
        zero=False,
        columns=("setup", "batch", "FLOP/byte", "GFLOP/s", "bound by", "of the limit"),
        rows=tuple(rows),
    )


def _accuracy(document: Json) -> Chart | None:
    """Draw the accuracy of each setup against its p50 latency at the smallest batch."""
    look, series, metric = _looks(document), [], ""
    points = [p for p in document["points"] if p["scenario"] == document["points"][0]["scenario"]]
    for label, (point, *_) in by_label(at_smallest(points)).items():
        row = accuracy_of(document["accuracy"], label, str(point["precision"]))
        p50 = point["latency"]["p50_ms"]
        if row is not None and p50 is not None:
            share = {key: part * 100 for key, part in row["value"].items()}
            series.append(Series(label, (_mark(p50["value"], share),), look[label]))
            metric = str(row["metric"])
    if not series:
        return None
    return Chart(
        title="Accuracy against latency",
        finding="Up and to the left is better. Whiskers are 95 % intervals.",
        x_label=f"p50 latency (ms) at the smallest batch, {points[0]['scenario']}",
        y_label=f"{metric} (%)",
        series=tuple(series),
        zero=False,
    )


def _waterfall(document: Json, found: Json) -> Chart:
    """Draw how the slowest layers of a LayerTimes add up to a call."""
    first, ends_ms = found["layers"][0], accumulate(each["ms"] for each in found["layers"])
    marks = tuple(
        Mark(float(place), end_ms, text=layer["name"][:_NAME] if place <= 3 else "")
        for place, (layer, end_ms) in enumerate(zip(found["layers"], ends_ms, strict=True), 1)
    )
    share, look = part_of(first["ms"], found["sum_ms"]), _looks(document).get(found["label"], 1)
    return Chart(
        title=f"Where the time goes, by layer: {found['label']}",
        finding=f"{first['name']} ({first['op']}) takes {share} of the time of all layers. "
        "The longer a line is flat, the fewer layers make the time; a table has all.",
        x_label="layers, the slowest first",
        y_label="their time in a call (ms)",
        series=(Series(found["label"], marks, look, plain=True),),
    )


def _traces(document: Json) -> list[Chart]:
    """Draw clock, power and temperature of the GPUs over the run, if recorded."""
    drawn = []
    for key, what, unit in _TRACES:
        series, look = list[Series](), len(_looks(document))
        for gpu in document["conditions"]:
            values = (gpu.get("trace") or {}).get(key) or ()
            last = max(len(values) - 1, 1)
            marks = [Mark(100 * i / last, y) for i, y in enumerate(values) if y is not None]
            series += [Series(gpu["name"], tuple(marks), look + len(series), plain=True)]
        why = {each for gpu in document["conditions"] for each in gpu["throttled"] or ()}
        chart = Chart(
            title=f"GPU {what} over the run",
            finding=f"THROTTLED ({', '.join(sorted(why))})." if why else "Not throttled.",
            x_label="share of the run (%)",
            y_label=f"{what} ({unit})",
            series=tuple(series),
            zero=False,
        )
        drawn += [chart] if any(one.marks for one in series) else []
    return drawn


def served_chart(document: Json) -> Chart | None:
    """Draw the percentiles of each load level up to the maximum, on a logarithmic axis."""
    series: list[Series] = []
    sentences = []
    first = len(_looks(document)) if document.get("points") else 1  # the first after the setups'
    wanted = {result.get("slo_ms") for result in document["serving"]}
    for result in document["serving"]:
        latency, label = result["latency"], load_label(result)
        if result["generator_limited"] or result["marks"]:
            label += ", no verdict"
        if latency is None or latency["p50_ms"] is None:
            continue
        shares_left = (("p50_ms", 0.5), ("p90_ms", 0.1), ("p99_ms", 0.01))
        marks = [_mark(1 / left, latency[key]) for key, left in shares_left if latency[key]]
        if latency["samples"] > 100 and latency["max_ms"] is not None:
            marks.append(Mark(float(latency["samples"]), latency["max_ms"], text="max"))
        series.append(Series(label, tuple(marks), first + len(series)))
        p99 = latency["p99_ms"]
        tail = MISSING if p99 is None else f"{number(p99['value'])}{SPACE}ms"
        sentences.append(f"{label}: p50 {number(latency['p50_ms']['value'])}{SPACE}ms, p99 {tail}")
    if not series:
        return None
    return Chart(
        title="Latency of requests, by percentile",
        finding="; ".join(sentences) + ". The flatter a line, the steadier the server.",
        x_label="share of requests that were answered by then",
        y_label="latency (ms)",
        series=tuple(series),
        x_ticks=_ticks(series),
        limit=_limit_line(wanted.pop(), "") if len(wanted) == 1 else None,
        x_log=True,
    )
