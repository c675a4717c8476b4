"""Open data: the arrays of a model's inputs, and labels where there are any.

In: an `.npz` whose arrays are named after the model's inputs (one array of any name, also an
`.npy`, will do for a model with one input), with an optional array `labels`; a folder of such
files; or a folder of pictures, whose sub-folders, if there are any, are the classes. Out:
`Samples`. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from deploykit.core.errors import BadInput, first_line, os_reason
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.machine import memory_bytes
from deploykit.core.tensors import BATCH, TensorSpec, carrier, concrete, mismatch

LABELS = "labels"
PICTURES = (".png", ".jpg", ".jpeg")
ARRAYS = (".npz", ".npy")


@dataclass(frozen=True)
class Samples:
    """`inputs`: by input name, shape (samples, ...). `labels`: shape (samples,) or None."""

    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray | None
    where: str  # the file, for error texts

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def batches(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        """The inputs in order, `size` samples at a time; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield {name: array[start : start + size] for name, array in self.inputs.items()}

    def first(self, count: int) -> Samples:
        """The first `count` samples, without a copy."""
        inputs = {name: array[:count] for name, array in self.inputs.items()}
        return Samples(inputs, None if self.labels is None else self.labels[:count], self.where)

    def batching(self, most: int, specs: Sequence[TensorSpec]) -> tuple[int, int]:
        """The batch size for a model with these inputs, and how many samples fill whole batches.

        `most` where the batch is dynamic, and all samples; else the model's own, which leaves out
        what does not fill the last batch. Raises BadInput when not one batch is filled.
        """
        fixed = next((n for spec in specs for n in spec.shape[:1] if isinstance(n, int)), None)
        if fixed is None:
            return most, len(self)
        if not 0 < fixed <= len(self):
            raise BadInput(
                f"{self.where}: {len(self)} samples do not fill the model's batch of {fixed}"
            )
        return fixed, len(self) // fixed * fixed


