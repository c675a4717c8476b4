"""Decode PNG and JPEG images into a model's input: uint8 [N,H,W,3], or [N,H,W,1] for grey.

Images are turned upright as their EXIF says. `Images` does not resize: an image of another size is
an error, as the model would not see what its user expects. The header's number of pixels is checked
before any pixel is decoded.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.files import check_readable
from deploykit.core.memory import check_memory
from deploykit.core.tensors import TensorSpec

Image = require("PIL.Image")
_JpegImageFile: Any = require("PIL.JpegImagePlugin").JpegImageFile

MAX_PIXELS = 25_000_000  # per image: a header of 74 bytes can declare 65535 x 65535
_FORMATS = ("PNG", "JPEG")
_NAMES = {"JPEG": "JPEG", "PNG": "PNG", "WEBP": "WebP"}
_MODES = {3: "RGB", 1: "L"}

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
_SIDEWAYS = (5, 6, 7, 8)  # these orientations swap width and height
_filters = threading.Lock()  # all threads share the filters of `warnings`


class _Jpeg(_JpegImageFile):  # type: ignore[misc]  # Any: Pillow is optional
    """A JPEG whose header is read without EXIF, which only the unused resolution needs."""

    def _read_dpi_from_exif(self) -> None:
        pass


_OPENS = {"JPEG": "DEPLOYKIT'S JPEG"}
Image.register_open(_OPENS["JPEG"], _Jpeg)


class Images:
    """Decodes images into uint8 (height, width, channels), for a model with these `inputs`.

    Converts colour to grey and grey to colour as the input needs; drops transparency; applies the
    EXIF orientation. The image `first` sets a dynamic H or W. Raises NotFound or BadInput naming
    the file; BadInput for a model whose input is not uint8.
    """

    def __init__(self, first: Path, inputs: Sequence[TensorSpec], where: str) -> None:
        self._first, self._where, self._spec = first, where, _takes_bytes(inputs, where)
        height, width, channels = self._spec.shape[1:]
        with _open_image(first) as image:
            size = _check_size(image, [height, width], first, first, self._spec)
            self.shape = (*size, int(channels))

    def decode(self, file: Path) -> np.ndarray:
        with _open_image(file) as image:
            _check_size(image, self.shape[:2], file, self._first, self._spec)
            pixels: np.ndarray = np.asarray(turn_upright(image, _MODES[self.shape[2]]))
            return pixels.reshape(*pixels.shape[:2], self.shape[2])

    def decode_all(self, files: Sequence[Path]) -> np.ndarray:
        """Return shape (files, height, width, channels). Raises as `decode` does."""
        check_memory(self._where, len(files) * math.prod(self.shape))
        pixels = np.empty((len(files), *self.shape), np.uint8)
        for number, file in enumerate(files):
            pixels[number] = self.decode(file)
        return pixels


def turn_upright(opened: Any, mode: str) -> Any:
    """Return the pixels in `mode`, turned by the EXIF orientation; unreadable EXIF is ignored."""
    opened.load()
    turn = _UPRIGHT.get(read_orientation(opened))
    opened.info.pop("transparency", None)  # else `convert` searches for a transparent colour
    found = opened.convert(mode)
    return found if turn is None else found.transpose(turn)


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


def _takes_bytes(inputs: Sequence[TensorSpec], where: str) -> TensorSpec:
    for spec in inputs if len(inputs) == 1 else ():
        if spec.dtype == "uint8" and len(spec.shape) == 4 and spec.shape[3] in _MODES:
            return spec
    names = ", ".join(map(str, inputs)) or "none"
    raise BadInput(
        f"{where}: contains images, which need a model with one input uint8[N,H,W,3] or "
        f"uint8[N,H,W,1]; its inputs are: {names}",
        hint="export with `preprocess` imagenet (or your own file), so that the model takes uint8; "
        "or store its float inputs as .npz",
    )


@contextlib.contextmanager
def _open_image(file: Path) -> Iterator[Any]:
    check_readable(file)
    with image_errors(file), file.open("rb") as handle, open_image(handle, file) as image:
        yield image


@contextlib.contextmanager
def open_image(
    stream: IO[bytes], where: object, formats: Sequence[str] = _FORMATS
) -> Iterator[Any]:
    """Open an image and read its header. Pillow's errors become a BadInput that names `where`."""
    with image_errors(where, formats):
        with no_warnings():  # our limit is below Pillow's
            image = Image.open(stream, formats=[_OPENS.get(name, name) for name in formats])
        with image:
            yield image


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Suppress Pillow's warnings in the block; other threads wait to enter it."""
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def image_errors(where: object, formats: Sequence[str] = _FORMATS) -> Iterator[None]:
    try:
        yield
    except DAMAGED as exc:
        reason = first_line(exc)
        if type(exc).__name__ == "UnidentifiedImageError":
            named = [_NAMES[name] for name in formats]
            reason = f"is neither {', '.join(named[:-1])} nor {named[-1]}"
        if isinstance(exc, Image.DecompressionBombError):  # Pillow's limit is not ours
            raise BadInput(f"{where}: has more than {MAX_PIXELS / 1e6:.0f} million pixels") from exc
        raise BadInput(f"{where}: is not a readable image: {reason}") from exc


def _check_size(
    image: Any, size: Sequence[int | str], file: Path, first: Path, spec: TensorSpec
) -> tuple[int, int]:
    """Return height and width of the upright image. `size`: the required ones; a name is any."""
    check_pixels(image, file)
    check_stored(image, file)  # first, as reading a PNG's EXIF decodes it
    found = (image.height, image.width)
    if read_orientation(image) in _SIDEWAYS:
        found = found[::-1]
    wanted = [own if isinstance(want, str) else want for own, want in zip(found, size, strict=True)]
    if list(found) == wanted:
        return found
    fixed = all(isinstance(axis, int) for axis in spec.shape[1:3])
    owner = f"the model's {spec}" if fixed else f"the first image, {first.name},"
    raise BadInput(
        f"{file}: is {found[1]}x{found[0]} (width x height), {owner} is {wanted[1]}x{wanted[0]}",
        hint="deploykit does not resize images: resize them as for training",
    )


def check_pixels(image: Any, where: object) -> None:
    """Raise BadInput for an opened image that is too large to be decoded."""
    if image.width * image.height > MAX_PIXELS:
        raise BadInput(
            f"{where}: is {image.width}x{image.height}, above the limit of "
            f"{MAX_PIXELS / 1e6:.0f} million pixels"
        )


def check_stored(image: Any, where: object) -> None:
    """Raise BadInput for an opened image that has more than 8 bits per channel, or is animated."""
    stored = str(image.tile[0][3]) if image.tile else image.mode  # "RGB;16B" for mode "RGB"
    if image.mode[0] in "IF" or ";16" in stored:  # conversion to bytes would clip or cut
        raise BadInput(
            f"{where}: has more than 8 bits per channel ({stored})",
            hint="store it with 8 bits per channel, as for training",
        )
    # a JPEG may hold a second image of another exposure; the first one is the photo
    if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
        raise BadInput(f"{where}: has {image.n_frames} frames, one image per file is needed")
