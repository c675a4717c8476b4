"""Prove that the rows of a batch do not depend on each other, before requests are joined.

A dynamic axis 0 may be time, tokens or points instead of samples: joined requests would then change
each other's values. So the proof runs rows alone, joined, in other orders, and next to rows of
other magnitudes, NaN and infinity.

Batches that the engine ran for another reason (`JoinedRun`) count: only missing runs are added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from deploykit.core.errors import first_line
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec, carrier
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays, Engine

# A row's outputs must be equal up to BOUND among runs with the same number of rows, and up to
# BOUND_BETWEEN among runs with different numbers, whose kernels may round differently. The second
# is relative to the largest value of the output. The first is relative to the element plus a tenth
# of that value, so that large boxes do not hide a change of small scores.

BOUND = 1e-3
BOUND_BETWEEN = 2e-2
_PLACES = 64  # the most rows of a batch that are compared
PLACED = "acdefgb"  # letters of rows spread over a joined batch, its last one first


class Dependent(Exception):  # noqa: N818 - it ends the search and is not an error
    """Rows may not be joined; the message is the reason."""


@dataclass(frozen=True)
class JoinedRun:
    """A batch of `rows` that an engine ran: a few rows spread over it, and their outputs.

    `shapes`: the shapes of the whole outputs.
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
        """Map letters of `PLACED` to the places of the rows that equal theirs in `kinds`."""
        return {
            letter: place
            for letter in PLACED
            if letter in kinds
            for place in range(min(self.rows, len(PLACED)))
            if all(np.array_equal(a[place], kinds[letter][n][0]) for n, a in self.feeds.items())
        }


def spread_places(rows: int, count: int) -> list[int]:
    """Return up to `count` places spread over a batch, from its last to its first."""
    return [int(place) for place in np.linspace(rows - 1, 0, min(count, rows)).round()]


class RowComparison:
    """Compares the outputs of runs with those of the rows "a" and "b" alone."""

    def __init__(
        self, specs: Sequence[TensorSpec], alone: Mapping[str, Mapping[str, np.ndarray]]
    ) -> None:
        self._names = [spec.name for spec in specs]
        self._alone = alone
        self._first: dict[tuple[int, str, str], np.ndarray] = {}
        self._others: dict[tuple[str, str], np.ndarray] = {}  # rows of the smallest batch with them
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
        """Return by how much each non-empty output differs between the two rows."""
        found = {}
        for name in self._names:
            a, b = (self._alone[letter][name] for letter in "ab")
            if a.size or b.size:
                found[name] = _difference(a, b, self._scales[name])
        return found

    def check(self, plan: str, outputs: Arrays) -> None:
        """Compare the rows of a run of `plan`. Raises Dependent."""
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
        """Compare the rows of a batch that ran already. Raises Dependent."""
        for name in self._names:
            _check_shape(name, run.rows, run.shapes.get(name))
            for letter, place in letters.items():
                self._check_row(name, letter, run.rows, run.outputs[name][place, ...])

    def _check_row(self, name: str, letter: str, rows: int, got: np.ndarray) -> None:
        """Compare one row; `got` is an array even without axes, as a string has no shape."""
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


_APART = 4  # times the error: the least difference that distinguishes the outputs of two rows
_ROUNDS = 3  # rounds of inputs; later ones run only if they are quick or nothing is decided
_QUICK_S = 0.03  # the limit of a quick round; a fifth of it if other runs count
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
# These plans suffice if batches of ordinary rows ran already.
_NEXT_TO: Mapping[int, tuple[str, ...]] = {
    2: ("aA", "zb", "na", "bi"),
    3: ("aAb", "zbt", "nai"),
    4: ("zbAa", "nait"),
}
_LARGEST = "abAzbtaba"
_PLAIN = str.maketrans("Atzni", "babab")

Make = Callable[[int], "dict[str, np.ndarray]"]  # seed -> a pool of rows


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


