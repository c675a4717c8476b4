"""Read data: arrays for a model's inputs, and labels.

Formats: an `.npz` with one array per input name and perhaps `labels`; an `.npy` (or an `.npz` with
one array of any name) for a model with one input; a folder of such files; a folder of images, whose
sub-folders are the classes. Pickled objects are never loaded.
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

from deploykit.core.artefact import sniff
from deploykit.core.errors import BadInput, DeploykitError, first_line, os_reason
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.memory import check_fits, check_memory, does_not_fit
from deploykit.core.tensors import BATCH, TensorSpec, carrier, concrete, mismatch, steps_counted

LABELS, INPUTS = "labels", "inputs/"  # the second stands before names in golden samples
_DATA = "data is an .npz or .npy file, or a folder of images"
_IMAGE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
_TEXT = bytes((*range(9, 14), *range(32, 256)))
_TURN = 0.6180339887498949  # the golden ratio's fraction: its multiples are evenly spread
IMAGES, ARRAYS = (".png", ".jpg", ".jpeg"), (".npz", ".npy")


@dataclass(frozen=True)
class Samples:
    """`inputs`: by input name, shape (samples, ...). `labels`: shape (samples,) or None."""

    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray | None
    where: str  # the file or folder, for error messages
    unused: tuple[str, ...] = ()  # arrays that are neither

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def batches(self, size: int, *, spread: bool = False) -> Iterator[dict[str, np.ndarray]]:
        """The inputs in order, `size` samples at a time; the last batch may be smaller.

        `spread`: in an order of which every beginning is from all over the samples.
        """
        starts = range(0, len(self), size)
        for start in sorted(starts, key=lambda at: at // size * _TURN % 1) if spread else starts:
            yield {name: array[start : start + size] for name, array in self.inputs.items()}

    def first(self, count: int) -> Samples:
        """The first `count` samples, without a copy."""
        inputs = {name: array[:count] for name, array in self.inputs.items()}
        return Samples(inputs, None if self.labels is None else self.labels[:count], self.where)

    def batching(self, most: int, specs: Sequence[TensorSpec]) -> tuple[int, int]:
        """The batch size for a model with these inputs, and how many samples fill whole batches.

        A dynamic batch uses `most` and all samples; a fixed one drops the samples that do not fill
        the last batch. Raises BadInput when they do not fill one batch.
        """
        fixed = next((n for spec in specs for n in spec.shape[:1] if isinstance(n, int)), None)
        if fixed is None:
            return most, len(self)
        if not 0 < fixed <= len(self):
            raise BadInput(
                f"{self.where}: {len(self)} samples do not fill the model's fixed batch of {fixed}"
            )
        return fixed, len(self) // fixed * fixed


def read_samples(path: Path, inputs: tuple[TensorSpec, ...], *, labelled: bool = False) -> Samples:
    """Read `path` for a model with these `inputs`. Raises BadInput when it does not fit them.

    Axis 0 of each array is the samples, even where the model's axis 0 is fixed. `labelled`: labels
    are required. Files are read in the order of their names; class folders are numbered in theirs.
    """
    arrays = _read_folder(path, inputs) if _is_folder(path) else _read_file(path)
    labels = arrays.pop(LABELS, None)
    golden = {n.removeprefix(INPUTS): a for n, a in arrays.items() if n.startswith(INPUTS)}
    arrays = golden or arrays  # of golden samples the inputs
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
            f"{path}: its arrays have {sorted(counts)} samples; all need the same number, above 0"
        )
    count = counts.pop()
    if labelled and labels is None:
        raise BadInput(
            f"{path}: no array '{LABELS}'",
            hint="add an array of labels; in a folder of images, one sub-folder per class",
        )
    if labels is not None and labels.shape[:1] != (count,):
        raise BadInput(f"{path}: {count} samples but labels of shape {labels.shape}")
    return Samples(chosen, labels, str(path), tuple(name for name in arrays if name not in chosen))


def _cure(spec: TensorSpec, array: np.ndarray) -> tuple[str, str | None]:
    """A guess at what an array that does not fit is, and a hint."""
    if array.ndim == len(spec.shape) == 4:
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


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz`; raises BadInput for anything else, and for pickled objects.

    Sizes in the headers are added up first: a small file can declare, or unpack to, any size.
    """
    if _is_folder(path):
        raise BadInput(f"{path}: is a folder; an .npz file is needed")
    if _is_npy(path):
        raise BadInput(f"{path}: is a single .npy array; an .npz is needed")
    return _read_file(path)


