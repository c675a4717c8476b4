"""Read where the texts of an SVG are, and which of them cover each other."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"
FONT, MEAN_WIDTH = 12, 0.6  # as charts are drawn


def text_box(x: float, y: float, text: str, anchor: str) -> tuple[float, float, float, float]:
    width = MEAN_WIDTH * FONT * len(text)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return left, y - FONT, left + width, y + 0.25 * FONT


def boxes(svg: str) -> list[tuple[str, tuple[float, float, float, float]]]:
    return [
        (
            text.text or "",
            text_box(
                float(text.attrib["x"]),
                float(text.attrib["y"]),
                text.text or "",
                text.get("text-anchor", "start"),
            ),
        )
        for text in ET.fromstring(svg).iter(f"{SVG}text")
    ]


def overlaps(svg: str) -> list[tuple[str, str]]:
    return [
        (a, b)
        for (a, (l1, t1, r1, b1)), (b, (l2, t2, r2, b2)) in itertools.combinations(boxes(svg), 2)
        if l1 < r2 and r1 > l2 and t1 < b2 and b1 > t2
    ]
