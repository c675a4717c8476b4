"""Images of a folder or of a client: how they are decoded, placed and refused."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound, TooLarge
from deploykit.core.task import IMAGENET, LETTERBOX, ImageInput, Task, TaskOutputs
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.samples import Samples, find_source, read_batches, read_samples
from deploykit.engines.torch.loaded import image_input as image_input_of
from deploykit.engines.torch.loaded import load_preprocess
from tests.support.installed import needs

needs("PIL")

from PIL import Image, ImageOps  # noqa: E402
from PIL.PngImagePlugin import PngInfo  # noqa: E402

from deploykit.engines.data.images import check_image_input, read_image  # noqa: E402
from tests.support.runtimes.pictures import encoded, image_input, noise, photo  # noqa: E402

COLOUR = (parse_spec("image:uint8[N,4,6,3]"),)
GREY = (parse_spec("image:uint8[N,4,6,1]"),)
ANY = (parse_spec("image:uint8[N,H,W,3]"),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "images"
    found.mkdir()
    return found


def write(path: Path, height: int = 4, width: int = 6, seed: int = 0) -> np.ndarray:
    path.parent.mkdir(exist_ok=True)
    pixels = noise(height, width, seed=seed)
    Image.fromarray(pixels).save(path)
    return pixels


def pixels_of(samples: Samples) -> np.ndarray:
    (array,) = samples.inputs.values()
    return array


# --- decoding ---


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_jpeg_png_and_webp_are_read(kind: str) -> None:
    smooth = np.full((4, 6, 3), (200, 100, 50), np.uint8)
    found = read_image(encoded(smooth, kind), image_input())
    assert np.abs(found.pixels.astype(int) - smooth).max() <= 3


MODES: dict[str, Callable[[], Any]] = {
    "grey": lambda: Image.fromarray(noise(4, 6, 1)),
    "black and white": lambda: Image.fromarray(noise(4, 6, 1)).convert("1"),
    "palette": lambda: Image.fromarray(noise(4, 6)).quantize(8),
    "alpha": lambda: Image.fromarray(noise(4, 6, 4), "RGBA"),
    "grey with alpha": lambda: Image.fromarray(noise(4, 6, 2), "LA"),
    "CMYK": lambda: Image.fromarray(noise(4, 6)).convert("CMYK"),
}


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("colours", ["RGB", "L"])
def test_other_modes_become_what_pillow_converts_them_to(
    kind: str, colours: str, folder: Path
) -> None:
    """As torchvision's datasets read them; transparency is dropped, not laid on a colour."""
    image = MODES[kind]()
    more = {"transparency": bytes([0, 128, 255])} if kind == "palette" else {}
    data = encoded(image, "JPEG" if kind == "CMYK" else "PNG", **more)
    found = read_image(data, image_input(colours=colours, interpolation="nearest")).pixels
    image = Image.open(io.BytesIO(data)) if kind == "CMYK" else image  # JPEG loses some
    expected = np.asarray(image.convert(colours)).reshape(4, 6, -1)
    np.testing.assert_array_equal(found, expected)
    (folder / "a.png").write_bytes(data)
    samples = read_samples(folder, COLOUR if colours == "RGB" else GREY)
    np.testing.assert_array_equal(pixels_of(samples)[0], expected)


def test_bgr_is_rgb_in_the_other_order() -> None:
    rule = image_input(interpolation="nearest", colours="BGR")
    found = read_image(encoded(noise(4, 6)), rule).pixels
    np.testing.assert_array_equal(found, noise(4, 6)[:, :, ::-1])
    assert found.flags.c_contiguous


def test_the_first_image_of_a_jpeg_with_several_is_the_photo() -> None:
    second = Image.fromarray(noise(4, 6, seed=1))
    data = encoded(noise(4, 6), "MPO", save_all=True, append_images=[second], quality=95)
    alone = encoded(noise(4, 6), "JPEG", quality=95)
    found, expected = (read_image(each, image_input()).pixels for each in (data, alone))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_an_image_turned_by_its_exif_orientation_is_upright(kind: str, folder: Path) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(noise(4, 6), kind, exif=exif)
        with Image.open(io.BytesIO(data)) as opened:
            upright = np.asarray(ImageOps.exif_transpose(opened))
        found = read_image(data, image_input(*upright.shape[:2], interpolation="nearest"))
        np.testing.assert_array_equal(found.pixels, upright)
        assert (found.height, found.width) == upright.shape[:2]
        (folder / f"a.{kind}").write_bytes(data)
        np.testing.assert_array_equal(pixels_of(read_samples(folder, ANY))[0], upright)


