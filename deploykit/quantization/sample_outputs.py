"""The model's outputs for calibration samples: to choose a calibrator by, and to evaluate against.

The pass that calibrates computes them for every sample, in batches of its own. They serve for other
batches where a few samples, at other places in another batch, were seen to have the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from deploykit.runtimes.data.samples import Samples
from deploykit.runtimes.engine import Arrays
from deploykit.runtimes.rows import spread_places

Kept: TypeAlias = tuple[np.ndarray, list[np.ndarray]]  # numbers of samples, the outputs for them
Run: TypeAlias = Callable[[Sequence[str], Arrays], list[np.ndarray]]
MOST_BYTES = 1 << 28  # of outputs for some batches
_EVERY_BYTES = 1 << 26  # of those for all samples
_FEW = 8  # samples to prove them by
_SAME = 1e-3  # of the largest value: kernels may round otherwise in another batch


class SampleOutputs:
    """The outputs `names` for batches of `size` samples, which may be `fixed`.

    `every`: also for all samples in order, as long as they are small.
    """

    def __init__(self, names: Sequence[str], size: int, *, fixed: bool, every: bool) -> None:
        self.proven: dict[str, np.ndarray] = {}  # for every sample, by output
        self._names = names
        self._size, self._fixed = size, fixed
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in names if every}
        self._bytes = 0

    @property
    def wanted(self) -> list[str]:
        """The outputs to `add` for the next samples."""
        return list(self._parts)

    def add(self, values: Mapping[str, np.ndarray], rows: int) -> None:
        """The outputs for the next `rows` samples."""
        for name, parts in self._parts.items():
            array = values[name]
            self._bytes += array.nbytes
            like = parts[0] if parts else array
            if array.shape != (rows, *like.shape[1:]) or self._bytes > _EVERY_BYTES:
                self._parts = {}
                return
            parts.append(array.copy())  # what a session returns keeps all of its memory

    def _prove(self, samples: Samples, run: Run) -> None:
        """Run a few samples of all batches as one: where these are equal, take all for proven."""
        every = {name: np.concatenate(found) for name, found in self._parts.items() if found}
        self._parts = {}
        used = min((len(array) for array in every.values()), default=0)
        if self._fixed and self._size == 1:  # always alone
            self.proven = every
        if self._size == 1 or used <= self._size:  # they would be in one batch again
            return
        rows = spread_places(used, self._size if self._fixed else min(self._size, _FEW))
        outputs = run(self._names, {name: array[rows] for name, array in samples.inputs.items()})
        if all(map(_same, outputs, (array[rows] for array in every.values()))):
            self.proven = every

    def at(
        self,
        places: Iterable[np.ndarray],
        samples: Samples,
        run: Run,
        out_of_time: Callable[[], bool] | None,
    ) -> Iterator[Kept]:
        """The samples at `places` and the outputs for them, in time and until too large.

        Before these, those for all samples are proven.
        """
        self._prove(samples, run)
        kept_bytes = 0
        for rows in places:
            if self.proven:
                outputs = [array[rows] for array in self.proven.values()]
            else:
                feeds = {name: array[rows] for name, array in samples.inputs.items()}
                outputs = [each.copy() for each in run(self._names, feeds)]
            yield rows, outputs
            kept_bytes += sum(each.nbytes for each in outputs)
            if kept_bytes > MOST_BYTES or (out_of_time is not None and out_of_time()):
                return


def _same(got: np.ndarray, want: np.ndarray) -> bool:
    if want.dtype.kind != "f" or got.shape != want.shape:
        return np.array_equal(got, want)
    bound = _SAME * float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
    return np.allclose(got, want, rtol=0.0, atol=bound, equal_nan=True)
