"""Folders of images to train on: which layouts are splits, and that serving sees their pixels."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deploykit as dk
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, NotFound, OutOfMemory
from deploykit.core.task import ImageInput, Task, TaskOutputs
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.data import folders
from deploykit.engines.data.folders import class_splits
from deploykit.engines.data.samples import read_samples
from deploykit.engines.tasks import TaskSteps
from deploykit.engines.torch.open import load_module
from tests.support.installed import needs
from tests.support.runtimes.pictures import encoded, noise

needs("PIL", "onnxscript")

pytestmark = pytest.mark.torch

CLASSES = ("oval", "round")
RULES = {
    "middle": ImageInput("photo", 12, 20, "shortest-edge", 22),
    "letterbox": ImageInput("photo", 12, 20, "letterbox", colours="BGR", padding=9),
    "grey": ImageInput("photo", 12, 20, "stretch", interpolation="bicubic", colours="L"),
}
RECIPE = """
from dataclasses import replace
from torch import nn
from deploykit.core.task import ImageInput, Preprocess
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.folders import class_splits
from deploykit.training.data import top1_per_sample
from tests.support.training import LINE

IMAGE = ImageInput("photo", 12, 20, "letterbox", colours="BGR", padding=9)
RECIPE = replace(
    LINE,
    build=lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 20, classes)),
    data=lambda path: class_splits(path, IMAGE),
    inputs=(parse_spec("photo:uint8[N,12,20,3]"),),
    outputs=(parse_spec("logits:float32[N,classes]"),),
    metric=top1_per_sample,
    epochs=1,
    preprocess=Preprocess("mine", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2)),
)
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of three sizes, with each EXIF orientation, as JPEG and PNG, in two class folders."""
    from PIL import Image

    where = tmp_path_factory.mktemp("photos")
    for seed, (height, width) in enumerate([(30, 45), (45, 30), (33, 33)]):
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            for kind, name in zip(("JPEG", "PNG"), CLASSES, strict=True):
                data = encoded(noise(height, width, seed=8 * seed + orientation), kind, exif=exif)
                file = where / name / f"{height}-{orientation}.{kind.lower()}"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(data)
    return where


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def parts_of(splits: Any) -> list[Any]:
    return [splits.train, splits.calibration, splits.test]


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a recipe of one's own that was trained on `photos`."""
    where = tmp_path_factory.mktemp("trained")
    (where / "mine.py").write_text(RECIPE)
    dk.train(str(where / "mine.py"), where / "m.pt", data=photos, device="cpu")
    return where / "m.pt"


def export(trained: Path, recipe: Path | None = None, **options: Any) -> Any:
    arch = str(recipe or trained.with_name("mine.py"))
    return dk.export(trained, arch=arch, task="classify", **options)


@pytest.fixture(scope="module")
def exported(trained: Path) -> Any:
    return export(trained)


def served(files: Sequence[Path], task: Task, inputs: Sequence[TensorSpec]) -> np.ndarray:
    steps = TaskSteps(task, inputs, (parse_spec("scores:float32[N,2]"),), Path())
    return np.concatenate([steps.read(file.read_bytes()).feeds["photo"] for file in files])


@pytest.mark.parametrize("rule", RULES)
def test_training_calibration_and_serving_read_the_same_bytes(photos: Path, rule: str) -> None:
    image = RULES[rule]
    inputs = (parse_spec(f"photo:uint8[N,12,20,{1 if image.colours == 'L' else 3}]"),)
    task = Task("classify", TaskOutputs("scores"), image, labels=CLASSES)
    fed = served(files_of(photos), task, inputs)
    splits = class_splits(photos, image)
    parts = parts_of(splits)
    labels = {
        pixels.tobytes(): label
        for part in parts
        for pixels, label in zip(part.inputs["photo"], part.labels.tolist(), strict=True)
    }
    names = [file.parent.name for file in files_of(photos)]
    assert [labels[pixels.tobytes()] for pixels in fed] == [CLASSES.index(name) for name in names]
    assert sum(len(part.labels) for part in parts) == len(fed) == 48
    np.testing.assert_array_equal(read_samples(photos, inputs, task=task).inputs["photo"], fed)


