"""Compare a row's outputs alone, joined, at other places and next to other rows.

A row's outputs must be the same up to BOUND among runs with as many rows, and up to BOUND_BETWEEN
among runs with different numbers of rows, whose kernels may round differently. The second is
relative to the largest value of the output, the first to that of the element and a tenth of the
output's: large boxes do not hide that small scores change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.engine import Arrays

BOUND = 1e-3
BOUND_BETWEEN = 2e-2
_PLACES = 64  # rows of the largest batch that are compared
PLACED = "acdefgb"  # letters of rows from all over a joined batch, its last one first


class Dependent(Exception):  # noqa: N818 - it ends the search, nothing is wrong
    """Why rows may not be joined."""


@dataclass(frozen=True)
class JoinedRun:
    """A batch that an engine ran: rows from all over its `rows`, and their outputs.

    `shapes`: of the whole outputs.
    """

    rows: int
    feeds: Arrays
    outputs: Arrays
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, feeds: Arrays, outputs: Arrays) -> JoinedRun:
        """Keep copies of a few rows. Axis 0 of every input is the batch."""
        rows = len(next(iter(feeds.values())))
        places = spread_places(rows, len(PLACED))
        shapes = {name: array.shape for name, array in outputs.items()}
        fitting = {name: outputs[name][places] for name in shapes if shapes[name][:1] == (rows,)}
        return cls(rows, {n: array[places] for n, array in feeds.items()}, fitting, shapes)

    def letters(self, kinds: Mapping[str, Arrays]) -> dict[str, int]:
        """Which of its rows are those of `PLACED` in `kinds`."""
        return {
            letter: place
            for letter in PLACED
            if letter in kinds
            for place in range(min(self.rows, len(PLACED)))
            if all(np.array_equal(a[place], kinds[letter][n][0]) for n, a in self.feeds.items())
        }


def spread_places(rows: int, count: int) -> list[int]:
    """Up to `count` places all over a batch, from its last to its first."""
    return [int(place) for place in np.linspace(rows - 1, 0, min(count, rows)).round()]


class RowComparison:
    """Compares the outputs of runs with those of the rows "a" and "b" alone."""

    def __init__(
        self, specs: Sequence[TensorSpec], alone: Mapping[str, Mapping[str, np.ndarray]]
    ) -> None:
        self._names = [spec.name for spec in specs]
        self._alone = alone
        self._first: dict[tuple[int, str, str], np.ndarray] = {}
        self._others: dict[tuple[str, str], np.ndarray] = {}  # of the smallest batch with them
        self._scales = {
            name: max(_largest(alone[letter].get(name)) for letter in "ab") for name in self._names
        }
        self._elements = {name: self._element_scale(name) for name in self._names}
        self.errors = dict.fromkeys(self._names, 0.0)

    def _element_scale(self, name: str) -> np.ndarray | float:
        a, b = (self._alone[letter].get(name) for letter in "ab")
        scale = self._scales[name]
        if a is None or b is None or a.dtype.kind != "f" or a.shape != b.shape or not len(a):
            return scale
        sizes = np.nan_to_num(np.maximum(abs(a[0]), abs(b[0])), nan=0.0, posinf=0.0)
        return np.asarray(sizes.astype(np.float64) + scale / 10)

    def apart(self) -> dict[str, float]:
        """How much the outputs of the two rows differ, of those that are not empty."""
        found = {}
        for name in self._names:
            a, b = (self._alone[letter][name] for letter in "ab")
            if a.size or b.size:
                found[name] = _difference(a, b, self._scales[name])
        return found

    def check(self, plan: str, outputs: Arrays) -> None:
        """Raises Dependent."""
        rows = len(plan)
        places = range(rows)
        if rows > _PLACES:
            places = [*range(_PLACES // 2), *range(rows - _PLACES // 2, rows)]  # type: ignore[assignment]
        for name in self._names:
            _check_shape(name, rows, None if name not in outputs else outputs[name].shape)
            for place in places:
                if plan[place] in PLACED:
                    self._check_row(name, plan[place], rows, outputs[name][place, ...])

    def check_joined(self, run: JoinedRun, letters: Mapping[str, int]) -> None:
        """Raises Dependent."""
        for name in self._names:
            _check_shape(name, run.rows, run.shapes.get(name))
            for letter, place in letters.items():
                self._check_row(name, letter, run.rows, run.outputs[name][place, ...])

    def _check_row(self, name: str, letter: str, rows: int, got: np.ndarray) -> None:
        """`got`: an array, of no axes where the output has one: a string has no shape."""
        if letter in self._alone:
            want = self._alone[letter][name][0, ...]
        else:
            want = self._others.setdefault((letter, name), got)
        if got.shape != want.shape:
            raise Dependent(
                f"a row of output '{name}' is {list(want.shape)} alone and "
                f"{list(got.shape)} among {rows} rows"
            )
        error = _difference(got, want, self._scales[name])
        same = self._first.setdefault((rows, letter, name), got)
        if error > BOUND_BETWEEN or _difference(got, same, self._elements[name]) > BOUND:
            raise Dependent(
                f"output '{name}' of a row changes with the rows next to it, or with its "
                f"place among them (seen with {rows} rows)"
            )
        self.errors[name] = max(self.errors[name], error)


def _check_shape(name: str, rows: int, shape: tuple[int, ...] | None) -> None:
    if shape is None or shape[:1] != (rows,):
        found = None if shape is None else list(shape)
        raise Dependent(f"output '{name}' is {found} for {rows} rows")


def _largest(array: np.ndarray | None) -> float:
    if array is None or array.dtype.kind != "f":
        return 0.0
    values = np.abs(array[np.isfinite(array)].astype(np.float64))
    return float(values.max(initial=0.0))


def _difference(got: np.ndarray, want: np.ndarray, scale: np.ndarray | float) -> float:
    """The largest difference relative to `scale`; inf where one is not finite, or not a number."""
    if got.shape != want.shape:
        return np.inf
    if want.dtype.kind != "f":
        return 0.0 if np.array_equal(got, want) else np.inf
    if np.array_equal(got, want, equal_nan=True):
        return 0.0
    x, y = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return np.inf
    off = np.where(finite, np.abs(x - y), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(off == 0, 0.0, off / scale).max(initial=0.0))
