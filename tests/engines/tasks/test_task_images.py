"""An image as a client sends it becomes the pixels that torchvision's transforms make."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.task import ImageInput
from tests.support.installed import needs

needs("PIL")

from PIL import Image  # noqa: E402

from deploykit.engines.data.images import OWN_JPEG, read_orientation  # noqa: E402
from deploykit.engines.tasks.images import check_image_input, read_image  # noqa: E402
from tests.support.runtimes.pictures import encoded, image_input, noise, photo  # noqa: E402


@pytest.fixture(scope="module")
def transforms() -> Any:
    needs("torchvision")
    from tests.support.zoo.models import register_torchvision

    register_torchvision()
    from torchvision.transforms import functional

    return functional


SIZES = [(427, 640), (640, 427), (256, 256), (257, 301), (31, 90), (1, 1), (1000, 3)]
FILTERS = ["bilinear", "bicubic", "nearest"]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("interpolation", FILTERS)
def test_shortest_edge_is_torchvisions_resize_and_centre_crop(
    transforms: Any, size: tuple[int, int], interpolation: str
) -> None:
    rule = image_input(64, 48, resize="shortest-edge", resize_to=73, interpolation=interpolation)
    found = read_image(encoded(noise(*size)), rule)
    mode = transforms.InterpolationMode(interpolation)
    resized = transforms.resize(Image.fromarray(noise(*size)), 73, mode)
    expected = transforms.center_crop(resized, [64, 48])
    np.testing.assert_array_equal(found.pixels, np.asarray(expected))


def test_a_crop_larger_than_the_image_is_filled_with_black_as_torchvision_does(
    transforms: Any,
) -> None:
    rule = image_input(60, 81, resize="shortest-edge", resize_to=50)
    found = read_image(encoded(noise(90, 120)), rule)
    resized = transforms.resize(Image.fromarray(noise(90, 120)), 50)
    expected = transforms.center_crop(resized, [60, 81])
    np.testing.assert_array_equal(found.pixels, np.asarray(expected))
    assert (found.pixels[0] == 0).all()


@pytest.mark.parametrize("interpolation", FILTERS)
def test_stretch_is_torchvisions_resize_to_both_sides(transforms: Any, interpolation: str) -> None:
    found = read_image(photo(), image_input(100, 50, interpolation=interpolation))
    with Image.open(_file(photo())) as opened:
        mode = transforms.InterpolationMode(interpolation)
        expected = transforms.resize(opened.convert("RGB"), [100, 50], mode)
    np.testing.assert_array_equal(found.pixels, np.asarray(expected))


def test_stretch_to_more_than_the_model_takes_keeps_the_middle(transforms: Any) -> None:
    """As timm's transforms of dm_nfnet_f1 do it: "squash" at 0.91."""
    found = read_image(photo(), image_input(40, 40, resize="stretch", resize_to=44))
    with Image.open(_file(photo())) as opened:
        expected = transforms.center_crop(transforms.resize(opened.convert("RGB"), [44, 44]), 40)
    np.testing.assert_array_equal(found.pixels, np.asarray(expected))
    middle = found.to_original(np.array([[0, 0, 40, 40]]))[0]
    assert middle == pytest.approx([640 / 22, 427 / 22, 640 * 21 / 22, 427 * 21 / 22])


def _file(data: bytes) -> Any:
    import io

    return io.BytesIO(data)


@pytest.mark.parametrize(
    ("size", "inner"),
    [((50, 100), (slice(15, 45), slice(0, 60))), ((100, 50), (slice(0, 60), slice(15, 45)))],
)
def test_letterbox_keeps_the_aspect_ratio_and_fills_the_rest(
    size: tuple[int, int], inner: tuple[slice, slice]
) -> None:
    found = read_image(encoded(noise(*size)), image_input(60, 60, resize="letterbox", padding=7))
    resized = Image.fromarray(noise(*size)).resize(
        (inner[1].stop - inner[1].start, inner[0].stop - inner[0].start),
        Image.Resampling.BILINEAR,
    )
    expected = np.full((60, 60, 3), 7, np.uint8)
    expected[inner] = np.asarray(resized)
    np.testing.assert_array_equal(found.pixels, expected)


