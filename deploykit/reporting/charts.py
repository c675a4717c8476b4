"""Choose and draw the charts of a report, as HTML and SVG that CSS scales, without scripts.

Each has a caption on how to read it, and its data in a table of the report; all figures come from
the document of `report.json`. Coordinates in a plot are percentages, so one drawing fits a phone
and a wide page; text and markers keep their size. Series differ in colour, dash and marker, so that
no reader needs the colours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import accumulate

from deploykit.evaluation.formatting import SPACE, Json, number
from deploykit.evaluation.statistics import percentile_ms
from deploykit.reporting.tables import (
    accuracy_of,
    at_smallest,
    by_label,
    load_label,
    rate_of,
    why_not,
)

LOG_FROM = 20  # axes whose values span a larger ratio are logarithmic
Ticks = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`; `ticks` are values and labels."""

    low: float
    high: float
    log: bool
    ticks: Ticks

    def at(self, value: float) -> float:
        """Return the position of a value in per cent of the axis."""
        low, high, value = self.low, self.high, value
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return 100 * (value - low) / (high - low)


def make_axis(
    values: Sequence[float], *, log: bool | None = None, zero: bool = False, ticks: Ticks = ()
) -> Axis:
    """Return an axis over one or more finite values.

    With `log` None the axis is logarithmic if the values span more than `LOG_FROM`. With `zero` a
    linear axis begins at 0.
    """
    low, high = min(values), max(values)
    if low > 0 and (high / low > LOG_FROM if log is None else log):
        margin = 1.15 if low < high else 2.0
        low, high = low / margin, high * margin
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5)):  # the fewest steps that give three ticks
            places = [float(f"{step}e{power}") for power in decades for step in steps]
            places = [place for place in places if low <= place <= high]
            if len(places) >= 3:
                break
        return Axis(low, high, True, ticks or [(place, _tick(place)) for place in places])
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    places = [i * step for i in range(first, last + 1)]
    ticks = ticks or [(place, _tick(place)) for place in places]
    return Axis(places[0], places[-1], False, ticks)


def _tick(value: float) -> str:
    """Return a round number as text: 0.3, 10, 12 500."""
    text = f"{value:,.12f}".rstrip("0").rstrip(".").replace(",", SPACE)
    return text.replace("-", "−")


COLOURS = 16  # colours in `look.css`; 0 is the baseline's
BOUND = -1  # the look of a limit, not of a setup


