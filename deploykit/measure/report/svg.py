"""Draw charts as SVG text, which the page's style sheet colours: no script is needed.

Series differ in colour, dash and marker, so that none depends on its colour. Each chart is drawn
twice by the page: `WIDE`, with the names at the ends of the lines, and `NARROW`, with them above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploykit.measure.report.axis import LOG_FROM, Axis, make_axis
from deploykit.measure.report.canvas import (
    FONT,
    Canvas,
    Place,
    group,
    line,
    marker,
    path,
    px,
    short,
    text_box,
    text_width,
    wrapped,
)
from deploykit.measure.report.chart import Bars, Chart, Figure, Series
from deploykit.measure.report.formatting import number

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