def exif_of(tags: int, shared: int) -> bytes:
    """A resolution of 300, the orientation 6, then tags that all refer to the same bytes."""
    first = struct.pack("<HHLL", 0x0112, 3, 1, 6) + struct.pack("<HHLL", 0x011A, 5, 1, 8)
    first += struct.pack("<HHLL", 0x0128, 3, 1, 2)
    body = b"".join(struct.pack("<HHLL", 0x8000 + n, 1, shared, 16) for n in range(tags))
    ends = struct.pack("<LLLH", 16, 300, 1, tags + 3)
    return b"Exif\0\0II*\0" + ends + first + body + bytes(4 + shared)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "PNG by ImageMagick"])
def test_exif_of_many_tags_that_share_their_bytes_is_not_read(kind: str) -> None:
    """300 tags of 8 kB; with 60,000 of 400 kB a file of a megabyte took gigabytes."""
    for shared, turned in ((10, True), (8000, False)):
        exif, info = exif_of(300, shared), PngInfo()
        info.add_text("Raw profile type exif", f"\nexif\n{len(exif):8}\n{exif.hex()}\n", zip=True)
        given = {"pnginfo": info} if kind.endswith("Magick") else {"exif": exif}
        found = read_image(encoded(noise(4, 6), kind.partition(" ")[0], **given), image_input(4, 6))
        assert (found.height, found.width) == ((6, 4) if turned else (4, 6))
    data = encoded(noise(4, 6), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(range(40)))
    assert read_image(data, image_input(4, 6)).width == 6  # damaged


# --- refused ---


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, bits: int = 8, colour: int = 2, interlaced: int = 0) -> bytes:
    """A PNG of zeros for its first 100 bytes or less; Pillow itself does not write 16 bits."""
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    data = chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + data + chunk(b"IEND", b"")


def frames(kind: str) -> bytes:
    other = Image.fromarray(noise(4, 6, seed=1))
    return encoded(noise(4, 6), kind, save_all=True, append_images=[other])


NOT_AN_IMAGE, DEPTH = "is neither PNG, JPEG nor WebP", "has more than 8 bits per channel"
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "html": (lambda: b"<!doctype html>" * 9, NOT_AN_IMAGE),
    **{
        kind: (lambda kind=kind: encoded(noise(4, 6), kind), NOT_AN_IMAGE)
        for kind in ("GIF", "BMP", "TIFF")
    },
    "16 bits of grey": (lambda: encoded(Image.fromarray(np.zeros((4, 6), np.uint16))), DEPTH),
    **{
        f"16 bits, {colour}, {interlaced}": (
            lambda colour=colour, interlaced=interlaced: png(6, 4, 16, colour, interlaced),
            DEPTH,
        )
        for colour in (0, 2, 4, 6)
        for interlaced in (0, 1)
    },
    "animated png": (lambda: frames("PNG"), "has 2 frames, one image per file is needed"),
    "animated webp": (lambda: frames("WEBP"), "has 2 frames, one image per file is needed"),
    "cut header": (lambda: photo()[:20], "is not a readable image"),
    "cut jpeg": (lambda: photo()[:9000], "is not a readable image"),
    "cut png": (lambda: encoded(noise(64, 64))[:9000], "is not a readable image"),
    "start of a png": (lambda: b"\x89PNG\r\n\x1a\n", "is not a readable image"),
    "bomb": (lambda: png(65_535, 65_535), "million pixels"),
    "smaller bomb": (lambda: png(13_000, 13_000), "pixels"),
    "thread": (lambda: png(1, 20_000_000), "a side has 65535 at most"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line_and_not_decoded(
    kind: str, folder: Path
) -> None:
    make, reason = REFUSED[kind]
    data = make()
    with pytest.raises(BadInput, match=f"^the image: .*{reason}") as caught:
        read_image(data, image_input())  # imports what it needs
    tracemalloc.start()
    with pytest.raises(BadInput):
        read_image(data, image_input())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert "\n" not in caught.value.message
    (folder / "a.jpg").write_bytes(data)
    with pytest.raises(BadInput, match=rf"a\.jpg: .*{reason}"):
        read_samples(folder, ANY)


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_an_image_with_any_flipped_byte_is_read_or_refused(folder: Path, name: str) -> None:
    write(folder / name)
    content = (folder / name).read_bytes()
    for at in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            changed = content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
            (folder / name).write_bytes(changed)
            with contextlib.suppress(BadInput):
                read_samples(folder, COLOUR)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "padding"])
