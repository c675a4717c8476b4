"""Read a folder of images with one sub-folder per class, to train a classifier on it.

It holds the class folders, DIR/cat and DIR/dog, or a folder for each split that holds them:
DIR/train/cat, DIR/val/cat, DIR/test/cat. Other layouts are refused.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from deploykit.core.errors import BadInput, NotFound, OutOfMemory, os_reason
from deploykit.core.machine import does_not_fit, free_bytes, usable_cores
from deploykit.core.recipe import Split, Splits
from deploykit.core.task import ImageInput
from deploykit.engines.data.samples import list_class, list_entries

if TYPE_CHECKING:
    from deploykit.engines.data.images import PlacedImages  # it needs Pillow

_TRAIN, _CALIBRATION, _TEST = "train", "calibrate", "test"  # the use of a split
_SPLITS = {
    "train": _TRAIN,
    "val": _CALIBRATION,
    "valid": _CALIBRATION,
    "validation": _CALIBRATION,
    "test": _TEST,
}
_SHARES = {_TEST: 0.2, _CALIBRATION: 0.1}  # of each class, for a split without a folder
_AT_ONCE = 256  # images, most of them placed, in memory
_DECODERS = 8  # each may hold a whole photograph
_SMALL_BYTES = 1 << 27  # always in memory
_DISK = "/var/tmp"  # noqa: S108 - a file without a name, which nobody else can open
_Classes: TypeAlias = dict[Path, list[Path]]  # the ordered files of each class folder


def class_splits(folder: Path, image: ImageInput, *, classes: int | None = None) -> Splits:
    """Read the images below `folder`, each placed as `image` says, as splits of labelled samples.

    Inputs: `image.tensor`, uint8 (samples, height, width, channels). The sorted names of the class
    folders are the classes. Folders train, val (valid, validation) and test are the splits; val is
    for calibration. A missing split is taken from each training class: 20 per cent to test, 10 to
    calibrate. `classes`: the required number, else the name of a size that the model takes from
    the data. Every file is tried, whatever its name; `skipped`: those that cannot be read or are in
    no class folder. Raises NotFound or BadInput.
    """
    files, loose = _files(folder)
    names = tuple(each.name for each in files[_TRAIN])
    wanted = classes or max(2, len(names))
    if len(names) != wanted:
        found = ", ".join(names) or "none"
        raise BadInput(
            f"{folder}: holds {len(names)} classes ({found}), {wanted} are needed",
            hint="put the images of each class into a sub-folder of its own: DIR/cat, DIR/dog",
        )
    from deploykit.engines.data.images import PlacedImages

    reader = PlacedImages(image)
    skipped = [f"{path}: is in no class folder" for path in loose]
    missing = [split for split in _SHARES if split not in files]
    chosen: dict[str, list[tuple[Path, int]]] = {split: [] for split in (*files, *missing)}
    for split, kinds in files.items():
        for label, paths in enumerate(kinds.values()):
            left = np.random.RandomState(0).permutation(len(paths)).tolist()
            for use in missing if split == _TRAIN else ():
                end = max(1, round(_SHARES[use] * len(paths)))
                chosen[use] += [(paths[n], label) for n in left[:end]]
                left = left[end:]
            chosen[split] += [(paths[n], label) for n in sorted(left)]
    parts = {}
    for use, images in chosen.items():
        pixels, labels = _read(f"{folder}: the images to {use}", reader, images, skipped)
        if absent := [name for label, name in enumerate(names) if label not in labels]:
            raise BadInput(
                f"{folder}: no image of '{absent[0]}' that can be read is left to {use}",
                hint=skipped[-1] if skipped else f"each class needs {len(chosen)} or more",
            )
        parts[use] = Split({reader.tensor: pixels}, np.array(labels, np.int64))
    return Splits(
        train=parts[_TRAIN],
        calibration=parts[_CALIBRATION],
        test=parts[_TEST],
        source=f"images in {folder}",
        classes=names,
        skipped=tuple(sorted(skipped)),
        build_with={} if classes else {"classes": len(names)},
        image=image,
    )


def _read(
    what: str, reader: PlacedImages, images: Sequence[tuple[Path, int]], skipped: list[str]
) -> tuple[np.ndarray, list[int]]:
    """Return the pixels and labels of images that can be read; the others go to `skipped`."""

    def decode(path: Path) -> np.ndarray | BadInput:
        try:
            return reader.decode(path)
        except BadInput as exc:
            return exc

    pixels, labels = large_array(what, (len(images), *reader.shape), np.uint8), list[int]()
    with ThreadPoolExecutor(min(usable_cores(), _DECODERS)) as pool:
        for start in range(0, len(images), _AT_ONCE):
            paths, numbers = zip(*images[start : start + _AT_ONCE], strict=True)
            for label, found in zip(numbers, pool.map(decode, paths), strict=True):
                if isinstance(found, BadInput):
                    skipped.append(found.message)
                else:
                    pixels[len(labels)] = found
                    labels.append(label)
    return pixels[: len(labels)], labels


def _files(folder: Path) -> tuple[dict[str, _Classes], list[Path]]:
    """Return the images by split, by default all for training, and files in no class folder."""
    if not folder.is_dir():
        reason = "is a file, not a folder" if folder.exists() else "no such folder"
        raise NotFound(f"{folder}: {reason}", hint="name a folder with one per class")
    loose, inner = list_entries(folder)
    if not inner or not {each.name.lower() for each in inner} <= set(_SPLITS):
        return {_TRAIN: _classes(inner)}, loose
    found: dict[str, _Classes] = {}
    for each in inner:
        split, (files, kinds) = _SPLITS[each.name.lower()], list_entries(each)
        loose += files
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
    names = {each.name for each in found[_TRAIN]}
    for classes in found.values():
        if odd := names ^ {each.name for each in classes}:
            where = next(iter(classes)).parent
            raise BadInput(
                f"{where}: the class '{min(odd)}' is not in all folders of splits",
                hint="every split needs a folder for every class",
            )
    return found, loose


def _classes(folders: Sequence[Path]) -> _Classes:
    hint = f"for splits, the folders are {', '.join(_SPLITS)} and no others"
    return {each: list_class(each, hint) for each in folders}


def large_array(what: str, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Return a new array, in a file without a name if it would take over half the free memory.

    The file is in $TMPDIR, else in /var/tmp: /tmp may be memory. Raises OutOfMemory where neither
    has the space.
    """
    nbytes, free = math.prod(shape) * np.dtype(dtype).itemsize, free_bytes()
    if nbytes < _SMALL_BYTES or free is None or 2 * nbytes < free:
        return np.empty(shape, dtype)
    folder = os.environ.get("TMPDIR") or next(filter(os.path.isdir, (_DISK,)), None)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # else a full disk would be SIGBUS
            memory = mmap.mmap(file.fileno(), nbytes)
    except OSError as exc:
        error = does_not_fit(f"{what} of {nbytes / 2**20:,.0f} MiB")
        raise OutOfMemory(
            f"{error.message}; nor into a file in {folder}: {os_reason(exc)}",
            hint="name a folder on a disk with more space: TMPDIR=FOLDER",
        ) from exc
    return np.frombuffer(memory, dtype).reshape(shape)
