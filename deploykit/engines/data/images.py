"""Decode PNG, JPEG and WebP images, and place them into a model's input as training did.

Transparency and colour profiles are dropped, as by `Image.convert`; the EXIF orientation is
applied. An animation, and more than 8 bits per channel, is refused. A task resizes by the steps of
torchvision's transforms on PIL images; without one, an image of another size is an error, as the
model would not see what its user expects.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deploykit.core.errors import BadInput, StageFailed, TooLarge, first_line
from deploykit.core.extras import require
from deploykit.core.files import check_readable
from deploykit.core.task import LETTERBOX, RESIZE_RULES, SHORTEST_EDGE, STRETCH, ImageInput
from deploykit.core.tensors import Bytes, TensorSpec

Image = require("PIL.Image")
_JpegImageFile: Any = require("PIL.JpegImagePlugin").JpegImageFile

MAX_PIXELS = 25_000_000  # a client's image: a header of 74 bytes can declare 65535 x 65535
FILE_PIXELS = 150_000_000  # the user's own files: phones write 50 to 200 million, cameras 100
_LARGE_PIXELS = 4_000_000  # larger images are decoded one at a time: 8 bytes for each pixel
_MOST_SIDE = 65_535  # JPEG's limit; Pillow's table for resizing grows with it
_READS, _READ_BYTES = 10_000, 1024  # a PNG needs a few reads per 8 KiB
_SCAN, _MOST_SCANS = b"\xff\xda\0", 100  # a JPEG has ten; a tiny scan is as slow as others
_MOST_SCANNED = 20  # scans of an image of the most pixels: at most a second to decode 25 million

# Pillow and its libraries raise these on damaged files; UnidentifiedImageError is an OSError.
DAMAGED: tuple[type[Exception], ...] = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    AttributeError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_EXIF_BYTES = 1 << 20  # for all tags of an image: a camera's preview is in another directory
_LARGEST_TYPE = 8  # bytes of an EXIF value: a fraction or a float64
_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_limits = {"pixels": MAX_PIXELS}  # of clients, in this process
_filters = threading.Lock()  # all threads share the filters of `warnings`
_one_large = threading.Lock()


def limit_pixels(most: int) -> None:
    """Set the most pixels of a client's image: 8 bytes of memory for each."""
    _limits["pixels"] = most


class _Jpeg(_JpegImageFile):  # type: ignore[misc]  # Any: Pillow is optional
    """A JPEG whose header is read without EXIF, which only the unused resolution needs."""

    def _read_dpi_from_exif(self) -> None:
        pass


OWN_JPEG = "DEPLOYKIT'S JPEG"
Image.register_open(OWN_JPEG, _Jpeg)


class _Parts(io.BytesIO):
    """An image file that limits its reads: Pillow loops over a million tiny parts in Python."""

    def __init__(self, data: Bytes) -> None:
        super().__init__(data)
        self._left = _READS + len(data) // _READ_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise OSError("it has too many parts")
        return super().read(size)


@contextlib.contextmanager
def open_upright(
    data: Bytes,
    mode: str,
    where: object,
    *,
    most_pixels: int | None = None,
    own_file: bool = False,
) -> Iterator[Any]:
    """Decode an image into a Pillow image in `mode`; `where` names it in errors.

    `own_file`: it comes from the user's disk, not from a client, and may have more pixels. Raises
    BadInput if it is not an image, damaged or refused; TooLarge above `most_pixels` times scans.
    Both are checked before any pixel is decoded; large images are decoded one at a time.
    """
    limit = FILE_PIXELS if own_file else _limits["pixels"]
    if not len(data):
        raise BadInput(f"{where}: is empty")
    parts = _Parts(data)
    try:
        with no_warnings():  # our limit is below Pillow's
            opened = Image.open(parts, formats=["PNG", OWN_JPEG, "WEBP"])
        with opened:
            pixels, scans = opened.width * opened.height, 1
            _check_header(opened, where, limit)
            if opened.format == "JPEG":
                scans = max(1, parts.getvalue().count(_SCAN))
            if scans > _MOST_SCANS or pixels * scans > _MOST_SCANNED * limit:
                raise BadInput(
                    f"{where}: has {scans} scans of {opened.width}x{opened.height}, a JPEG has "
                    f"{min(_MOST_SCANS, _MOST_SCANNED * limit // pixels)} at most",
                    hint="store it again: cameras and image programs write at most 10",
                )
            if most_pixels is not None and pixels * scans > most_pixels:
                raise TooLarge(f"{where}: is {opened.width}x{opened.height}")
            with _one_large if pixels > _LARGE_PIXELS else contextlib.nullcontext():
                opened.load()
                turn = _UPRIGHT.get(read_orientation(opened))
                opened.info.pop("transparency", None)  # else `convert` looks for such a colour
                found = opened.convert(mode)
                yield found if turn is None else found.transpose(turn)
    except DAMAGED as exc:
        reason = first_line(exc)
        if type(exc).__name__ == "UnidentifiedImageError":
            reason = "is neither PNG, JPEG nor WebP"
        if isinstance(exc, Image.DecompressionBombError):  # Pillow's limit is not ours
            raise BadInput(f"{where}: has more than {limit / 1e6:.0f} million pixels") from exc
        raise BadInput(f"{where}: is not a readable image: {reason}") from exc