def test_an_exported_checkpoint_is_served_the_pixels_it_was_trained_on(
    photos: Path, trained: Path, exported: Any
) -> None:
    task = exported.manifest.task
    assert task.image == RULES["letterbox"]
    splits = class_splits(photos, task.image)
    read = {pixels.tobytes() for part in parts_of(splits) for pixels in part.inputs["photo"]}
    fed = served(files_of(photos), task, exported.manifest.inputs)
    assert {pixels.tobytes() for pixels in fed} == read
    with dk.load(exported.path, "cpu") as engine:
        logits = engine({"photo": splits.test.inputs["photo"]})[engine.outputs[0].name]
    training = Artefact(trained).manifest.evidence.training
    score, figures = training.score.value, training.figures
    assert (figures["classes"], figures["image"]) == (list(CLASSES), task.image.to_dict())
    assert figures["preprocess"]["mean"] == [0.5, 0.4, 0.3]
    assert (logits.argmax(1) == splits.test.labels).mean() == pytest.approx(score)  # normalised
    assert task.labels == CLASSES
    assert not any("labels" in note for note in exported.notes)


@pytest.mark.parametrize("end", ["jsonl", "csv"])
def test_a_folder_is_answered_into_a_file(
    photos: Path, exported: Any, tmp_path: Path, end: str
) -> None:
    """A damaged file is answered with its error; one of another kind is left out, with a note."""
    folder, out = tmp_path / "new", tmp_path / f"a.{end}"
    shutil.copytree(photos / CLASSES[0], folder)
    (folder / "damaged.png").write_bytes(encoded(noise(9, 9))[:60])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "scan.bmp").write_bytes(b"BM")
    files = files_of(photos / CLASSES[0])
    expected = dk.predict_items(exported.path, files).answers
    notes: list[str] = []
    for _ in range(2):  # its own file is replaced
        dk.predict_items(exported.path, [folder], out=out, on_note=notes.append)
    lines = out.read_text().splitlines()
    if end == "csv":
        rows: list[Any] = list(csv.DictReader(lines))
        assert list(rows[0]) == ["file", "error", "label", "score"]
    else:
        rows = [{"file": each["file"], **each["answer"]} for each in map(json.loads, lines)]
    failed = [row for row in rows if row.get("error")]
    assert [Path(row["file"]).name for row in failed] == ["damaged.png", "empty.jpg"]
    right = [row for row in rows if not row.get("error")]
    assert [Path(row["file"]).name for row in right] == [file.name for file in files]
    found = [(row["label"], float(row["score"])) for row in right]
    assert found == [(answer["label"], answer["score"]) for answer in expected]
    assert {label for label, _ in found} <= {*CLASSES}
    assert "1 files that do not end in" in notes[0]
    assert notes[1].startswith("2 of 26 items could not be answered, such as ")
    (tmp_path / f"b.{end}").write_text("somebody's\n")
    with pytest.raises(BadInput, match=rf"b\.{end}: exists"):
        dk.predict_items(exported.path, [folder], out=tmp_path / f"b.{end}")