@dataclass(frozen=True)
class Mark:
    """One measured point; `low` to `high` is its interval, `text` its label."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Series:
    """A line through `marks` in order."""

    label: str
    marks: tuple[Mark, ...]
    look: int = 0


@dataclass(frozen=True)
class Chart:
    """One figure.

    `x_ticks`: values and labels of the x axis; round numbers if empty. `x_log`, `y_log`: None
    decides by the values' span. `zero`: the y axis begins at 0. `limit`: a y value and its label.
    """

    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    x_log: bool | None = None
    y_log: bool | None = None
    zero: bool = True
    limit: tuple[float, str] | None = None


_DASHES = ("", "7 4", "2 4", "10 4 2 4", "4 2", "12 3", "1 3", "6 2 1 2")
_SHAPES = (  # the first, a circle, is the baseline's
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.7 -3.7h7.4v7.4h-7.4Z",
    "M0 -4.8L4.6 3.6H-4.6Z",
    "M0 -5.2L5.2 0L0 5.2L-5.2 0Z",
    "M0 4.8L4.6 -3.6H-4.6Z",
    "M-4.8 0L3.6 -4.6V4.6Z",
    "M4.8 0L-3.6 -4.6V4.6Z",
    "M-2.2 -4.4H2.2L4.6 0L2.2 4.4H-2.2L-4.6 0Z",
)
_MARKERS = 16  # lines of more marks show about five markers
_CHARACTER = 2.6  # its width on a phone, in per cent of a plot
_APART = (7.0, 5.0)  # least distance of labels in x and y, to be legible on a phone
Place = tuple[float, float]  # in per cent of the plot, from the left and the top


def draw(chart: Chart) -> str:
    """Return the chart as HTML, a legend above its drawing; "" if there is nothing to draw."""
    series = [one for one in chart.series if one.marks]
    if not series:
        return ""
    marks = [mark for one in series for mark in one.marks]
    ends = [end for mark in marks for end in (mark.y, mark.low, mark.high) if end is not None]
    ends = [*filter(math.isfinite, ends), *(chart.limit or ())[:1]]
    x_values = [mark.x for mark in marks] + [x for x, _ in chart.x_ticks]
    x_axis = make_axis(x_values, log=chart.x_log, ticks=chart.x_ticks)
    y_axis = make_axis(ends, log=chart.y_log, zero=chart.zero)

    def at(x: float, y: float) -> Place:
        return x_axis.at(x), 100 - y_axis.at(y)

    (lines, still), keys = _draw_axes(x_axis, y_axis), list[str]()
    for one in series:
        places, look = [at(mark.x, mark.y) for mark in one.marks], one.look
        whiskers = [
            f'<path class="whisker" d="{_path([at(mark.x, mark.low), at(mark.x, mark.high)])}"/>'
            for mark in one.marks
            if mark.low is not None and mark.high is not None and mark.high > mark.low
        ]
        lines.append(group(look, line(places, look) * (len(places) > 1), *whiskers))
        shown = places if len(places) <= _MARKERS else places[:: len(places) // 5]
        still.append(group(look, *(_at(place, marker(look)) for place in shown)))
        sample = line([(0, 6), (34, 6)], look) + _at((50, 50), marker(look))
        keys.append(_key(group(look, sample), one.label))
    if chart.limit:
        lines.append(f'<path class="flag" d="M0 {_px(100 - y_axis.at(chart.limit[0]))}H100"/>')
        keys.append(_key('<path class="flag" d="M0 6H34"/>', chart.limit[1]))
    still += _mark_labels((at(mark.x, mark.y), mark.text) for mark in marks if mark.text)
    names = [
        label + ", log scale" * axis.log
        for label, axis in ((chart.y_label, y_axis), (chart.x_label, x_axis))
    ]
    stretched = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(lines)}</svg>'
    return (
        f'<ul class="legend">{"".join(keys)}</ul><p class="axis-name">{escape(names[0])}</p>'
        f'<svg class="plot" role="img" aria-label="{escape(chart.title)}">'
        f"{stretched}{''.join(still)}</svg>"
        f'<p class="axis-name below">{escape(names[1])}</p>'
    )


def _draw_axes(x_axis: Axis, y_axis: Axis) -> tuple[list[str], list[str]]:
    """Return the lines of both axes and the labels of their ticks."""
    lines, labels = ['<path class="axis" d="M0 100H100"/>'], []
    for value, text in y_axis.ticks:
        y = 100 - y_axis.at(value)
        lines.append(f'<path class="grid" d="M0 {_px(y)}H100"/>')
        labels.append(_text((0, y), text, "tick", "end", -8, 4))
    for x, text in _spaced(x_axis):
        lines.append(f'<path class="axis" d="M{_px(x)} 100v1.5"/>')
        labels.append(_text((x, 100), text, "tick", "middle", 0, 20))
    return lines, labels


def _spaced(axis: Axis) -> list[tuple[float, str]]:
    """Return positions and labels of ticks: all, or every n-th to fit on a phone."""
    for step in itertools.count(1):
        found = [(axis.at(value), text) for value, text in axis.ticks[::step]]
        pairs = itertools.pairwise(found)
        if all(b - a > _CHARACTER * (1 + len(s + t) / 2) for (a, s), (b, t) in pairs):
            break
    return found


def _mark_labels(labels: Iterable[tuple[Place, str]]) -> Iterator[str]:
    """Yield the labels of marks, without those too near another one."""
    taken: list[Place] = []
    for (x, y), text in labels:
        if not any(abs(x - a) < _APART[0] and abs(y - b) < _APART[1] for a, b in taken):
            taken.append((x, y))
            anchor, dx = ("start", 8) if x < 100 - _APART[0] else ("end", -8)
            yield _text((x, y), text, "small", anchor, dx, 4)


def _text(place: Place, text: str, kind: str, anchor: str, dx: float, dy: float) -> str:
    x, y = map(_px, place)
    return (
        f'<text class="{kind}" x="{x}%" y="{y}%" dx="{dx}" dy="{dy}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _path(places: Sequence[Place]) -> str:
    return "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in places)


def line(places: Sequence[Place], look: int) -> str:
    dash = _DASHES[look % len(_DASHES)] if look != BOUND else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="line" d="{_path(places)}"{dashed}/>'


def marker(look: int) -> str:
    """Return one of 16 markers: eight shapes, filled or hollow."""
    if look == BOUND:
        return ""
    hollow = ' class="hollow"' * (look // len(_SHAPES) % 2)
    return f'<path d="{_SHAPES[look % len(_SHAPES)]}"{hollow}/>'


def group(look: int, *parts: str) -> str:
    """Return the parts in one colour: setups repeat 15 colours, the baseline has its own."""
    kind = "bound" if look == BOUND else f"s{1 + (look - 1) % (COLOURS - 1) if look else 0}"
    return f'<g class="s {kind}">{"".join(parts)}</g>' if any(parts) else ""


def _at(place: Place, drawn: str) -> str:
    return f'<svg x="{_px(place[0])}%" y="{_px(place[1])}%">{drawn}</svg>' if drawn else ""


def _key(sample: str, label: str) -> str:
    return f'<li><svg class="key" aria-hidden="true">{sample}</svg>{escape(label)}</li>'


def _px(value: float) -> str:
    return f"{round(value, 2) + 0.0:g}"  # + 0.0: no minus zero


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


def _by_setup(
    document: Json, points: Sequence[Json], marks_of: Callable[[list[Json]], Iterable[Mark]]
) -> tuple[Series, ...]:
    """Return a series for each setup that has marks; ✗ in its name: a point gives no verdict."""
    looks, found = _looks(document), []
    for label, chosen in by_label(points).items():
        if marks := tuple(marks_of(chosen)):
            name = "✗ " * any(why_not(document, point) for point in chosen) + label
            found.append(Series(name, marks, looks.get(label, len(looks))))
    return tuple(found)


def _mark(x: float, parts: Json, text: str = "") -> Mark:
    return Mark(x, parts["value"], parts["low"], parts["high"], text)


def _limit_line(slo_ms: float | None, of: str) -> tuple[float, str] | None:
    return (slo_ms, f"wanted{of}: {number(slo_ms)}{SPACE}ms") if slo_ms else None


def charts(document: Json) -> tuple[list[Chart], list[str]]:
    """Return the charts that have data, of right outputs, and notes on what they leave out."""
    wrong = document["wrong"]
    points: list[Json] = [point for point in document["points"] if point["label"] not in wrong]
    document = {**document, "points": points}
    notes = [f"Not drawn, as the outputs are wrong: {'; '.join(wrong)}."] * bool(wrong)
    if any(why_not(document, point) for point in points):
        notes += ["✗ in a chart: rows of this setup give no verdict, for reasons below."]
    drawn = list[Chart | None]()
    for scenario in dict.fromkeys(point["scenario"] for point in points):  # they share no chart
        chosen = [point for point in points if point["scenario"] == scenario]
        drawn += [_trade_off(document, chosen), _sweep(document, chosen)]
    drawn += [make(document) for make in (calls_chart, roofline, _accuracy, served_chart)]
    drawn += [roofline(document, GPU_ROOFLINE), *_traces(document)]
    drawn += [_waterfall(document, each) for each in document["layers"] if each["sum_ms"]]
    return [chart for chart in drawn if chart], notes


def _trade_off(document: Json, points: Sequence[Json]) -> Chart:
    def marks_of(chosen: list[Json]) -> Iterator[Mark]:
        for point in chosen:
            p50, p99 = (point["latency"][key] for key in ("p50_ms", "p99_ms"))
            if p50 is not None:
                ends = (p50["value"], p99 and p99["value"])
                yield Mark(rate_of(point), p50["value"], *ends, str(point["batch"]))

    return Chart(
        title="Latency against throughput",
        caption="Down and to the right is better. Marks are the p50, whiskers reach up to the p99; "
        "the figures are batch sizes.",
        x_label=f"throughput (inferences/s), {points[0]['scenario']}",
        y_label="latency of one call (ms)",
        series=_by_setup(document, points, marks_of),
        limit=_limit_line(document.get("slo_ms"), " at p99"),
        zero=False,
    )


def _sweep(document: Json, points: Sequence[Json]) -> Chart:
    scenario, batches = points[0]["scenario"], sorted({int(point["batch"]) for point in points})
    overtakes = [
        (found["label"], found["batch"])
        for found in document["crossovers"]
        if (found["by"], found["scenario"]) == ("throughput", scenario)
    ]

    def mark(point: Json) -> Mark:
        ahead = point["batch"] > batches[0] and (point["label"], point["batch"]) in overtakes
        return _mark(float(point["batch"]), point["throughput_per_s"], "ahead from here" * ahead)

    return Chart(
        title="Throughput against batch size",
        caption="Whiskers are 95 % intervals. A label names the batch from which on a setup that "
        "was behind the baseline stays ahead of it.",
        x_label=f"batch size (inferences per call), {scenario}",
        y_label="throughput (inferences/s)",
        series=_by_setup(document, points, partial(map, mark)),
        x_ticks=tuple((float(batch), str(batch)) for batch in batches),
        x_log=len(batches) > 1,
    )


def calls_chart(document: Json) -> Chart | None:
    """Draw the calls of each setup at the smallest batch from their histograms."""
    points = [p for p in document["points"] if p["histogram"] and p["histogram"]["counts"]]
    points = at_smallest([p for p in points if p["scenario"] == points[0]["scenario"]])

    def marks_of(chosen: list[Json]) -> list[Mark]:
        histogram = chosen[0]["histogram"]
        calls, slowest = sum(histogram["counts"]), percentile_ms(histogram, 100)
        shares = [share for share in _SHARES_LEFT if share * calls >= 1]
        marks = [Mark(1 / share, percentile_ms(histogram, 100 - 100 * share)) for share in shares]
        return [*marks, Mark(max(float(calls), marks[-1].x), slowest)] if marks else []

    series = _by_setup(document, points, marks_of)
    if not series:
        return None
    return Chart(
        title="Latency of calls, by percentile",
        caption="The flatter a line, the steadier the engine; its right end is the slowest call.",
        x_label=f"share of calls that took no longer, {points[0]['scenario']}, smallest batch",
        y_label="latency of one call (ms)",
        series=series,
        x_ticks=_percentile_ticks(series),
        x_log=True,
        zero=False,
    )


def _percentile_ticks(series: Sequence[Series]) -> tuple[tuple[float, str], ...]:
    most = max(mark.x for one in series for mark in one.marks)
    return tuple(tick for tick in _TICKS if tick[0] <= max(most, 100.0))


def roofline(document: Json, name: str = "roofline") -> Chart | None:
    """Draw the performance of each setup under the machine's roofline (Williams et al., 2009)."""
    found = document[name] or {}
    points = [p for p in found.get("points") or [] if p["intensity"] > 0 and p["gflops"] > 0]
    points = [point for point in points if point["label"] not in document["wrong"]]
    ceilings = found.get("ceilings") or {}
    most, fastest = (float(ceilings.get(key, 0)) for key in ("gflops", "gbytes_per_s"))
    if not points or not (most > 0 and fastest > 0):
        return None
    ridge = most / fastest
    xs = [ridge, *(float(point["intensity"]) for point in points)]
    roof = tuple(Mark(x, min(most, x * fastest)) for x in (min(xs) / 2, ridge, max(xs) * 2))

    def mark(point: Json) -> Mark:
        return Mark(float(point["intensity"]), float(point["gflops"]), text=str(point["batch"]))

    return Chart(
        title="Roofline: what limits the speed" + " on the GPU" * (name == GPU_ROOFLINE),
        caption="Left of the bend memory is the limit, right of it arithmetic; far below the line "
        "it is neither, but launches and calls. The figures at the marks are batch sizes.",
        x_label="operations per byte that is moved (FLOP/byte)",
        y_label="speed (GFLOP/s)",
        series=(
            Series("measured limit", roof, BOUND),
            *_by_setup(document, points, partial(map, mark)),
        ),
        x_log=True,
        y_log=True,
        zero=False,
    )