def _read_file(path: Path) -> dict[str, np.ndarray]:
    check_memory(str(path), _declared_bytes(path))
    return _load(path)


def _read_folder(folder: Path, inputs: tuple[TensorSpec, ...]) -> dict[str, np.ndarray]:
    """Arrays by name from a folder of arrays or images; with `labels` where it has classes."""
    files, classes = _entries(folder)
    if files and classes:
        raise BadInput(
            f"{folder}: contains both files ({files[0].name}) and folders ({classes[0].name})",
            hint="use either files only, or one sub-folder of images per class",
        )
    labels = []
    for number, kind in enumerate(classes):
        images, deeper = _entries(kind)
        if deeper:
            raise BadInput(f"{deeper[0]}: is a folder; a class folder contains images only")
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
    if not images:
        return _join_files(files, str(folder))
    if len(images) < len(files):
        other = next(file for file in files if file not in images)
        raise BadInput(
            f"{folder}: contains both images ({images[0].name}) and arrays ({other.name})"
        )
    from deploykit.runtimes.data.images import read_images  # Pillow is not needed for arrays

    arrays = {"images": read_images(files, inputs, str(folder))}
    return arrays | {LABELS: np.array(labels, np.int64)} if labels else arrays


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and the folders in a folder, by name, without hidden ones. Raises BadInput."""
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
        return False  # opening it reports what is wrong


def _join_files(files: Sequence[Path], where: str) -> dict[str, np.ndarray]:
    """Concatenate the arrays of several files along axis 0."""
    needed_bytes = sum(_declared_bytes(file) for file in files)
    check_memory(where, needed_bytes * (2 if len(files) > 1 else 1))  # parts and whole
    parts = [_load(file) for file in files]
    kinds = [
        {name: (array.dtype, array.shape[1:], array.ndim > 0) for name, array in part.items()}
        for part in parts
    ]
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0] or not all(joins for _, _, joins in kind.values()):
            raise BadInput(
                f"{file}: has {_describe(kind)}; {files[0].name} has {_describe(kinds[0])}",
                hint="files of one folder are joined: names, dtypes and all axes but the first "
                "must be equal",
            )
    return {name: np.concatenate([part.pop(name) for part in parts]) for name in kinds[0]}


def _describe(kind: Mapping[str, tuple[np.dtype, tuple[int, ...], bool]]) -> str:
    return ", ".join(
        f"{name}:{dtype}[{','.join(map(str, ('N', *shape) if joins else ()))}]"
        for name, (dtype, shape, joins) in sorted(kind.items())
    )


def _is_npy(path: Path) -> bool:
    with check_readable(path).open("rb") as handle:
        return handle.read(6) == npy.MAGIC_PREFIX


def _declared_bytes(path: Path) -> int:
    """The memory that the arrays of a file need, by their headers. Raises NotFound or BadInput."""
    with _damage(path):
        if _is_npy(path):
            with path.open("rb") as handle:
                return _check_header(f"{path}: the array", handle, path.stat().st_size)
        with zipfile.ZipFile(path) as archive:
            total = 0
            for info in _members(archive):
                with archive.open(info) as member:
                    where = f"{path}: '{_array_name(info)}'"
                    total += _check_header(where, member, info.file_size)
            return total


def _load(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that `_declared_bytes` has checked; an .npy's is named "array"."""
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
        raise BadInput(f"{path}: contains no arrays")
    return arrays


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn the errors of zipfile, zlib and numpy on damaged or encrypted files into BadInput."""
    try:
        yield
    except _DAMAGED as exc:
        if isinstance(exc, MemoryError) and "allocate" in str(exc):  # not the parser of headers
            raise does_not_fit(path, first_line(exc)) from exc
        _refuse_other(path)
        kind = ".npy" if path.suffix == ".npy" else ".npz"
        raise BadInput(f"{path}: is not a readable {kind} file: {first_line(exc)}") from exc


def _refuse_other(path: Path) -> None:
    """Raise BadInput if `path` is an image, a model or text."""
    try:
        with path.open("rb") as handle:
            head = handle.read(512)
    except OSError:
        return
    if head.startswith(_IMAGE_STARTS):
        raise BadInput(
            f"{path}: is a single image", hint="give the folder that contains the images"
        )
    try:
        kind = sniff(path)
    except DeploykitError:
        kind = ""
    if kind:
        raise BadInput(f"{path}: is a model ({kind}), not data", hint=_DATA)
    if not head.translate(None, _TEXT):
        raise BadInput(
            f"{path}: is a text file, not data",
            hint=f"numpy.save('{path.stem}.npy', numpy.loadtxt('{path.name}', delimiter=',', "
            "dtype='float32')) converts a CSV file; axis 0 is the samples",
        )


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


def _check_header(where: str, member: IO[bytes], file_bytes: int) -> int:
    """The bytes of one array. Raises BadInput when its header disagrees with its file's size."""
    version = npy.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise BadInput(f"{where} is in the unsupported .npy format version {version}")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(member)
    header_bytes = member.tell()
    if dtype.hasobject:
        raise BadInput(
            f"{where} contains Python objects, which are not loaded",
            hint="save numbers: np.savez(path, x=np.asarray(values, dtype='float32'))",
        )
    size = math.prod(shape) * dtype.itemsize
    if header_bytes + size != file_bytes:
        raise BadInput(
            f"{where}: its header declares {dtype}{list(shape)}, "
            f"but the data has {file_bytes - header_bytes} bytes"
        )
    return size