def test_pixels_are_normalised_as_in_training_unless_an_option_says_otherwise(
    photos: Path, trained: Path, exported: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(RECIPE.replace("(0.5, 0.4, 0.3)", "(0.9, 0.9, 0.9)"))
    made = export(trained, tmp_path / "mine.py", out=tmp_path / "m.onnx")
    files = files_of(photos)[:4]
    answers = [dk.predict_items(each.path, files).answers for each in (made, exported)]
    assert answers[0] == answers[1]
    for each, noted in ((made, True), (exported, False)):
        assert any("normalised as in training" in note for note in each.notes) == noted
    rule = tmp_path / "rule.toml"
    rule.write_text('mean = [0.5, 0.4, 0.3]\nstd = [0.2, 0.2, 0.2]\nresize = "stretch"\n')
    options = {"labels": ["egg", "ball"], "preprocess": str(rule), "force": True}
    task = export(trained, out=tmp_path / "m.onnx", **options).manifest.task
    assert task.labels == ("egg", "ball")
    assert task.image == replace(RULES["letterbox"], resize="stretch")


@pytest.mark.parametrize(
    "changed",
    [
        {"image": {"tensor": "x", "height": 0, "width": 8}},
        {"classes": [1, 2]},
        {"preprocess": {"name": "x", "mean": "half", "std": [1.0]}},
    ],
    ids=str,
)
def test_a_checkpoint_with_an_odd_image_or_odd_classes_is_refused(
    trained: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    document = torch.load(trained, weights_only=True) | changed
    torch.save(document, tmp_path / "m.pt")
    with pytest.raises(BadInput, match=f"damaged deploykit checkpoint: .*'{next(iter(changed))}'"):
        load_module(tmp_path / "m.pt", arch=str(trained.with_name("mine.py")))


def test_every_file_is_read_or_counted(photos: Path, tmp_path: Path) -> None:
    """WebP, a JPEG under another name and one of 26 million pixels; others are named."""
    from PIL import Image

    for name in CLASSES:
        shutil.copytree(photos / name, tmp_path / name)
    odd = tmp_path / CLASSES[0]
    (odd / "a.webp").write_bytes(encoded(noise(30, 45), "WEBP"))
    (odd / "a.jfif").write_bytes(encoded(noise(30, 45), "JPEG"))
    Image.new("RGB", (6500, 4000)).save(odd / "large.jpg")
    others = [tmp_path / "loose.jpg", odd / "notes.txt", odd / "scan.bmp"]
    for path in others:
        path.write_bytes(b"x")
    splits = class_splits(tmp_path, RULES["middle"])
    assert sum(len(part.labels) for part in parts_of(splits)) == 51
    assert [each.partition(":")[0] for each in splits.skipped] == sorted(map(str, others))


def test_images_that_do_not_fit_into_memory_are_read_into_a_file(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = parts_of(class_splits(photos, RULES["middle"]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(folders, "free_bytes", lambda: 0)
    monkeypatch.setattr(folders, "_SMALL_BYTES", 0)
    for part, other in zip(parts_of(class_splits(photos, RULES["middle"])), expected, strict=True):
        np.testing.assert_array_equal(part.inputs["photo"], other.inputs["photo"])
        assert part.labels.tolist() == other.labels.tolist()
    assert not list(tmp_path.iterdir())

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    reason = f"does not fit into memory: .* nor into a file in {tmp_path}: No space left"
    with pytest.raises(OutOfMemory, match=reason):
        class_splits(photos, RULES["middle"])


SMALL = ImageInput("image", 4, 4)


def write(folder: Path, layout: dict[str, int]) -> Path:
    """Images of one colour each, so many in each of the folders."""
    from PIL import Image

    for at, (name, count) in enumerate(layout.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (9, 7), (at, number, 0)).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("val", ["valid", "Val"])
def test_folders_named_after_splits_are_the_splits(tmp_path: Path, val: str) -> None:
    layout = {f"{split}/{name}": 3 for split in ("train", val, "test") for name in ("cat", "dog")}
    folder = write(tmp_path, layout)
    loose = [place / "loose.png" for place in (folder, folder / val)]
    for path in loose:
        path.write_text("")
    splits = class_splits(folder, SMALL)
    assert splits.classes == ("cat", "dog")
    assert splits.skipped == tuple(sorted(f"{each}: is in no class folder" for each in loose))
    for number, part in enumerate(parts_of(splits)):
        places = part.inputs["image"][:, 0, 0, 0].tolist()  # in the layout, of a sample's folder
        found = set(zip(places, part.labels.tolist(), strict=True))
        assert found == {(2 * number, 0), (2 * number + 1, 1)}


@pytest.mark.parametrize(
    ("splits", "counts"), [(["train"], [14, 2, 4]), (["train", "test"], [18, 2, 20])], ids=str
)
def test_splits_without_a_folder_are_cut_out_of_train(
    tmp_path: Path, splits: list[str], counts: list[int]
) -> None:
    folder = write(tmp_path, {f"{each}/{name}": 10 for each in splits for name in ("cat", "dog")})
    found = class_splits(folder, SMALL)
    assert [len(part.labels) for part in parts_of(found)] == counts


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ([], "holds 0 classes"),
        (["cat", "dog", "bird"], "holds 3 classes"),
        (["train", "val"], "train: holds no class folders"),
        (["train/cat", "train/dog", "val"], "val: holds no class folders"),
        (["val/cat", "val/dog"], "holds val, and no folder train"),
        (["train/cat", "val/cat", "valid/cat"], "several folders that calibrate: train, val, val"),
        (["train/cat", "val/cat", "val/bird"], "val: the class 'bird' is not in all"),
        (["train/cat", "train/dog", "val/cat"], "val: the class 'dog' is not in all"),
        (["cat/big", "cat/small", "dog"], "cat/big: is a folder; a class folder"),
    ],
    ids=str,
)
def test_a_layout_that_would_have_to_be_guessed_is_refused(
    tmp_path: Path, layout: list[str], reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        class_splits(write(tmp_path, dict.fromkeys(layout, 5)), SMALL, classes=2)


@pytest.mark.parametrize("count", [0, 2])
def test_a_class_of_too_few_images_is_refused(tmp_path: Path, count: int) -> None:
    folder = write(tmp_path / "p", {"cat": 5, "dog": count})
    with pytest.raises(BadInput, match="no image of 'dog' that can be read is left to train"):
        class_splits(folder, SMALL)
    (tmp_path / "file").write_bytes(b"x")
    for name, reason in (("nowhere", "no such folder"), ("file", "is a file, not a folder")):
        with pytest.raises(NotFound, match=f"{name}: {reason}"):
            class_splits(tmp_path / name, SMALL)
