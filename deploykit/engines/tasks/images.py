"""Read an image file, and place it into a model's input as training did.

The steps are those of torchvision's transforms on PIL images: decode, convert, resize, cut out the
middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, StageFailed
from deploykit.core.files import check_readable
from deploykit.core.task import LETTERBOX, RESIZE_RULES, SHORTEST_EDGE, STRETCH, ImageInput
from deploykit.core.tensors import Bytes
from deploykit.engines.data.images import MAX_PIXELS, Image, Images, open_upright

_MOST_RATIO = 4  # of an image's sides, for a model of any size: its memory grows with them
_MOST_MULTIPLE = 1024
_MODES = {"RGB": "RGB", "BGR": "RGB", "L": "L"}
_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image in the form of its model's input: `pixels`, uint8 [height, width, channels].

    `width`, `height`: the size of the upright original. A point (x, y) of the original is at
    (x * scale_x + left, y * scale_y + top) in `pixels`.
    """

    pixels: np.ndarray
    width: int
    height: int
    scale_x: float
    scale_y: float
    left: int
    top: int

    def to_original(self, boxes: np.ndarray) -> np.ndarray:
        """Convert boxes [.., 4], x1 y1 x2 y2, from pixels of `pixels` to those of the original."""
        offset = np.array([self.left, self.top] * 2, np.float64)
        scale = np.array([self.scale_x, self.scale_y] * 2, np.float64)
        found: np.ndarray = (boxes - offset) / scale
        return found.clip(0, [self.width, self.height] * 2)


def check_image_input(image: ImageInput) -> None:
    """Raise BadInput for an unknown rule or a value out of range."""
    known = {"resize": RESIZE_RULES, "interpolation": (*_FILTERS,), "colours": (*_MODES,)}
    for name, choices in known.items():
        if (value := getattr(image, name)) not in choices:
            hint = f"one of: {', '.join(choices)}"
            raise BadInput(f"the task's image has `{name}` {value!r}", hint=hint)
    free = (image.height, image.width, image.resize) == (0, 0, SHORTEST_EDGE)
    if min(image.height, image.width) < 1 - free or image.height * image.width > MAX_PIXELS:
        raise BadInput(f"the task's image is {image.width}x{image.height} pixels")
    if image.resize == SHORTEST_EDGE and image.resize_to < 1:
        raise BadInput(f"the task's image has `resize_to` {image.resize_to}, 1 or more is needed")
    if not 0 <= image.padding <= 255:
        raise BadInput(f"the task's image has `padding` {image.padding}, 0 to 255 is possible")
    if not 1 <= image.multiple <= _MOST_MULTIPLE:
        raise BadInput(f"the task's image has `multiple` {image.multiple}, 1 to {_MOST_MULTIPLE}")


def read_image(
    data: Bytes,
    image: ImageInput,
    where: str = "the image",
    *,
    most_pixels: int | None = None,
    own_file: bool = False,
) -> PlacedImage:
    """Decode a JPEG, PNG or WebP and place it as `image` says. Raises as `open_upright` does."""
    mode = _MODES[image.colours]
    with open_upright(data, mode, where, most_pixels=most_pixels, own_file=own_file) as upright:
        return place(upright, image, where)


def read_pixels(data: bytes, *, own_file: bool = False) -> np.ndarray:
    """Decode a JPEG, PNG or WebP, upright, to uint8 [height, width, 3]. Raises BadInput."""
    with open_upright(data, "RGB", "the image", own_file=own_file) as upright:
        return np.asarray(upright)


def place_pixels(pixels: np.ndarray, image: ImageInput) -> PlacedImage:
    """Resize uint8 [height, width, 3], or grey [height, width], for the task's input.

    Raises StageFailed for other arrays, as they come from a stage and not from a client.
    """
    grey = pixels.ndim == 2
    if pixels.dtype != np.uint8 or not (grey or pixels.shape[2:] == (3,)) or not pixels.size:
        raise StageFailed(
            f"the image: is {pixels.dtype}{list(pixels.shape)}, uint8[height,width,3] is needed"
        )
    found = Image.fromarray(np.ascontiguousarray(pixels)).convert(_MODES[image.colours])
    return place(found, image, "the image")


class PlacedImages(Images):
    """Reads the images of a folder, and places each into the model's input as the server does.

    Training, calibration and the tests of accuracy use it. A model that takes any height and width
    gets the middle squares.
    """

    def __init__(self, image: ImageInput) -> None:
        check_image_input(image)
        side = math.ceil(image.resize_to / image.multiple) * image.multiple
        if not image.height:  # one array needs one size
            image = replace(image, height=side, width=side, resize_to=side)
        self._image, self.tensor = image, image.tensor
        self.shape = (image.height, image.width, 1 if image.colours == "L" else 3)

    def decode(self, file: Path) -> np.ndarray:
        data = check_readable(file).read_bytes()
        return read_image(data, self._image, str(file), own_file=True).pixels


def place(upright: Any, image: ImageInput, where: str) -> PlacedImage:
    width, height = upright.size
    size = _resized(width, height, image)
    most = MAX_PIXELS if image.height else min(MAX_PIXELS, _MOST_RATIO * image.resize_to**2)
    if size[0] * size[1] > most:
        raise BadInput(
            f"{where}: is {width}x{height}, and {size[0]}x{size[1]} once its shorter side has "
            f"{image.resize_to} pixels, above the limit of {most / 1e6:.3g} million pixels"
        )
    resized = upright.resize(size, _FILTERS[image.interpolation])
    wide, high = image.width, image.height
    left = top = 0
    if not image.height:
        wide, high = (math.ceil(side / image.multiple) * image.multiple for side in size)
    elif image.resize == LETTERBOX:  # YOLO pads the odd pixel right and below
        left, top = (wide - size[0]) // 2, (high - size[1]) // 2
    else:
        left, top = _margin(wide, size[0]), _margin(high, size[1])
        resized = resized.crop((-left, -top, wide - left, high - top))
    pixels = np.asarray(resized)
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    if image.colours == "BGR":
        pixels = pixels[:, :, ::-1]
    if pixels.shape[:2] != (high, wide):
        filled = np.full((high, wide, pixels.shape[2]), image.padding, np.uint8)
        filled[top : top + size[1], left : left + size[0]] = pixels
        pixels = filled
    pixels = np.ascontiguousarray(pixels)
    return PlacedImage(pixels, width, height, size[0] / width, size[1] / height, left, top)


def _resized(width: int, height: int, image: ImageInput) -> tuple[int, int]:
    """Return width and height after resizing, before cropping and padding."""
    if image.resize == STRETCH:  # timm's "squash" enlarges both sides, then crops
        least = min(image.width, image.height)
        edge = max(image.resize_to, least)
        return image.width * edge // least, image.height * edge // least
    if image.resize == SHORTEST_EDGE:  # torchvision truncates the longer side
        to = image.resize_to
        return (to, to * height // width) if width <= height else (to * width // height, to)
    ratio = min(image.width / width, image.height / height)
    return max(1, round(width * ratio)), max(1, round(height * ratio))


def _margin(wanted: int, found: int) -> int:
    """Return the offset of torchvision's CenterCrop; above 0 means that it adds black."""
    return (wanted - found) // 2 if found < wanted else -round((found - wanted) / 2)
