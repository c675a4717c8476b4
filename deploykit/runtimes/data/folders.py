"""Read a folder with one sub-folder of images per class, to train a classifier on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deploykit.core.errors import BadInput, NotFound, os_reason
from deploykit.core.memory import check_fits
from deploykit.core.recipe import Split, Splits

SUFFIXES = (".jpg", ".jpeg", ".png")
_TEST, _CALIBRATION = 0.2, 0.1  # of each class; the rest trains


def class_splits(folder: Path, side: int, *, classes: int | None = None) -> Splits:
    """The images below `folder`, as squares, split within each class: 70, 10 and 20 per cent.

    Inputs: image uint8 (samples, side, side, 3). The sub-folders' sorted names are the classes;
    `classes`: how many there must be, else a size that the model takes from the data. `skipped`:
    files that cannot be read. Raises NotFound or BadInput.
    """
    files = _files(folder)
    wanted = classes or max(2, len(files))
    if len(files) != wanted:
        found = ", ".join(files) or "none"
        raise BadInput(
            f"{folder}: holds {len(files)} classes ({found}), {wanted} are needed",
            hint="put the images of each class into a sub-folder of its own: DIR/cat, DIR/dog",
        )
    check_fits(f"{folder}: the images", sum(map(len, files.values())) * side * side * 3)
    parts: dict[str, list[tuple[np.ndarray, int]]] = {"train": [], "calibration": [], "test": []}
    skipped: list[str] = []
    for label, (name, paths) in enumerate(files.items()):
        images = _read(paths, side, skipped)
        if len(images) < 3:
            raise BadInput(
                f"{folder / name}: holds {len(images)} images that can be read, 3 or more are "
                "needed: to train, to calibrate and to test",
                hint=skipped[-1] if skipped else f"images end in {', '.join(SUFFIXES)}",
            )
        order = np.random.RandomState(0).permutation(len(images))
        tests, calibrates = (max(1, round(s * len(images))) for s in (_TEST, _CALIBRATION))
        for place, index in enumerate(order):
            to_test, to_calibrate = place < tests, place < tests + calibrates
            part = "test" if to_test else "calibration" if to_calibrate else "train"
            parts[part].append((images[index], label))
    return Splits(
        train=_split(parts["train"]),
        calibration=_split(parts["calibration"]),
        test=_split(parts["test"]),
        source=f"images in {folder}",
        classes=tuple(files),
        skipped=tuple(skipped),
        build_with={} if classes else {"classes": len(files)},
    )


def _files(folder: Path) -> dict[str, list[Path]]:
    """The images of each class by its name."""
    if not folder.is_dir():
        reason = "is a file, not a folder" if folder.exists() else "no such folder"
        raise NotFound(f"{folder}: {reason}", hint="name a folder with one per class")
    try:
        inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        return {
            each.name: sorted(p for p in each.rglob("*") if p.suffix.lower() in SUFFIXES)
            for each in inner
        }
    except OSError as exc:
        raise BadInput(f"{folder}: cannot be read: {os_reason(exc)}") from exc


def _read(paths: list[Path], side: int, skipped: list[str]) -> list[np.ndarray]:
    from deploykit.runtimes.data.images import read_square

    images = []
    for path in paths:
        try:
            images.append(read_square(path, side))
        except BadInput as exc:
            skipped.append(exc.message)
    return images


def _split(samples: list[tuple[np.ndarray, int]]) -> Split:
    images = np.stack([image for image, _ in samples])
    return Split({"image": images}, np.array([label for _, label in samples], np.int64))