def test_a_file_of_a_million_tiny_parts_is_not_walked_through(kind: str) -> None:
    """3 MB took 1.1 s of Python, in which no other image was opened."""
    head, part, tail = {
        "PNG": (png(4, 4)[:33], chunk(b"tEXt", b"a\0b"), png(4, 4)[33:]),
        "JPEG": (photo()[:2], b"\xff\xfe\0\2", photo()[2:]),
        "padding": (photo()[:2], b"\xff" * 4, photo()[2:]),
    }[kind]
    with pytest.raises(BadInput, match="too many parts"):
        read_image(head + part * 200_000 + tail, image_input())
    real = encoded(noise(1000, 1000))
    assert real.count(b"IDAT") > 40
    assert read_image(real, image_input()).width == 1000


def test_an_image_above_a_limit_is_refused() -> None:
    with pytest.raises(TooLarge, match="is 6x4"):
        read_image(encoded(noise(4, 6)), image_input(), most_pixels=23)
    rule = image_input(224, 224, resize="shortest-edge", resize_to=256)
    with pytest.raises(BadInput, match="is 1x9000, and 256x2304000 once its shorter side has 256"):
        read_image(encoded(noise(9000, 1)), rule)
    free = ImageInput("image", 0, 0, "shortest-edge", 20)
    assert read_image(encoded(noise(10, 40)), free).pixels.shape == (20, 80, 3)
    with pytest.raises(BadInput, match=r"is 41x10, and 82x20 .* limit of 0\.0016 million"):
        read_image(encoded(noise(10, 41)), free)


# --- placing ---


@pytest.fixture(scope="module")
def transforms() -> Any:
    needs("torchvision")
    from tests.support.zoo.models import register_torchvision

    register_torchvision()
    from torchvision.transforms import functional

    return functional


SIZES = [(427, 640), (257, 301), (31, 90), (90, 120), (1, 1), (1000, 3)]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_resizing_and_cropping_are_torchvisions(transforms: Any, interpolation: str) -> None:
    mode = transforms.InterpolationMode(interpolation)
    for size in SIZES:
        image = Image.fromarray(noise(*size))
        shortest = transforms.center_crop(transforms.resize(image, 73, mode), [64, 48])
        filled = transforms.center_crop(transforms.resize(image, 50, mode), [60, 81])
        squashed = transforms.center_crop(transforms.resize(image, [44, 44], mode), 40)
        for expected, rule in (
            (shortest, image_input(64, 48, resize="shortest-edge", resize_to=73)),
            (transforms.resize(image, [100, 50], mode), image_input(100, 50)),
            (squashed, image_input(40, 40, resize="stretch", resize_to=44)),  # as timm does it
            (filled, image_input(60, 81, resize="shortest-edge", resize_to=50)),  # with black
        ):
            rule = replace(rule, interpolation=interpolation)
            found = read_image(encoded(noise(*size)), rule).pixels
            np.testing.assert_array_equal(found, np.asarray(expected))


FREE = ImageInput("image", 0, 0, "shortest-edge", 20, padding=7)
LETTER = image_input(60, 60, resize=LETTERBOX, padding=7)


@pytest.mark.parametrize(
    ("size", "rule", "shape", "box"),
    [
        ((50, 100), LETTER, (60, 60), (15, 0, 45, 60)),
        ((100, 50), LETTER, (60, 60), (0, 15, 60, 45)),
        ((35, 100), FREE, (20, 57), (0, 0, 20, 57)),
        ((35, 100), replace(FREE, multiple=8), (24, 64), (0, 0, 20, 57)),
    ],
)
def test_an_image_that_keeps_its_ratio_is_filled_up(
    size: tuple[int, int], rule: ImageInput, shape: tuple[int, int], box: tuple[int, ...]
) -> None:
    top, left, bottom, right = box
    found = read_image(encoded(noise(*size)), rule)
    inner = (right - left, bottom - top)
    resized = Image.fromarray(noise(*size)).resize(inner, Image.Resampling.BILINEAR)
    expected = np.full((*shape, 3), 7, np.uint8)
    expected[top:bottom, left:right] = np.asarray(resized)
    np.testing.assert_array_equal(found.pixels, expected)
    whole = found.to_original(np.array([[left, top, right, bottom]]))
    np.testing.assert_allclose(whole, [[0, 0, size[1], size[0]]])


