"""Put lines, markers and text into an SVG, keeping account of the places that text takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from html import escape

from deploykit.measure.report.chart import BOUND, COLOURS

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
