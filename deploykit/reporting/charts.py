"""Axes with round ticks, linear or logarithmic."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from deploykit.evaluation.formatting import SPACE, number

LOG_FROM = 20  # an axis whose values span more than this is logarithmic, and says so
Ticks = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; `ticks`: positions and labels."""

    low: float
    high: float
    log: bool
    ticks: Ticks

    def at(self, value: float, start: float, end: float) -> float:
        """The pixel of a value between the pixels `start` and `end` of the two ends."""
        low, high, value = self.low, self.high, value
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return start + (value - low) / (high - low) * (end - start)


def make_axis(
    values: Sequence[float], *, log: bool | None = None, zero: bool = False, ticks: Ticks = ()
) -> Axis:
    """An axis over one or more finite values. `log` None: where they span much. `zero`: from 0."""
    low, high = min(values), max(values)
    if low > 0 and (high / low > LOG_FROM if log is None else log):
        return _log_axis(low, high, ticks)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = next(n for n in range(20) if n == 19 or _is_whole(step * 10**n))
    found = [(i * step, tick(i * step, digits)) for i in range(first, last + 1)]
    return Axis(first * step, last * step, False, ticks or found)


def tick(value: float, digits: int | None = None) -> str:
    """A round number on an axis: 0.3, 10, 12 500; with `digits` decimals if given."""
    if digits is None and abs(value) < 1000:
        text = f"{value:.12f}".rstrip("0").rstrip(".")
    else:
        text = f"{value:,.{digits or 0}f}".replace(",", SPACE)
    return text.replace("-", "−")


def _is_whole(value: float) -> bool:
    return value > 0.5 and abs(value - round(value)) < 1e-9 * value


def _log_axis(low: float, high: float, ticks: Ticks) -> Axis:
    low, high = (low / 1.15, high * 1.15) if low < high else (low / 2, high * 2)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[tuple[float, str]] = []
    for steps in ((1,), (1, 3), (1, 2, 5)):  # the fewest that give three ticks
        places = [float(f"{step}e{power}") for power in decades for step in steps]
        found = [(place, tick(place)) for place in places if low <= place <= high]
        if len(found) >= 3:
            break
    return Axis(low, high, True, ticks or found)


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    steps = (m * power for m in (1, 2, 2.5, 5, 10))
    return next(step for step in steps if step >= raw * (1 - 1e-9))


# Charts as data: what svg.py draws, with a caption and a table of the same figures.

COLOURS = 16  # of `look.css`; 0 is the baseline's
BOUND = -1  # the look of what is no setup: of a limit
Row = tuple[str, ...]


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
    """A line through `marks`, in their order. `upper`: a thin line above it (p99 over p50).

    `plain`: has a few markers only, not one at each mark.
    """

    label: str
    marks: tuple[Mark, ...]
    look: int = 0
    upper: tuple[Mark, ...] = ()
    plain: bool = False


@dataclass(frozen=True)
class Chart:
    """One figure. `finding`: its caption, what a reader should see in it.

    `x_ticks`: positions and labels of the x axis, round numbers where empty. `x_log`, `y_log`
    None: if the values span much. `zero`: the y axis begins at 0. `flag`: an x, and what begins
    there. `limit`: a y, and what it bounds. `columns`, `rows`: the same data as a table.
    """

    name: str
    title: str
    finding: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    x_log: bool | None = None
    y_log: bool | None = None
    zero: bool = True
    flag: tuple[float, str] | None = None
    limit: tuple[float, str] | None = None
    columns: Row = ()
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Bars:
    """One bar for each of `bars`: a name and its parts end to end, as long as they take.

    `parts`: the names of the parts, with the looks from `look` on; a bar has a value for each.
    `looks`: of the setups that the bars are of, whose markers are before their names.
    """

    name: str
    title: str
    finding: str
    x_label: str
    parts: Row
    bars: tuple[tuple[str, tuple[float, ...]], ...]
    look: int = 1
    looks: tuple[int, ...] = ()
    columns: Row = ()
    rows: tuple[Row, ...] = ()


Figure = Chart | Bars


# Put lines, markers and text into an SVG, keeping account of the places that text takes.

