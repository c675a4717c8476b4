"""Prove that the rows of a batch do not depend on each other, before requests are joined.

A dynamic axis 0 may be time, tokens or points instead of samples: joined requests would then change
each other's values. So the proof runs rows alone, joined, in other orders, and next to rows of
other magnitudes, NaN and infinity.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle, islice, product

import numpy as np

from deploykit.core.errors import DeviceLost, first_line
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec, carrier
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays, Engine

# A row's outputs must be equal up to BOUND among runs with the same number of rows, and up to
# BOUND_BETWEEN among runs with different numbers, whose kernels may round differently. The second
# is relative to the largest value of the output. The first is relative to the element plus a tenth
# of that value, so that large boxes do not hide a change of small scores.

BOUND = 1e-3
BOUND_BETWEEN = 2e-2
_PLACES = 64  # the most rows of a batch that are compared


def spread_places(rows: int, count: int) -> list[int]:
    """Return up to `count` places spread over a batch, from its last to its first."""
    return [int(place) for place in np.linspace(rows - 1, 0, min(count, rows)).round()]


_APART = 4  # times the error: the least difference that distinguishes the outputs of two rows
_ROUNDS = 3  # rounds of inputs; later ones run only if they are quick or nothing is decided
_QUICK_S = 0.03  # the limit of a quick round
_POOL = 8  # rows of invented inputs
_SIZES = (5, 8, 16, 32, 64, 128, 224, 256, 512, 1, 2, 3, 4)  # sizes to try for other axes
_IDS = (10, 2)  # upper limits of integers to try
_SEGMENTS = ("type", "segment")  # names of inputs whose ids are 0 and 1 hold these
# Rows by letter: a and b are compared, the others are next to them. A has large values, t tiny
# ones, z zeros, n NaN, i infinity; integers have any values.
_PLANS: Mapping[int, tuple[str, ...]] = {
    2: ("ab", "ba", "aA", "zb", "na", "bi"),
    3: ("ab", "ba", "aAb", "zbt", "nai", "bna"),
    4: ("ab", "ba", "aAb", "zbat", "naib"),
}
_NEXT_TO = ("zbAa", "nait")  # after a batch of ordinary rows that ran already
_LARGEST = "abAzbtaba"
_PLAIN = str.maketrans("Atzni", "babab")


def why_no_batch(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Return why axis 0 cannot be a batch, by the names of the axes; empty if it may be one."""
    specs = [*inputs, *outputs]
    fixed = next((spec for spec in specs if not spec.batched), None)
    if fixed is not None:
        return f"axis 0 of '{fixed.name}' is not dynamic"
    if len({spec.shape[0] for spec in specs}) != 1:
        return "axis 0 is not the same dynamic axis in every input and output"
    axis = specs[0].shape[0]
    again = next((spec for spec in specs if axis in spec.shape[1:]), None)
    return f"axis {axis} is also another axis of '{again.name}'" if again else ""


def looks_batched(engine: Engine) -> bool:
    """Return whether one dynamic axis is axis 0 of all inputs and outputs, as users expect."""
    inputs = engine.inputs
    first = {spec.shape[:1] for spec in (*inputs, *engine.outputs)}
    return len(first) == 1 and bool(inputs) and inputs[0].batched


class _Dependent(Exception):  # noqa: N818 - it ends the search and is not an error
    """Rows may not be joined; the message is the reason."""


def prove_rows(
    engine: Engine,
    most_rows: int,
    *,
    sizes: Mapping[str, int] | None = None,
    samples: Arrays | None = None,
    joined: tuple[Arrays, Arrays] | None = None,
) -> RowIndependence:
    """Run up to `most_rows` rows, at least 2, and report whether they depend on each other.

    Args:
        engine: the engine.
        most_rows: the most rows of a batch.
        sizes: sizes of dynamic axes.
        samples: inputs that the model is known to run; others are invented in addition.
        joined: inputs that ran in one batch, and their outputs; it is not run again.

    Raises DeviceLost.
    """
    if why := why_no_batch(engine.inputs, engine.outputs):
        return RowIndependence(False, why)
    most = min(max(2, most_rows), engine.max_batch or most_rows + 2)
    if most < 2:
        return RowIndependence(True, "the engine takes one row at a time", (1,))
    proof, began_s = _Proof(engine), time.perf_counter()
    whole, outputs = joined or ({}, {})
    first = [whole] if whole and _count(whole) > 1 else []
    try:
        for number, pool in enumerate(chain(first, _pools(engine, sizes or {}, samples or {})), 1):
            proof.run(pool, _NEXT_TO if pool is whole and most >= 4 else _plans(most))
            if pool is whole:
                proof.check_whole(outputs, _count(pool))
            quick = time.perf_counter() - began_s < _QUICK_S
            if number >= _ROUNDS or (proof.decided and not quick):
                break
        else:
            if not proof.rows:
                raise _Dependent("no invented input was found that it runs")
        if not proof.decided:
            raise _Dependent("its outputs were the same for all invented inputs")
    except _Dependent as exc:
        return RowIndependence(False, str(exc), tuple(sorted(proof.rows)), proof.worst)
    why = f"the same within {proof.worst:.2g} alone and joined, whatever the other rows are"
    return RowIndependence(True, why, tuple(sorted(proof.rows)), proof.worst)