@pytest.mark.parametrize(("multiple", "shape"), [(1, (20, 57)), (8, (24, 64))])
def test_an_image_for_a_model_of_any_size_keeps_its_ratio(
    multiple: int, shape: tuple[int, int]
) -> None:
    """Padded below and on the right alone, to the multiple that the model needs."""
    rule = ImageInput("image", 0, 0, "shortest-edge", 20, padding=7, multiple=multiple)
    found = read_image(encoded(noise(35, 100)), rule)
    expected = np.full((*shape, 3), 7, np.uint8)
    resized = Image.fromarray(noise(35, 100)).resize((57, 20), Image.Resampling.BILINEAR)
    expected[:20, :57] = np.asarray(resized)
    np.testing.assert_array_equal(found.pixels, expected)
    np.testing.assert_allclose(found.to_original(np.array([[0, 0, 57, 20]])), [[0, 0, 100, 35]])


def test_an_image_too_long_for_a_model_of_any_size_is_refused() -> None:
    rule = ImageInput("image", 0, 0, "shortest-edge", 20)
    assert read_image(encoded(noise(10, 40)), rule).pixels.shape == (20, 80, 3)
    with pytest.raises(BadInput, match=r"is 41x10, and 82x20 .* limit of 0\.0016 million"):
        read_image(encoded(noise(10, 41)), rule)


@pytest.mark.parametrize(
    ("rule", "box"),
    [
        (image_input(20, 20), [4, 10, 8, 18]),  # 100 wide, 40 high: a fifth, and a half
        (image_input(20, 20, resize="shortest-edge", resize_to=20), [-5, 10, 5, 18]),
        (image_input(50, 50, resize="letterbox"), [10, 25, 20, 33]),
    ],
    ids=["stretch", "shortest-edge", "letterbox"],
)
def test_boxes_are_given_in_pixels_of_the_original(rule: ImageInput, box: list[int]) -> None:
    """The same box, x 20 to 40 and y 20 to 36, in each model's pixels."""
    found = read_image(encoded(noise(40, 100)), rule)
    assert (found.width, found.height) == (100, 40)
    np.testing.assert_allclose(found.to_original(np.array([box])), [[20, 20, 40, 36]])


def test_boxes_end_at_the_edges_of_the_image() -> None:
    found = read_image(encoded(noise(40, 100)), image_input(50, 50, resize="letterbox"))
    boxes = found.to_original(np.array([[-3, 0, 50, 60]]))
    np.testing.assert_allclose(boxes, [[0, 0, 100, 40]])


def test_an_image_turned_by_its_exif_orientation_is_upright() -> None:
    """Pillow's own `exif_transpose` is the reference, for each of the eight orientations."""
    from PIL import ImageOps

    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(noise(4, 6), exif=exif)
        with Image.open(_file(data)) as opened:
            upright = np.asarray(ImageOps.exif_transpose(opened))
        found = read_image(data, image_input(*upright.shape[:2], interpolation="nearest"))
        np.testing.assert_array_equal(found.pixels, upright)
        assert (found.height, found.width) == upright.shape[:2]


def test_damaged_exif_leaves_the_image_as_it_is() -> None:
    data = encoded(noise(4, 6), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(range(40)))
    found = read_image(data, image_input(4, 6, interpolation="nearest"))
    np.testing.assert_array_equal(found.pixels, noise(4, 6))


def exif_of(tags: int, shared: int) -> bytes:
    """A resolution of 300, the orientation 6, then tags that all refer to the same bytes."""
    first = struct.pack("<HHLL", 0x0112, 3, 1, 6) + struct.pack("<HHLL", 0x011A, 5, 1, 8)
    first += struct.pack("<HHLL", 0x0128, 3, 1, 2)
    body = b"".join(struct.pack("<HHLL", 0x8000 + n, 1, shared, 16) for n in range(tags))
    ends = struct.pack("<LLLH", 16, 300, 1, tags + 3)
    return b"Exif\0\0II*\0" + ends + first + body + bytes(4 + shared)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(("shared", "turned"), [(10, True), (8000, False)])
