"""Draw a chart as SVG: lines with intervals over linear or logarithmic axes.

In: a `Chart`, whose text already says what it shows. Out: one `<svg>` that takes its colours from
the page around it, so that light, dark and print need no second picture. Series differ in colour,
dash and marker, and are named beside their line. The same chart gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from deploykit.measure.report.formatting import tick

WIDTH, HEIGHT = 760, 400
TOP, BOTTOM, LEFT = 28, 52, 64
FONT = 12.0
ROW = 18  # of labels above a plot
LOG_FROM = 20.0  # an axis whose values span more than this is logarithmic, and says so
DASHES = ("", "7 4", "2 4", "10 4 2 4", "4 2", "12 3", "1 3", "6 2 1 2")
LOOKS = 8  # colours, dashes and markers before they repeat; 0 is the baseline's
_EM = 0.6  # the mean width of a character, a little more than common fonts need


@dataclass(frozen=True)
class Mark:
    """One measured point; `low` to `high` is its interval, `text` stands beside it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Series:
    """A line through `marks`, in their order. `upper`: a thin line above it (p99 over p50)."""

    label: str
    marks: tuple[Mark, ...]
    look: int = 0
    upper: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Chart:
    """`finding` is what a reader should see in it; it is the text for those who cannot see.

    `x_ticks`: places and labels of the x axis where they are given, else round numbers. `zero`: the
    y axis begins at 0. `flag`: an x, and what begins there.
    """

    name: str
    title: str
    finding: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    x_log: bool | None = None  # None: if the values span much
    zero: bool = True
    flag: tuple[float, str] | None = None
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()  # the same data, for the table below


@dataclass(frozen=True)
class Axis:
    """Places values between `low` and `high` on a line of pixels."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float, start: float, end: float) -> float:
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        place = math.log(max(value, self.low)) if self.log else value
        return start + (place - low) / (high - low) * (end - start)


def make_axis(
    values: Iterable[float],
    *,
    log: bool | None = None,
    zero: bool = False,
    ticks: Sequence[tuple[float, str]] = (),
) -> Axis:
    """An axis over `values`, which must hold one or more finite numbers, with round ticks."""
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    if log is None:
        log = low > 0 and high / low > LOG_FROM
    if log and low > 0:
        return _log_axis(low, high, ticks)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = next(d for d in range(330) if math.isclose(step * 10**d, max(1, round(step * 10**d))))
    found = tuple((i * step, tick(i * step, digits)) for i in range(first, last + 1))
    return Axis(first * step, last * step, False, tuple(ticks) or found)


def _log_axis(low: float, high: float, ticks: Sequence[tuple[float, str]]) -> Axis:
    low, high = (low / 1.15, high * 1.15) if low < high else (low / 2, high * 2)
    found: list[tuple[float, str]] = []
    for steps in ((1,), (1, 3), (1, 2, 5)):  # the fewest that give three ticks
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        places = [step * 10.0**decade for decade in decades for step in steps]
        found = [(place, tick(place)) for place in places if low <= place <= high]
        if len(found) >= 3:
            break
    return Axis(low, high, True, tuple(ticks) or tuple(found))


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))


@dataclass
class _Canvas:
    """What is drawn so far, and which places are taken by text."""

    parts: list[str] = field(default_factory=list)
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.parts.append(text)

    def fits(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        return not any(
            left < r and right > x and top < b and bottom > t for x, t, r, b in self.taken
        )

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> None:
        self.taken.append(text_box(x, y, text, anchor))
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        style = f' class="{kind}"' if kind else ""
        self.add(f'<text x="{_px(x)}" y="{_px(y)}"{place}{style}>{escape(text)}</text>')

    def text_if_free(self, places: Iterable[tuple[float, float, str]], text: str) -> None:
        """Write `text` at the first of (x, y, anchor) where it covers nothing; else nowhere."""
        for x, y, anchor in places:
            if self.fits(text_box(x, y, text, anchor)):
                self.text(x, y, text, anchor=anchor, kind="small")
                return


def text_width(text: str) -> float:
    """About how many pixels `text` takes; rather too many than too few."""
    return sum(_EM if ord(c) < 0x2E80 else 1.0 for c in text) * FONT


def text_box(x: float, y: float, text: str, anchor: str) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a text whose baseline is at `y`."""
    width = text_width(text)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return left, y - FONT, left + width, y + 0.25 * FONT


