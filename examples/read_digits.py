"""A pipeline: find the handwritten digits on a page, read each, answer the lines of numbers.

    python examples/read_digits.py page.png                      # draws a page
    deploykit predict examples/read_digits.py page.png
    deploykit serve --pipeline examples/read_digits.py
    curl -F page=@page.png http://127.0.0.1:8000/v2/models/read_digits/predict

`classifier` is the model that the first steps of the README train and export, `model.onnx`.
"""

from __future__ import annotations

import sys
from typing import TypedDict

import numpy as np

classifier = {"model": "../model.onnx", "image": "crops"}  # its input takes what `crops` gives

IN_FLIGHT = {"boxes": 64}  # more requests at a time are answered 503
TIMEOUT_MS = {"boxes": 2000}  # a longer one is answered 504

INK, SIDE = 240, 28


class Box(TypedDict):
    line: int
    left: int
    top: int
    right: int
    bottom: int


def boxes(page: np.ndarray) -> list[Box]:
    """Lines are divided by white rows, digits of a line by white columns."""
    ink = page.min(axis=2) < INK
    found = []
    for line, (top, bottom) in enumerate(_runs(ink.any(axis=1))):
        for left, right in _runs(ink[top:bottom].any(axis=0)):
            rows = _runs(ink[top:bottom, left:right].any(axis=1))
            first, last = top + rows[0][0], top + rows[-1][1]
            found.append(Box(line=line, left=left, top=first, right=right, bottom=last))
    return found


def crops(page: np.ndarray, boxes: list[Box]) -> list[np.ndarray]:
    """Each digit white on black in a square, float32 (1, 28, 28): as the model was trained."""
    return [_square(255 - page[b["top"] : b["bottom"], b["left"] : b["right"], 0]) for b in boxes]


def answer(boxes: list[Box], classifier: list[np.ndarray]) -> list[str]:
    """The digits of each line."""
    lines: dict[int, str] = {}
    for box, logits in zip(boxes, classifier, strict=True):
        lines[box["line"]] = lines.get(box["line"], "") + str(int(logits.argmax()))
    return list(lines.values())


def _runs(marked: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], marked.astype(np.int8), [0]))))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _square(digit: np.ndarray) -> np.ndarray:
    edge = max(digit.shape)
    filled = np.zeros((edge, edge), np.float32)
    top, left = ((edge - size) // 2 for size in digit.shape)
    filled[top : top + digit.shape[0], left : left + digit.shape[1]] = digit / 255
    at = (np.arange(SIDE) + 0.5) * edge / SIDE  # the nearest pixel of each
    return filled[at.astype(int)][:, at.astype(int)][None]


def _draw(path: str, rows: int = 3, columns: int = 6) -> list[str]:
    """Digits of scikit-learn's that the model was not trained on; returns what they are."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = np.random.RandomState(0).permutation(len(digits.target))[-rows * columns :]
    page = np.full((rows * 48 + 16, columns * 48 + 16, 3), 255, np.uint8)
    for number, index in enumerate(chosen):
        y, x = 16 + 48 * (number // columns), 16 + 48 * (number % columns)
        small = Image.fromarray((digits.images[index] * 255 / 16).astype(np.uint8))
        large = np.asarray(small.resize((32, 32), Image.Resampling.BILINEAR))
        page[y : y + 32, x : x + 32] = 255 - large[..., None]
    Image.fromarray(page).save(path)
    labels = "".join(map(str, digits.target[chosen]))
    return [labels[at : at + columns] for at in range(0, len(labels), columns)]


if __name__ == "__main__":
    sys.stdout.write("\n".join([*_draw(sys.argv[1]), ""]))