def _plans(most: int) -> list[str]:
    largest = "".join(islice(cycle(_LARGEST), most - 1)) + "b"
    return [*_PLANS[min(most, 4)], *[largest] * (most > 4)]


def _run(engine: Engine, feeds: Arrays) -> dict[str, np.ndarray] | Exception:
    """Return the outputs, or the reason why the engine gives none. Raises DeviceLost."""
    try:
        return engine(feeds)
    except DeviceLost:
        raise
    except Exception as exc:  # noqa: BLE001 - any failure means the same
        return exc


def _pools(
    engine: Engine, sizes: Mapping[str, int], samples: Arrays
) -> Iterator[dict[str, np.ndarray]]:
    """Yield rows, the first of which runs: of the samples, then invented ones."""

    def runs(pool: Arrays) -> bool:
        return isinstance(_run(engine, {name: array[:1] for name, array in pool.items()}), dict)

    pool = {name: array[:_POOL] for name, array in samples.items()}
    counts = {len(array) for array in pool.values()}
    if len(counts) == 1 and min(counts) > 1 and runs(pool):
        yield pool
    axes = {axis for spec in engine.inputs for axis in spec.shape[1:] if isinstance(axis, str)}
    free = sorted(axes - set(sizes))
    integers = any("int" in carrier(spec.dtype) for spec in engine.inputs)
    for size in _SIZES if free else _SIZES[:1]:
        for below in _IDS if integers else _IDS[:1]:
            chosen = dict(sizes)
            for axis in free:
                low, high = engine.limits.get(axis, (1, None))
                chosen[axis] = max(low, size if high is None else min(size, high))
            chosen[str(engine.inputs[0].shape[0])] = _POOL
            if runs(_invent(engine, chosen, below, 0)):
                yield from (_invent(engine, chosen, below, seed) for seed in range(_ROUNDS))
                return


def _invent(
    engine: Engine, sizes: Mapping[str, int], below: int, seed: int
) -> dict[str, np.ndarray]:
    """Return random inputs; integers are below 2 if `below` is, or if they name segments."""
    kinds = [s.dtype if s.dtype == "string" else carrier(s.dtype) for s in engine.inputs]
    specs = [TensorSpec(s.name, k, s.shape) for s, k in zip(engine.inputs, kinds, strict=True)]
    feeds = random_feeds(tuple(specs), sizes, seed)
    for name, array in feeds.items():
        segments = any(word in name.lower() for word in _SEGMENTS)
        if array.dtype.kind in "iu" and (segments or below < _IDS[0]):
            feeds[name] = array % array.dtype.type(_IDS[1])
    return feeds