FONT = 12
_EM = 0.6  # the mean width of a character, a little more than fonts need
_WIDE_FROM = 0x2E80  # CJK and what follows: as wide as high
_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
_DASHES = ("", "7 4", "2 4", "10 4 2 4", "4 2", "12 3", "1 3", "6 2 1 2")
_SHAPES: tuple[tuple[tuple[float, float], ...], ...] = (  # the baseline's, the first, is a circle
    (),
    ((-3.7, -3.7), (3.7, -3.7), (3.7, 3.7), (-3.7, 3.7)),
    ((0, -4.8), (4.6, 3.6), (-4.6, 3.6)),
    ((0, -5.2), (5.2, 0), (0, 5.2), (-5.2, 0)),
    ((0, 4.8), (4.6, -3.6), (-4.6, -3.6)),
    ((-4.8, 0), (3.6, -4.6), (3.6, 4.6)),
    ((4.8, 0), (-3.6, -4.6), (-3.6, 4.6)),
    ((-2.2, -4.4), (2.2, -4.4), (4.6, 0), (2.2, 4.4), (-2.2, 4.4), (-4.6, 0)),
)
Box = tuple[float, float, float, float]  # left, top, right, bottom
Place = tuple[float, float]


class Canvas:
    """What is drawn so far, and which places are taken."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._taken: list[Box] = []

    def add(self, part: str) -> None:
        self._parts.append(part)

    def take(self, box: Box) -> None:
        self._taken.append(box)

    def is_free(self, box: Box) -> bool:
        left, top, right, bottom = box
        return not any(x < right and r > left and y < bottom and b > top
                       for x, y, r, b in self._taken)  # fmt: skip

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        self.take(text_box(x, y, text, anchor))
        self.add(
            f'<text x="{px(x)}" y="{px(y)}" text-anchor="{anchor}" class="{kind}">'
            f"{_escape(text)}</text>"
        )

    def text_if_free(
        self, places: Sequence[tuple[float, float, str]], text: str, kind: str = "small"
    ) -> None:
        """Write `text` at the first of the places (x, y, anchor) that is free; else nowhere."""
        free = (each for each in places if self.is_free(text_box(*each[:2], text, each[2])))
        for x, y, anchor in itertools.islice(free, 1):
            self.text(x, y, text, anchor, kind)

    def svg(self, width: float, height: float, alt: str) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {px(width)} {px(height)}" '
            f'role="img" aria-label="{_escape(alt)}">{"".join(self._parts)}</svg>'
        )


def text_width(text: str) -> float:
    """About how many pixels a text takes; rather too many than too few."""
    return sum(_EM if ord(c) < _WIDE_FROM else 1.0 for c in text) * FONT


def text_box(x: float, y: float, text: str, anchor: str) -> Box:
    """The place of a text whose baseline is at `y`."""
    width = text_width(text)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return left, y - FONT, left + width, y + 0.25 * FONT


def wrapped(text: str, width: float) -> list[str]:
    """The text in lines of at most `width` pixels; a longer word has a line of its own."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def short(label: str, most: int = 26) -> str:
    """Cut in the middle: labels of one file begin alike, and often differ at their ends."""
    end = most // 2
    return label if len(label) <= most else f"{label[: most - end - 1]}…{label[-end:]}"


def px(value: float) -> str:
    """A coordinate with one decimal at most."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")  # + 0.0: no minus zero


def path(places: Sequence[Place]) -> str:
    return "M" + "L".join(f"{px(x)} {px(y)}" for x, y in places)


def line(places: Sequence[Place], look: int, kind: str = "line") -> str:
    dash = _DASHES[look % len(_DASHES)] if look != BOUND else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="{kind}" d="{path(places)}"{dashed}/>'


def marker(look: int, x: float, y: float, size: float = 1.0) -> str:
    """Of eight shapes, filled, hollow, or hollow with a smaller one inside: 24 that differ."""
    if look == BOUND:
        return ""
    fill = look // len(_SHAPES) % 3
    outer = _shape(look, x, y, size, ' class="hollow"' if fill else "")
    return outer + (_shape(look, x, y, size * 0.4) if fill == 2 else "")


def _shape(look: int, x: float, y: float, size: float, kind: str = "") -> str:
    shape = _SHAPES[look % len(_SHAPES)]
    if not shape:
        return f'<circle cx="{px(x)}" cy="{px(y)}" r="{px(4 * size)}"{kind}/>'
    return f'<path d="{path([(x + dx * size, y + dy * size) for dx, dy in shape])}Z"{kind}/>'


def group(look: int, *parts: str) -> str:
    """Of one colour: the 15 of setups repeat, and the baseline's is its own."""
    kind = "bound" if look == BOUND else f"s{1 + (look - 1) % (COLOURS - 1) if look else 0}"
    return f'<g class="s {kind}">{"".join(parts)}</g>'


def _escape(text: str) -> str:
    return escape(_NOT_IN_XML.sub("\ufffd", text))