def prove_rows(
    engine: Engine,
    most_rows: int,
    *,
    sizes: Mapping[str, int] | None = None,
    samples: Arrays | None = None,
    times_us: dict[int, int] | None = None,
    joined: Sequence[JoinedRun] = (),
) -> RowIndependence:
    """Run up to `most_rows` rows, at least 2, and report whether they depend on each other.

    `sizes`: sizes of dynamic axes. `samples`: inputs that the model is known to run; others are
    invented in addition. `times_us` gets the time of the largest batch. `joined`: batches that
    `engine` ran already. Raises DeviceLost.
    """
    why = why_no_batch(engine.inputs, engine.outputs)
    if why:
        return RowIndependence(False, why)
    most = min(max(2, most_rows), engine.max_batch or most_rows + 2)
    if most < 2:
        return RowIndependence(True, "the engine takes one row at a time", (1,))
    proof, began_s = _Proof(engine, most, joined), time.perf_counter()
    quick_s = _QUICK_S / 5 if joined else _QUICK_S
    try:
        for number, pool in enumerate(_pools(engine, sizes or {}, samples, joined), 1):
            proof.run(pool)
            quick = time.perf_counter() - began_s < quick_s
            if number >= _ROUNDS or (proof.decided and not quick):
                break
        else:
            if not proof.rows:
                raise Dependent("no invented input was found that it runs")
        if not proof.decided:
            raise Dependent("its outputs were the same for all invented inputs")
    except Dependent as exc:
        return RowIndependence(False, str(exc), tuple(sorted(proof.rows)), proof.worst)
    if times_us is not None:
        times_us.update(proof.times_us)
    why = f"the same within {proof.worst:.2g} alone and joined, whatever the other rows are"
    return RowIndependence(True, why, tuple(sorted(proof.rows)), proof.worst)


def _pools(
    engine: Engine,
    sizes: Mapping[str, int],
    samples: Arrays | None,
    joined: Sequence[JoinedRun],
) -> Iterator[dict[str, np.ndarray]]:
    """Yield inputs of several rows, whose first row the engine runs.

    The rows come from the largest batch that it ran, then from the samples, then are invented.
    """
    largest = max(joined, key=lambda run: run.rows, default=None)
    if largest is not None and largest.rows > 1:
        pool = {n: np.concatenate([a[:1], a[-1:], a[1:-1]]) for n, a in largest.feeds.items()}
        if any(run.rows == 1 and run.letters({"a": pool}) for run in joined) or _runs(engine, pool):
            yield pool
    given = {name: array[:_POOL] for name, array in (samples or {}).items()}
    rows = {len(array) for array in given.values()}
    if rows and min(rows) > 1 and len(rows) == 1 and _runs(engine, given):
        yield given
    for make in _inventions(engine, sizes):
        if _runs(engine, make(0)):
            yield from (make(seed) for seed in range(_ROUNDS))
            return


def _inventions(engine: Engine, sizes: Mapping[str, int]) -> Iterator[Make]:
    specs = tuple(TensorSpec(s.name, carrier(s.dtype), s.shape) for s in engine.inputs)
    strings = {spec.name for spec in engine.inputs if spec.dtype == "string"}
    axes = {axis for spec in specs for axis in spec.shape[1:] if isinstance(axis, str)}
    free = sorted(axes - set(sizes))

    def make(size: int, below: int, seed: int) -> dict[str, np.ndarray]:
        chosen = {**{axis: _within(engine, axis, size) for axis in free}, **sizes}
        chosen[str(specs[0].shape[0])] = _POOL
        known = tuple(s if s.name not in strings else TensorSpec(s.name, "string", s.shape)
                      for s in specs)  # fmt: skip
        feeds = random_feeds(known, chosen, seed)
        for name, array in feeds.items():
            if array.dtype.kind in "iu":
                segments = any(word in name.lower() for word in _SEGMENTS)
                if segments or below < _IDS[0]:
                    feeds[name] = array % array.dtype.type(_IDS[1])
        return feeds

    integers = any("int" in spec.dtype for spec in specs)
    for size in _SIZES if free else _SIZES[:1]:
        for below in _IDS if integers else _IDS[:1]:
            yield lambda seed, size=size, below=below: make(size, below, seed)  # type: ignore[misc]


def _within(engine: Engine, axis: str, size: int) -> int:
    low, high = engine.limits.get(axis, (1, None))
    return max(low, size if high is None else min(size, high))


def _runs(engine: Engine, feeds: Arrays) -> bool:
    try:
        engine({name: array[:1] for name, array in feeds.items()})
    except DeviceLost:
        raise
    except Exception:  # noqa: BLE001 - the next inputs are tried
        return False
    return True


