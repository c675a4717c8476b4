"""Decode PNG, JPEG and WebP images: for training, for data in folders, and for a server's clients.

Transparency and colour profiles are dropped, as by `Image.convert`; the EXIF orientation is
applied. An animation, and more than 8 bits per channel, is refused. `Images` does not resize: an
image of another size is an error, as the model would not see what its user expects.
"""

from __future__ import annotations

import contextlib
import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deploykit.core.errors import BadInput, TooLarge, first_line
from deploykit.core.extras import require
from deploykit.core.files import check_readable
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


class Images:
    """Decodes images into uint8 (height, width, channels), for a model with these `inputs`.

    Converts colour to grey and grey to colour as the input needs. The image `first` sets a dynamic
    H or W. Raises NotFound or BadInput naming the file; BadInput for a model whose input is not
    uint8.
    """

    def __init__(self, first: Path, inputs: Sequence[TensorSpec], where: str) -> None:
        for spec in inputs if len(inputs) == 1 else ():
            if spec.dtype == "uint8" and len(spec.shape) == 4 and spec.shape[3] in _MODES:
                break
        else:
            names = ", ".join(map(str, inputs)) or "none"
            raise BadInput(
                f"{where}: contains images, which need a model with one input uint8[N,H,W,3] or "
                f"uint8[N,H,W,1]; its inputs are: {names}",
                hint="export with `preprocess` imagenet (or your own file), so that the model "
                "takes uint8; or store its float inputs as .npz",
            )
        height, width, channels = spec.shape[1:]
        self._wanted, self._mode = (height, width), _MODES[int(channels)]
        fixed = isinstance(height, int) and isinstance(width, int)
        self._owner = f"the model's {spec}" if fixed else f"the first image, {first.name},"
        high, wide, deep = self.decode(first).shape
        self._wanted, self.shape = (high, wide), (high, wide, deep)

    def decode(self, file: Path) -> np.ndarray:
        data = check_readable(file).read_bytes()
        with open_upright(data, self._mode, file, own_file=True) as upright:
            found = np.asarray(upright)
        high, wide = found.shape[:2]
        sizes = zip((high, wide), self._wanted, strict=True)
        wanted = [own if isinstance(size, str) else size for own, size in sizes]
        if [high, wide] != wanted:
            raise BadInput(
                f"{file}: is {wide}x{high} (width x height), {self._owner} is "
                f"{wanted[1]}x{wanted[0]}",
                hint="deploykit does not resize images: resize them as for training",
            )
        return found.reshape(high, wide, -1)


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
