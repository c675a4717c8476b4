"""Define charts as data, and draw them as HTML and SVG that CSS scales, without scripts.

Coordinates in a plot are percentages, so one drawing fits a phone and a wide page; text and markers
keep their size. Series differ in colour, dash and marker, so that no reader needs the colours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from deploykit.evaluation.formatting import SPACE

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
        return _log_axis(low, high, ticks)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    found = [(i * step, _tick(i * step)) for i in range(first, last + 1)]
    return Axis(first * step, last * step, False, ticks or found)


def _tick(value: float) -> str:
    """Return a round number as text: 0.3, 10, 12 500."""
    text = f"{value:,.12f}".rstrip("0").rstrip(".").replace(",", SPACE)
    return text.replace("-", "−")


def _log_axis(low: float, high: float, ticks: Ticks) -> Axis:
    low, high = (low / 1.15, high * 1.15) if low < high else (low / 2, high * 2)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[tuple[float, str]] = []
    for steps in ((1,), (1, 3), (1, 2, 5)):  # the fewest steps that give three ticks
        places = [float(f"{step}e{power}") for power in decades for step in steps]
        found = [(place, _tick(place)) for place in places if low <= place <= high]
        if len(found) >= 3:
            break
    return Axis(low, high, True, ticks or found)


COLOURS = 16  # colours in `look.css`; 0 is the baseline's
BOUND = -1  # the look of a limit, not of a setup
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
    """A line through `marks` in order. `upper`: a thin line above it (p99 over p50).

    A `plain` line has only a few markers, not one at each mark.
    """

    label: str
    marks: tuple[Mark, ...]
    look: int = 0
    upper: tuple[Mark, ...] = ()
    plain: bool = False


@dataclass(frozen=True)
class Chart:
    """One figure. `finding`: its caption, which states what it shows.

    `x_ticks`: values and labels of the x axis; round numbers if empty. `x_log`, `y_log`: None
    decides by the values' span. `zero`: the y axis begins at 0. `limit`: a y value and its label.
    `columns`, `rows`: data in no other table.
    """

    title: str
    finding: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    x_log: bool | None = None
    y_log: bool | None = None
    zero: bool = True
    limit: tuple[float, str] | None = None
    columns: Row = ()
    rows: tuple[Row, ...] = ()


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
_PLAIN_MARKERS = 5  # approximate number on a plain line
_CHARACTER = 2.6  # its width on a phone, in per cent of a plot
_APART = (7.0, 5.0)  # least distance of labels in x and y, to be legible on a phone
Place = tuple[float, float]  # in per cent of the plot, from the left and the top


def draw(chart: Chart) -> str:
    """Return the chart as HTML, a legend above its drawing; "" if there is nothing to draw."""
    series = [one for one in chart.series if one.marks]
    if not series:
        return ""
    marks = [mark for one in series for mark in (*one.marks, *one.upper)]
    x_values = [mark.x for mark in marks] + [x for x, _ in chart.x_ticks]
    x_axis = make_axis(x_values, log=chart.x_log, ticks=chart.x_ticks)
    y_axis = _y_axis(chart, marks)
    (lines, still), keys = _draw_axes(x_axis, y_axis), list[str]()
    for one in series:
        low, high = (
            [(x_axis.at(mark.x), 100 - y_axis.at(mark.y)) for mark in line]
            for line in (one.marks, one.upper)
        )
        spans = [
            f'<path class="whisker" d="M{_px(x_axis.at(mark.x))} '
            f'{_px(100 - y_axis.at(mark.low))}V{_px(100 - y_axis.at(mark.high))}"/>'
            for mark in (*one.marks, *one.upper)
            if mark.low is not None and mark.high is not None and mark.high > mark.low
        ]
        lines.append(group(one.look, *_lines(one.look, low, high), *spans))
        some = low[:: max(1, len(low) // _PLAIN_MARKERS)] if one.plain else low
        small = high if len(high) == 1 or len(low) == 1 else []
        markers = [_at(place, marker(one.look)) for place in some]
        markers += [_at(place, marker(one.look, 0.6)) for place in small]
        still.append(group(one.look, *markers))
        sample = line([(0, 6), (34, 6)], one.look) + _at((50, 50), marker(one.look))
        keys.append(_key(group(one.look, sample), one.label))
    if chart.limit:
        lines.append(f'<path class="flag" d="M0 {_px(100 - y_axis.at(chart.limit[0]))}H100"/>')
        keys.append(_key('<path class="flag" d="M0 6H34"/>', chart.limit[1]))
    still += _mark_labels([mark for one in series for mark in one.marks], x_axis, y_axis)
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


def _y_axis(chart: Chart, marks: Sequence[Mark]) -> Axis:
    values = [mark.y for mark in marks]
    ends = [end for mark in marks for end in (mark.y, mark.low, mark.high) if end is not None]
    ends += [chart.limit[0]] if chart.limit else []
    ends = [end for end in ends if math.isfinite(end)]
    wide = min(values) > 0 and max(values) / min(values) > LOG_FROM
    log = wide if chart.y_log is None else chart.y_log
    return make_axis([end for end in ends if end > 0] if log else ends, log=log, zero=chart.zero)


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
        widths = [len(text) * _CHARACTER for _, text in found]
        pairs = itertools.pairwise(zip(found, widths, strict=True))
        if all(b - a > (one + other) / 2 + _CHARACTER for ((a, _), one), ((b, _), other) in pairs):
            break
    return found


def _mark_labels(marks: Sequence[Mark], x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    """Yield the labels of marks, without those too near another one."""
    taken: list[Place] = []
    for mark in marks:
        x, y = x_axis.at(mark.x), 100 - y_axis.at(mark.y)
        near = any(abs(x - a) < _APART[0] and abs(y - b) < _APART[1] for a, b in taken)
        if mark.text and not near:
            taken.append((x, y))
            anchor, dx = ("start", 8) if x < 100 - _APART[0] else ("end", -8)
            yield _text((x, y), mark.text, "small", anchor, dx, 4)


def _text(place: Place, text: str, kind: str, anchor: str, dx: float, dy: float) -> str:
    x, y = map(_px, place)
    return (
        f'<text class="{kind}" x="{x}%" y="{y}%" dx="{dx}" dy="{dy}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _lines(look: int, low: Sequence[Place], high: Sequence[Place]) -> Iterator[str]:
    """Yield a line and, if there is an upper one, that line and the band between them."""
    if len(high) > 1 and len(low) > 1:
        yield f'<path class="band" d="{_path([*low, *reversed(high)])}Z"/>'
        yield line(high, look, "line thin")
    if len(low) > 1:
        yield line(low, look)


def _path(places: Sequence[Place]) -> str:
    return "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in places)


def line(places: Sequence[Place], look: int, kind: str = "line") -> str:
    dash = _DASHES[look % len(_DASHES)] if look != BOUND else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="{kind}" d="{_path(places)}"{dashed}/>'


def marker(look: int, scale: float = 1.0) -> str:
    """Return one of 16 markers: eight shapes, filled or hollow."""
    if look == BOUND:
        return ""
    hollow = ' class="hollow"' * (look // len(_SHAPES) % 2)
    sized = f' transform="scale({scale})"' * (scale != 1)
    return f'<path d="{_SHAPES[look % len(_SHAPES)]}"{sized}{hollow}/>'


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