# Draw charts as SVG text, which the page's style sheet colours: no script is needed.
#
# Series differ in colour, dash and marker, so that none depends on its colour. Each chart is
# drawn
# twice by the page: `WIDE`, with the names at the ends of the lines, and `NARROW`, with them
# above.

_ROW = 18  # height of a row of labels
_LINE = 16  # height of a line of text
_BELOW = 52  # under a plot: ticks, and one line that names the axis
_PLAIN_MARKERS = 5  # about so many on a plain line
_SMALL = 0.6  # of a marker: p99 where there is no line
_BAR = 72  # from one bar to the next: its name, the bar, the names of its parts


@dataclass(frozen=True)
class Frame:
    """The width of a drawing and the height of its plot, in pixels.

    `narrow`: the names of the lines are above the plot, for a phone.
    """

    width: int
    plot: int
    narrow: bool = False


WIDE = Frame(760, 320)
NARROW = Frame(360, 240, narrow=True)


@dataclass(frozen=True)
class _Plot:
    """Where the plot of a drawing is, with its axes; `begin`: where the labels above it begin."""

    frame: Frame
    left: float
    right: float
    begin: float
    top: float
    x_axis: Axis
    y_axis: Axis

    @property
    def bottom(self) -> float:
        return self.top + self.frame.plot

    def at(self, x: float, y: float) -> Place:
        return self.x_axis.at(x, self.left, self.right), self.y_axis.at(y, self.bottom, self.top)


def draw(figure: Figure, frame: Frame = WIDE) -> str:
    """The figure as `<svg>`; "" where it has nothing to draw."""
    return _draw_bars(figure, frame) if isinstance(figure, Bars) else _draw_chart(figure, frame)


def _draw_chart(chart: Chart, frame: Frame) -> str:
    series = [one for one in chart.series if one.marks]
    if not series:
        return ""
    single = not frame.narrow and all(len(one.marks) == 1 for one in series)
    plot = _layout(chart, series, frame, single)
    canvas = Canvas()
    height = _draw_axes(canvas, chart, plot)
    _draw_bounds(canvas, chart, plot)
    for one in series:
        _draw_series(canvas, one, plot)
    if frame.narrow:
        _draw_legend(canvas, series, plot)
    elif single:
        _draw_names_above(canvas, series, plot)
    else:
        _draw_names(canvas, series, plot)
    for mark in (mark for one in series for mark in one.marks if mark.text):
        x, y = plot.at(mark.x, mark.y)
        places = ((x + 8, y + 5, "start"), (x, y + 19, "middle"), (x, y - 9, "middle"))
        ends = [text_box(*each[:2], mark.text, each[2])[2:] for each in places]
        inside = [right <= frame.width and bottom <= plot.bottom for right, bottom in ends]
        canvas.text_if_free(list(itertools.compress(places, inside)), mark.text)
    return canvas.svg(frame.width, height, chart.title)


def _layout(chart: Chart, series: Sequence[Series], frame: Frame, single: bool) -> _Plot:
    marks = [mark for one in series for mark in (*one.marks, *one.upper)]
    values = [mark.y for mark in marks]
    ends = [end for mark in marks for end in (mark.y, mark.low, mark.high) if end is not None]
    ends += [chart.limit[0]] if chart.limit else []
    ends = [end for end in ends if math.isfinite(end)]
    wide = min(values) > 0 and max(values) / min(values) > LOG_FROM
    log = wide if chart.y_log is None else chart.y_log
    y_axis = make_axis([end for end in ends if end > 0] if log else ends, log=log, zero=chart.zero)
    x_values = [mark.x for mark in marks] + [x for x, _ in chart.x_ticks]
    x_axis = make_axis(x_values, log=chart.x_log, ticks=chart.x_ticks)
    longest = max(text_width(short(one.label)) for one in series)
    left = max(36 if frame.narrow else 64, 14 + max(text_width(text) for _, text in y_axis.ticks))
    right = frame.width - (16 if frame.narrow else 34 if single else longest + 34)
    begin = 12 + _LINE * len(_y_name(chart, y_axis, frame))
    top = begin + (_ROW * len(series) + 8 if frame.narrow else 0)
    if not (frame.narrow or single):  # as high as the names at the ends of the lines
        frame = replace(frame, plot=max(frame.plot, _ROW * len(series)))
    plot = _Plot(frame, left, right, begin, top, x_axis, y_axis)
    if not single:
        return plot
    rows = max(row for _, row in _rows_above(series, plot))
    return replace(plot, top=begin + _ROW * rows)


def _y_name(chart: Chart, axis: Axis, frame: Frame) -> list[str]:
    return wrapped(chart.y_label + ", log scale" * axis.log, frame.width)