def write_npz(path: Path, arrays: Mapping[str, np.ndarray], *, kind: str = "arrays") -> None:
    """Write arrays by name, completely or not at all, and in the archive's comment their `kind`."""
    with atomic_write(path) as tmp, zipfile.ZipFile(tmp, "w") as archive:
        archive.comment = f"deploykit {kind}".encode()
        for name, array in arrays.items():  # np.savez reserves "file", and fails before 1980
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                npy.write_array(member, np.asarray(array), allow_pickle=False)


def random_feeds(
    specs: tuple[TensorSpec, ...], sizes: Mapping[str, int], seed: int = 0
) -> dict[str, np.ndarray]:
    """Seeded inputs for timing and parity.

    Standard normal floats, uint8 from 0 to 255, lengths of rows by their name, the last of a full
    row, other integers and strings from 0 to 9. Booleans and a mask, by its name, get zeros and
    ones, with a one first in each row and, as booleans, the other value last; with "pad" in its
    name the reverse: attention over a fully masked row is undefined. `sizes`: 1 by default.
    """
    random, feeds = np.random.default_rng(seed), {}
    for spec in specs:
        shape = concrete(spec, sizes)
        check_fits(f"input '{spec.name}'", 8 * math.prod(shape))
        if "float" in spec.dtype:
            feeds[spec.name] = random.standard_normal(shape).astype(carrier(spec.dtype))
        elif spec.dtype == "string":
            feeds[spec.name] = random.integers(0, 10, shape).astype(str).astype(object)
        elif spec.dtype == "bool":
            feeds[spec.name] = found = random.integers(0, 2, shape).astype(bool)
            if found.ndim > 1:  # either value may be the one that hides
                found[..., :1] = "pad" not in spec.name.lower()
                found[..., -1:] = ~found[..., :1] if shape[-1] > 1 else found[..., :1]
        elif (steps := steps_counted(spec, specs, sizes)) is not None:
            feeds[spec.name] = random.integers(1, steps + 1, shape).astype(spec.dtype)
            feeds[spec.name][-1:] = steps
        elif "mask" in spec.name.lower():
            feeds[spec.name] = found = random.integers(0, 2, shape).astype(spec.dtype)
            found[..., :1] = 1
        elif spec.dtype == "uint8":  # pixels: ids need a larger type
            feeds[spec.name] = random.integers(0, 256, shape).astype(np.uint8)
        else:
            feeds[spec.name] = random.integers(0, 10, shape).astype(spec.dtype)
    return feeds
