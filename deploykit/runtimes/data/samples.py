"""Read data: arrays for a model's inputs, and labels.

Formats: an `.npz` with one array per input name and perhaps `labels`; an `.npy` (or an `.npz` with
one array of any name) for a model with one input; a folder of such files; a folder of images, whose
sub-folders are the classes. Pickled objects are never loaded.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from deploykit.core.errors import BadInput
from deploykit.core.files import atomic_write
from deploykit.core.memory import check_fits, check_memory
from deploykit.core.task import Task
from deploykit.core.tensors import TensorSpec, carrier, concrete, steps_counted
from deploykit.runtimes.data.archives import is_npy, read_arrays, read_headers
from deploykit.runtimes.data.sources import INPUTS as INPUTS
from deploykit.runtimes.data.sources import LABELS as LABELS
from deploykit.runtimes.data.sources import find_source, is_folder

_TURN = 0.6180339887498949  # the golden ratio's fraction: its multiples are evenly spread


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


def read_samples(
    path: Path, inputs: tuple[TensorSpec, ...], *, task: Task | None = None
) -> Samples:
    """Read `path` for a model with these `inputs`. Raises BadInput when it does not fit them.

    Axis 0 of each array is the samples, even where the model's axis 0 is fixed. Files are read in
    the order of their names; class folders are numbered in theirs.
    `task`: places images of any size as the server does, and its labels may be the folders' names.
    """
    source = find_source(path, inputs, task=task)
    wanted = [*source.names.values(), *([LABELS] if LABELS in source.headers else [])]
    if source.images is not None:
        arrays = dict.fromkeys(source.names.values(), source.images.decode_all(source.files))
    else:
        needed = sum(source.headers[name].nbytes for name in wanted)
        check_memory(source.where, needed * (2 if len(source.files) > 1 else 1))  # parts and whole
        arrays = source.read(wanted)
    chosen = {
        name: arrays[own].astype(arrays[own].dtype.newbyteorder("="), copy=False)
        for name, own in source.names.items()
    }
    return Samples(chosen, arrays.get(LABELS, source.classes), source.where, source.unused)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz`; raises BadInput for anything else, and for pickled objects.

    Sizes in the headers are added up first: a small file can declare, or unpack to, any size.
    """
    if is_folder(path):
        raise BadInput(f"{path}: is a folder; an .npz file is needed")
    if is_npy(path):
        raise BadInput(f"{path}: is a single .npy array; an .npz is needed")
    headers = read_headers(path)
    check_memory(str(path), sum(each.nbytes for each in headers.values()))
    return read_arrays(path, headers)


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