def _accuracy(document: Json) -> Chart | None:
    """Draw the accuracy of each setup against its p50 latency at the smallest batch."""
    points = [p for p in document["points"] if p["scenario"] == document["points"][0]["scenario"]]
    metrics: list[str] = []

    def marks_of(chosen: list[Json]) -> Iterator[Mark]:
        point, p50 = chosen[0], chosen[0]["latency"]["p50_ms"]
        row = accuracy_of(document["accuracy"], point["label"], str(point["precision"]))
        if row is not None and p50 is not None:
            metrics.append(str(row["metric"]))
            yield _mark(p50["value"], {key: part * 100 for key, part in row["value"].items()})

    series = _by_setup(document, at_smallest(points), marks_of)
    if not series:
        return None
    return Chart(
        title="Accuracy against latency",
        caption="Up and to the left is better. Whiskers are 95 % intervals.",
        x_label=f"p50 latency (ms) at the smallest batch, {points[0]['scenario']}",
        y_label=f"{metrics[-1]} (%)",
        series=series,
        zero=False,
    )


def _waterfall(document: Json, found: Json) -> Chart:
    """Draw how the slowest layers of a LayerTimes add up to a call."""
    ends_ms = accumulate(each["ms"] for each in found["layers"])
    marks = tuple(
        Mark(float(place), end_ms, text=layer["name"][:_NAME] if place <= 3 else "")
        for place, (layer, end_ms) in enumerate(zip(found["layers"], ends_ms, strict=True), 1)
    )
    look = _looks(document).get(found["label"], 1)
    return Chart(
        title=f"Where the time goes, by layer: {found['label']}",
        caption="The longer a line is flat, the fewer layers make the time; a table has all.",
        x_label="layers, the slowest first",
        y_label="their time in a call (ms)",
        series=(Series(found["label"], marks, look),),
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
            series += [Series(gpu["name"], tuple(marks), look + len(series))]
        why = {each for gpu in document["conditions"] for each in gpu["throttled"] or ()}
        chart = Chart(
            title=f"GPU {what} over the run",
            caption=f"THROTTLED ({', '.join(sorted(why))})." if why else "Not throttled.",
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
    first = len(_looks(document)) if document.get("points") else 1  # the first after the setups'
    wanted = {result.get("slo_ms") for result in document["serving"]}
    for result in document["serving"]:
        latency, label = result["latency"], load_label(result)
        if latency is None or latency["p50_ms"] is None:
            continue
        label += ", no verdict" * bool(result["generator_limited"] or result["marks"])
        shares_left = (("p50_ms", 0.5), ("p90_ms", 0.1), ("p99_ms", 0.01))
        marks = [_mark(1 / left, latency[key]) for key, left in shares_left if latency[key]]
        if latency["samples"] > 100 and latency["max_ms"] is not None:
            marks.append(Mark(float(latency["samples"]), latency["max_ms"], text="max"))
        series.append(Series(label, tuple(marks), first + len(series)))
    if not series:
        return None
    return Chart(
        title="Latency of requests, by percentile",
        caption="The flatter a line, the steadier the server.",
        x_label="share of requests that were answered by then",
        y_label="latency (ms)",
        series=tuple(series),
        x_ticks=_percentile_ticks(series),
        limit=_limit_line(wanted.pop(), "") if len(wanted) == 1 else None,
        x_log=True,
    )
