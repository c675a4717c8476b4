"""The answers of a model with a task as lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploykit.cli.output import Part

if TYPE_CHECKING:
    from deploykit.api.predict_items import Answered

_SHOWN_VALUES = 8  # of an embedding


def answered(result: Answered) -> list[Part]:
    """One line for each item, or for each box; with its name where there are several."""
    several = len(result.items) > 1
    lines: list[Part] = []
    for name, answer in zip(result.items, result.answers, strict=True):
        found = _answer_lines(answer)
        lines += [f"{name}: {line}" for line in found] if several else found
    return lines


def _answer_lines(answer: dict[str, Any]) -> list[str]:
    if "label" in answer:
        return [f"{answer['label']} {_share(answer['score'])}"]
    if "embedding" in answer:
        values = answer["embedding"]
        shown = " ".join(f"{value:.4g}" for value in values[:_SHOWN_VALUES])
        return [f"{len(values)} numbers: {shown}{' ...' * (len(values) > _SHOWN_VALUES)}"]
    if "boxes" in answer:
        named = [(f"{b['label']} {_share(b['score'])}", b["box"]) for b in answer["boxes"]]
        at = [f"{text} at {x:.0f},{y:.0f} to {u:.0f},{v:.0f}" for text, (x, y, u, v) in named]
        return at or ["no boxes"]
    size = answer["width"] * answer["height"]
    parts = sorted(answer["segments"], key=lambda each: -int(each["pixels"]))
    return [", ".join(f"{each['label']} {_share(each['pixels'] / size)}" for each in parts)]


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
