"""Choose the charts of a report; each has a caption and a table of the same data.

Nothing is computed that is not in the document of `report.json`; svg.py draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploykit.evaluation.formatting import MISSING, SPACE, count, number, percent, spread
from deploykit.evaluation.latency import percentile_ms
from deploykit.reporting.charts import BOUND, Bars, Chart, Figure, Mark, Series
from deploykit.reporting.tables import (
    JsonRows as Json,
)
from deploykit.reporting.tables import (
    accuracy_of,
    after_setups,
    at_smallest,
    by_label,
    limit_line,
    load_label,
    looks,
    mark,
    name_in_charts,
    value,
    why_not,
)

# Charts of what limits an engine: where its time goes, the roofline, and the state of its GPU.

GPU_ROOFLINE = "gpu_roofline"
_TRACES = (
    ("clock_mhz", "GPU clock", "clock (MHz)"),
    ("power_w", "GPU power", "power (W)"),
    ("temperature_c", "GPU temperature", "temperature (°C)"),
)


def waterfall(document: Json) -> Bars | None:
    """What a call is made of at the smallest batch, for setups whose compute was timed alone."""
    bars, rows = [], []
    for label, chosen in by_label(at_smallest(document["points"])).items():
        whole = value(chosen[0]["latency"]["p50_ms"])
        compute = value((chosen[0].get("compute") or {}).get("p50_ms"))
        if whole is None or compute is None:
            continue
        rest = max(whole - compute, 0.0)
        bars.append((label, (compute, rest)))
        rows.append((label, count(chosen[0]["batch"]), *map(number, (compute, rest, whole))))
    if not bars:
        return None
    look = looks(document)
    label, (compute, rest) = max(bars, key=lambda bar: bar[1][1])
    share = f"{100 * rest / (compute + rest):.0f}{SPACE}%"
    return Bars(
        name="waterfall",
        title="Where the time of a call goes",
        finding=f"{label} spends {share} of a call outside of its kernels: copies to and from the "
        "GPU, launches, and the call itself. Medians at the smallest batch.",
        x_label="time of one call (ms)",
        parts=("compute", "copies and launches"),
        bars=tuple(bars),
        look=after_setups(document),
        looks=tuple(look[name] for name, _ in bars),
        columns=("setup", "batch", "compute (ms)", "copies and launches (ms)", "whole (ms)"),
        rows=tuple(rows),
    )


def roofline(document: Json, name: str = "roofline") -> Chart | None:
    """What each setup reaches under what was measured of the machine (Williams et al., 2009)."""
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
    look, series, rows = looks(document), list[Series](), []
    shares: list[tuple[float, str, str, str]] = []
    for label, chosen in by_label(points).items():
        marks = tuple(
            Mark(float(p["intensity"]), float(p["gflops"]), text=str(p["batch"])) for p in chosen
        )
        series.append(Series(label, marks, look.get(label, len(look))))
        for point in marks:
            bound = "memory" if point.x < ridge else "arithmetic"
            shares.append((point.y / min(most, point.x * fastest), label, point.text, bound))
            of_it = f"{100 * shares[-1][0]:.0f}{SPACE}%"
            rows.append((label, point.text, number(point.x), number(point.y), bound, of_it))
    share, label, batch, bound = max(shares)
    return Chart(
        name=name,
        title="Roofline: what limits the speed" + " on the GPU" * (name == GPU_ROOFLINE),
        finding=f"{label} at batch {batch} comes closest to the limit of its {bound}: "
        f"{100 * share:.0f}{SPACE}% of it. Left of the bend memory is the limit, right of it "
        "arithmetic; far below the line it is neither, but launches and calls. The figures at the "
        "marks are batch sizes.",
        x_label="operations per byte that is moved (FLOP/byte)",
        y_label="speed (GFLOP/s)",
        series=(Series("measured limit", roof, BOUND, plain=True), *series),
        x_log=True,
        y_log=True,
        zero=False,
        columns=("setup", "batch", "FLOP/byte", "GFLOP/s", "bound by", "of the limit"),
        rows=tuple(rows),
    )


def gpu_charts(document: Json) -> list[Chart]:
    """Clock, power and temperature of the GPUs over the run, where they were recorded."""
    found = []
    first = after_setups(document)
    for key, title, y_label in _TRACES:
        gpus = [
            each for each in document["conditions"] if _known((each.get("trace") or {}).get(key))
        ]
        if gpus:
            found.append(_trace(key, title, y_label, gpus, first))
    return found


def _known(values: Sequence[float | None] | None) -> list[float]:
    return [each for each in values or () if each is not None]


def _trace(key: str, title: str, y_label: str, gpus: Sequence[Json], first: int) -> Chart:
    series, rows, sentences = [], [], []
    for index, gpu in enumerate(gpus):
        values, name = gpu["trace"][key], gpu["name"] + f" {index + 1}" * (len(gpus) > 1)
        last = max(len(values) - 1, 1)
        marks = [Mark(100 * i / last, y) for i, y in enumerate(values) if y is not None]
        series.append(Series(name, tuple(marks), first + index, plain=True))
        low, high = min(_known(values)), max(_known(values))
        rows.append((name, number(low), number(high), count(len(values))))
        sentences.append(f"{name}: {number(low)} to {number(high)}")
    why = [reason for gpu in gpus for reason in gpu["throttled"] or ()]
    throttled = f"; THROTTLED ({', '.join(dict.fromkeys(why))})" if why else "; not throttled"
    unit = y_label.partition("(")[2].rstrip(")")
    return Chart(
        name=key,
        title=f"{title} over the run",
        finding="; ".join(sentences) + f"{SPACE}{unit}{throttled}.",
        x_label="share of the run (%)",
        y_label=y_label,
        series=tuple(series),
        zero=False,
        columns=("GPU", f"lowest, {y_label}", "highest", "samples"),
        rows=tuple(rows),
    )


# The layers of a call as a table and as a chart, and whether their times add up to the call.

COLUMNS = ("layer", "operator", "ms", "share", "GFLOP/s", "of ceiling")
_DRAWN = 15
_ADDS_UP = 0.05  # of a call, which the sum of its layers may be off


def layer_rows(found: Json, most: int | None = None) -> list[tuple[str, ...]]:
    """Of a LayerTimes in JSON: those that take most, then the others in one row."""
    rows, whole, rest_ms = list[tuple[str, ...]](), found["sum_ms"], found["sum_ms"]
    for each in found["layers"][:most]:
        ms, gflops = each["ms"], each["gflops"]
        rate = number(gflops) if gflops else MISSING
        reached = _share(gflops or 0.0, gflops and found["ceilings"].get(each["precision"]))
        rows.append((each["name"], each["op"], number(ms), _share(ms, whole), rate, reached))
        rest_ms = max(0.0, rest_ms - ms)
    if others := found["count"] - len(rows):
        rest = MISSING, number(rest_ms), _share(rest_ms, whole), MISSING, MISSING
        rows.append((f"{count(others)} others", *rest))
    return rows


def _share(part: float, whole: float | None) -> str:
    return f"{number(100 * part / whole)}{SPACE}%" if whole else MISSING


def layer_note(found: Json) -> str:
    """How far the layers add up to a call, and what to think of it."""
    share = found["sum_ms"] / found["call_ms"]
    call, profiled = (number(found[key]) for key in ("call_ms", "profiled_ms"))
    more_us = 1e3 * (found["profiled_ms"] - found["call_ms"]) / (found["count"] or 1)
    text = (
        f"{found['label']} at batch {found['batch']}, {found['runtime']}, {found['calls']} calls: "
        f"{count(found['count'])} layers add up to {_share(share, 1)} of a call of {call}{SPACE}ms "
        f"without the profiler, with which one takes {profiled}{SPACE}ms"
    )
    if more_us > 0:
        text += f", {number(more_us)}{SPACE}µs more for each layer"
    if abs(share - 1) > _ADDS_UP:
        text += f". NOT within 5{SPACE}%, so only the shares say something: the profiler takes "
        text += "time itself and may count whole microseconds, or other work ran meanwhile"
    return f"{text}.{_ceilings(found)}"


def _ceilings(found: Json) -> str:
    """What the rates are compared with, and where most time would be gained at the ceiling."""
    ceilings = {p: f"{number(most)} GFLOP/s in {p}" for p, most in found["ceilings"].items()}
    timed = [each for each in found["layers"] if each["gflops"] and each["precision"] in ceilings]
    if not timed:
        return ""
    names = ", ".join(ceilings[p] for p in dict.fromkeys(each["precision"] for each in timed))

    def lost_ms(layer: Json) -> float:
        return float(layer["ms"] * (1 - layer["gflops"] / found["ceilings"][layer["precision"]]))

    most = max(timed, key=lost_ms)
    return (
        f" The ceiling is {names}, the highest that a probe of this CPU or a layer reached; at it "
        f"the most time would be gained in {most['name']}: {number(lost_ms(most))}{SPACE}ms."
    )


def layers_chart(document: Json) -> list[Bars]:
    """One for each engine whose layers were timed."""
    return [_bars(document, found) for found in document.get("layers") or () if found["sum_ms"]]


def _bars(document: Json, found: Json) -> Bars:
    top = found["layers"][:_DRAWN]
    share = _share(top[0]["ms"], found["sum_ms"])
    takes = f"{top[0]['name']} ({top[0]['op']}) takes {share} of the time of all layers. "
    return Bars(
        name="layers",
        title=f"Where the time goes, by layer: {found['label']}",
        finding=takes + layer_note(found),
        x_label="time in one call (ms)",
        parts=("",),
        bars=tuple((f"{each['name']} · {each['op']}", (each["ms"],)) for each in top),
        look=after_setups(document),
        columns=COLUMNS,
        rows=tuple(layer_rows(found)),
    )


# Charts of latency by percentile, to the slowest call: of engines, and of a served model.

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
    missing = [_MISSING[make] for make, figure in others.items() if not figure]
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
}
