"""Open a data file: the arrays of a model's inputs, and labels where there are any.

In: an `.npz` whose arrays are named after the model's inputs (one array of any name will do for a
model with one input), with an optional array `labels`. Out: `Samples`. Nothing is unpickled.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from deploykit.core.errors import BadInput, first_line
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.machine import memory_bytes
from deploykit.core.tensors import BATCH, TensorSpec, concrete, mismatch

LABELS = "labels"


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


def read_samples(path: Path, inputs: tuple[TensorSpec, ...], *, labelled: bool = False) -> Samples:
    """Read `path` for a model with these `inputs`. Raises BadInput when it does not fit them.

    Axis 0 of each array is the samples, also where the model's own axis 0 is fixed. `labelled`:
    labels must be there.
    """
    arrays = read_npz(path)
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
            raise BadInput(f"{path}: {problem}")
        chosen[spec.name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    counts = {len(array) for array in chosen.values()}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(
            f"{path}: its arrays hold {sorted(counts)} samples; equal and above 0 is needed"
        )
    count = counts.pop()
    if labelled and labels is None:
        raise BadInput(f"{path}: no array '{LABELS}'", hint="labelled data are needed here")
    if labels is not None and labels.shape[:1] != (count,):
        raise BadInput(f"{path}: {count} samples but labels of shape {labels.shape}")
    return Samples(chosen, labels, str(path))


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz`; raises BadInput for anything else, and for pickled objects.

    Headers are read and added up first: a small file can claim, or unpack to, any size.
    """
    if path.is_dir():
        raise BadInput(
            f"{path}: is a folder; this version reads .npz files", hint="np.savez(path, x=array)"
        )
    with check_readable(path).open("rb") as handle:
        if handle.read(6) == npy.MAGIC_PREFIX:
            raise BadInput(f"{path}: is a single .npy array, an .npz is needed")
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            needed_bytes = sum(_checked_bytes(path, archive, info) for info in members)
            most_bytes = memory_bytes()
            if most_bytes is not None and needed_bytes > most_bytes:
                raise BadInput(
                    f"{path}: holds {needed_bytes / 1e9:.0f} GB of arrays, "
                    f"this machine's memory is {most_bytes / 1e9:.0f} GB"
                )
            arrays = {}
            for info in members:
                with archive.open(info) as member:
                    arrays[_array_name(info)] = npy.read_array(member, allow_pickle=False)
    except _DAMAGED as exc:
        raise BadInput(f"{path}: is not a readable .npz file: {first_line(exc)}") from exc
    if not arrays:
        raise BadInput(f"{path}: holds no arrays")
    return arrays


# What zipfile, zlib and numpy raise on damaged or encrypted input.
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


def _array_name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _checked_bytes(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """The size of one array, once its header agrees with the size that the archive gives."""
    with archive.open(info) as member:
        version = npy.read_magic(member)
        if version not in ((1, 0), (2, 0)):
            raise BadInput(f"{path}: '{_array_name(info)}' is no plain array (.npy {version})")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(member)
        header_bytes = member.tell()
    if dtype.hasobject:
        raise BadInput(
            f"{path}: '{_array_name(info)}' holds Python objects, which are not loaded",
            hint="save numbers: np.savez(path, x=np.asarray(values, dtype='float32'))",
        )
    size = math.prod(shape) * dtype.itemsize
    if header_bytes + size != info.file_size:
        raise BadInput(
            f"{path}: '{_array_name(info)}' says it is {dtype}{list(shape)}, "
            f"but {info.file_size - header_bytes} bytes of data are there"
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
    """Seeded inputs for timing and parity: standard normal floats, small whole numbers, booleans.

    `sizes`: the size of each dynamic axis; one that is not there is 1.
    """
    random = np.random.default_rng(seed)
    feeds = {}
    for spec in specs:
        shape = concrete(spec, sizes)
        if spec.dtype.startswith("float"):
            feeds[spec.name] = random.standard_normal(shape).astype(spec.dtype)
        elif spec.dtype == "bool":
            feeds[spec.name] = random.integers(0, 2, shape).astype(bool)
        else:
            feeds[spec.name] = random.integers(0, 10, shape).astype(spec.dtype)
    return feeds
