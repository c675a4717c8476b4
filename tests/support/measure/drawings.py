"""Read where the texts of a chart are on a page, and which of them cover each other."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree as ET

PHONE, PAGE, HEIGHT = 254, 900, 320  # pixels of a plot
FONT, MEAN_WIDTH = 12, 0.6  # as the style sheet draws them
Box = tuple[float, float, float, float]


def elements(drawn: str) -> ET.Element:
    return ET.fromstring(f"<div>{drawn}</div>")


def boxes(drawn: str, width: int) -> list[tuple[str, Box]]:
    """The texts of a drawing whose plot is so wide: left, top, right, bottom in pixels."""
    found = []
    for text in elements(drawn).iter("text"):
        x, y = (float(text.attrib[name].rstrip("%")) / 100 for name in "xy")
        at_x = x * width + float(text.attrib["dx"])
        at_y = y * HEIGHT + float(text.attrib["dy"])
        name = text.text or ""
        size = MEAN_WIDTH * FONT * len(name.replace("\u202f", ""))
        left = at_x - {"start": 0.0, "middle": size / 2, "end": size}[text.attrib["text-anchor"]]
        found.append((name, (left, at_y - FONT, left + size, at_y + 0.25 * FONT)))
    return found


def overlaps(drawn: str) -> list[tuple[str, str]]:
    """The texts that cover each other on a phone or on a wide page."""
    return [
        (a, b)
        for width in (PHONE, PAGE)
        for (a, (l1, t1, r1, b1)), (b, (l2, t2, r2, b2)) in itertools.combinations(
            boxes(drawn, width), 2
        )
        if l1 < r2 and r1 > l2 and t1 < b2 and b1 > t2
    ]


def names(drawn: str) -> list[str]:
    """The legend's."""
    return re.findall(r"</svg>([^<]+)</li>", drawn)