class _Proof:
    """The runs of one engine, compared. `rows`: the numbers of rows that were run."""

    def __init__(self, engine: Engine) -> None:
        self.rows: set[int] = set()
        self._engine = engine
        self._names = [spec.name for spec in engine.outputs]
        self._errors = dict.fromkeys(self._names, 0.0)
        self._alone: dict[str, Arrays] = {}  # the outputs of the rows a and b of a pool, run alone
        self._scales: dict[str, tuple[float, np.ndarray | float]] = {}  # whole output, element
        self._first: dict[tuple[int, str, str], np.ndarray] = {}  # by rows, letter and output
        self._apart: dict[str, float] = {}  # differences of two rows, by non-empty output

    @property
    def worst(self) -> float:
        return max(self._errors.values())

    @property
    def decided(self) -> bool:
        """Whether the rows' outputs differ enough for a mix-up of rows to be noticed."""
        distinct = {
            name: apart > _APART * self._errors[name] for name, apart in self._apart.items()
        }
        kinds = {spec.name: spec.dtype for spec in self._engine.outputs}
        floats = [found for name, found in distinct.items() if "float" in kinds[name]]
        return all(floats) if floats else any(distinct.values())

    def run(self, pool: Arrays, plans: Sequence[str]) -> None:
        """Compare the first and the last row of `pool` in every plan. Raises _Dependent."""
        kinds = _rows(pool)
        self._first = {}
        for letter in "ab":
            outputs = self._call(kinds, letter)
            if isinstance(outputs, Exception):
                raise _Dependent(f"a row does not run alone: {first_line(outputs)}")
            self._alone[letter] = outputs
        for name in self._names:
            a, b = (self._alone[letter][name] for letter in "ab")
            scale = max(_largest(a), _largest(b))
            self._scales[name] = scale, _element_scale(a, b, scale)
            if a.size or b.size:
                apart = _difference(a, b, scale)
                self._apart[name] = max(self._apart.get(name, 0.0), apart)
        for plan in plans:
            outputs = self._call(kinds, plan)
            if isinstance(outputs, Exception):  # it may refuse only these values
                failure, plan = outputs, plan.translate(_PLAIN)
                outputs = self._call(kinds, plan)
                if isinstance(outputs, Exception):
                    if len(plan) > 4:
                        continue  # the warm-up reports a batch that is too large
                    why = f"it does not run with {len(plan)} rows: {first_line(failure)}"
                    raise _Dependent(why)
            middle = range(_PLACES // 2, len(plan) - _PLACES // 2)
            compared = [n for n, letter in enumerate(plan) if letter in "ab" and n not in middle]
            for place, name in product(compared, self._names):
                self._check(plan, place, name, outputs[name][place, ...])  # `...`: an array always

    def check_whole(self, outputs: Arrays, rows: int) -> None:
        """Compare the same two with `outputs`, those of the whole pool at once. Raises as `run`."""
        self._check_count(outputs, rows)
        for place, name in product((0, rows - 1), self._names):
            self._check(f"a{'A' * (rows - 2)}b", place, name, outputs[name][place, ...])

    def _check(self, plan: str, place: int, name: str, got: np.ndarray) -> None:
        """Compare a row of output `name` with itself alone, and elsewhere among as many rows."""
        rows, letter, (scale, elements) = len(plan), plan[place], self._scales[name]
        alone = self._alone[letter][name][0, ...]
        same = self._first.setdefault((rows, letter, name), got)
        if got.shape != alone.shape:
            raise _Dependent(
                f"a row of output '{name}' is {list(alone.shape)} alone and {list(got.shape)} "
                f"among {rows} rows"
            )
        error = _difference(got, alone, scale)
        if error > BOUND_BETWEEN or _difference(got, same, elements) > BOUND:
            raise _Dependent(
                f"output '{name}' of a row changes with the rows next to it, or with its place "
                f"among them (seen with {rows} rows)"
            )
        self._errors[name] = max(self._errors[name], error)

    def _call(self, kinds: Mapping[str, Arrays], plan: str) -> dict[str, np.ndarray] | Exception:
        """Run the rows of `plan`. Raises as `_check_count`."""
        rows = len(plan)
        joined = {n: np.concatenate([kinds[each][n] for each in plan]) for n in kinds["a"]}
        outputs = _run(self._engine, joined)
        if isinstance(outputs, dict):
            self._check_count(outputs, rows)
        return outputs

    def _check_count(self, outputs: Arrays, rows: int) -> None:
        """Raise _Dependent where an output has another number of rows."""
        for name in self._names:
            shape = list(outputs[name].shape) if name in outputs else []
            if shape[:1] != [rows]:
                raise _Dependent(f"output '{name}' is {shape} for {rows} rows")
        self.rows |= {rows} - {1}


def _largest(array: np.ndarray) -> float:
    if array.dtype.kind != "f":
        return 0.0
    values = np.abs(array[np.isfinite(array)].astype(np.float64))
    return float(values.max(initial=0.0))


def _element_scale(a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray | float:
    if a.dtype.kind != "f" or a.shape != b.shape or not len(a):
        return scale
    sizes = np.nan_to_num(np.maximum(abs(a[0]), abs(b[0])), nan=0.0, posinf=0.0)
    return np.asarray(sizes.astype(np.float64) + scale / 10)


def _difference(got: np.ndarray, want: np.ndarray, scale: np.ndarray | float) -> float:
    """Return the largest difference relative to `scale`; inf if only one value is finite."""
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


def _count(pool: Arrays) -> int:
    return len(next(iter(pool.values())))


def _rows(pool: Arrays) -> dict[str, dict[str, np.ndarray]]:
    """Return one row of each kind, by its letter in a plan."""
    count = _count(pool)
    places = {letter: n % count for n, letter in enumerate("aAtzni")} | {"b": count - 1}
    found: dict[str, dict[str, np.ndarray]] = {
        letter: {name: array[n : n + 1] for name, array in pool.items()}
        for letter, n in places.items()
    }
    for name, array in pool.items():
        found["z"][name] = np.full_like(array[:1], "" if array.dtype == object else 0)
        if array.dtype.kind == "f":
            with np.errstate(all="ignore"):
                found["A"][name] = found["A"][name] * array.dtype.type(1000)
                found["t"][name] = found["t"][name] * array.dtype.type(1e-3)
            found["n"][name] = np.full_like(array[:1], np.nan)
            found["i"][name] = np.full_like(array[:1], np.inf)
    return found
