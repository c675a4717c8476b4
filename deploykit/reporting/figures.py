"""Choose the charts of a report; each has a caption, and its data in a table of the report.

All figures come from the document of `report.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploykit.evaluation.formatting import MISSING, SPACE, Json, count, number, percent
from deploykit.evaluation.latency import percentile_ms
from deploykit.reporting.charts import BOUND, Bars, Chart, Figure, Mark, Series
from deploykit.reporting.tables import (
    accuracy_of,
    at_smallest,
    by_label,
    load_label,
    rate_of,
    why_not,
)

GPU_ROOFLINE = "gpu_roofline"
COLUMNS = ("layer", "operator", "ms", "share")
_DRAWN = 15  # most layers
_SHARES_LEFT = tuple(m * 10.0**-k for k in range(1, 8) for m in (5, 2.5, 1))  # slower calls
_TICKS = (
    (2.0, "50 %"),
    (10.0, "90 %"),
    *((1e2 * 10**n, f"{100 - 10.0**-n:g} %") for n in range(5)),
)
_TRACES = (
    ("clock_mhz", "GPU clock", "MHz", "clock"),
    ("power_w", "GPU power", "W", "power"),
    ("temperature_c", "GPU temperature", "°C", "temperature"),
)


def _looks(document: Json) -> dict[str, int]:
    """Return the unique look of each setup in all charts; the baseline has 0."""
    labels = dict.fromkeys([document["baseline"], *(str(p["label"]) for p in document["points"])])
    return {label: number for number, label in enumerate(labels)}


def _after_setups(document: Json) -> int:
    """Return the first look after the setups', for load levels, GPUs and parts of a call."""
    return len(_looks(document)) if document.get("points") else 1


def _name_in_charts(document: Json, label: str, points: Sequence[Json]) -> str:
    """Return a label, with a warning if some of its points are not used for conclusions."""
    marked = any(why_not(document, point) for point in points)
    return f"✗ {label}" if marked else label


def _mark(x: float, parts: Json) -> Mark:
    return Mark(x, parts["value"], parts["low"], parts["high"])


def _limit_line(slo_ms: float | None, of: str) -> tuple[float, str] | None:
    return (slo_ms, f"wanted{of}: {number(slo_ms)}{SPACE}ms") if slo_ms else None


def _part(part: float, whole: float | None) -> str:
    return f"{number(100 * part / whole)}{SPACE}%" if whole else MISSING


def charts(document: Json) -> tuple[list[Figure], list[str]]:
    """Return the charts that have data, of right outputs, and a sentence for each without."""
    wrong = document["wrong"]
    points: list[Json] = [point for point in document["points"] if point["label"] not in wrong]
    document = {**document, "points": points}
    drawn: list[Figure] = []
    missing = [f"Not drawn, as the outputs are wrong: {'; '.join(wrong)}."] * bool(wrong)
    if any(why_not(document, point) for point in points):
        missing += ["✗ in a chart: rows of this setup give no verdict, for reasons below."]
    if not points:
        missing += ["Latency and throughput of the engines were not measured."]
    scenarios = dict.fromkeys(str(point["scenario"]) for point in points)
    for index, scenario in enumerate(scenarios, 1):  # scenarios never share a chart
        chosen = [point for point in points if point["scenario"] == scenario]
        drawn += [_trade_off(document, chosen, index), _sweep(document, chosen, index)]
    for make, sentence in _MISSING.items():
        figure = make(document)
        drawn += [figure] if figure else []
        missing += [] if figure else [sentence]
    on_gpu, traces = roofline(document, GPU_ROOFLINE), gpu_charts(document)
    drawn += [*([on_gpu] if on_gpu else []), *layers_chart(document), *traces]
    if not traces:
        missing.append("Clocks, power and temperature are not drawn: no GPU was watched.")
    return drawn, missing


def _trade_off(document: Json, points: Sequence[Json], index: int) -> Chart:
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
        name=f"trade-off-{index}",
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