def read_samples(path: Path, inputs: tuple[TensorSpec, ...], *, labelled: bool = False) -> Samples:
    """Read `path` for a model with these `inputs`. Raises BadInput when it does not fit them.

    Axis 0 of each array is the samples, also where the model's own axis 0 is fixed. `labelled`:
    labels must be there. A folder is read in the order of its files' names; with a sub-folder for
    each class the labels are their numbers, also in the order of their names.
    """
    arrays = _read_folder(path, inputs) if _is_folder(path) else _read_file(path)
    labels = arrays.pop(LABELS, None)
    if len(inputs) == 1 and len(arrays) == 1:
        arrays = {inputs[0].name: next(iter(arrays.values()))}
    chosen = {}
    for spec in inputs:
        if spec.name not in arrays:
            names = ", ".join(str(spec) for spec in inputs)
            raise BadInput(
                f"{path}: no array '{spec.name}'", hint=f"the model's inputs are: {names}"
            )
        array = arrays[spec.name]
        problem = mismatch(
            replace(spec, shape=(BATCH, *spec.shape[1:])), array.dtype.name, array.shape
        )
        if problem is not None:
            guess, cure = _cure(spec, array)
            raise BadInput(f"{path}: {problem}{guess}", hint=cure)
        chosen[spec.name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    counts = {len(array) for array in chosen.values()}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(
            f"{path}: its arrays hold {sorted(counts)} samples; equal and above 0 is needed"
        )
    count = counts.pop()
    if labelled and labels is None:
        raise BadInput(
            f"{path}: no array '{LABELS}'",
            hint="labelled data are needed here; in a folder of pictures: a sub-folder per class",
        )
    if labels is not None and labels.shape[:1] != (count,):
        raise BadInput(f"{path}: {count} samples but labels of shape {labels.shape}")
    return Samples(chosen, labels, str(path))


def _cure(spec: TensorSpec, array: np.ndarray) -> tuple[str, str | None]:
    """What an array that does not fit looks like, and a hint."""
    if array.ndim == len(spec.shape) == 4:
        shapes = replace(spec, shape=(BATCH, *spec.shape[1:]))
        for layout, order in (("NHWC", (0, 3, 1, 2)), ("NCHW", (0, 2, 3, 1))):
            moved = [array.shape[axis] for axis in order]
            if mismatch(shapes, spec.dtype, array.shape) and not mismatch(
                shapes, spec.dtype, moved
            ):
                return f"; it looks like {layout}", f"np.transpose(x, {order})"
    if array.dtype == np.uint8 and spec.dtype.startswith("float"):
        return "", "normalise as was done for training, or export with `preprocess`"
    if array.dtype.name != spec.dtype:
        return "", f"x.astype('{spec.dtype}')"
    return "", None


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz`; raises BadInput for anything else, and for pickled objects.

    Headers are read and added up first: a small file can claim, or unpack to, any size.
    """
    if _is_folder(path):
        raise BadInput(f"{path}: is a folder, an .npz file is needed")
    if _is_npy(path):
        raise BadInput(f"{path}: is a single .npy array, an .npz is needed")
    return _read_file(path)


def _read_file(path: Path) -> dict[str, np.ndarray]:
    _check_memory(str(path), _claimed_bytes(path))
    return _load(path)


def _read_folder(folder: Path, inputs: tuple[TensorSpec, ...]) -> dict[str, np.ndarray]:
    """Arrays by name of a folder's files, or its pictures; with `labels` where it has classes."""
    files, classes = _entries(folder)
    if files and classes:
        raise BadInput(
            f"{folder}: holds both files ({files[0].name}) and folders ({classes[0].name})",
            hint="either the data lie in it, or one sub-folder of pictures for each class",
        )
    labels = []
    for number, kind in enumerate(classes):
        pictures, deeper = _entries(kind)
        if deeper:
            raise BadInput(f"{deeper[0]}: is a folder; a class folder holds pictures only")
        if not pictures:
            raise BadInput(f"{kind}: the class folder is empty")
        files += pictures
        labels += [number] * len(pictures)
    if not files:
        raise BadInput(f"{folder}: the folder is empty")
    for file in files:
        if file.suffix.lower() not in PICTURES + (() if classes else ARRAYS):
            raise BadInput(
                f"{file}: is no file of data",
                hint=f"a folder of data holds {' '.join(PICTURES)} or {' '.join(ARRAYS)} files and "
                "nothing else; class folders hold pictures",
            )
    pictured = [file for file in files if file.suffix.lower() in PICTURES]
    if not pictured:
        return _joined(files, str(folder))
    if len(pictured) < len(files):
        other = next(file for file in files if file not in pictured)
        raise BadInput(
            f"{folder}: holds both pictures ({pictured[0].name}) and arrays ({other.name})"
        )
    from deploykit.runtimes.data.images import read_images  # Pillow is not needed for arrays

    arrays = {"pictures": read_images(files, inputs, str(folder))}
    return arrays | {LABELS: np.array(labels, np.int64)} if labels else arrays


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and the folders in a folder by name, hidden ones left out. Raises BadInput."""
    try:
        found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as exc:
        raise BadInput(f"{folder}: cannot be read: {os_reason(exc)}") from exc
    folders = [path for path in found if _is_folder(path)]
    return [path for path in found if path not in set(folders)], folders


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # whatever is wrong with it is said when it is opened


def _joined(files: Sequence[Path], where: str) -> dict[str, np.ndarray]:
    """The arrays of several files, each joined along axis 0."""
    needed_bytes = sum(_claimed_bytes(file) for file in files)
    _check_memory(where, needed_bytes * (2 if len(files) > 1 else 1))  # parts and whole
    parts = [_load(file) for file in files]
    kinds = [
        {name: (array.dtype, array.shape[1:], array.ndim > 0) for name, array in part.items()}
        for part in parts
    ]
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0] or not all(joins for _, _, joins in kind.values()):
            raise BadInput(
                f"{file}: holds {_listed(kind)}; {files[0].name} holds {_listed(kinds[0])}",
                hint="files of one folder are joined: names, dtypes and all axes but the first "
                "must be equal",
            )
    return {name: np.concatenate([part.pop(name) for part in parts]) for name in kinds[0]}


def _listed(kind: Mapping[str, tuple[np.dtype, tuple[int, ...], bool]]) -> str:
    return ", ".join(
        f"{name}:{dtype}[{','.join(map(str, ('N', *shape) if joins else ()))}]"
        for name, (dtype, shape, joins) in sorted(kind.items())
    )


def _check_memory(where: str, needed_bytes: int) -> None:
    most_bytes = memory_bytes()
    if most_bytes is not None and needed_bytes > most_bytes:
        raise BadInput(
            f"{where}: holds {needed_bytes / 1e9:.0f} GB of arrays, "
            f"this machine's memory is {most_bytes / 1e9:.0f} GB"
        )


def _is_npy(path: Path) -> bool:
    with check_readable(path).open("rb") as handle:
        return handle.read(6) == npy.MAGIC_PREFIX


def _claimed_bytes(path: Path) -> int:
    """What the arrays of a file will take, each header checked. Raises NotFound or BadInput."""
    with _damage(path):
        if _is_npy(path):
            with path.open("rb") as handle:
                return _checked_bytes(f"{path}: the array", handle, path.stat().st_size)
        with zipfile.ZipFile(path) as archive:
            total = 0
            for info in _members(archive):
                with archive.open(info) as member:
                    where = f"{path}: '{_array_name(info)}'"
                    total += _checked_bytes(where, member, info.file_size)
            return total


def _load(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that `_claimed_bytes` has checked; an .npy's is named "array"."""
    with _damage(path):
        if _is_npy(path):
            with path.open("rb") as handle:
                return {"array": npy.read_array(handle, allow_pickle=False)}
        arrays = {}
        with zipfile.ZipFile(path) as archive:
            for info in _members(archive):
                with archive.open(info) as member:
                    arrays[_array_name(info)] = npy.read_array(member, allow_pickle=False)
    if not arrays:
        raise BadInput(f"{path}: holds no arrays")
    return arrays


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """What zipfile, zlib and numpy raise on damaged or encrypted input, as BadInput."""
    try:
        yield
    except _DAMAGED as exc:
        kind = ".npy" if path.suffix == ".npy" else ".npz"
        raise BadInput(f"{path}: is not a readable {kind} file: {first_line(exc)}") from exc


_DAMAGED = (
    ValueError,
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    return [info for info in archive.infolist() if not info.is_dir()]


def _array_name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _checked_bytes(where: str, member: IO[bytes], file_bytes: int) -> int:
    """The size of one array, once its header agrees with the size of its file."""
    version = npy.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise BadInput(f"{where} is no plain array (.npy {version})")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(member)
    header_bytes = member.tell()
    if dtype.hasobject:
        raise BadInput(
            f"{where} holds Python objects, which are not loaded",
            hint="save numbers: np.savez(path, x=np.asarray(values, dtype='float32'))",
        )
    size = math.prod(shape) * dtype.itemsize
    if header_bytes + size != file_bytes:
        raise BadInput(
            f"{where} says it is {dtype}{list(shape)}, "
            f"but {file_bytes - header_bytes} bytes of data are there"
        )
    return size


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, whole or not at all."""
    with atomic_write(path) as tmp, zipfile.ZipFile(tmp, "w") as archive:
        for name, array in arrays.items():  # np.savez cannot take every name: "file" is its own
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, np.asarray(array), allow_pickle=False)


def random_feeds(
    specs: tuple[TensorSpec, ...], sizes: Mapping[str, int], seed: int = 0
) -> dict[str, np.ndarray]:
    """Seeded inputs for timing and parity.

    Standard normal floats, bytes from 0 to 255, other whole numbers from 0 to 9, the same as texts,
    booleans; for a mask, by its name, zeros and ones of which the first of each row is a one: over
    a row that is masked altogether attention is not defined. `sizes`: the size of each dynamic
    axis; one that is not there is 1.
    """
    random = np.random.default_rng(seed)
    feeds = {}
    for spec in specs:
        shape = concrete(spec, sizes)
        if "float" in spec.dtype:
            feeds[spec.name] = random.standard_normal(shape).astype(carrier(spec.dtype))
        elif spec.dtype == "string":
            feeds[spec.name] = random.integers(0, 10, shape).astype(str).astype(object)
        elif "mask" in spec.name.lower():
            feeds[spec.name] = random.integers(0, 2, shape).astype(spec.dtype)
            feeds[spec.name][..., :1] = 1
        elif spec.dtype == "uint8":  # pixels; ids are never that small a type
            feeds[spec.name] = random.integers(0, 256, shape).astype(np.uint8)
        elif spec.dtype == "bool":
            feeds[spec.name] = random.integers(0, 2, shape).astype(bool)
        else:
            feeds[spec.name] = random.integers(0, 10, shape).astype(spec.dtype)
    return feeds
