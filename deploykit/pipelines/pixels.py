"""Decode an image file to an array, and resize an array for a model's task."""

from __future__ import annotations

import contextlib
import io

import numpy as np

from deploykit.core.errors import StageFailed
from deploykit.core.task import ImageInput
from deploykit.engines.data.images import (
    Image,
    check_pixels,
    check_stored,
    open_image,
    turn_upright,
)
from deploykit.engines.tasks.images import (
    FORMATS,
    LARGE_PIXELS,
    MODES,
    ONE_LARGE,
    PlacedImage,
    place,
)


def read_pixels(data: bytes) -> np.ndarray:
    """Decode a JPEG, PNG or WebP, upright, to uint8 [height, width, 3]. Raises BadInput."""
    where = "the image"
    with open_image(io.BytesIO(data), where, FORMATS) as opened:
        check_pixels(opened, where)
        check_stored(opened, where)
        large = opened.width * opened.height > LARGE_PIXELS
        with ONE_LARGE if large else contextlib.nullcontext():
            pixels: np.ndarray = np.asarray(turn_upright(opened, "RGB"))
            return pixels


def place_pixels(pixels: np.ndarray, image: ImageInput) -> PlacedImage:
    """Resize uint8 [height, width, 3], or grey [height, width], for the task's input.

    Raises StageFailed for other arrays, as they come from a stage and not from a client.
    """
    where = "the image"
    grey = pixels.ndim == 2
    if pixels.dtype != np.uint8 or not (grey or pixels.shape[2:] == (3,)) or not pixels.size:
        raise StageFailed(
            f"{where}: is {pixels.dtype}{list(pixels.shape)}, uint8[height,width,3] is needed"
        )
    found = Image.fromarray(np.ascontiguousarray(pixels)).convert(MODES[image.colours])
    return place(found, image, where)
