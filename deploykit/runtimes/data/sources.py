"""Find what data a path has for a model, by names and headers alone, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploykit.core.errors import BadInput, os_reason
from deploykit.core.task import ImageInput, Task
from deploykit.core.tensors import BATCH, TensorSpec, mismatch
from deploykit.runtimes.data.archives import Header, read_arrays, read_headers

if TYPE_CHECKING:
    from deploykit.runtimes.data.images import Images

LABELS, INPUTS = "labels", "inputs/"  # the second stands before names in golden samples
IMAGES, ARRAYS = (".png", ".jpg", ".jpeg"), (".npz", ".npy")


@dataclass(frozen=True)
class DataSource:
    """Data that fit a model, not yet read.

    `names`: by input name, the array that is for it. `headers`: of each array, joined over all
    files; `parts`: of each file. `images` decodes the files where they are images, and `classes`
    are the labels of those in class folders. `count`: samples. `unused`: other arrays.
    """

    where: str
    files: tuple[Path, ...]
    names: Mapping[str, str]
    headers: Mapping[str, Header]
    parts: tuple[Mapping[str, Header], ...]
    images: Images | None
    classes: np.ndarray | None
    count: int
    unused: tuple[str, ...]

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """These arrays, whole."""
        read = [
            read_arrays(file, {name: part[name] for name in names})
            for file, part in zip(self.files, self.parts, strict=True)
        ]
        if len(read) == 1:
            return read[0]
        return {name: np.concatenate([part.pop(name) for part in read]) for name in names}


def find_source(
    path: Path, inputs: tuple[TensorSpec, ...], *, task: Task | None = None
) -> DataSource:
    """The data of `path` for a model with these `inputs`: see `samples.read_samples`."""
    files, classes, of_images = [path], list[int](), False
    if is_folder(path):
        files, classes, of_images = _files_of(path, task.labels if task else ())
    images, parts = None, []
    if of_images:
        images = _images(files[0], inputs, str(path), task.image if task else None)
        shape = (len(files), *images.shape)
        headers = {"images": Header(shape, np.dtype(np.uint8), in_rows=True, start=0)}
    else:
        parts = [read_headers(file) for file in files]
        headers = _join_headers(files, parts) if is_folder(path) else parts[0]
    names, unused = _choose(path, inputs, headers)
    counts = {headers[name].shape[0] for name in names.values()}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(
            f"{path}: its arrays have {sorted(counts)} samples; all need the same number, above 0"
        )
    (count,) = counts
    if LABELS in headers and headers[LABELS].shape[:1] != (count,):
        raise BadInput(f"{path}: {count} samples but labels of shape {headers[LABELS].shape}")
    numbers = np.array(classes, np.int64) if classes else None
    return DataSource(
        str(path), tuple(files), names, headers, tuple(parts), images, numbers, count, unused
    )


def _images(
    first: Path, inputs: Sequence[TensorSpec], where: str, placed: ImageInput | None
) -> Images:
    """Pillow is imported here: arrays do not need it."""
    if placed is not None:
        from deploykit.runtimes.tasks.images import PlacedImages

        return PlacedImages(placed, where)
    from deploykit.runtimes.data.images import Images

    return Images(first, inputs, where)


def _choose(
    path: Path, inputs: tuple[TensorSpec, ...], headers: Mapping[str, Header]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The array for each input, and the arrays that are neither inputs nor labels."""
    golden = {n.removeprefix(INPUTS): n for n in headers if n.startswith(INPUTS)}
    arrays = golden or {n: n for n in headers if n != LABELS}  # of golden samples the inputs
    if len(inputs) == 1 and len(arrays) == 1:
        arrays = {inputs[0].name: next(iter(arrays.values()))}
    chosen = {}
    for spec in inputs:
        if spec.name not in arrays:
            has = ", ".join(arrays) or "none"
            raise BadInput(
                f"{path}: no array '{spec.name}'; it contains: {has}",
                hint="the model's inputs are: " + ", ".join(map(str, inputs)),
            )
        found = headers[arrays[spec.name]]
        problem = mismatch(
            replace(spec, shape=(BATCH, *spec.shape[1:])), found.dtype.name, found.shape
        )
        if problem is not None:
            guess, cure = _cure(spec, found)
            raise BadInput(f"{path}: {problem}{guess}", hint=cure)
        chosen[spec.name] = arrays[spec.name]
    return chosen, tuple(name for name in arrays if name not in chosen)