def draw(chart: Chart) -> str:
    """The chart as an `<svg>`; a chart without any mark is an empty text."""
    chart = replace(chart, series=tuple(series for series in chart.series if series.marks))
    if not chart.series:
        return ""
    marks = [mark for series in chart.series for mark in (*series.marks, *series.upper)]
    ends = [e for m in marks for e in (m.y, m.low, m.high) if e is not None]
    values = [mark.y for mark in marks]
    many = min(values) > 0 and max(values) / min(values) > LOG_FROM
    y_axis = make_axis([e for e in ends if e > 0] if many else ends, log=many, zero=chart.zero)
    left = max(LEFT, 14 + max(text_width(text) for _, text in y_axis.ticks))
    single = all(len(series.marks) == 1 for series in chart.series)  # labels go above, not beside
    labels = 0.0 if single else max(text_width(_short(series.label)) for series in chart.series)
    right, bottom = WIDTH - labels - 34, HEIGHT - BOTTOM
    xs = [mark.x for mark in marks] + [x for x, _ in chart.x_ticks]
    x_axis = make_axis(xs, log=chart.x_log, ticks=chart.x_ticks)
    above = _above(chart.series, x_axis, left, right) if single else []
    top = TOP + ROW * max((row for _, row in above), default=0)
    canvas = _Canvas()
    place = _Place(x_axis, y_axis, left, right, top, bottom)
    _draw_axes(canvas, chart, place)
    _draw_flag(canvas, chart, place)
    for series in chart.series:
        _draw_series(canvas, series, place)
    if single:
        _draw_labels_above(canvas, chart.series, above, place)
    else:
        _draw_labels(canvas, chart.series, place)
    for series in chart.series:
        for mark in series.marks:
            x, y = place(mark.x, mark.y)
            if mark.text:
                around = [(x + 8, y + 5, "start"), (x, y + 19, "middle"), (x, y - 9, "middle")]
                canvas.text_if_free(around, mark.text)
    named = f'aria-labelledby="{chart.name}-t {chart.name}-d"'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {named}>'
        f'<title id="{chart.name}-t">{escape(chart.title)}</title>'
        f'<desc id="{chart.name}-d">{escape(chart.finding)}</desc>'
        + "".join(canvas.parts)
        + "</svg>"
    )


@dataclass(frozen=True)
class _Place:
    x_axis: Axis
    y_axis: Axis
    left: float
    right: float
    top: float
    bottom: float

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        return self.x_axis.at(x, self.left, self.right), self.y_axis.at(y, self.bottom, self.top)


def _draw_axes(canvas: _Canvas, chart: Chart, place: _Place) -> None:
    left, right, bottom = place.left, place.right, place.bottom
    for value, text in place.y_axis.ticks:
        y = place.y_axis.at(value, bottom, place.top)
        canvas.add(f'<path class="grid" d="M{_px(left)} {_px(y)}H{_px(right)}"/>')
        if canvas.fits(text_box(left - 8, y + 4, text, "end")):
            canvas.text(left - 8, y + 4, text, anchor="end", kind="tick")
    for value, text in place.x_axis.ticks:
        x = place.x_axis.at(value, left, right)
        if canvas.fits(text_box(x, bottom + 20, text + " ", "middle")):
            canvas.add(f'<path class="axis" d="M{_px(x)} {_px(bottom)}v5"/>')
            canvas.text(x, bottom + 20, text, anchor="middle", kind="tick")
    canvas.add(f'<path class="axis" d="M{_px(left)} {_px(bottom)}H{_px(right)}"/>')
    x_text = chart.x_label + (", log scale" if place.x_axis.log else "")
    y_text = chart.y_label + (", log scale" if place.y_axis.log else "")
    canvas.text((left + right) / 2, HEIGHT - 12, x_text, anchor="middle", kind="name")
    canvas.text(0, 13, y_text, kind="name")


def _draw_flag(canvas: _Canvas, chart: Chart, place: _Place) -> None:
    if chart.flag is None:
        return
    x = place.x_axis.at(chart.flag[0], place.left, place.right)
    canvas.add(f'<path class="flag" d="M{_px(x)} {TOP - 4}V{_px(place.bottom)}"/>')
    fits_right = x + 6 + text_width(chart.flag[1]) < place.right
    anchor, gap = ("start", 6) if fits_right else ("end", -6)
    canvas.text(x + gap, TOP + 8, chart.flag[1], anchor=anchor, kind="small")