def read_orientation(image: Any) -> int:
    """Return the EXIF orientation of an open image, 1 to 8; 1 if its EXIF is not readable.

    Pillow before 13 copies each tag's bytes, and tens of thousands of tags may share the same
    bytes: a megabyte of EXIF then takes gigabytes. Such EXIF is not read.
    """
    text = image.info.pop("Raw profile type exif", None)  # ImageMagick stores EXIF so in a PNG
    with contextlib.suppress(*DAMAGED):
        if text is not None and "exif" not in image.info:
            image.info["exif"] = bytes.fromhex("".join(text.split("\n")[3:]))
    if _tag_bytes(image.info.get("exif", b"")) > _EXIF_BYTES:
        return 1
    with contextlib.suppress(*DAMAGED), no_warnings():
        return int(image.getexif().get(_ORIENTATION, 1))
    return 1


def _tag_bytes(exif: bytes) -> int:
    """Return at most how many bytes the first directory's tags refer to (TIFF 6.0, section 2)."""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    if exif and exif[:4] not in (b"II*\0", b"MM\0*"):
        return _EXIF_BYTES + 1  # it is not a TIFF, or of another form
    order: Literal["big", "little"] = "big" if exif.startswith(b"MM") else "little"
    at = int.from_bytes(exif[4:8], order)
    tags = exif[at + 2 : at + 2 + 12 * int.from_bytes(exif[at : at + 2], order)]
    counts = (int.from_bytes(tags[each + 4 : each + 8], order) for each in range(0, len(tags), 12))
    return len(tags) + _LARGEST_TYPE * sum(counts)


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Suppress Pillow's warnings in the block; other threads wait to enter it."""
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check_header(image: Any, where: object, most: int) -> None:
    size = f"{image.width}x{image.height}"
    if image.width * image.height > most:
        limit = f"{most / 1e6:.0f} million pixels"
        cure = "send a smaller image, or start the server with a larger `max_pixels`"
        hint = None if most == FILE_PIXELS else cure
        raise BadInput(f"{where}: is {size}, above the limit of {limit}", hint=hint)
    if max(image.size) > _MOST_SIDE:
        raise BadInput(f"{where}: is {size}, a side has {_MOST_SIDE} at most")
    stored = str(image.tile[0][3]) if image.tile else image.mode  # "RGB;16B" for mode "RGB"
    if image.mode[0] in "IF" or ";16" in stored:  # conversion to bytes would clip or cut
        raise BadInput(
            f"{where}: has more than 8 bits per channel ({stored})",
            hint="store it with 8 bits per channel, as for training",
        )
    # a JPEG may hold a second image of another exposure; the first one is the photo
    if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
        raise BadInput(f"{where}: has {image.n_frames} frames, one image per file is needed")


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


def read_pixels(data: bytes, *, own_file: bool = False, where: object = "the image") -> np.ndarray:
    """Decode a JPEG, PNG or WebP, upright, to uint8 [height, width, 3]. Raises BadInput."""
    with open_upright(data, "RGB", where, own_file=own_file) as upright:
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


class PlacedImages:
    """Reads image files, and places each into the model's input as the server does.

    Training, calibration and the tests of accuracy use it. A model that takes any height and width
    gets the middle squares. `resize`: if False, an image of another size is refused.
    """

    def __init__(self, image: ImageInput, *, resize: bool = True) -> None:
        check_image_input(image)
        side = math.ceil(image.resize_to / image.multiple) * image.multiple
        if not image.height:  # one array needs one size
            image = replace(image, height=side, width=side, resize_to=side)
        self._image, self.tensor, self._resize = image, image.tensor, resize
        self.shape = (image.height, image.width, 1 if image.colours == "L" else 3)

    def decode(self, file: Path) -> np.ndarray:
        image = self._image
        placed = read_image(check_readable(file).read_bytes(), image, str(file), own_file=True)
        if not self._resize and (placed.width, placed.height) != (image.width, image.height):
            raise BadInput(
                f"{file}: is {placed.width}x{placed.height} (width x height), the model's input, "
                f"or the first image, is {image.width}x{image.height}",
                hint="without `task`, deploykit does not resize images: resize them as for "
                "training",
            )
        return placed.pixels


def input_without_task(inputs: Sequence[TensorSpec], first: Path) -> ImageInput:
    """Describe the one input uint8 (N, H, W, C) of a model; the image `first` sets dynamic sizes.

    Raises NotFound or BadInput naming the file.
    """
    spec = inputs[0] if len(inputs) == 1 else None
    if spec is None or spec.dtype != "uint8" or spec.shape[3:] not in ((1,), (3,)):
        raise BadInput(
            f"{first}: is an image, which needs a model with one input uint8[N,H,W,3] or "
            f"uint8[N,H,W,1]; its inputs are: {', '.join(map(str, inputs)) or 'none'}",
            hint="export with `preprocess` imagenet (or your own file), so that the model "
            "takes uint8; or store its float inputs as .npz",
        )
    pixels = read_pixels(check_readable(first).read_bytes(), own_file=True, where=first)
    height, width = (
        own if isinstance(own, int) else size
        for own, size in zip(spec.shape[1:3], pixels.shape[:2], strict=True)
    )
    return ImageInput(spec.name, height, width, colours="L" if spec.shape[3] == 1 else "RGB")


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
