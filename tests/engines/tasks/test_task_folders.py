"""Folders of images as the data of a model with a task: placed as the server places them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.task import LETTERBOX, ImageInput, Task, TaskOutputs
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.samples import SampleStream, find_source, read_samples

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from deploykit.engines.tasks.images import read_image  # noqa: E402

INPUTS = (parse_spec("image:uint8[N,8,8,3]"),)
PLACED = ImageInput("image", 8, 8, LETTERBOX)
TASK = Task("classify", TaskOutputs("scores"), PLACED, labels=("dog", "cat", "crane", "crane"))


def photo(path: Path, width: int, height: int, seed: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def placed(files: list[Path]) -> np.ndarray:
    return np.stack([read_image(file.read_bytes(), PLACED).pixels for file in files])


def labels_of(folder: Path) -> list[int] | None:
    found = read_samples(folder, INPUTS, task=TASK).labels
    return None if found is None else found.tolist()


def test_photos_of_any_size_are_placed_as_the_server_places_them(tmp_path: Path) -> None:
    files = [photo(tmp_path / "d/a.jpg", 30, 20, 0), photo(tmp_path / "d/b.png", 5, 9, 1)]
    found = read_samples(tmp_path / "d", INPUTS, task=TASK)
    np.testing.assert_array_equal(found.inputs["image"], placed(files))
    source = find_source(tmp_path / "d", INPUTS, task=TASK)
    with SampleStream(source) as stream:
        (batch,) = stream.batches(4)
    np.testing.assert_array_equal(batch.feeds["image"], placed(files))


def test_a_model_of_any_size_gets_the_middle_squares_of_a_folder(tmp_path: Path) -> None:
    files = [photo(tmp_path / "d/a.png", 30, 20, 0), photo(tmp_path / "d/b.png", 15, 19, 1)]
    free = replace(PLACED, height=0, width=0, resize="shortest-edge", resize_to=6, multiple=8)
    inputs = (parse_spec("image:uint8[N,H,W,3]"),)
    found = read_samples(tmp_path / "d", inputs, task=replace(TASK, image=free))
    square = replace(PLACED, resize="shortest-edge", resize_to=8)
    expected = np.stack([read_image(file.read_bytes(), square).pixels for file in files])
    np.testing.assert_array_equal(found.inputs["image"], expected)


def test_class_folders_have_the_numbers_of_the_labels_they_are_named_after(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        photo(tmp_path / name / "a.png", 9, 9, 0)
    assert labels_of(tmp_path) == [1, 0]


@pytest.mark.parametrize(
    ("name", "reason"), [("bird", "stands for none of"), ("crane", "stands for several of")]
)
def test_a_class_folder_that_is_no_label_next_to_one_that_is_is_refused(
    name: str, reason: str, tmp_path: Path
) -> None:
    for each in ("cat", name):
        photo(tmp_path / each / "a.png", 9, 9, 0)
    with pytest.raises(BadInput, match=f"the class folder '{name}' {reason} the model's labels"):
        read_samples(tmp_path, INPUTS, task=TASK)


@pytest.mark.parametrize(("count", "labels"), [(4, [0, 1, 2, 3]), (2, None)])
def test_class_folders_with_names_of_their_own_are_numbered_if_there_is_one_for_each_label(
    tmp_path: Path, count: int, labels: list[int] | None
) -> None:
    for number in range(count):
        photo(tmp_path / f"n{number}" / "a.png", 9, 9, 0)
    assert labels_of(tmp_path) == labels


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    photo(tmp_path / "d/a.png", 9, 9, 0)
    (tmp_path / "d/b.jpg").write_bytes(b"not an image")
    with pytest.raises(BadInput, match=r"b\.jpg: is not a readable image"):
        read_samples(tmp_path / "d", INPUTS, task=TASK)


def test_a_model_that_takes_no_bytes_gets_no_placed_images(tmp_path: Path) -> None:
    photo(tmp_path / "d/a.png", 9, 9, 0)
    with pytest.raises(BadInput, match="float32"):
        read_samples(tmp_path / "d", (parse_spec("image:float32[N,3,8,8]"),), task=TASK)
