"""Images and texts that strangers send: what is answered, and why the others are not."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from tests.support.runtimes.pictures import encoded, noise, photo

_FORMATS = "is neither PNG, JPEG nor WebP"
_TURNED = Image.Exif()
_TURNED[0x0112] = 6
Make = Callable[[], bytes]


def small_image(mode: str = "RGB") -> Any:
    return Image.fromarray(noise(9, 12)).convert(mode)


def frames(kind: str, count: int) -> bytes:
    others = [Image.fromarray(noise(9, 12, seed=seed)) for seed in range(1, count)]
    return encoded(small_image(), kind, save_all=True, append_images=others)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has a few pixels."""
    found = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")):
        found += struct.pack(">I", len(data)) + kind + data
        found += struct.pack(">I", zlib.crc32(kind + data))
    return found


def comments(count: int) -> bytes:
    """A PNG with so many empty comments."""
    data, comment = encoded(small_image()), b"tEXt"
    one = struct.pack(">I", 0) + comment + struct.pack(">I", zlib.crc32(comment))
    return data[:-12] + count * one + data[-12:]


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan, of a few bytes, comes so many times."""
    data = encoded(small_image("L"), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + count * data[last:-2] + data[-2:]


ANSWERED: dict[str, Make] = {
    "cmyk": lambda: encoded(small_image("CMYK"), "JPEG"),
    "turned": lambda: encoded(small_image(), "JPEG", exif=_TURNED),
    "one pixel": lambda: encoded(np.zeros((1, 1, 3), np.uint8)),
    "alpha": lambda: encoded(small_image("RGBA")),
    "grey and alpha": lambda: encoded(small_image("LA")),
    "palette": lambda: encoded(small_image("P")),
    "one bit": lambda: encoded(small_image("1")),
    "two images of a phone": lambda: frames("MPO", 2),
    "rubbish behind it": lambda: photo() + bytes(100_000),
    "many scans": lambda: many_scans(90),
    "a colour profile": lambda: encoded(small_image("CMYK"), "JPEG", icc_profile=bytes(200_000)),
    "a long side": lambda: encoded(np.zeros((1, 60_000, 3), np.uint8)),
}
REFUSED: dict[str, tuple[Make, str]] = {
    "bomb": (lambda: png_header(50_000, 50_000), "has more than 25 million pixels"),
    "smaller bomb": (lambda: png_header(5_001, 5_000), "is 5001x5000, above the limit of 25"),
    "thread": (lambda: png_header(70_000, 1), "is 70000x1, a side has 65535 at most"),
    "no size": (lambda: png_header(0, 0), _FORMATS),
    "gif": (lambda: frames("GIF", 30), _FORMATS),
    "animated webp": (lambda: frames("WEBP", 20), "has 20 frames, one image per file"),
    "animated png": (lambda: frames("PNG", 5), "has 5 frames, one image per file"),
    "16 bits": (
        lambda: encoded(Image.fromarray(np.zeros((4, 4), np.uint16))),
        "has more than 8 bits per channel",
    ),
    "cut": (lambda: photo()[:9000], "image file is truncated"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", _FORMATS),
    "tiff": (lambda: encoded(small_image(), "TIFF"), _FORMATS),
    "heic": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(2000), _FORMATS),
    "too many scans": (lambda: many_scans(100), "scans, a JPEG has 100 at most"),
    "half of a progressive one": (
        lambda: encoded(noise(90, 120), "JPEG", progressive=True)[:4000],
        "image file is truncated",
    ),
    "parts": (lambda: comments(50_000), "it has too many parts"),
}
TEXTS: dict[str, tuple[bytes, str]] = {
    "too long": (b"good " * 100, "has 102 tokens, the model takes 8"),
    "10 MB": (b"good " * 2_000_000, "has 10000000 characters, the model takes 8 tokens"),
    "spaces": (b" \n", "is empty"),
    "byte order mark": (b"\xef\xbb\xbf", "is empty"),
    "no utf-8": (b"\xff\xfe\0", "is not UTF-8"),
    "utf-16": ("good".encode("utf-16"), "is not UTF-8"),
    "half of a pair": (b"\xed\xa0\x80", "is not UTF-8"),
}
