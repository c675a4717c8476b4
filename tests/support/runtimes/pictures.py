"""Images of the formats that clients send, made here, and scikit-learn's two photos."""

from __future__ import annotations

import io
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from deploykit.core.task import ImageInput


def photo(name: str = "china") -> bytes:
    """A JPEG of 640x427 that scikit-learn brings: "china" or "flower"."""
    found = util.find_spec("sklearn")  # to import it takes a second
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "datasets/images" / f"{name}.jpg").read_bytes()


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (height, width, channels)[: 2 if channels == 1 else 3]
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """An array or PIL image as a file of that kind."""
    found = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    data = io.BytesIO()
    found.save(data, kind, **options)
    return data.getvalue()


def image_input(height: int = 4, width: int = 6, **more: Any) -> ImageInput:
    return ImageInput("image", height, width, **more)
