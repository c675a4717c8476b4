"""Read a folder of images with one sub-folder per class, to train a classifier on it.

It holds the class folders, DIR/cat and DIR/dog, or a folder for each split that holds them:
DIR/train/cat, DIR/val/cat, DIR/test/cat. Other layouts are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.memory import check_fits
from deploykit.core.recipe import Split, Splits
from deploykit.core.task import ImageInput
from deploykit.engines.data.samples import IMAGES, list_entries

_TRAIN, _CALIBRATION, _TEST = "train", "calibrate", "test"  # the use of a split
_SPLITS = {
    "train": _TRAIN,
    "val": _CALIBRATION,
    "valid": _CALIBRATION,
    "validation": _CALIBRATION,
    "test": _TEST,
}
_SHARES = {_TEST: 0.2, _CALIBRATION: 0.1}  # of each class, for a split without a folder
_Classes: TypeAlias = dict[Path, list[Path]]  # the ordered images of each class folder
_Sample: TypeAlias = tuple[np.ndarray, int]  # pixels and label


def class_splits(folder: Path, image: ImageInput, *, classes: int | None = None) -> Splits:
    """Read the images below `folder`, each placed as `image` says, as splits of labelled samples.

    Inputs: `image.tensor`, uint8 (samples, height, width, channels). The sorted names of the class
    folders are the classes. Folders train, val (valid, validation) and test are the splits; val is
    for calibration. A missing split is taken from each training class: 20 per cent to test, 10 to
    calibrate. `classes`: the required number, else the name of a size that the model takes from
    the data. `skipped`: files that cannot be read. Raises NotFound or BadInput.
    """
    files = _files(folder)
    names = tuple(each.name for each in files[_TRAIN])
    wanted = classes or max(2, len(names))
    if len(names) != wanted:
        found = ", ".join(names) or "none"
        raise BadInput(
            f"{folder}: holds {len(names)} classes ({found}), {wanted} are needed",
            hint="put the images of each class into a sub-folder of its own: DIR/cat, DIR/dog",
        )
    parts, skipped = _read(folder, files, image)
    return Splits(
        train=_split(parts[_TRAIN], image),
        calibration=_split(parts[_CALIBRATION], image),
        test=_split(parts[_TEST], image),
        source=f"images in {folder}",
        classes=names,
        skipped=tuple(skipped),
        build_with={} if classes else {"classes": len(names)},
        image=image,
    )


def _files(folder: Path) -> dict[str, _Classes]:
    """Return the images by split; without folders for splits, all of them are for training."""
    if not folder.is_dir():
        reason = "is a file, not a folder" if folder.exists() else "no such folder"
        raise NotFound(f"{folder}: {reason}", hint="name a folder with one per class")
    _, inner = list_entries(folder)
    if not inner or not {each.name.lower() for each in inner} <= set(_SPLITS):
        return {_TRAIN: _classes(inner)}
    found: dict[str, _Classes] = {}
    for each in inner:
        split, kinds = _SPLITS[each.name.lower()], list_entries(each)[1]
        if not kinds:
            raise BadInput(
                f"{each}: holds no class folders, and its name is that of a split, not of a class",
                hint="put the images of each class into a sub-folder of it: DIR/train/cat, "
                "DIR/val/cat; or rename the folder if it is a class",
            )
        if split in found:
            raise BadInput(
                f"{folder}: holds several folders that {split}: {', '.join(x.name for x in inner)}"
            )
        found[split] = _classes(kinds)
    if _TRAIN not in found:
        raise BadInput(f"{folder}: holds {inner[0].name}, and no folder {_TRAIN}")
    for one, two in ((a, b) for a in found.values() for b in found.values()):
        for each in one:
            if each.name not in {other.name for other in two}:
                where = next(iter(two)).parent
                raise BadInput(
                    f"{each}: the class '{each.name}' is not in {where}",
                    hint="every split needs a folder for every class",
                )
    return found


def _classes(folders: Sequence[Path]) -> _Classes:
    """Return the images of each class folder. Raises BadInput if one contains folders."""
    found = {}
    for each in folders:
        files, deeper = list_entries(each)
        if deeper:
            raise BadInput(
                f"{deeper[0]}: is a folder; a class folder contains images only",
                hint=f"for splits, the folders are {', '.join(_SPLITS)} and no others",
            )
        found[each] = [file for file in files if file.suffix.lower() in IMAGES]
    return found


def _read(
    folder: Path, files: Mapping[str, _Classes], image: ImageInput
) -> tuple[dict[str, list[_Sample]], list[str]]:
    """Return the samples of each split, and why the other files could not be read."""
    from deploykit.engines.tasks.images import PlacedImages

    reader, skipped = PlacedImages(image, str(folder)), list[str]()
    count = sum(len(paths) for classes in files.values() for paths in classes.values())
    check_fits(f"{folder}: the images", count * math.prod(reader.shape))
    parts: dict[str, list[_Sample]] = {_TRAIN: [], _CALIBRATION: [], _TEST: []}
    missing = [split for split in _SHARES if split not in files]
    for split, classes in files.items():
        cut = missing if split == _TRAIN else []
        for label, (kind, paths) in enumerate(classes.items()):
            images = []
            for path in paths:
                try:
                    images.append(reader.decode(path))
                except BadInput as exc:
                    skipped.append(exc.message)
            if len(images) <= len(cut):
                raise BadInput(
                    f"{kind}: holds {len(images)} images that can be read, {len(cut) + 1} or more "
                    f"are needed: {', '.join(f'to {each}' for each in (split, *cut))}",
                    hint=skipped[-1] if skipped else f"images end in {', '.join(IMAGES)}",
                )
            order, start = np.random.RandomState(0).permutation(len(images)), 0
            for other in cut:
                end = start + max(1, round(_SHARES[other] * len(images)))
                parts[other] += [(images[index], label) for index in order[start:end]]
                start = end
            parts[split] += [(images[index], label) for index in order[start:]]
    return parts, skipped


def _split(samples: Sequence[_Sample], image: ImageInput) -> Split:
    pixels = np.stack([pixels for pixels, _ in samples])
    return Split({image.tensor: pixels}, np.array([label for _, label in samples], np.int64))