def _draw_series(canvas: _Canvas, series: Series, place: _Place) -> None:
    look = series.look % LOOKS
    dash = f' stroke-dasharray="{DASHES[look]}"' if DASHES[look] else ""
    low = [place(mark.x, mark.y) for mark in series.marks]
    high = [place(mark.x, mark.y) for mark in series.upper]
    canvas.add(f'<g class="s{look}">')
    if len(high) > 1 and len(low) > 1:
        canvas.add(f'<path class="band" d="{_path([*low, *reversed(high)])}Z"/>')
        canvas.add(f'<path class="line thin" d="{_path(high)}"{dash}/>')
    if len(low) > 1:
        canvas.add(f'<path class="line" d="{_path(low)}"{dash}/>')
    for mark in (*series.marks, *series.upper):
        if mark.low is not None and mark.high is not None and mark.high > mark.low:
            (x, top), (_, end) = place(mark.x, mark.high), place(mark.x, mark.low)
            canvas.add(
                f'<path class="whisker" d="M{_px(x)} {_px(top)}V{_px(end)}'
                f'M{_px(x - 4)} {_px(top)}h8M{_px(x - 4)} {_px(end)}h8"/>'
            )
    canvas.add("".join(_marker(look, x, y) for x, y in low))
    canvas.taken += [(x - 5, y - 5, x + 5, y + 5) for x, y in low]
    if len(high) == 1 or len(low) == 1:
        canvas.add("".join(f'<g class="open">{_marker(look, x, y)}</g>' for x, y in high))
    canvas.add("</g>")


def _marker(look: int, x: float, y: float) -> str:
    if look == 0:
        return f'<circle cx="{_px(x)}" cy="{_px(y)}" r="4"/>'
    corners = (
        [(-3.7, -3.7), (3.7, -3.7), (3.7, 3.7), (-3.7, 3.7)],
        [(0, -4.8), (4.6, 3.6), (-4.6, 3.6)],
        [(0, -5.2), (5.2, 0), (0, 5.2), (-5.2, 0)],
        [(0, 4.8), (4.6, -3.6), (-4.6, -3.6)],
        [(-4.8, 0), (3.6, -4.6), (3.6, 4.6)],
        [(4.8, 0), (-3.6, -4.6), (-3.6, 4.6)],
        [(-2.2, -4.4), (2.2, -4.4), (4.6, 0), (2.2, 4.4), (-2.2, 4.4), (-4.6, 0)],
    )[look - 1]
    return f'<path d="{_path([(x + dx, y + dy) for dx, dy in corners])}Z"/>'


def _draw_labels(canvas: _Canvas, all_series: Sequence[Series], place: _Place) -> None:
    """Name each line at the right edge, in the order of their ends, none over another."""
    ends = sorted((place(s.marks[-1].x, s.marks[-1].y)[1], i, s) for i, s in enumerate(all_series))
    step = FONT * 1.5
    y = place.top - step
    wanted = []
    for end_y, _, series in ends:
        y = max(y + step, end_y)
        wanted.append((y, series))
    over = max(0.0, y - (place.bottom - 4))
    limit = place.bottom - 4
    for y, series in reversed(wanted):
        y_label = min(y, limit) if over else y
        limit = y_label - step
        x_end, y_end = place(series.marks[-1].x, series.marks[-1].y)
        look = series.look % LOOKS
        lead = f"M{_px(x_end + 7)} {_px(y_end)}L{_px(place.right + 6)} {_px(y_label)}"
        marker = _marker(look, place.right + 14, y_label)
        canvas.add(f'<g class="s{look}"><path class="leader" d="{lead}"/>{marker}</g>')
        canvas.taken.append((place.right + 8, y_label - 6, place.right + 20, y_label + 6))
        canvas.text(place.right + 24, y_label + 4, _short(series.label), kind="label")


def _above(
    all_series: Sequence[Series], x_axis: Axis, left: float, right: float
) -> list[tuple[float, int]]:
    """Where the name of each single mark stands: its middle, and its row from the top, from 1."""
    taken: list[tuple[float, float, int]] = []
    found = []
    for series in all_series:
        half = text_width(_short(series.label)) / 2
        x = min(max(x_axis.at(series.marks[0].x, left, right), left + half), right - half)
        clash = {row for start, end, row in taken if x - half - 8 < end and x + half + 8 > start}
        row = next(row for row in range(1, len(taken) + 2) if row not in clash)
        taken.append((x - half, x + half, row))
        found.append((x, row))
    return found


def _draw_labels_above(
    canvas: _Canvas,
    all_series: Sequence[Series],
    above: Sequence[tuple[float, int]],
    place: _Place,
) -> None:
    for series, (x_text, row) in zip(all_series, above, strict=True):
        mark, y_text = series.marks[0], TOP + ROW * row - 12
        x, y = place(mark.x, mark.y if mark.high is None else mark.high)
        lead = f"M{_px(x)} {_px(y_text + 5)}V{_px(y - 4)}"
        canvas.add(f'<g class="s{series.look % LOOKS}"><path class="leader" d="{lead}"/></g>')
        canvas.text(x_text, y_text, _short(series.label), anchor="middle", kind="label")


def _short(label: str, most: int = 26) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in places)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
