"""Folders of images: what is decoded, in which order, and which images are refused."""

from __future__ import annotations

import contextlib
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.samples import Samples, read_samples

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

COLOUR = (parse_spec("image:uint8[N,4,6,3]"),)
GREY = (parse_spec("image:uint8[N,4,6,1]"),)
ANY = (parse_spec("image:uint8[N,H,W,3]"),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "images"
    found.mkdir()
    return found


def write_image(path: Path, height: int = 4, width: int = 6, seed: int = 0) -> np.ndarray:
    """Write an image of noise as PNG or JPEG, by its name; return its pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def pixels_of(samples: Samples) -> np.ndarray:
    (array,) = samples.inputs.values()
    return array


def test_images_are_read_as_uint8_in_the_order_of_their_names(folder: Path) -> None:
    b, a = write_image(folder / "b.png", seed=1), write_image(folder / "a.PNG", seed=2)
    samples = read_samples(folder, COLOUR)
    assert list(samples.inputs) == ["image"]
    np.testing.assert_array_equal(pixels_of(samples), [a, b])
    assert pixels_of(samples).dtype == np.uint8
    assert samples.labels is None


@pytest.mark.parametrize("name", ["a.jpg", "a.jpeg", "a.JPG"])
def test_a_decoded_jpeg_is_close_to_the_original(folder: Path, name: str) -> None:
    smooth = np.full((4, 6, 3), (200, 100, 50), np.uint8)
    Image.fromarray(smooth).save(folder / name, quality=95)
    found = pixels_of(read_samples(folder, COLOUR))[0]
    assert np.abs(found.astype(int) - smooth).max() <= 3


def test_sub_folders_are_classes_numbered_in_the_order_of_their_names(folder: Path) -> None:
    for kind, names in (("dog", ["b", "a"]), ("cat", ["z"])):
        (folder / kind).mkdir()
        for name in names:
            write_image(folder / kind / f"{name}.png", seed=ord(name))
    samples = read_samples(folder, COLOUR)
    assert samples.labels is not None
    assert samples.labels.tolist() == [0, 1, 1]
    assert samples.labels.dtype == np.int64
    expected = [write_image(folder / "x.png", seed=ord(name)) for name in "zab"]
    np.testing.assert_array_equal(pixels_of(samples), expected)


def test_grey_is_turned_to_colour_and_colour_to_grey(folder: Path) -> None:
    Image.fromarray(np.full((4, 6), 77, np.uint8)).save(folder / "a.png")
    np.testing.assert_array_equal(
        pixels_of(read_samples(folder, COLOUR)), np.full((1, 4, 6, 3), 77)
    )
    Image.fromarray(np.full((4, 6, 3), (200, 100, 50), np.uint8)).save(folder / "a.png")
    grey = pixels_of(read_samples(folder, GREY))
    assert grey.shape == (1, 4, 6, 1)
    assert np.unique(grey) == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)  # ITU-R 601


@pytest.mark.parametrize("mode", ["RGBA", "P", "1", "LA"])
def test_images_of_all_eight_bit_modes_are_read(folder: Path, mode: str) -> None:
    Image.new("RGB", (6, 4), (255, 255, 255)).convert(mode).save(folder / "a.png")
    np.testing.assert_array_equal(
        pixels_of(read_samples(folder, COLOUR)), np.full((1, 4, 6, 3), 255)
    )


def test_a_palette_with_transparency_is_read_without_a_warning(folder: Path) -> None:
    image = Image.new("P", (6, 4), 0)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.save(folder / "a.png", transparency=b"\x00\xff")
    found = pixels_of(read_samples(folder, COLOUR))
    np.testing.assert_array_equal(found[0, 0, 0], [10, 20, 30])


def sixteen_bit_png(colour: int, interlaced: bool) -> bytes:
    """A PNG of 6 x 4 pixels with 16 bits per channel; Pillow reads these, but does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    rows = (b"\0" + bytes(range(6 * channels)) * 2) * 8
    header = struct.pack(">IIBBBBB", 6, 4, 16, colour, 0, 0, interlaced)
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("kind", "colour"), [("L", 0), ("RGB", 2), ("LA", 4), ("RGBA", 6)])
def test_sixteen_bits_per_channel_are_refused_in_every_kind_of_png(
    folder: Path, kind: str, colour: int, interlaced: bool
) -> None:
    (folder / f"{kind}.png").write_bytes(sixteen_bit_png(colour, interlaced))
    with pytest.raises(BadInput, match=rf"{kind}\.png: has more than 8 bits per channel"):
        read_samples(folder, COLOUR)


def test_an_animated_png_is_refused_not_cut_to_its_first_frame(folder: Path) -> None:
    frames = [Image.new("RGB", (6, 4), (value, 0, 0)) for value in (10, 200)]
    frames[0].save(folder / "a.png", save_all=True, append_images=frames[1:])
    with pytest.raises(BadInput, match=r"a\.png: has 2 frames"):
        read_samples(folder, COLOUR)