def _sweep(document: Json, points: Sequence[Json], index: int) -> Chart:
    look, scenario = _looks(document), points[0]["scenario"]
    batches = sorted({int(point["batch"]) for point in points})
    wanted = ("throughput", scenario)
    found = [c for c in document["crossovers"] if (c["by"], c["scenario"]) == wanted]
    ahead = [c for c in found if c["batch"] is not None]
    sentences = [
        f"{c['label']} is ahead of {c['baseline']} from batch {c['batch']} on" for c in ahead
    ]
    if behind := [c["label"] for c in found if c["batch"] is None]:
        sentences.append(
            f"Not ahead of {document['baseline']} up to batch {batches[-1]}: {'; '.join(behind)}"
        )
    usable = [point for point in points if not why_not(document, point)]
    best = max(usable or points, key=rate_of)
    flags = [
        (float(c["batch"]), f"{c['label']} ahead from batch {c['batch']}")
        for c in ahead
        if c["label"] == best["label"] and c["batch"] != batches[0]
    ]
    return Chart(
        name=f"sweep-{index}",
        title="Throughput against batch size",
        finding=". ".join([*sentences, "Whiskers are 95 % intervals."]),
        x_label=f"batch size (inferences per call), {scenario}",
        y_label="throughput (inferences/s)",
        series=tuple(
            Series(
                _name_in_charts(document, label, chosen),
                tuple(_mark(float(p["batch"]), p["throughput_per_s"]) for p in chosen),
                look[label],
            )
            for label, chosen in by_label(points).items()
        ),
        x_ticks=tuple((float(batch), str(batch)) for batch in batches),
        x_log=len(batches) > 1,
        flag=flags[0] if flags else None,
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
        name="calls",
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
            rows.append((label, batch, number(x), number(y), bound, _part(y, limit)))
    share, label, batch, bound = max(shares)
    return Chart(
        name=name,
        title="Roofline: what limits the speed" + " on the GPU" * (name == GPU_ROOFLINE),
        finding=f"{label} at batch {batch} comes closest to the limit of its {bound}: "
        f"{_part(share, 1)} of it. Left of the bend memory is the limit, right of it "
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
    look, series, sentences, metric = _looks(document), [], [], ""
    points = [p for p in document["points"] if p["scenario"] == document["points"][0]["scenario"]]
    for label, (point, *_) in by_label(at_smallest(points)).items():
        row = accuracy_of(document["accuracy"], label, str(point["precision"]))
        p50 = point["latency"]["p50_ms"]
        if row is None or p50 is None:
            continue
        share = {key: part * 100 for key, part in row["value"].items()}
        series.append(Series(label, (_mark(p50["value"], share),), look[label]))
        text, metric = percent(row["value"], row["n"]), str(row["metric"])
        sentences.append(f"{label}: {text} at {number(p50['value'])}{SPACE}ms")
    if not series:
        return None
    better = "Up and to the left is better. Whiskers are 95 % intervals."
    return Chart(
        name="accuracy",
        title="Accuracy against latency",
        finding=f"{'; '.join(sentences)}. {better}",
        x_label=f"p50 latency (ms) at the smallest batch, {points[0]['scenario']}",
        y_label=f"{metric} (%)",
        series=tuple(series),
        zero=False,
    )


def served_chart(document: Json) -> Chart | None:
    """Draw the percentiles of each load level up to the maximum, on a logarithmic axis."""
    series: list[Series] = []
    sentences, first = [], _after_setups(document)
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
        name="served",
        title="Latency of requests, by percentile",
        finding="; ".join(sentences) + ". The flatter a line, the steadier the server.",
        x_label="share of requests that were answered by then",
        y_label="latency (ms)",
        series=tuple(series),
        x_ticks=_ticks(series),
        limit=_limit_line(wanted.pop(), "") if len(wanted) == 1 else None,
        x_log=True,
    )


_MISSING: Mapping[Callable[[Json], Figure | None], str] = {  # chart -> sentence if it has no data
    calls_chart: "The latency of calls by percentile is not drawn: no calls were kept.",
    roofline: "The roofline is not drawn: the limits of the machine were not measured.",
    _accuracy: "Accuracy against latency is not drawn: one of the two was not measured.",
    served_chart: "The latency of requests was not measured.",
}


def gpu_charts(document: Json) -> list[Chart]:
    """Draw clock, power and temperature of the GPUs over the run, if recorded."""
    found = []
    for key, title, unit, what in _TRACES:
        series, sentences, why = [], [], list[str]()
        traced = [(gpu, (gpu.get("trace") or {}).get(key) or ()) for gpu in document["conditions"]]
        traced = [(gpu, values) for gpu, values in traced if any(v is not None for v in values)]
        for index, (gpu, values) in enumerate(traced):
            name = gpu["name"] + f" {index + 1}" * (len(traced) > 1)
            last = max(len(values) - 1, 1)
            marks = [Mark(100 * i / last, y) for i, y in enumerate(values) if y is not None]
            look = _after_setups(document) + index
            series.append(Series(name, tuple(marks), look, plain=True))
            low, high = (number(end([mark.y for mark in marks])) for end in (min, max))
            sentences.append(f"{name}: {low} to {high}")
            why += gpu["throttled"] or ()
        throttled = f"THROTTLED ({', '.join(dict.fromkeys(why))})" if why else "not throttled"
        chart = Chart(
            name=key,
            title=f"{title} over the run",
            finding=f"{'; '.join(sentences)}{SPACE}{unit}; {throttled}.",
            x_label="share of the run (%)",
            y_label=f"{what} ({unit})",
            series=tuple(series),
            zero=False,
        )
        found += [chart] if series else []
    return found


def layer_rows(found: Json, most: int | None = None) -> list[tuple[str, ...]]:
    """Return the slowest layers of a LayerTimes in JSON, and the others in one row."""
    rows: list[tuple[str, ...]] = [
        (each["name"], each["op"], number(each["ms"]), _part(each["ms"], found["sum_ms"]))
        for each in found["layers"][:most]
    ]
    if others := found["count"] - len(rows):
        rest_ms = max(0.0, found["sum_ms"] - sum(each["ms"] for each in found["layers"][:most]))
        rest = MISSING, number(rest_ms), _part(rest_ms, found["sum_ms"])
        rows.append((f"{count(others)} others", *rest))
    return rows


def layer_note(found: Json) -> str:
    """Describe how far the layers add up to a call, and what follows from that."""
    share = found["sum_ms"] / found["call_ms"]
    call, profiled = (number(found[key]) for key in ("call_ms", "profiled_ms"))
    more_us = 1e3 * (found["profiled_ms"] - found["call_ms"]) / (found["count"] or 1)
    text = (
        f"{found['label']} at batch {found['batch']}, {found['runtime']}, {found['calls']} calls: "
        f"{count(found['count'])} layers add up to {_part(share, 1)} of a call of {call}{SPACE}ms "
        f"without the profiler, with which one takes {profiled}{SPACE}ms"
    )
    if more_us > 0:
        text += f", {number(more_us)}{SPACE}µs more for each layer"
    if abs(share - 1) > 0.05:  # share of a call by which the sum of its layers may differ
        text += f". NOT within 5{SPACE}%, so only the shares say something: the profiler takes "
        text += "time itself and may count whole microseconds, or other work ran meanwhile"
    return f"{text}."


def layers_chart(document: Json) -> list[Bars]:
    """Draw the layers of each engine whose layers were timed."""
    return [
        Bars(
            name="layers",
            title=f"Where the time goes, by layer: {found['label']}",
            finding=f"{found['layers'][0]['name']} ({found['layers'][0]['op']}) takes "
            f"{_part(found['layers'][0]['ms'], found['sum_ms'])} of the time of all layers. "
            + layer_note(found),
            x_label="time in one call (ms)",
            bars=tuple(
                (f"{each['name']} · {each['op']}", each["ms"]) for each in found["layers"][:_DRAWN]
            ),
            look=_after_setups(document),
            columns=COLUMNS,
            rows=tuple(layer_rows(found)),
        )
        for found in document.get("layers") or ()
        if found["sum_ms"]
    ]
