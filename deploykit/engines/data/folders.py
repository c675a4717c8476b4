"""Read a folder of images with one sub-folder per class, to train a classifier on it.

It holds the class folders, DIR/cat and DIR/dog, or a folder for each split that holds them:
DIR/train/cat, DIR/val/cat, DIR/test/cat. Other layouts are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.memory import check_fits
from deploykit.core.recipe import Split, Splits
from deploykit.core.task import ImageInput
from deploykit.engines.data.samples import list_entries

if TYPE_CHECKING:
    from deploykit.engines.tasks.images import PlacedImages  # it needs Pillow

_TRAIN, _CALIBRATION, _TEST = "train", "calibrate", "test"  # the use of a split
_SPLITS = {
    "train": _TRAIN,
    "val": _CALIBRATION,
    "valid": _CALIBRATION,
    "validation": _CALIBRATION,
    "test": _TEST,
}
_SHARES = {_TEST: 0.2, _CALIBRATION: 0.1}  # of each class, for a split without a folder
_Classes: TypeAlias = dict[Path, list[Path]]  # the ordered files of each class folder


def class_splits(folder: Path, image: ImageInput, *, classes: int | None = None) -> Splits:
    """Read the images below `folder`, each placed as `image` says, as splits of labelled samples.

    Inputs: `image.tensor`, uint8 (samples, height, width, channels). The sorted names of the class
    folders are the classes. Folders train, val (valid, validation) and test are the splits; val is
    for calibration. A missing split is taken from each training class: 20 per cent to test, 10 to
    calibrate. `classes`: the required number, else the name of a size that the model takes from
    the data. Every file is tried, whatever its name; `skipped`: those that cannot be read. Raises
    NotFound or BadInput.
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
    from deploykit.engines.tasks.images import PlacedImages

    reader, skipped = PlacedImages(image), list[str]()
    missing = [split for split in _SHARES if split not in files]
    count = sum(len(paths) for kinds in files.values() for paths in kinds.values())
    check_fits(f"{folder}: the images", round(1.3 * count * math.prod(reader.shape)))
    parts = {}
    for split, kinds in files.items():
        uses = [split, *(missing if split == _TRAIN else ())]
        use = ", ".join(f"to {each}" for each in uses)
        parts[split] = _read(kinds, reader, skipped, len(uses), use)
    parts |= _cut(parts[_TRAIN], missing)
    return Splits(
        train=parts[_TRAIN],
        calibration=parts[_CALIBRATION],
        test=parts[_TEST],
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
    """Return the files of each class folder. Raises BadInput if one contains folders."""
    found = {}
    for each in folders:
        files, deeper = list_entries(each)
        if deeper:
            raise BadInput(
                f"{deeper[0]}: is a folder; a class folder contains images only",
                hint=f"for splits, the folders are {', '.join(_SPLITS)} and no others",
            )
        found[each] = files
    return found


def _read(
    classes: _Classes, reader: PlacedImages, skipped: list[str], least: int, use: str
) -> Split:
    """Read the images of each class into one array; those that cannot be read go to `skipped`."""
    pixels = np.empty((sum(map(len, classes.values())), *reader.shape), np.uint8)
    labels: list[int] = []
    for label, (kind, paths) in enumerate(classes.items()):
        before = len(labels)
        for path in paths:
            try:
                pixels[len(labels)] = reader.decode(path)
            except BadInput as exc:
                skipped.append(exc.message)
            else:
                labels.append(label)
        if len(labels) - before < least:
            raise BadInput(
                f"{kind}: holds {len(labels) - before} images that can be read, {least} or more "
                f"are needed: {use}",
                hint=skipped[-1] if skipped else "PNG, JPEG and WebP are read",
            )
    return Split({reader.tensor: pixels[: len(labels)]}, np.array(labels, np.int64))


def _cut(train: Split, missing: Sequence[str]) -> dict[str, Split]:
    """Take the `missing` splits out of each class of the training split.

    What is left is moved to the front of its array, as a copy would take the memory twice.
    """
    rows: dict[str, list[int]] = {name: [] for name in (*missing, _TRAIN)}
    for label in np.unique(train.labels):
        own, start = np.flatnonzero(train.labels == label), 0
        order = own[np.random.RandomState(0).permutation(len(own))]
        for name in missing:
            end = start + max(1, round(_SHARES[name] * len(own)))
            rows[name] += order[start:end].tolist()
            start = end
        rows[_TRAIN] += order[start:].tolist()
    ((tensor, pixels),) = train.inputs.items()
    found = {
        name: Split({tensor: pixels[rows[name]]}, train.labels[rows[name]]) for name in missing
    }
    kept = sorted(rows[_TRAIN])
    for place, row in enumerate(kept):
        pixels[place] = pixels[row]
    return {**found, _TRAIN: Split({tensor: pixels[: len(kept)]}, train.labels[kept])}