def test_dynamic_sizes_are_those_of_the_first_image(folder: Path) -> None:
    write_image(folder / "a.png", 5, 7)
    write_image(folder / "b.png", 5, 7)
    assert pixels_of(read_samples(folder, ANY)).shape == (2, 5, 7, 3)
    write_image(folder / "c.png", 7, 5)
    says = r"c\.png: is 5x7 \(width x height\), the first image, a\.png, is 7x5"
    with pytest.raises(BadInput, match=says):
        read_samples(folder, ANY)


def test_an_image_of_another_size_is_refused_with_both_sizes(folder: Path) -> None:
    write_image(folder / "a.png")
    write_image(folder / "b.png", 8, 6)
    says = r"b\.png: is 6x8 \(width x height\), the model's image:uint8\[N,4,6,3\] is 6x4"
    with pytest.raises(BadInput, match=says) as caught:
        read_samples(folder, COLOUR)
    assert "not resize" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "specs",
    [
        "x:float32[N,3,4,6]",
        "x:float32[N,4,6,3]",
        "x:uint8[N,3,4,6]",
        "x:uint8[N,72]",
        "x:uint8[N,4,6,C]",
        "x:uint8[N,4,6,3] mask:uint8[N,4,6,1]",
    ],
)
def test_a_model_without_uint8_input_is_refused_with_the_export_option(
    folder: Path, specs: str
) -> None:
    write_image(folder / "a.png")
    with pytest.raises(BadInput, match="need a model with one input uint8") as caught:
        read_samples(folder, tuple(map(parse_spec, specs.split())))
    assert "`preprocess`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<!DOCTYPE html><title>404</title>", "neither PNG, JPEG nor WebP"),
        (b"\x7fELF" + bytes(60), "neither PNG, JPEG nor WebP"),
        (b"GIF89a" + bytes(60), "neither PNG, JPEG nor WebP"),
        (b"\xff\xd8\xff", "."),
        (b"\x89PNG\r\n\x1a\n", "."),
        (b"", "the file is empty"),
    ],
    ids=["html", "elf", "gif", "jpeg start", "png start", "empty"],
)
@pytest.mark.parametrize("name", ["b.jpg", "b.png"])
def test_a_file_that_is_not_an_image_is_named(
    folder: Path, name: str, content: bytes, reason: str
) -> None:
    write_image(folder / "a.png")
    (folder / name).write_bytes(content)
    with pytest.raises(BadInput, match=rf"{name}: .*{reason}"):
        read_samples(folder, COLOUR)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_an_image_of_another_format_is_refused_whatever_its_name(folder: Path, kind: str) -> None:
    Image.new("RGB", (6, 4)).save(folder / "a.png", format=kind)
    with pytest.raises(
        BadInput, match=r"a\.png: is not a readable image: is neither PNG, JPEG nor WebP"
    ):
        read_samples(folder, COLOUR)


@pytest.mark.parametrize("name", ["b.jpg", "b.png"])
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
def test_a_truncated_image_is_named(folder: Path, name: str, keep: float) -> None:
    specs = (parse_spec("image:uint8[N,64,64,3]"),)
    write_image(folder / name, 64, 64)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(BadInput, match=rf"{name}: is not a readable image"):
        read_samples(folder, specs)


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_an_image_with_any_flipped_byte_is_read_or_refused(folder: Path, name: str) -> None:
    """Refused, or read: never another exception, never a warning."""
    write_image(folder / name)
    content = (folder / name).read_bytes()
    for at in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            (folder / name).write_bytes(
                content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
            )
            with contextlib.suppress(BadInput):
                read_samples(folder, COLOUR)


def png_of_zeros(width: int, height: int, rows: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("size", [(65535, 65535), (14000, 14000), (12300, 12300)], ids=str)
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(
    folder: Path, size: tuple[int, int]
) -> None:
    """No pixel data are there at all: decoding would say that it is truncated."""
    (folder / "a.png").write_bytes(png_of_zeros(*size))
    with pytest.raises(BadInput, match=r"a\.png: .*(pixels|limit)") as caught:
        read_samples(folder, ANY)
    assert "truncated" not in caught.value.message


def test_more_pixels_than_memory_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write_image(folder / f"{number}.png")
    monkeypatch.setattr("deploykit.core.memory.memory_bytes", lambda: 3 * 4 * 6 * 3 - 1)
    with pytest.raises(BadInput, match="images: contains 0 GB of arrays, this machine's memory"):
        read_samples(folder, COLOUR)


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_an_image_of_the_models_size_is_read_upright(folder: Path, kind: str) -> None:
    """Stored on its side: the model's size is that of the upright image."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f"a.{kind}", exif=exif)
    with Image.open(folder / f"a.{kind}") as opened:
        upright = np.asarray(ImageOps.exif_transpose(opened))
    for inputs in (COLOUR, ANY):
        np.testing.assert_array_equal(pixels_of(read_samples(folder, inputs))[0], upright)
