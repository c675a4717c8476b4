"""A pipeline on drawn images: coloured tiles are found, cut out and named by a real model."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from PIL import Image

from tests.support.onnx_zoo import make, save

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
STEPS = """
import numpy as np

colours = {"model": "mean.onnx", "image": "crops"}


def crops(page: np.ndarray) -> list[np.ndarray]:
    height, width, _ = page.shape
    places = [(y, x) for y in range(0, height, 8) for x in range(0, width, 8)]
    tiles = [page[y : y + 8, x : x + 8] for y, x in places]
    return [(t.transpose(2, 0, 1) / 255).astype(np.float32) for t in tiles if t.min() < 128]


def answer(colours: np.ndarray) -> str:
    return ["red", "green", "blue"][int(colours.argmax())]
"""


def mean_model() -> onnx.ModelProto:
    """The mean of each channel: image float32[N,3,8,8] -> scores float32[N,3]."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["scores"], name="flatten"),
    ]
    return make(nodes, {"image": ("N", 3, 8, 8)}, {"scores": ("N", 3)}, {})


def page(*tiles: str, width: int = 8) -> np.ndarray:
    """uint8 (H, W, 3): white, with a tile in each colour, row by row; "" for an empty place."""
    rows = max(1, -(-len(tiles) // width))
    pixels = np.full((8 * rows, 8 * width, 3), 255, np.uint8)
    for number, colour in enumerate(tiles):
        y, x = 8 * (number // width), 8 * (number % width)
        if colour:
            pixels[y : y + 8, x : x + 8] = COLOURS[colour]
    return pixels


def png(pixels: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def write_pipeline(folder: Path, text: str = STEPS, name: str = "tiles.py") -> Path:
    """The file of a pipeline, next to its model."""
    save(mean_model(), folder / "mean.onnx")
    path = folder / name
    path.write_text(text)
    return path
