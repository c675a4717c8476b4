"""The preprocessing contract as text: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.task import IMAGENET
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.preprocess import image_input, load_preprocess


def test_imagenet_is_known_by_name() -> None:
    found = load_preprocess("imagenet")
    assert found is IMAGENET
    assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert found.scale == 1 / 255


def test_a_file_gives_mean_std_and_scale(tmp_path: Path) -> None:
    path = tmp_path / "grey.toml"
    path.write_text("mean = [0.5]\nstd = [0.25]\nscale = 1\n")
    found = load_preprocess(str(path))
    assert (found.name, found.mean, found.std, found.scale) == ("grey", (0.5,), (0.25,), 1.0)
    assert found.channels == 1


def test_without_a_scale_bytes_become_0_to_1(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("mean = [0]\nstd = [1]\n")
    assert load_preprocess(str(path)).scale == 1 / 255


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mean = [0.5]", "std: must be a list"),
        ("mean = [0.5]\nstd = [0.5, 0.5]", "mean has 1 values, std has 2"),
        ("mean = [0.5]\nstd = [0.0]", "above 0"),
        ("mean = [0.5]\nstd = [1.0]\nscale = -1", "above 0"),
        ("mean = [0.5]\nstd = [nan]", "std: must be a list of numbers"),
        ("mean = ['a']\nstd = [1.0]", "mean: must be a list of numbers"),
        ("mean = []\nstd = []", "mean: must be a list"),
        ("mean = [true]\nstd = [1.0]", "mean: must be a list of numbers"),
        ("mean = 0.5\nstd = 1.0", "mean: must be a list"),
        ("mean = [0.5]\nstd = [1.0]\ncrop = 256", "unknown key 'crop'"),
        ("mean = [", "not valid TOML"),
        ("mean = [0.5]\nstd = [1.0]\nscale = 'x'", "scale: must be"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=reason) as caught:
        load_preprocess(str(path))
    assert str(path) in caught.value.message


def test_bytes_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(b"\xff\xfe\x00mean")
    with pytest.raises(BadInput, match="not a text file in UTF-8"):
        load_preprocess(str(path))


def test_an_unknown_name_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neither 'imagenet' nor"):
        load_preprocess("resnet")
    with pytest.raises(NotFound):
        load_preprocess(str(tmp_path / "none.toml"))


def test_the_image_becomes_bytes_with_its_channels_last() -> None:
    inputs = [parse_spec("boxes:float32[N,4]"), parse_spec("image:float32[N,3,H,200]")]
    place, spec = image_input(inputs, IMAGENET)
    assert place == 1
    assert str(spec) == "image:uint8[N,H,200,3]"


@pytest.mark.parametrize(
    "inputs",
    [
        ["x:float32[N,1,28,28]"],
        ["x:float32[N,10]"],
        ["x:uint8[N,3,8,8]"],
        ["a:float32[N,3,8,8]", "b:float32[N,3,8,8]"],
    ],
    ids=str,
)
def test_a_model_with_no_image_input_or_with_two_is_refused(inputs: list[str]) -> None:
    with pytest.raises(BadInput, match="exactly one must be"):
        image_input([parse_spec(text) for text in inputs], IMAGENET)