@pytest.mark.parametrize(
    ("rule", "box"),
    [
        (image_input(20, 20), [4, 10, 8, 18]),  # 100 wide, 40 high: a fifth, and a half
        (image_input(20, 20, resize="shortest-edge", resize_to=20), [-5, 10, 5, 18]),
        (image_input(40, 40, resize="stretch", resize_to=44), [6.8, 20, 15.6, 37.6]),
        (image_input(50, 50, resize="letterbox"), [10, 25, 20, 33]),
    ],
    ids=["stretch", "shortest-edge", "squash", "letterbox"],
)
def test_boxes_are_given_in_pixels_of_the_original(rule: ImageInput, box: list[float]) -> None:
    """The same box, x 20 to 40 and y 20 to 36, in each model's pixels; no box leaves the image."""
    found = read_image(encoded(noise(40, 100)), rule)
    assert (found.width, found.height) == (100, 40)
    np.testing.assert_allclose(found.to_original(np.array([box])), [[20, 20, 40, 36]])
    np.testing.assert_allclose(
        found.to_original(np.array([[-99, -99, 999, 999]])), [[0, 0, 100, 40]]
    )


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


# --- folders ---


def test_sub_folders_are_classes_numbered_in_the_order_of_their_names(folder: Path) -> None:
    written = [write(folder / f"{name}.png", seed=ord(name[-1])) for name in ("dog/b", "dog/a")]
    written.append(write(folder / "cat" / "z.png", seed=3))
    samples = read_samples(folder, COLOUR)
    assert samples.labels is not None
    assert samples.labels.tolist() == [0, 1, 1]
    assert samples.labels.dtype == np.int64
    np.testing.assert_array_equal(pixels_of(samples), written[::-1])


def test_an_image_of_another_size_is_refused_with_both_sizes(folder: Path) -> None:
    write(folder / "a.png", 5, 7)
    write(folder / "b.png", 5, 7)
    assert pixels_of(read_samples(folder, ANY)).shape == (2, 5, 7, 3)
    write(folder / "c.png", 7, 5)
    says = r"c\.png: is 5x7 \(width x height\), the model's input, or the first image, is 7x5"
    with pytest.raises(BadInput, match=says):
        read_samples(folder, ANY)
    says = r"a\.png: is 7x5 \(width x height\), the model's input, or the first image, is 6x4"
    with pytest.raises(BadInput, match=says) as caught:
        read_samples(folder, COLOUR)
    assert "not resize" in (caught.value.hint or "")


NO_IMAGE = "x:float32[N,3,4,6] x:float32[N,4,6,3] x:uint8[N,3,4,6] x:uint8[N,72] x:uint8[N,4,6,C]"


@pytest.mark.parametrize("specs", [*NO_IMAGE.split(), "x:uint8[N,4,6,3] mask:uint8[N,4,6,1]"])
def test_a_model_without_uint8_input_is_refused_with_the_option(folder: Path, specs: str) -> None:
    write(folder / "a.png")
    with pytest.raises(BadInput, match="needs a model with one input uint8") as caught:
        read_samples(folder, tuple(map(parse_spec, specs.split())))
    assert "`preprocess`" in (caught.value.hint or "")


INPUTS = (parse_spec("image:uint8[N,8,8,3]"),)
PLACED = ImageInput("image", 8, 8, LETTERBOX)
TASK = Task("classify", TaskOutputs("scores"), PLACED, labels=("dog", "cat", "crane", "crane"))