def test_exif_of_many_tags_that_share_their_bytes_is_not_read(
    kind: str, shared: int, turned: bool
) -> None:
    """300 tags of 8 kB; with 60,000 of 400 kB a file of a megabyte took gigabytes."""
    data = encoded(noise(4, 6), kind, exif=exif_of(300, shared))
    found = read_image(data, image_input(4, 6))
    assert (found.height, found.width) == ((6, 4) if turned else (4, 6))


@pytest.mark.parametrize(("shared", "turned"), [(10, True), (8000, False)])
def test_exif_as_imagemagick_writes_it_into_a_png_has_the_same_bound(
    shared: int, turned: bool
) -> None:
    from PIL.PngImagePlugin import PngInfo

    exif, info = exif_of(300, shared), PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n{len(exif):8}\n{exif.hex()}\n", zip=True)
    found = read_image(encoded(noise(4, 6), pnginfo=info), image_input(4, 6))
    assert (found.height, found.width) == ((6, 4) if turned else (4, 6))


def test_opening_a_jpeg_does_not_read_its_exif() -> None:
    data = encoded(noise(4, 6), "JPEG", exif=exif_of(3, 10))
    data = data[:2] + data[2 + 18 :] if data[6:10] == b"JFIF" else data  # which says no resolution
    with Image.open(_file(data)) as opened:
        assert opened.info["dpi"] == (300, 300)  # Pillow reads it
    with Image.open(_file(data), formats=[OWN_JPEG]) as opened:
        assert "dpi" not in opened.info
        assert read_orientation(opened) == 6


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_jpeg_png_and_webp_are_read(kind: str) -> None:
    smooth = np.full((4, 6, 3), (200, 100, 50), np.uint8)
    found = read_image(encoded(smooth, kind), image_input())
    assert np.abs(found.pixels.astype(int) - smooth).max() <= 3