def _cure(spec: TensorSpec, array: Header) -> tuple[str, str | None]:
    """A guess at what an array that does not fit is, and a hint."""
    if len(array.shape) == len(spec.shape) == 4:
        shapes = replace(spec, shape=(BATCH, *spec.shape[1:]))
        for layout, order in (("NHWC", (0, 3, 1, 2)), ("NCHW", (0, 2, 3, 1))):
            moved = [array.shape[axis] for axis in order]
            if mismatch(shapes, spec.dtype, array.shape) and not mismatch(
                shapes, spec.dtype, moved
            ):
                return f"; it looks like {layout}", f"np.transpose(x, {order})"
    if array.dtype == np.uint8 and spec.dtype.startswith("float"):
        return "", "normalise as for training, or export with `preprocess`"
    if array.dtype.name != spec.dtype:
        return "", f"x.astype('{spec.dtype}')"
    return "", None


def _files_of(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[int], bool]:
    """The files of a data folder, the class of each where it has classes; whether it is images.

    `names`: the model's labels, which may be the names of class folders.
    """
    files, classes = list_entries(folder)
    if files and classes:
        raise BadInput(
            f"{folder}: contains both files ({files[0].name}) and folders ({classes[0].name})",
            hint="use either files only, or one sub-folder of images per class",
        )
    labels = []
    for number, kind in zip(_class_numbers(folder, classes, names), classes, strict=True):
        images, deeper = list_entries(kind)
        if deeper:
            raise BadInput(
                f"{deeper[0]}: is a folder; a class folder contains images only",
                hint=f"for one split of several, name its folder: {kind}",
            )
        if not images:
            raise BadInput(f"{kind}: the class folder is empty")
        files += images
        labels += [number] * len(images)
    if not files:
        raise BadInput(f"{folder}: the folder is empty")
    for file in files:
        if file.suffix.lower() not in IMAGES + (() if classes else ARRAYS):
            raise BadInput(
                f"{file}: is not a data file",
                hint=f"a data folder contains {' '.join(IMAGES)} or {' '.join(ARRAYS)} files and "
                "nothing else; class folders contain images",
            )
    images = [file for file in files if file.suffix.lower() in IMAGES]
    if images and len(images) < len(files):
        other = next(file for file in files if file not in images)
        raise BadInput(
            f"{folder}: contains both images ({images[0].name}) and arrays ({other.name})"
        )
    return files, labels, bool(images)


def _class_numbers(folder: Path, classes: Sequence[Path], names: Sequence[str]) -> Sequence[int]:
    """Those of the labels that class folders are named after; without such, in their own order."""
    if not {kind.name for kind in classes} & set(names):
        return range(len(classes))
    for kind in classes:
        if names.count(kind.name) != 1:
            several = "several" if kind.name in names else "none"
            raise BadInput(
                f"{folder}: the class folder '{kind.name}' stands for {several} of the model's "
                "labels",
                hint="name all class folders after labels; or none of them, in the labels' order",
            )
    return [names.index(kind.name) for kind in classes]


def list_entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and the folders in a folder, by name, without hidden ones. Raises BadInput."""
    try:
        found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as exc:
        raise BadInput(f"{folder}: cannot be read: {os_reason(exc)}") from exc
    folders = [path for path in found if is_folder(path)]
    return [path for path in found if path not in set(folders)], folders


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # opening it reports what is wrong


def _join_headers(
    files: Sequence[Path], parts: Sequence[Mapping[str, Header]]
) -> dict[str, Header]:
    """The arrays that several files hold together, joined along axis 0."""
    kinds = [
        {name: (each.dtype, each.shape[1:], len(each.shape) > 0) for name, each in part.items()}
        for part in parts
    ]
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0] or not all(joins for _, _, joins in kind.values()):
            raise BadInput(
                f"{file}: has {_describe(kind)}; {files[0].name} has {_describe(kinds[0])}",
                hint="files of one folder are joined: names, dtypes and all axes but the first "
                "must be equal",
            )
    return {
        name: replace(first, shape=(sum(part[name].shape[0] for part in parts), *first.shape[1:]))
        for name, first in parts[0].items()
    }


def _describe(kind: Mapping[str, tuple[np.dtype, tuple[int, ...], bool]]) -> str:
    return ", ".join(
        f"{name}:{dtype}[{','.join(map(str, ('N', *shape) if joins else ()))}]"
        for name, (dtype, shape, joins) in sorted(kind.items())
    )
