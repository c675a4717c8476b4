"""Augmentation: what it does to pixels, and that a sample is the same wherever it is made."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.engines.torch.files import with_torchvision  # noqa: E402
from deploykit.training import data as augment  # noqa: E402
from deploykit.training.data import DRAWS, Augment  # noqa: E402
from tests.support.augmenting import BYTES, EVERYTHING, FLOATS, KINDS, random_draws  # noqa: E402

pytestmark = pytest.mark.torch
MIDDLE = 0.5  # the draw that changes nothing, but for the flip


def draws(count: int, **fixed: float) -> torch.Tensor:
    """`fixed`: the place of a draw as `u3`, and its value; the others change nothing."""
    found = torch.full((count, DRAWS), MIDDLE)
    found[:, 1] = 1.0  # no flip
    for name, value in fixed.items():
        found[:, int(name[1:])] = value
    return found


@KINDS
@pytest.mark.parametrize("size", [1, 7, 39])
def test_a_sample_is_the_same_in_any_batch(
    images: np.ndarray, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, uniform = torch.from_numpy(images), random_draws(40)
    expected = EVERYTHING(whole, uniform)
    assert expected.dtype == whole.dtype
    assert not torch.equal(expected, whole)
    parts = zip(whole.split(size), uniform.split(size), strict=True)
    assert torch.equal(torch.cat([EVERYTHING(*part) for part in parts]), expected)
    monkeypatch.setitem(augment._CHUNK, "cpu", size * images[0].size)
    assert torch.equal(EVERYTHING(whole, uniform), expected)


@KINDS
def test_draws_in_the_middle_change_nothing(images: np.ndarray) -> None:
    whole = torch.from_numpy(images)
    assert torch.equal(EVERYTHING(whole, draws(40)), whole)
    assert torch.equal(Augment()(whole, random_draws(40)), whole)


@pytest.mark.parametrize(("u", "shift"), [(0.0, -2), (0.25, -1), (MIDDLE, 0), (0.99, 2)])
def test_a_crop_is_cut_out_of_the_padded_image(u: float, shift: int) -> None:
    found = Augment(crop=2)(torch.from_numpy(BYTES), draws(40, u2=u, u3=0.99)).numpy()
    padded = np.pad(BYTES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    assert (found == padded[:, 4:13, 2 + shift : 15 + shift]).all()


@KINDS
def test_a_flip_mirrors_left_to_right(images: np.ndarray) -> None:
    whole, axis = torch.from_numpy(images), 2 if images.dtype == np.uint8 else 3
    uniform = draws(40)
    uniform[::2, 1] = 0.49
    found = Augment(flip=0.5)(whole, uniform)
    assert torch.equal(found[::2], whole[::2].flip(axis))
    assert torch.equal(found[1::2], whole[1::2])


@pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed")
@pytest.mark.parametrize("degrees", [-30.0, 7.0, 90.0, 180.0])
def test_it_turns_and_colours_as_torchvision_does(degrees: float) -> None:
    """An independent implementation; a byte may be rounded otherwise."""
    functional = with_torchvision(lambda: import_module("torchvision.transforms.v2.functional"))
    whole = torch.from_numpy(BYTES)
    NCHW = whole.permute(0, 3, 1, 2)
    turned = Augment(rotation_degrees=180)(whole, draws(40, u0=(1 - degrees / 180) / 2))
    bilinear = functional.InterpolationMode.BILINEAR
    # outside of the image torchvision takes 0 as well
    expected = functional.rotate(NCHW.float(), degrees, interpolation=bilinear)
    assert (turned.permute(0, 3, 1, 2).float() - expected).abs().max() <= 1
    for name, draw, change in (
        ("brightness", "u4", functional.adjust_brightness),
        ("contrast", "u5", functional.adjust_contrast),
        ("saturation", "u6", functional.adjust_saturation),
    ):
        coloured = Augment(**{name: 0.5})(whole, draws(40, **{draw: 0.9}))
        away = (coloured.permute(0, 3, 1, 2).int() - change(NCHW, 1.4).int()).abs()
        assert away.max() <= 1, name


def test_saturation_leaves_grey_images_as_they_are() -> None:
    whole = torch.from_numpy(FLOATS)
    assert torch.equal(Augment(saturation=1.0)(whole, random_draws(40)), whole)


@pytest.mark.parametrize("shape", [(0, 9, 9, 3), (1, 1, 1, 1), (1, 1, 1, 3), (2, 3, 1, 2)], ids=str)
def test_odd_sizes_are_augmented(shape: tuple[int, ...]) -> None:
    change = replace(EVERYTHING, crop=0)
    for images in (torch.full(shape, 7, dtype=torch.uint8), torch.zeros(shape).permute(0, 3, 1, 2)):
        found = change(images, random_draws(shape[0]))
        assert (found.shape, found.dtype) == (images.shape, images.dtype)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"crop": -1}, "crop"),
        ({"crop": 1.5}, "crop"),
        ({"flip": 1.1}, "flip"),
        ({"flip": True}, "flip"),
        ({"flip": math.nan}, "flip"),
        ({"rotation_degrees": 181}, "rotation_degrees"),
        ({"brightness": "0.2"}, "brightness"),
        ({"contrast": math.inf}, "contrast"),
        ({"saturation": None}, "saturation"),
    ],
    ids=str,
)
def test_wrong_values_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=f"`{named}`"):
        Augment(**options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@KINDS
def test_a_gpu_gives_the_bits_of_the_cpu(images: np.ndarray) -> None:
    whole, uniform = torch.from_numpy(images), random_draws(40)
    assert torch.equal(EVERYTHING(whole.cuda(), uniform).cpu(), EVERYTHING(whole, uniform))
