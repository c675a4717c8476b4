"""Read arrays for a model's inputs, and labels.

The data may be an `.npz` with one array per input name and optionally `labels`; an `.npy` (or an
`.npz` with one array of any name) for a model with one input; a folder of images, whose sub-folders
are the classes.

Archives are not trusted: headers are read first, as a small file can declare, or unpack to, any
size, and pickled objects are never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tokenize
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import numpy as np
from numpy.lib import format as npy

from deploykit.core.artefact import file_stamp
from deploykit.core.errors import BadInput, first_line, os_reason
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.machine import check_fits, does_not_fit, usable_cores
from deploykit.core.task import Task
from deploykit.core.tensors import (
    BATCH,
    Specs,
    TensorSpec,
    batch_axes,
    carrier,
    concrete,
    fits_shape,
    mismatch,
    steps_counted,
)

if TYPE_CHECKING:
    from deploykit.engines.data.images import PlacedImages


LABELS, INPUTS = "labels", "inputs/"  # names in golden samples begin with the second
IMAGES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class DataSource:
    """Data that fit a model and are not read yet.

    `names`: input name -> array name; `axes`: by input name, see `sample_axes`. `headers`: of the
    arrays in the file; of images together. `images` decodes the files if they are images, and
    `classes` are the labels of images in class folders. `count`: samples. `unused`: other arrays.
    """

    where: str
    files: tuple[Path, ...]
    names: Mapping[str, str]
    axes: Mapping[str, int | None]
    headers: Mapping[str, Header]
    images: PlacedImages | None
    classes: np.ndarray | None
    count: int
    unused: tuple[str, ...]

    @property
    def labelled(self) -> bool:
        """Whether it has an array of labels, which is not an input of that name."""
        return LABELS in self.headers and LABELS not in self.names.values()

    def read(self, name: str) -> np.ndarray:
        """Read the whole array `name`."""
        return read_array(self.files[0], self.headers[name])

    def read_labels(self) -> np.ndarray | None:
        # in this machine's byte order
        return np.concatenate([self.read(LABELS)]) if self.labelled else self.classes

    def stamp(self, count: int) -> str:
        """Return a hash that changes when a file with one of the first `count` samples does."""
        stamps = [(x.parent.name, x.name, file_stamp(x)) for x in self.files[:count]]
        return hashlib.sha256(repr(stamps).encode()).hexdigest()


def find_source(path: Path, inputs: Specs, *, task: Task | None = None) -> DataSource:
    """Find the data of `path` for a model with these `inputs`: see `read_samples`."""
    files, classes, images = [path], list[int](), None
    if is_folder(path):  # the decoders import Pillow, which arrays do not need
        files, classes = _images_of(path, task.labels if task else ())
        from deploykit.engines.data.images import PlacedImages, input_without_task

        image = task.image if task else None
        images = PlacedImages(image or input_without_task(inputs, files[0]), resize=bool(image))
        shape = (len(files), *images.shape)
        headers = {"images": Header(shape, np.dtype(np.uint8), in_rows=True, start=0)}
    else:
        headers = read_headers(path)
    names, unused, axes = _choose(path, inputs, headers)
    placed = {names[name]: axis for name, axis in axes.items() if axis is not None}
    counts = {headers[name].shape[axis] for name, axis in placed.items()} or {1}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(
            f"{path}: its arrays have {sorted(counts)} samples; all need the same number, above 0",
            hint="samples lie along the axis of the batch, wherever an input has it; an input "
            "without one is given once",
        )
    (count,) = counts
    numbers = np.array(classes, np.int64) if classes else None
    facts = (names, axes, headers, images, numbers, count, unused)
    found = DataSource(str(path), tuple(files), *facts)
    if found.labelled and headers[LABELS].shape[:1] != (count,):
        raise BadInput(f"{path}: {count} samples but labels of shape {headers[LABELS].shape}")
    return found


def sample_axes(
    specs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]]
) -> dict[str, int | None]:
    """Return the axis of each input along which samples lie; None for one that is given once.

    It is that of the batch, wherever an input has it: [2,N,8]. In a model whose batch is fixed it
    is the axis at which an array is longer than the model says. `shapes`: those of the arrays.
    """
    batch = batch_axes(specs)
    axes: dict[str, int | None] = {}
    for spec in specs:
        shape = shapes[spec.name]
        places = [place for place, axis in enumerate(spec.shape) if axis in batch]
        if not batch:
            pairs = enumerate(zip(spec.shape, shape, strict=False))
            places = [n for n, (axis, size) in pairs if isinstance(axis, int) and axis != size]
            if len(places) > 1 or len(shape) != len(spec.shape):
                places = [0] if spec.shape else []  # it does not fit, which is reported
        axes[spec.name] = next(iter(places), None)
    placed = [(shapes[name], axis) for name, axis in axes.items() if axis is not None]
    counts = {shape[axis] for shape, axis in placed if axis < len(shape)}
    if not counts:  # one batch as the model has it
        first = next((shapes[spec.name][:1] for spec in specs if spec.shape), ())
        return {
            spec.name: 0 if first and shapes[spec.name][:1] == first else None for spec in specs
        }
    for spec in specs if batch else ():  # of a batch without a known name, or of one that is fixed
        others = {axis for each in specs if each is not spec for axis in each.shape}
        pairs = enumerate(zip(spec.shape, shapes[spec.name], strict=False))
        if axes[spec.name] is None and len(spec.shape) == len(shapes[spec.name]):
            own = (
                place
                for place, (axis, size) in pairs
                if size in counts and axis != size and (isinstance(axis, int) or axis not in others)
            )
            axes[spec.name] = next(own, None)
    return axes


def _choose(
    path: Path, inputs: Specs, headers: Mapping[str, Header]
) -> tuple[dict[str, str], tuple[str, ...], dict[str, int | None]]:
    """Return the array for each input, those that are neither inputs nor labels, and the axes."""
    golden = {n.removeprefix(INPUTS): n for n in headers if n.startswith(INPUTS)}
    own = {spec.name for spec in inputs}  # one of them may be named as the labels are
    arrays = golden or {n: n for n in headers if n != LABELS or n in own}
    if len(inputs) == 1 and len(arrays) == 1:
        arrays = {inputs[0].name: next(iter(arrays.values()))}
    for spec in inputs:
        if spec.name not in arrays:
            has = ", ".join(arrays) or "none"
            raise BadInput(
                f"{path}: no array '{spec.name}'; it contains: {has}",
                hint="the model's inputs are: " + ", ".join(map(str, inputs)),
            )
    axes = sample_axes(inputs, {spec.name: headers[arrays[spec.name]].shape for spec in inputs})
    for spec in inputs:
        found, axis = headers[arrays[spec.name]], axes[spec.name]
        shape = tuple(BATCH if place == axis else size for place, size in enumerate(spec.shape))
        dtype = found.dtype.name
        if spec.dtype == "string" and found.dtype.kind == "U":  # of any length
            dtype = carrier(spec.dtype)
        problem = mismatch(replace(spec, shape=shape), dtype, found.shape)
        if problem is not None:
            cure = None if found.dtype.name == spec.dtype else f"x.astype('{spec.dtype}')"
            if found.dtype == np.uint8 and spec.dtype.startswith("float"):
                cure = "normalise as for training, or export with `preprocess`"
            wanted = (BATCH, *spec.shape[1:])
            for layout, order in (("NHWC", (0, 3, 1, 2)), ("NCHW", (0, 2, 3, 1))):
                if len(found.shape) == len(spec.shape) == 4:
                    moved = [found.shape[axis] for axis in order]
                    if fits_shape(wanted, moved) and not fits_shape(wanted, found.shape):
                        problem += f"; it looks like {layout}"
                        cure = f"np.transpose(x, {order})"
            raise BadInput(f"{path}: {problem}", hint=cure)
    chosen = {spec.name: arrays[spec.name] for spec in inputs}
    unused = tuple(name for name in arrays if name not in chosen)
    return chosen, unused, axes


def _images_of(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[int]]:
    """Return a folder's images, and their classes if it has any.

    Class folders stand for the labels `names` that they are named after, else for 0, 1, …; other
    names, and another number of them than of labels, say nothing of the classes.
    """
    files, classes = list_entries(folder)
    if files and classes:
        raise BadInput(
            f"{folder}: contains both files ({files[0].name}) and folders ({classes[0].name})",
            hint="use either files only, or one sub-folder of images per class",
        )
    labels, named = [], {kind.name for kind in classes} & set(names)
    for position, kind in enumerate(classes):
        if named and names.count(kind.name) != 1:
            several = "several" if kind.name in named else "none"
            raise BadInput(
                f"{folder}: the class folder '{kind.name}' stands for {several} of the model's "
                "labels",
                hint="name all class folders after labels; or none of them, in the labels' order",
            )
        number = names.index(kind.name) if named else position
        images = list_class(kind, f"for one split of several, name its folder: {kind}")
        if not images:
            raise BadInput(f"{kind}: the class folder is empty")
        files += images
        labels += [number] * len(images) if named or len(names) in (0, len(classes)) else []
    if not files:
        raise BadInput(f"{folder}: the folder is empty")
    for file in files:
        if file.suffix.lower() not in IMAGES:
            raise BadInput(
                f"{file}: is not an image",
                hint=f"a folder of data contains {' '.join(IMAGES)} files, and nothing else; "
                "arrays are one .npz or .npy file",
            )
    return files, labels


def list_entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files and folders in a folder, sorted, without hidden ones. Raises BadInput."""
    try:
        found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as exc:
        raise BadInput(f"{folder}: cannot be read: {os_reason(exc)}") from exc
    folders = [path for path in found if is_folder(path)]
    return [path for path in found if path not in set(folders)], folders