MADE: dict[str, Callable[[], Any]] = {
    "grey": lambda: Image.fromarray(noise(4, 6, 1)),
    "black and white": lambda: Image.fromarray(noise(4, 6, 1)).convert("1"),
    "palette": lambda: Image.fromarray(noise(4, 6)).quantize(8),
    "alpha": lambda: Image.fromarray(noise(4, 6, 4), "RGBA"),
    "grey with alpha": lambda: Image.fromarray(noise(4, 6, 2), "LA"),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("colours", ["RGB", "L"])
def test_other_modes_become_what_pillow_converts_them_to(kind: str, colours: str) -> None:
    """As torchvision's datasets read them; transparency is dropped, not laid on a colour."""
    image = MADE[kind]()
    found = read_image(encoded(image), image_input(colours=colours, interpolation="nearest"))
    expected = np.asarray(image.convert(colours)).reshape(4, 6, -1)
    np.testing.assert_array_equal(found.pixels, expected)


def test_a_palette_with_transparent_colours_is_read() -> None:
    image = Image.fromarray(noise(4, 6)).quantize(8)
    data = encoded(image, transparency=bytes([0, 128, 255]))
    found = read_image(data, image_input(interpolation="nearest"))
    np.testing.assert_array_equal(found.pixels, np.asarray(image.convert("RGB")))


def test_cmyk_becomes_what_pillow_converts_it_to() -> None:
    data = encoded(Image.fromarray(noise(16, 16)).convert("CMYK"), "JPEG", quality=95)
    with Image.open(_file(data)) as opened:
        assert opened.mode == "CMYK"
        expected = np.asarray(opened.convert("RGB"))
    found = read_image(data, image_input(16, 16, interpolation="nearest"))
    np.testing.assert_array_equal(found.pixels, expected)


def test_bgr_is_rgb_in_the_other_order() -> None:
    given = image_input(interpolation="nearest", colours="BGR")
    found = read_image(encoded(noise(4, 6)), given).pixels
    np.testing.assert_array_equal(found, noise(4, 6)[:, :, ::-1])
    assert found.flags.c_contiguous


def test_the_first_image_of_a_jpeg_with_several_is_the_photo() -> None:
    """As phones write them: the second one is another exposure, or a preview."""
    second = Image.fromarray(noise(4, 6, seed=1))
    data = encoded(noise(4, 6), "MPO", save_all=True, append_images=[second], quality=95)
    alone = encoded(noise(4, 6), "JPEG", quality=95)
    found, expected = (read_image(each, image_input()).pixels for each in (data, alone))
    np.testing.assert_array_equal(found, expected)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be that large, and has no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (head, b"IDAT" + zlib.compress(bytes(9)))
    written = [
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def frames(kind: str) -> bytes:
    other = Image.fromarray(noise(4, 6, seed=1))
    return encoded(noise(4, 6), kind, save_all=True, append_images=[other])


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the image: is empty"),
    "no image": (lambda: b"<!doctype html>" * 9, "is neither PNG, JPEG nor WebP"),
    "gif": (lambda: encoded(noise(4, 6), "GIF"), "is neither PNG, JPEG nor WebP"),
    "bomb": (lambda: png_header(65_535, 65_535), "has more than 25 million pixels"),
    "thread": (lambda: png_header(1, 20_000_000), "is 1x20000000, a side has 65535 at most"),
    "truncated": (lambda: photo()[:9000], "is not a readable image: "),
    "cut header": (lambda: photo()[:20], "is not a readable image: "),
    "16 bits of grey": (
        lambda: encoded(Image.fromarray(noise(4, 6, 1).astype(np.uint16) * 257)),
        "has more than 8 bits per channel",
    ),
    "animated png": (lambda: frames("PNG"), "has 2 frames, one image per file is needed"),
    "animated webp": (lambda: frames("WEBP"), "has 2 frames, one image per file is needed"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(BadInput, match=reason) as caught:
        read_image(make(), image_input())
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("the image: ")


def test_no_pixel_of_a_bomb_is_decoded() -> None:
    """13,000 x 13,000 zeros are 0.5 MB as a PNG and 0.5 GB in memory."""
    import tracemalloc

    data = png_header(13_000, 13_000)
    tracemalloc.start()
    with pytest.raises(BadInput, match="is 13000x13000"):
        read_image(data, image_input())
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "padding"])
def test_a_file_of_a_million_tiny_parts_is_not_walked_through(kind: str) -> None:
    """3 MB took 1.1 s of Python, in which no other image was opened."""
    chunk = struct.pack(">I", 3) + b"tEXta\0b" + struct.pack(">I", zlib.crc32(b"tEXta\0b"))
    head, part, tail = {
        "PNG": (png_header(4, 4)[:33], chunk, png_header(4, 4)[33:]),
        "JPEG": (photo()[:2], b"\xff\xfe\0\2", photo()[2:]),
        "padding": (photo()[:2], b"\xff" * 4, photo()[2:]),
    }[kind]
    with pytest.raises(BadInput, match="too many parts"):
        read_image(head + part * 200_000 + tail, image_input())


def test_a_real_png_of_many_small_pieces_is_read() -> None:
    data = encoded(noise(1000, 1000))
    assert data.count(b"IDAT") > 40
    assert read_image(data, image_input()).width == 1000


def test_a_thin_image_whose_shorter_side_would_make_it_huge_is_refused() -> None:
    rule = image_input(224, 224, resize="shortest-edge", resize_to=256)
    with pytest.raises(BadInput, match="is 1x9000, and 256x2304000 once its shorter side has 256"):
        read_image(encoded(noise(9000, 1)), rule)


def test_an_image_above_the_callers_limit_is_too_large() -> None:
    with pytest.raises(TooLarge, match="is 6x4"):
        read_image(encoded(noise(4, 6)), image_input(), most_pixels=23)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"resize": "squeeze"}, "`resize` 'squeeze'"),
        ({"interpolation": "lanczos"}, "`interpolation` 'lanczos'"),
        ({"colours": "CMYK"}, "`colours` 'CMYK'"),
        ({"resize": "shortest-edge"}, "`resize_to` 0, 1 or more"),
        ({"padding": 256}, "`padding` 256"),
        ({"height": 0}, "is 6x0 pixels"),
        ({"height": 0, "width": 0}, "is 0x0 pixels"),
        ({"multiple": 0}, "`multiple` 0, 1 to 1024"),
        ({"height": 1 << 30}, "is 6x1073741824 pixels"),
    ],
)
def test_a_rule_that_is_not_known_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        check_image_input(image_input(**{"height": 4, **change}))