def test_photos_of_any_size_are_placed_as_the_server_places_them(folder: Path) -> None:
    for name, size in (("a.jpg", (20, 30)), ("b.PNG", (9, 5))):
        write(folder / name, *size)
    free = replace(PLACED, height=0, width=0, resize="shortest-edge", resize_to=6, multiple=8)
    square = replace(PLACED, resize="shortest-edge", resize_to=8)
    for rule, inputs, server in ((PLACED, INPUTS, PLACED), (free, ANY, square)):
        task = replace(TASK, image=rule)
        files = sorted(folder.iterdir())
        expected = np.stack([read_image(file.read_bytes(), server).pixels for file in files])
        samples = read_samples(folder, inputs, task=task)
        assert (list(samples.inputs), samples.labels) == (["image"], None)
        np.testing.assert_array_equal(pixels_of(samples), expected)
        (batch,) = read_batches(find_source(folder, inputs, task=task), 4)
        np.testing.assert_array_equal(batch["image"], expected)
    with pytest.raises(BadInput, match="float32"):
        read_samples(folder, (parse_spec("image:float32[N,3,8,8]"),), task=TASK)
    (folder / "b.jpg").write_bytes(b"not an image")
    with pytest.raises(BadInput, match=r"b\.jpg: is not a readable image"):
        read_samples(folder, INPUTS, task=TASK)


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (["cat", "dog"], [1, 0]),  # by the model's labels
        (["n0", "n1", "n2", "n3"], [0, 1, 2, 3]),
        (["n0", "n1"], None),
        (["cat", "bird"], "the class folder 'bird' stands for none of the model's labels"),
        (["cat", "crane"], "the class folder 'crane' stands for several of the model's labels"),
    ],
)
def test_class_folders_have_the_numbers_of_the_labels_they_are_named_after(
    folder: Path, classes: list[str], labels: list[int] | str | None
) -> None:
    for name in classes:
        write(folder / name / "a.png")
    if isinstance(labels, str):
        with pytest.raises(BadInput, match=labels):
            read_samples(folder, INPUTS, task=TASK)
        return
    found = read_samples(folder, INPUTS, task=TASK).labels
    assert (None if found is None else found.tolist()) == labels


# --- preprocessing ---


def test_a_file_gives_mean_std_and_scale(tmp_path: Path) -> None:
    path = tmp_path / "grey.toml"
    path.write_text("mean = [0.5]\nstd = [0.25]\nscale = 1\nresize = 'stretch'\n")
    found, placing = load_preprocess(str(path))
    assert found is not None
    assert placing == {"resize": "stretch"}
    assert (found.name, found.mean, found.std, found.scale) == ("grey", (0.5,), (0.25,), 1.0)
    assert load_preprocess("imagenet") == (IMAGENET, {})
    with pytest.raises(BadInput, match="neither 'imagenet' nor"):
        load_preprocess("resnet")
    with pytest.raises(NotFound):
        load_preprocess(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mean = [0.5]", "not a complete Preprocess: no 'std'"),
        ("mean = [0.5]\nstd = [0.5, 0.5]", "a number per channel"),
        ("mean = [0.5]\nstd = [0.0]", "above 0"),
        ("mean = [0.5]\nstd = [nan]", "a number per channel"),
        ("mean = [true]\nstd = [1.0]", r"'mean'.0. must be a number"),
        ("mean = [0.5]\nstd = [1.0]\ncrop = 256", "unknown key 'crop'"),
        ("mean = [0.5]\nstd = [1.0]\nresize = 'x'", "resize must be one of"),
        ("mean = [0.5]\nstd = [1.0]\npadding = 256", r"padding must be one of 0, \.\.\., 255"),
        ("mean = [0.5]\nstd = [1.0]\npadding = true", "padding must be one of 0"),
        ("mean = [0.5]\nstd = [1.0]\nresize_to = 9.0", "resize_to must be one of 1"),
        ("mean = [0.5]\nstd = [1.0]\nresize_to = 9", "and resize_to go together"),
        ("mean = [", "not valid TOML"),
        ("mean = [0.5]\nstd = [1.0]\nscale = 'x'", "'scale' must be"),
        ("\udcff", "not a text file in UTF-8"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput, match=reason) as caught:
        load_preprocess(str(path))
    assert str(path) in caught.value.message


def test_the_image_becomes_bytes_with_its_channels_last() -> None:
    inputs = [parse_spec("boxes:float32[N,4]"), parse_spec("image:float32[N,3,H,200]")]
    place, spec = image_input_of(inputs, IMAGENET)
    assert (place, str(spec)) == (1, "image:uint8[N,H,200,3]")
    for specs in (
        "x:float32[N,1,28,28]",
        "x:uint8[N,3,8,8]",
        "a:float32[N,3,8,8] b:float32[N,3,8,8]",
    ):
        with pytest.raises(BadInput, match="exactly one must be"):
            image_input_of([parse_spec(text) for text in specs.split()], IMAGENET)