def _draw_axes(canvas: Canvas, chart: Chart, plot: _Plot) -> float:
    """Returns the height of the whole."""
    for value, text in plot.y_axis.ticks:
        y = plot.y_axis.at(value, plot.bottom, plot.top)
        canvas.add(f'<path class="grid" d="M{px(plot.left)} {px(y)}H{px(plot.right)}"/>')
        canvas.text_if_free([(plot.left - 8, y + 4, "end")], text, "tick")
    height = _draw_x_axis(canvas, chart.x_label, plot)
    for i, text in enumerate(_y_name(chart, plot.y_axis, plot.frame)):
        canvas.text(0, 13 + _LINE * i, text, "start", "name")
    return height


def _draw_x_axis(canvas: Canvas, label: str, plot: _Plot) -> float:
    for value, text in plot.x_axis.ticks:
        x = plot.x_axis.at(value, plot.left, plot.right)
        if not canvas.is_free(text_box(x, plot.bottom + 20, f"{text}  ", "middle")):
            continue
        canvas.add(f'<path class="axis" d="M{px(x)} {px(plot.bottom)}v5"/>')
        width = text_width(text) / 2
        x = min(max(x, width), plot.frame.width - width)
        canvas.text(x, plot.bottom + 20, text, "middle", "tick")
    canvas.add(f'<path class="axis" d="M{px(plot.left)} {px(plot.bottom)}H{px(plot.right)}"/>')
    lines = wrapped(label + ", log scale" * plot.x_axis.log, plot.frame.width)
    for i, text in enumerate(lines):
        half = text_width(text) / 2
        middle = min((plot.left + plot.right) / 2, plot.frame.width - half)
        canvas.text(max(middle, half), plot.bottom + 40 + _LINE * i, text, "middle", "name")
    return plot.bottom + _BELOW + _LINE * (len(lines) - 1)


def _draw_bounds(canvas: Canvas, chart: Chart, plot: _Plot) -> None:
    """The x from which something holds, and the y that bounds something."""
    if chart.limit:
        _, y = plot.at(plot.x_axis.low, chart.limit[0])
        canvas.add(f'<path class="flag" d="M{px(plot.left)} {px(y)}H{px(plot.right)}"/>')
        canvas.text(plot.left + 6, y - 5, chart.limit[1], "start", "small")
    if chart.flag:
        x, _ = plot.at(chart.flag[0], plot.y_axis.low)
        canvas.add(f'<path class="flag" d="M{px(x)} {px(plot.top - 4)}V{px(plot.bottom)}"/>')
        text = short(chart.flag[1], 48 if plot.frame.narrow else 80)
        fits = x + 6 + text_width(text) < plot.right
        places = [(x + 6, "start")] if fits else [(x - 6, "end")]
        canvas.text_if_free(
            [(at, plot.top + 8 + 14 * n, to) for n in range(4) for at, to in places], text
        )


