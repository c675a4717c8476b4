"""Open a data file: the arrays of a model's inputs, and labels where there are any.

In: an `.npz` whose arrays are named after the model's inputs (one array of any name will do for a
model with one input), with an optional array `labels`. Out: `Samples`. Nothing is unpickled.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.tensors import TensorSpec, concrete, mismatch

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

    `labelled`: labels must be there.
    """
    arrays = read_npz(path)
    labels = arrays.pop(LABELS, None)
    if len(inputs) == 1 and len(arrays) == 1:
        arrays = {inputs[0].name: next(iter(arrays.values()))}
    names = ", ".join(str(spec) for spec in inputs)
    for spec in inputs:
        if spec.name not in arrays:
            raise BadInput(
                f"{path}: no array '{spec.name}'", hint=f"the model's inputs are: {names}"
            )
        array = arrays[spec.name]
        problem = mismatch(spec, array.dtype.name, array.shape)
        if spec.batched and problem is not None:
            raise BadInput(f"{path}: {problem}")
    chosen = {spec.name: arrays[spec.name] for spec in inputs}
    counts = {len(array) if array.ndim else 0 for array in chosen.values()}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(
            f"{path}: its arrays hold {sorted(counts)} samples; equal and above 0 is needed"
        )
    count = counts.pop()
    if labelled and labels is None:
        raise BadInput(f"{path}: no array '{LABELS}'", hint="labelled data are needed here")
    if labels is not None and len(labels) != count:
        raise BadInput(f"{path}: {count} samples but {len(labels)} labels")
    return Samples(chosen, labels, str(path))


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz`; raises BadInput for anything else, and for pickled objects."""
    if path.is_dir():
        raise BadInput(
            f"{path}: is a folder; this version reads .npz files", hint="np.savez(path, x=array)"
        )
    check_readable(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BadInput(f"{path}: is a single .npy array, an .npz is needed")
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError) as exc:
        raise BadInput(f"{path}: is not a readable .npz file: {first_line(exc)}") from exc
    if not arrays:
        raise BadInput(f"{path}: holds no arrays")
    return arrays


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, whole or not at all."""
    with atomic_write(path) as tmp, tmp.open("wb") as handle:
        np.savez(handle, **{name: np.asarray(array) for name, array in arrays.items()})


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
            feeds[spec.name] = random.integers(0, 2 if spec.dtype == "int8" else 10, shape).astype(
                spec.dtype
            )
    return feeds