class _Proof:
    """The results for one engine. `worst`: the largest error. `rows`: the numbers of rows run."""

    def __init__(self, engine: Engine, most: int, joined: Sequence[JoinedRun]) -> None:
        self.worst = 0.0
        self.rows: set[int] = set()
        self.times_us: dict[int, int] = {}
        self._engine = engine
        self._most = most
        self._joined = joined
        self._errors = {spec.name: 0.0 for spec in engine.outputs}
        self._apart: dict[str, float] = {}  # by non-empty output

    @property
    def decided(self) -> bool:
        """Whether the rows' outputs differ enough for a mix-up of rows to be noticed."""
        distinct = {
            name: apart > _APART * self._errors[name] for name, apart in self._apart.items()
        }
        floats = [
            distinct[s.name]
            for s in self._engine.outputs
            if "float" in s.dtype and s.name in distinct
        ]
        return all(floats) if floats else any(distinct.values())

    def run(self, pool: Arrays) -> None:
        """Compare the first two rows of `pool` in every plan. Raises Dependent."""
        kinds = _rows(pool)
        joined = [(run, found) for run in self._joined if (found := run.letters(kinds))]
        single = {letter: run.outputs for run, found in joined if run.rows == 1 for letter in found}
        alone = {letter: single.get(letter) or self._alone(kinds, letter) for letter in "ab"}
        compared = RowComparison(self._engine.outputs, alone)
        for letter in "ab":
            compared.check(letter, alone[letter])
        for name, apart in compared.apart().items():
            self._apart[name] = max(self._apart.get(name, 0.0), apart)
        for run, found in sorted(joined, key=lambda each: each[0].rows):
            compared.check_joined(run, found)
            self._add(run.rows, compared)
        for plan in self._plans(kinds, [run.rows for run, found in joined if {*"ab"} <= {*found}]):
            try:
                outputs = self._call(kinds, plan)
            except DeviceLost:
                raise
            except Exception as exc:  # noqa: BLE001 - it may refuse only these values
                plain = plan.translate(_PLAIN)
                try:
                    outputs = self._call(kinds, plain)
                except DeviceLost:
                    raise
                except Exception:  # noqa: BLE001
                    if len(plan) > 4:
                        continue  # the warm-up reports a batch that is too large
                    why = f"it does not run with {len(plan)} rows: {first_line(exc)}"
                    raise Dependent(why) from None
                plan = plain
            compared.check(plan, outputs)
            self._add(len(plan), compared)

    def _alone(self, kinds: Mapping[str, Arrays], letter: str) -> dict[str, np.ndarray]:
        try:
            return self._call(kinds, letter)
        except DeviceLost:
            raise
        except Exception as exc:  # noqa: BLE001 - any failure means the same
            raise Dependent(f"a row does not run alone: {first_line(exc)}") from None

    def _plans(self, kinds: Mapping[str, Arrays], ran: Sequence[int]) -> Iterator[str]:
        """Yield the plans to run. `ran`: sizes of the batches with "a" and "b" that ran already."""
        largest = max(ran, default=1)
        if largest < self._most:
            yield from _PLANS[min(self._most, 4)]
            if self._most > 4:
                yield "".join(islice(cycle(_LARGEST), self._most - 1)) + "b"
            return
        yield from _NEXT_TO[min(self._most, 4)]
        if not any(1 < rows < largest for rows in ran):
            others = [letter for letter in PLACED[1:-1] if letter in kinds]
            yield "".join(("a", *others[: self._most - 2], "b"))

    def _add(self, rows: int, compared: RowComparison) -> None:
        self.rows.add(rows)
        for name, error in compared.errors.items():
            self._errors[name] = max(self._errors[name], error)
        self.worst = max(self._errors.values())

    def _call(self, kinds: Mapping[str, Arrays], plan: str) -> dict[str, np.ndarray]:
        feeds = {
            name: np.concatenate([kinds[letter][name] for letter in plan]) for name in kinds["a"]
        }
        began_s = time.perf_counter()
        outputs = self._engine(feeds)
        if len(plan) == self._most:
            self.times_us[self._most] = round((time.perf_counter() - began_s) * 1e6)
        return outputs


def _rows(pool: Arrays) -> dict[str, dict[str, np.ndarray]]:
    """Return one row of each kind, by its letter in a plan."""
    count = len(next(iter(pool.values())))
    found: dict[str, dict[str, np.ndarray]] = {
        letter: {name: array[n % count : n % count + 1] for name, array in pool.items()}
        for n, letter in enumerate("abAtzni")
    }
    for n, letter in enumerate(PLACED[1:-1][: count - 2], 2):
        found[letter] = {name: array[n : n + 1] for name, array in pool.items()}
    values: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
        "A": lambda row: row * row.dtype.type(1000),
        "t": lambda row: row * row.dtype.type(1e-3),
        "n": lambda row: np.full_like(row, np.nan),
        "i": lambda row: np.full_like(row, np.inf),
    }
    with np.errstate(all="ignore"):
        for name in pool:
            for letter, change in values.items():
                if pool[name].dtype.kind == "f":
                    found[letter][name] = change(found[letter][name])
            zero = "" if pool[name].dtype == object else 0
            found["z"][name] = np.full_like(found["z"][name], zero)
    return found