def list_class(folder: Path, hint: str) -> list[Path]:
    """Return the files of a class folder. Raises BadInput if it contains folders."""
    files, deeper = list_entries(folder)
    if deeper:
        message = f"{deeper[0]}: is a folder; a class folder contains images only"
        raise BadInput(message, hint=hint)
    return files


is_folder = os.path.isdir  # False for a path that cannot be looked at: opening it reports the error


@dataclass(frozen=True)
class Samples:
    """`inputs`: by input name. `labels`: shape (samples,) or None.

    `axes`: the axis of samples, by input name, None for an input that all of them share; 0 where it
    has no entry.
    """

    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray | None
    where: str  # file or folder, for errors
    unused: tuple[str, ...] = ()  # other arrays
    axes: Mapping[str, int | None] = field(default_factory=dict)

    def __len__(self) -> int:
        sizes = (
            a.shape[axis] for n, a in self.inputs.items() if (axis := self.axis(n)) is not None
        )
        return next(sizes, 1)

    def axis(self, name: str) -> int | None:
        return self.axes.get(name, 0)

    def rows(self, places: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Return the inputs of these samples; a slice is not copied."""
        found = {}
        for name, array in self.inputs.items():
            axis = self.axis(name)
            found[name] = array[places] if axis == 0 else array
            if axis:
                found[name] = np.ascontiguousarray(array[(slice(None),) * axis + (places,)])
        return found

    def each(self, name: str) -> np.ndarray:
        """Return an input with the samples along axis 0; one that all share is a single one."""
        axis = self.axis(name)
        array = self.inputs[name]
        return array[None] if axis is None else np.moveaxis(array, axis, 0)

    def batches(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the inputs in order, `size` samples at a time; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

    def first(self, count: int) -> Samples:
        """Return the first `count` samples, without a copy."""
        labels = None if self.labels is None else self.labels[:count]
        return replace(self, inputs=self.rows(slice(count)), labels=labels)

    def fixed_batch(self, specs: Sequence[TensorSpec]) -> int | None:
        """Return the size of the batch of a model with these inputs; None for any size."""
        axes = [(spec.shape, self.axis(spec.name)) for spec in specs if spec.shape]
        sizes = [shape[axis] for shape, axis in axes if axis is not None and axis < len(shape)]
        return next((size for size in sizes if isinstance(size, int)), None)

    def batching(self, most: int, specs: Sequence[TensorSpec]) -> tuple[int, int]:
        """Return the batch size for a model with these inputs, and the samples in whole batches.

        A dynamic batch uses `most` and all samples; a fixed one drops the samples that do not fill
        the last batch. Raises BadInput if they do not fill one batch.
        """
        fixed = self.fixed_batch(specs)
        if fixed is None:
            return most, len(self)
        if not 0 < fixed <= len(self):
            raise BadInput(
                f"{self.where}: {len(self)} samples do not fill the model's fixed batch of {fixed}"
            )
        return fixed, len(self) // fixed * fixed


def read_samples(path: Path, inputs: Specs, *, task: Task | None = None) -> Samples:
    """Read `path` for a model with these `inputs`. Raises BadInput when it does not fit them.

    `sample_axes` says where the samples lie in each array. Files are read, and class folders are
    numbered, in the order of their names. `task`: places images of any size as the server does, and
    its labels may be the folders' names.
    """
    source = find_source(path, inputs, task=task)
    check_fits(f"{source.where}: its samples", sum(x.nbytes for x in source.headers.values()))
    (whole,) = read_batches(source, source.count)
    return Samples(whole, source.read_labels(), source.where, source.unused, source.axes)


def _native(array: np.ndarray) -> np.ndarray:
    """Return the array as an engine takes it: this machine's byte order, strings as objects."""
    if array.dtype.kind == "U":
        return array.astype(object)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an `.npz`. Raises BadInput for anything else, and for pickled objects.

    Sizes in the headers are added up first: a small file can declare, or unpack to, any size.
    """
    if is_folder(path):
        raise BadInput(f"{path}: is a folder; an .npz file is needed")
    if is_npy(path):
        raise BadInput(f"{path}: is a single .npy array; an .npz is needed")
    headers = read_headers(path)
    check_fits(f"{path}: its arrays", sum(each.nbytes for each in headers.values()))
    return {name: _native(read_array(path, header)) for name, header in headers.items()}


def write_npz(path: Path, arrays: Mapping[str, np.ndarray], *, kind: str = "arrays") -> None:
    """Write arrays by name, completely or not at all, with `kind` in the archive's comment."""
    with atomic_write(path) as tmp, zipfile.ZipFile(tmp, "w") as archive:
        archive.comment = f"deploykit {kind}".encode()
        for name, array in arrays.items():  # np.savez reserves "file", fails before 1980
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                whole = np.asarray(array, np.str_ if array.dtype.hasobject else None)
                npy.write_array(member, whole, allow_pickle=False)


_TAIL = 4  # places of padding at most, fewer than a window of attention has


def random_feeds(
    specs: Specs, sizes: Mapping[str, int], seed: int = 0, *, integers: int = 10
) -> dict[str, np.ndarray]:
    """Return seeded inputs for timing and parity.

    Floats are standard normal, uint8 is 0 to 255, others and strings below `integers`. An input
    named as lengths gets lengths of rows, the last one full. Booleans and an input named as a mask
    get zeros and ones: a mask (N, T) ends with a few zeros, as padding does; any other begins with
    a one and, for booleans, ends with the other value. A "pad" in a boolean's name reverses this,
    as attention over a fully masked row is undefined. `sizes`: 1 by default.
    """
    random, feeds = np.random.default_rng(seed), {}
    for spec in specs:
        shape = concrete(spec, sizes)
        check_fits(f"input '{spec.name}'", 8 * math.prod(shape))
        name = spec.name.lower()
        hides = spec.dtype == "bool" and "pad" in name  # True masks a place
        if "float" in spec.dtype:
            feeds[spec.name] = random.standard_normal(shape).astype(carrier(spec.dtype))
        elif spec.dtype == "string":
            feeds[spec.name] = random.integers(0, 10, shape).astype(str).astype(object)
        elif "mask" in name and len(shape) == 2:
            least = int(spec.dtype == "bool" and shape[1] > 1)
            most = min(_TAIL, max(least + 1, shape[1]))
            found = np.arange(shape[1]) < shape[1] - random.integers(least, most, (shape[0], 1))
            found[:1, -1:] = shape[1] < 2  # one row at least has padding
            feeds[spec.name] = (found != hides).astype(spec.dtype)
        elif (steps := steps_counted(spec, specs, sizes)) is not None:
            feeds[spec.name] = random.integers(1, steps + 1, shape).astype(spec.dtype)
            feeds[spec.name][-1:] = steps
        elif spec.dtype == "bool" or (shape and "mask" in name):
            feeds[spec.name] = found = random.integers(0, 2, shape).astype(spec.dtype)
            either = spec.dtype == "bool"  # either value may mean masked
            if not either or (len(shape) > 1 and spec.shape[-1] not in (1, 2)):
                found[..., :1] = not hides
                if either and shape[-1] > 1:
                    found[..., -1:] = hides
        elif spec.dtype == "uint8":  # it holds pixels, as ids need a larger type
            feeds[spec.name] = random.integers(0, 256, shape).astype(np.uint8)
        else:
            feeds[spec.name] = random.integers(0, integers, shape).astype(spec.dtype)
    return feeds


FEW = 100  # with fewer samples, a calibration depends on chance
_NORMALISED = 16.0  # normalised pixels span about 5, those in 0..1 span 1


def check_calibration(samples: Samples, inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Warn of few samples, duplicates, and pixels that are not normalised.

    The calibration itself refuses data that cannot calibrate: NaN, all samples equal.
    """
    count = len(samples)
    found = []
    if count < FEW:
        found.append(f"only {count} samples: a few hundred real ones are better")
    repeated = count - len(set(digests(samples)))
    if repeated * 10 > count:
        found.append(f"{repeated} of {count} samples are duplicates")
    for spec in inputs:
        array = samples.inputs[spec.name]
        pixels = len(spec.shape) == 4 and spec.dtype.startswith("float")
        if pixels and np.ptp(array) > _NORMALISED:
            found.append(
                f"'{spec.name}' ranges from {array.min():g} to {array.max():g}: its pixels look "
                "unnormalised; preprocess them as for training"
            )
    return tuple(f"{samples.where}: {text}" for text in found)


def check_finite(samples: Samples) -> None:
    """Raise BadInput naming the first sample that holds NaN or infinity."""
    for name in samples.inputs:
        array = samples.each(name)
        ends = [array.min(initial=0), array.max(initial=0)] if array.dtype.kind == "f" else []
        if np.isfinite(ends).all():  # of the whole, without a second array as long
            continue
        odd = ~np.isfinite(array).reshape(len(array), -1).all(1)
        raise BadInput(
            f"{samples.where}: input '{name}' of sample {int(odd.argmax())} holds NaN or infinity, "
            "and so do the model's answers",
            hint="leave such samples out, or fill the gaps as for training",
        )


def overlap(calib: Samples, test: Samples) -> int:
    """Count the samples of `test` that are also in `calib`, byte for byte."""
    known = set(digests(calib))
    return sum(digest in known for digest in digests(test))


def digests(samples: Samples) -> Iterator[bytes]:
    """Yield a hash of each sample, over the bytes of all its inputs."""
    names = sorted(samples.inputs)
    for number in range(len(samples)):
        digest = hashlib.blake2b(digest_size=16)
        for name in names:
            values = samples.each(name)
            row = values[number % len(values)]
            strings = isinstance(row, str) or row.dtype.hasobject
            digest.update(repr(np.asarray(row).tolist()).encode() if strings else row.tobytes())
        yield digest.digest()


_DECODERS = 8  # threads at most; each decodes a few hundred images per second
_AHEAD = 2  # batches to read ahead

Item = TypeVar("Item")


def read_batches(source: DataSource, size: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Yield the inputs of the samples from `start` on, in order, `size` samples at a time.

    The last batch may be smaller. Archives are unpacked and images decoded on demand. Raises
    BadInput naming a damaged file.
    """
    if (images := source.images) is not None:
        (name,) = source.names
        with ThreadPoolExecutor(min(usable_cores(), _DECODERS)) as decoders:
            for at in range(start, source.count, size):
                files = source.files[at : at + size]
                pixels = np.empty((len(files), *images.shape), np.uint8)
                for number, one in enumerate(decoders.map(images.decode, files)):
                    pixels[number] = one
                yield {name: pixels}
        return
    streams = {name: _read_rows(source, name, size, start) for name in source.names}
    for _ in range(start, source.count, size):
        yield {name: next(stream) for name, stream in streams.items()}


def _read_rows(source: DataSource, name: str, size: int, start: int) -> Iterator[np.ndarray]:
    """Yield the rows of an input from `start` on, `size` at a time; all of one without an axis."""
    path, header, axis = source.files[0], source.headers[source.names[name]], source.axes[name]
    starts = range(start, source.count, size)
    if axis is None or axis > 0 or not header.in_rows:  # any row needs the whole array
        check_fits(f"{path}: its array", 2 * header.nbytes)  # and its rows
        array = _native(source.read(source.names[name]))
        for at in starts:
            rows = (slice(None),) * (axis or 0) + (slice(at, at + size),)
            yield array if axis is None else np.ascontiguousarray(array[rows])
        return
    row_bytes = header.nbytes // source.count
    with open_array(path, header) as handle:
        handle.read(header.start)  # after `seek`, Python 3.13 does not check an archive's CRC
        if start:
            handle.seek(start * row_bytes, os.SEEK_CUR)
        for at in starts:
            found = np.empty((min(size, source.count - at), *header.shape[1:]), header.dtype)
            got = handle.readinto(found.reshape(-1).view(np.uint8))  # type: ignore[attr-defined]
            if got < found.nbytes:
                raise EOFError("it ends before its last sample")
            yield _native(found)


def read_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the same items while a thread makes the next ones."""
    rest = iter(items)
    with ThreadPoolExecutor(1) as thread:
        ready = deque(thread.submit(next, rest, None) for _ in range(_AHEAD))
        while (item := ready.popleft().result()) is not None:
            ready.append(thread.submit(next, rest, None))
            yield item


_DATA = (
    "data is an .npz or .npy file, which numpy.savez and numpy.save write, or a folder of images"
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


@dataclass(frozen=True)
class Header:
    """The header of one array. `start`: the position in its member where the values begin."""

    shape: tuple[int, ...]
    dtype: np.dtype
    in_rows: bool  # C order: the rows of axis 0 are contiguous
    start: int
    member: str = ""  # the name in the archive; "" for an .npy

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(path: Path) -> dict[str, Header]:
    """Return a file's headers by name; an .npy's is "array". Raises NotFound or BadInput."""
    with damage(path):
        if is_npy(path):
            with path.open("rb") as handle:
                return {"array": _header(f"{path}: the array", handle, path.stat().st_size)}
        found = {}
        with zipfile.ZipFile(path) as archive:
            for info in (each for each in archive.infolist() if not each.is_dir()):
                name = info.filename.removesuffix(".npy")
                with archive.open(info) as member:
                    where = f"{path}: '{name}'"
                    found[name] = _header(where, member, info.file_size, info.filename)
    if not found:
        raise BadInput(f"{path}: contains no arrays")
    return found


def read_array(path: Path, header: Header) -> np.ndarray:
    """Return an array whose header was checked."""
    with open_array(path, header) as handle:
        found: np.ndarray = npy.read_array(handle, allow_pickle=False)
        return found


@contextlib.contextmanager
def open_array(path: Path, header: Header) -> Iterator[IO[bytes]]:
    """Open the array's member at its start. In the block, damage is BadInput."""
    with damage(path), contextlib.ExitStack() as stack:
        if header.member:
            archive = stack.enter_context(zipfile.ZipFile(path))
            yield stack.enter_context(archive.open(header.member))
        else:
            yield stack.enter_context(path.open("rb"))


def is_npy(path: Path) -> bool:
    """Return whether the file is a single array. Raises NotFound or BadInput."""
    with check_readable(path).open("rb") as handle:
        return handle.read(6) == npy.MAGIC_PREFIX


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Turn the errors of zipfile, zlib and numpy on damaged or encrypted files into BadInput."""
    try:
        yield
    except _DAMAGED as exc:
        if isinstance(exc, MemoryError) and "allocate" in str(exc):  # an array, not the parser
            raise does_not_fit(path, first_line(exc)) from exc
        kind = ".npy" if path.suffix == ".npy" else ".npz"
        what = f"{path}: is not a readable {kind} file: {first_line(exc)}"
        raise BadInput(what, hint=_DATA) from exc


def _header(where: str, member: IO[bytes], file_bytes: int, name: str = "") -> Header:
    version = npy.read_magic(member)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_columns, dtype = read_header(member)
    found = Header(shape, dtype, not by_columns or len(shape) < 2, member.tell(), name)
    if dtype.hasobject:
        raise BadInput(
            f"{where} contains Python objects, which are not loaded",
            hint="save numbers: np.savez(path, x=np.asarray(values, dtype='float32'))",
        )
    if found.start + found.nbytes != file_bytes or min(shape, default=0) < 0:
        raise BadInput(
            f"{where}: its header declares {dtype}{list(shape)}, "
            f"but the data has {file_bytes - found.start} bytes"
        )
    return found
