"""The curve of a run: loss and score per epoch, as SVG and as TensorBoard's event files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from deploykit.core.extras import require

_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 320, 60, 40
_RIGHT, _BOTTOM = _WIDTH - 60, _HEIGHT - 45
MARK = "<!-- deploykit: training curve -->"


def curve_svg(history: Sequence[Mapping[str, Any]], title: str, metric: str) -> str:
    """Loss on the left axis, the score on the right one from 0 to 1, over the epochs."""
    epochs = [int(each["epoch"]) for each in history]
    losses = [float(each["loss"]) for each in history]
    scores = [(int(e["epoch"]), float(e["score"])) for e in history if e["score"] is not None]
    top = max((each for each in losses if math.isfinite(each)), default=1.0) or 1.0
    first, last = (epochs[0], epochs[-1]) if epochs else (1, 1)

    def x(epoch: int) -> float:
        share = (epoch - first) / (last - first) if last > first else 0.5
        return _LEFT + (_RIGHT - _LEFT) * share

    def y(share: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * min(1.0, max(0.0, share))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"',
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        MARK,
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14" fill="#111">{escape(title)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y(share)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{top * share:.3g}", "#b3261e", "end"))
        parts.append(_text(_RIGHT + 8, at + 4, f"{share:.2f}", "#1a56a8", "start"))
    for epoch in sorted({first, (first + last) // 2, last}):
        parts.append(_text(x(epoch), _BOTTOM + 18, str(epoch), "#444", "middle"))
    parts.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 10, "epoch", "#444", "middle"))
    parts.append(_text(_RIGHT, 22, f"training loss (left), {metric} (right)", "#444", "end"))
    parts += _line([(x(e), y(v / top)) for e, v in zip(epochs, losses, strict=True)], "#b3261e")
    parts += _line([(x(e), y(v)) for e, v in scores], "#1a56a8")
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, colour: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _line(points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points),
    ]


class EventFile:
    """TensorBoard's event files in `folder`. Raises MissingExtra where tensorboard is missing."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def write(self, entry: Mapping[str, Any]) -> None:
        for name, value in entry.items():
            if name != "epoch" and value is not None:
                self.writer.add_scalar(name, value, entry["epoch"])

    def close(self) -> None:
        self.writer.close()