def _draw_series(canvas: Canvas, series: Series, plot: _Plot) -> None:
    """A line with its markers and intervals, and a thin one above it (p99 above p50)."""
    low = [plot.at(mark.x, mark.y) for mark in series.marks]
    high = [plot.at(mark.x, mark.y) for mark in series.upper]
    parts = []
    if len(high) > 1 and len(low) > 1:
        parts += [f'<path class="band" d="{path([*low, *reversed(high)])}Z"/>']
        parts += [line(high, series.look, "line thin")]
    if len(low) > 1:
        parts.append(line(low, series.look))
    for mark in (*series.marks, *series.upper):
        if mark.low is None or mark.high is None or not mark.high > mark.low:
            continue
        (x, top), (_, end) = plot.at(mark.x, mark.high), plot.at(mark.x, mark.low)
        bars = f"M{px(x - 4)} {px(top)}h8M{px(x - 4)} {px(end)}h8"
        parts.append(f'<path class="whisker" d="M{px(x)} {px(top)}V{px(end)}{bars}"/>')
    some = low[:: max(1, len(low) // _PLAIN_MARKERS)] if series.plain else low
    parts += [marker(series.look, x, y) for x, y in some]
    if not series.plain:
        for x, y in low:
            canvas.take((x - 5, y - 5, x + 5, y + 5))
    if len(high) == 1 or len(low) == 1:
        parts += [marker(series.look, x, y, _SMALL) for x, y in high]
    canvas.add(group(series.look, *parts))


def _draw_names(canvas: Canvas, series: Sequence[Series], plot: _Plot) -> None:
    """Name each line at its right end, in the order of the ends, none over another."""
    ends = sorted(
        ((*plot.at(one.marks[-1].x, one.marks[-1].y), one) for one in series),
        key=lambda end: end[1],
    )
    step, labels = FONT * 1.5, list[float]()
    for _, y, _ in ends:
        labels.append(max(labels[-1] + step if labels else plot.top, y))
    limit = plot.bottom - 4
    for at in reversed(range(len(labels))):
        labels[at] = min(labels[at], limit)
        limit = labels[at] - step
    for (x, y, one), label in zip(ends, labels, strict=True):
        right = plot.right
        leader = f'<path class="leader" d="M{px(x + 7)} {px(y)}L{px(right + 6)} {px(label)}"/>'
        sample = marker(one.look, right + 14, label)  # or a piece of a line that has none
        sample = sample or line([(right + 8, label), (right + 20, label)], one.look)
        canvas.add(group(one.look, leader, sample))
        canvas.take((right + 8, label - 6, right + 20, label + 6))
        canvas.text(right + 24, label + 4, short(one.label), "start", "label")


def _draw_legend(canvas: Canvas, series: Sequence[Series], plot: _Plot) -> None:
    for row, one in enumerate(series):
        y = plot.begin + 6 + _ROW * row
        sample = line([(0, y), (22, y)], one.look)
        canvas.add(group(one.look, sample, marker(one.look, 11, y)))
        canvas.text(30, y + 4, short(one.label, 44), "start", "label")


def _rows_above(series: Sequence[Series], plot: _Plot) -> list[tuple[float, int]]:
    """Where the name of each single mark is: its middle, and its row from the top, from 1."""
    taken: list[tuple[float, float, int]] = []
    found = []
    for one in series:
        half = text_width(short(one.label)) / 2 + 8  # with its marker
        x = plot.x_axis.at(one.marks[0].x, plot.left, plot.right)
        x = min(max(x, plot.left + half), plot.right - half)
        clash = {row for a, b, row in taken if x - half - 8 < b and x + half + 8 > a}
        row = next(row for row in range(1, len(taken) + 2) if row not in clash)
        taken.append((x - half, x + half, row))
        found.append((x, row))
    return found


def _draw_names_above(canvas: Canvas, series: Sequence[Series], plot: _Plot) -> None:
    for one, (x_text, row) in zip(series, _rows_above(series, plot), strict=True):
        mark, y_text = one.marks[0], plot.begin + _ROW * row - 12
        x, y = plot.at(mark.x, mark.y if mark.high is None else mark.high)
        leader = f'<path class="leader" d="M{px(x)} {px(y_text + 5)}V{px(y - 4)}"/>'
        sample = marker(one.look, x_text - text_width(short(one.label)) / 2 - 8, y_text - 4)
        canvas.add(group(one.look, leader, sample))
        canvas.text(x_text, y_text, short(one.label), "middle", "label")


def _draw_bars(chart: Bars, frame: Frame) -> str:
    """Horizontal bars; the names of the parts are under the first bar that has the place."""
    if not chart.bars:
        return ""
    axis = make_axis([sum(values) for _, values in chart.bars], log=False, zero=True)
    most = max(text_width(number(sum(values))) for _, values in chart.bars)
    step = _BAR if any(chart.parts) else _BAR - 2 * _LINE  # without the names of parts
    right, height = frame.width - most - 12, step * len(chart.bars)
    plot = _Plot(Frame(frame.width, height, frame.narrow), 8, right, 0, 0, axis, axis)
    canvas = Canvas()
    for row, (name, values) in enumerate(chart.bars):
        y, start = step * row + 20, 0.0
        own = chart.looks[row : row + 1]
        canvas.add("".join(group(each, marker(each, plot.left + 5, y - 9)) for each in own))
        canvas.text(plot.left + 16 * len(own), y - 5, short(name, 44), "start", "label")
        for look, (part, value) in enumerate(zip(chart.parts, values, strict=True), chart.look):
            x, end = (axis.at(each, plot.left, right) for each in (start, start + value))
            width = px(max(end - x - 1.5, 0.5))
            rect = f'<rect x="{px(x)}" y="{y}" width="{width}" height="18"/>'
            canvas.add(group(look, rect) if value > 0 else "")
            text = f"{part} {number(value)}"
            if part and value > 0 and x + text_width(text) <= frame.width:
                canvas.text_if_free([(x, y + 31, "start"), (x, y + 46, "start")], text, "tick")
            start += value
        total = axis.at(start, plot.left, right) + 5
        canvas.text(total, y + 13, number(start), "start", "label")
    return canvas.svg(frame.width, _draw_x_axis(canvas, chart.x_label, plot), chart.title)
