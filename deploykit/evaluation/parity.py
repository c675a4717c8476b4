"""Compare two engines on the same inputs, output by output.

The first engine is the reference: errors are relative to its values. Different names, dtypes or
shapes raise an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Unsupported, first_line
from deploykit.core.evidence import Parity, ParityRow
from deploykit.core.tensors import BATCH, TensorSpec, batch_axes, batch_places
from deploykit.engines.answers import class_axis
from deploykit.engines.batching import spread_places
from deploykit.engines.data.examples import Example
from deploykit.engines.data.samples import Samples, random_feeds
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.accuracy import Matches, pair

if TYPE_CHECKING:
    from deploykit.graph.graph import Graph

Feeds = Mapping[str, np.ndarray]
MAX_ERROR = 1e-3
CLASSES, PIXELS, BOXES = "classes", "pixels", "boxes"  # `ParityRow.answers`
BLOCK = 1 << 20  # values that are converted to float64 at a time
REL_FLOOR = 1e-6  # below it a reference value counts as this large in max_rel


def compare_engines(
    a: Engine,
    b: Engine,
    feeds_list: Iterable[Mapping[str, np.ndarray]],
    *,
    names: tuple[str, str] = ("a", "b"),
    max_error: float = MAX_ERROR,
    each: Callable[[int, Arrays, Arrays], None] | None = None,
    random: bool = False,
) -> Parity:
    """Run both engines on each of the feeds and compare all outputs.

    Feeds of one batch size share their rows. `names` appear in the table and in errors. `each` gets
    the number of the feeds and the outputs of a and b, in the order of a's specs, until one is not
    finite. `random`: the feeds are made up, so that a size at which both are NaN or infinite at the
    same places (the deviation of one step) is left out where other sizes have an answer.

    Raises BadInput when inputs, outputs or their shapes differ, or when there is nothing to
    compare. An exceeded bound does not raise: `Parity.raise_if_over` does.
    """
    if not (math.isfinite(max_error) and max_error >= 0):  # NaN would pass anything
        raise BadInput(f"`max_error` must be 0 or more, got {max_error}")
    _check_same("input", a.inputs, b.inputs, names)
    _check_same("output", a.outputs, b.outputs, names)
    tallies: dict[tuple[str, int], _Tally] = {}
    for number, feeds in enumerate(feeds_list):
        batch = _batch(a.inputs, feeds)
        values = a(feeds), b(feeds)
        left, right = ({spec.name: each[spec.name] for spec in a.outputs} for each in values)
        x, y, boxes = pair(left, right)
        for name in left:
            if x[name].dtype != y[name].dtype or x[name].shape != y[name].shape:
                found = (f"{each.dtype}{list(each.shape)}" for each in (x[name], y[name]))
                sides = ", ".join(map("{} from {}".format, found, names))
                raise BadInput(f"output '{name}' at batch {batch} is {sides}")
            axis = class_axis(name, x[name], feeds) if x[name] is left[name] else None
            tally = tallies.setdefault((name, batch), _Tally())
            images = [array.shape[:3] for array in feeds.values() if array.ndim == 4]
            tally.mask = x[name].dtype.kind in "iu" and x[name].shape in images
            tally.add(x[name], y[name], axis)
            if name in boxes:
                tally.match(boxes[name])
        if each is not None and not any(tally.not_finite for tally in tallies.values()):
            each(number, left, right)
    if not tallies:
        raise BadInput(f"{names[0]} and {names[1]}: no inputs to compare on")
    answered = {output for (output, _), tally in tallies.items() if not tally.not_finite}
    rows = tuple(
        tally.row(output, batch)
        for (output, batch), tally in tallies.items()
        if not (random and tally.places_match and tally.undefined and output in answered)
    )
    return Parity(names[0], names[1], rows, max_error)


def exact_noun(array: np.ndarray) -> str:
    """Return the plural noun for the values of an output that must be equal."""
    return "strings" if array.dtype.hasobject else "integers or booleans"


def relative(error: float, scale: float) -> float:
    """Return `error` as a share of `scale`; 0 where nothing differs, whatever the scale."""
    return error / scale if error else 0.0


def add_float32_errors(
    parity: Parity,
    reference: Engine,
    other: Callable[[Arrays], Mapping[str, np.ndarray]],
    feeds_list: Iterable[Arrays],
) -> Parity:
    """Return `parity` with float32's own errors: those of `reference` against `other`.

    `other`: the same computation in float64, or rounded in another order. More feeds only loosen
    the bound: those after which `parity` passes are not run.
    """
    found: dict[str, float] = {}
    for feeds in feeds_list:
        others, values, boxes = pair(other(feeds), reference(feeds))
        for name, array in values.items():
            if array.dtype.kind in "biuO" or array.shape != others[name].shape:
                continue
            tally = _Tally()
            tally.add(others[name].astype(np.float64), array.astype(np.float64))
            if name in boxes:
                tally.match(boxes[name])
            row = tally.row(name, 0)
            if not row.problem:
                found[name] = max(found.get(name, 0.0), row.error)
        rows = (replace(row, float32_error=found.get(row.output)) for row in parity.rows)
        parity = replace(parity, rows=tuple(rows))
        if parity.passed:
            break
    return parity


def in_other_batches(engine: Engine, feeds: Arrays) -> dict[str, np.ndarray]:
    """Return the outputs for `feeds`, computed row by row where the engine takes single rows.

    Another batch takes other kernels, which add in another order.
    """
    specs = (*engine.inputs, *engine.outputs)
    rows = _batch(engine.inputs, feeds)
    if rows < 2 or not all(spec.batched for spec in specs):
        return dict(engine(feeds))
    parts = [engine({n: a[row : row + 1] for n, a in feeds.items()}) for row in range(rows)]
    return {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}


def _check_same(
    kind: str, a: Sequence[TensorSpec], b: Sequence[TensorSpec], names: tuple[str, str]
) -> None:
    """Check that names and dtypes are equal and shapes fit, in any order; dynamic axes fit any.

    A file may declare an output's shape wrongly: each run compares what the outputs really have.
    """
    left, right = {spec.name: spec for spec in a}, {spec.name: spec for spec in b}
    for name in sorted(left.keys() ^ right.keys()):
        has, lacks = names if name in left else names[::-1]
        raise BadInput(
            f"{has} has an {kind} '{name}', {lacks} has none",
            hint="; ".join(
                f"{name}: {', '.join(map(str, specs))}"
                for name, specs in zip(names, (a, b), strict=True)
            ),
        )
    for name, spec in left.items():
        other = right[name]
        fits = kind == "output" or (
            len(spec.shape) == len(other.shape)
            and all(
                isinstance(x, str) or isinstance(y, str) or x == y
                for x, y in zip(spec.shape, other.shape, strict=True)
            )
        )
        if spec.dtype != other.dtype or not fits:
            raise BadInput(f"{kind} '{name}' is {spec} in {names[0]}, {other} in {names[1]}")


def _batch(specs: Sequence[TensorSpec], feeds: Arrays) -> int:
    """Return the size of the batch: where an input has it, else of the first axis 0; else 1."""
    axes = {**dict.fromkeys((spec.name for spec in specs if spec.shape), 0), **batch_places(specs)}
    for name in (*batch_places(specs), *axes):
        if name in feeds and feeds[name].ndim > axes[name]:
            return int(feeds[name].shape[axes[name]])
    return 1


class _Tally:
    """Adds up the differences of one output at one batch size, call by call."""

    def __init__(self) -> None:
        self.values = self.compared = self.differing = 0
        self.max_abs = self.max_rel = self.scale = self.noise = self.signal = 0.0
        self.rows = self.agreeing = self.undefined = 0
        self.other_scale = 0.0
        self.finite = self.places_match = True
        self.mask = False  # the class of each pixel: where scores are equal, either is right
        self.floating, self.exact = True, ""
        self.answers = ""
        self.boxes: list[Matches] = []
        self.lost = 0  # boxes of one of the two alone
        self.shared = self.either = np.zeros(0, np.int64)  # pixels by class

    def match(self, found: Matches) -> None:
        """Count boxes as answers."""
        self.answers = BOXES
        self.boxes.append(found)
        self.rows += found.total
        self.agreeing += found.matched
        self.lost += found.total - found.matched

    def add(self, a: np.ndarray, b: np.ndarray, axis: int | None = None) -> None:
        """Add two arrays of one shape and dtype; `axis`: that of the classes, if there is one."""
        self.values += a.size
        self.floating, self.exact = a.dtype.kind not in "biuO", exact_noun(a)
        if a.size == 0:
            return
        classes = 1 if axis is None else a.shape[axis]
        if axis is not None:
            self.answers = PIXELS if a.ndim == 4 else CLASSES
            a, b = np.moveaxis(a, axis, -1), np.moveaxis(b, axis, -1)
        rows_a, rows_b = a.reshape(-1, classes), b.reshape(-1, classes)
        step = max(1, BLOCK // classes)
        for start in range(0, len(rows_a), step):
            self._add_rows(rows_a[start : start + step], rows_b[start : start + step])

    def _add_rows(self, a: np.ndarray, b: np.ndarray) -> None:
        if not self.floating:
            self.differing += int((a != b).sum())
        if a.dtype.hasobject:  # 0 and, where another string is, 1
            a, b = np.zeros(a.shape), a != b
        x, y = a.astype(np.float64), b.astype(np.float64)
        both = np.isfinite(x) & np.isfinite(y)
        self.finite &= bool(both.all())
        self.places_match &= np.array_equal(x[~both], y[~both], equal_nan=True)
        self.undefined += int((x[~both] != -np.inf).sum())  # -infinity masks
        if x.shape[1] >= 2:
            left, right = x.argmax(1), y.argmax(1)
            self.rows += len(x)
            self.agreeing += int((left == right).sum())
            if self.answers == PIXELS:
                counts = [np.bincount(each, minlength=x.shape[1]) for each in (left, right)]
                shared = np.bincount(left[left == right], minlength=x.shape[1])
                self.shared = self.shared + shared if self.shared.size else shared
                either = counts[0] + counts[1] - shared
                self.either = self.either + either if self.either.size else either
        x, y = x[both], y[both]
        self.compared += x.size
        if x.size == 0:
            return
        with np.errstate(over="ignore"):  # float64 outputs near its end: an infinite error is right
            off, size = np.abs(x - y), np.abs(x)
            self.max_abs = max(self.max_abs, float(off.max()))
            self.max_rel = max(self.max_rel, float((off / np.maximum(size, REL_FLOOR)).max()))
            self.scale = max(self.scale, float(size.max()))
            self.other_scale = max(self.other_scale, float(np.abs(y).max()))
            self.noise += float((off**2).sum())
            self.signal += float((size**2).sum())

    def row(self, output: str, batch: int) -> ParityRow:
        problem = self._problem()
        shown = self.rows and (self.scale or self.boxes)
        agreement = self.agreeing / self.rows if shown else None
        error = relative(self.max_abs, self.scale or self.other_scale)
        if self.mask:
            error = self.differing / max(1, self.values)
        if self.boxes and agreement is not None:
            error = max(error, 1 - agreement)
        return ParityRow(
            output=output,
            batch=batch,
            values=self.values + self.lost,
            max_abs=self.max_abs,
            max_rel=self.max_rel,
            rms=math.sqrt(self.noise / self.compared) if self.compared else 0.0,
            sqnr_db=self._sqnr_db(),
            agreement=agreement,
            finite=self.finite,
            error=math.inf if problem else error,
            problem=problem,
            places_match=self.places_match,
            floating=self.floating,
            scale=self.scale,
            answers=self.answers if agreement is not None else "",
            mean_iou=self._mean_iou(),
        )

    def _mean_iou(self) -> float | None:
        if self.boxes:
            return sum(each.iou for each in self.boxes) / self.agreeing if self.agreeing else None
        there = self.either > 0
        return float((self.shared[there] / self.either[there]).mean()) if there.any() else None

    @property
    def not_finite(self) -> bool:
        return bool(self.undefined) or not self.places_match

    def _problem(self) -> str:
        if not self.places_match:
            return "NaN or infinity in one of the two and not in the other"
        if self.differing and not self.mask:
            return f"{self.differing} of {self.values} {self.exact} differ"
        if self.values and not self.compared:
            return "no value is finite in either, so nothing could be compared"
        if self.undefined:
            return f"{self.undefined} of {self.values} values are NaN or infinity on both sides"
        return ""

    def _sqnr_db(self) -> float:
        if self.noise == 0:
            return math.inf
        share = self.signal / self.noise  # NaN where both squares passed the end of float64
        return 10 * math.log10(share) if share > 0 else -math.inf


BATCHES = (1, 2, 7, 32)
_LENGTHS = (5, 12, 1, 33)  # lengths of sequences, one for each batch
_SIDES = (64, 96, 64, 128)  # sides of images whose height or width is dynamic

AxisLimits = Mapping[str, tuple[int, int | None]]  # least and largest size by axis


def feeds_at_sizes(
    inputs: Sequence[TensorSpec],
    limits: AxisLimits | None = None,
    example: Example | None = None,
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Return inputs at each of the `sizes`, by default the `parity_sizes`, from one seed each.

    Where nothing but the batch differs, the smaller ones are rows from all over the largest, in
    reverse order: the outputs then also show whether a row depends on its place and on other rows.
    """
    make = example.feeds if example else random_feeds
    sizes = sizes or parity_sizes(inputs, limits, example.sizes(inputs) if example else {})
    largest = make(tuple(inputs), sizes[-1], len(sizes) - 1)
    by_rows = all(spec.shape[:1] == (BATCH,) and BATCH not in spec.shape[1:] for spec in inputs)

    def feeds(seed: int, each: Mapping[str, int]) -> dict[str, np.ndarray]:
        if not by_rows or {**each, BATCH: 0} != {**sizes[-1], BATCH: 0}:
            return make(tuple(inputs), each, seed)
        places = spread_places(sizes[-1][BATCH], each[BATCH])
        return {name: array[places] for name, array in largest.items()}

    return [feeds(seed, each) for seed, each in enumerate(sizes[:-1])] + [largest]


def parity_sizes(
    inputs: Sequence[TensorSpec],
    limits: AxisLimits | None = None,
    usual: Mapping[str, int] | None = None,
) -> list[dict[str, int]]:
    """Return the sizes of dynamic axes to compare at: batches 1, 2, odd and large, several lengths.

    `limits`: least and largest size by axis, where the model has them. `usual`: sizes that the user
    has; the first two results then are near them.
    """
    images = {
        axis for spec in inputs if len(spec.shape) == 4 for axis in spec.shape[1:]
    }  # their sides must survive the pooling of a CNN
    axes = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)}
    rows = batch_axes(inputs)
    if not axes:
        return [{}]

    def within(axis: str, size: int) -> int:
        low, high = (limits or {}).get(axis, (1, None))
        return max(low, size if high is None else min(size, high))

    found = [
        {
            axis: within(axis, batch if axis in rows else side if axis in images else length)
            for axis in sorted(axes)
        }
        for batch, length, side in zip(BATCHES, _LENGTHS, _SIDES, strict=True)
    ]
    for axis in (usual or {}).keys() & axes - {BATCH}:
        size = (usual or {})[axis]
        found[0][axis], found[1][axis] = within(axis, size), within(axis, -(-3 * size // 4))
    return [sizes for n, sizes in enumerate(found) if sizes not in found[:n]]


MOST_SAMPLES, MOST_BYTES = 32, 64 << 20
MOST_CALL_BYTES = 128 << 20  # limit of the largest tensor when comparing


def comparison_feeds(
    first: Engine,
    second: Engine,
    samples: Samples | None,
    graph: Path | None,
    sizes: Mapping[str, int] | None = None,
    most: int = MOST_SAMPLES,
) -> tuple[list[Feeds], tuple[str, ...]]:
    """Return the inputs to compare two engines on, in batches that both take, and notes.

    They are the samples, where there are any, else random inputs at several sizes of the dynamic
    axes, see `sizes_that_run`. `graph`: the ONNX file that shows how many rows fit into memory;
    None where there is none. `sizes`: those that the user chose, of some axes or of the batch.
    `most`: rows of a batch.
    """
    limits = {**first.limits, **second.limits}
    least, high = batch_limits(first.inputs, limits)
    usual = min(high or most, *(engine.max_batch or most for engine in (first, second)), most)
    if samples is not None:
        usual, notes = rows_that_run(first, samples, usual) if least < 2 else (usual, ())
        size, used = samples.batching(usual, (*first.inputs, *second.inputs))
        used -= used % size if used % size < least else 0
        if not used:
            raise BadInput(f"{samples.where}: {len(samples)} samples are no batch of {least}")
        samples = samples.first(used)
        if graph is None or size != usual or notes:
            return list(samples.batches(size)), notes
        rows = max(least, rows_that_fit([next(samples.batches(size))], graph))
        return list(samples.batches(min(size, rows))), rows_note(rows, usual)
    for axis in batch_axes(first.inputs):
        low, high = limits.get(axis, (1, None))
        limits[axis] = low, min(usual, high or usual)
    found, notes = sizes_that_run(first, sizes or {}, limits)
    feeds = feeds_at_sizes(first.inputs, sizes=found)
    if graph is None:
        return list(feeds), notes
    rows = max(least, rows_that_fit(feeds, graph))
    return first_rows(feeds, rows, first.inputs), (*notes, *rows_note(rows, usual))


def batch_limits(inputs: Sequence[TensorSpec], limits: AxisLimits) -> tuple[int, int | None]:
    """Return the least and the largest batch within `limits`, those of the axes."""
    found = [limits[axis] for axis in batch_axes(inputs) if axis in limits]
    return max((low for low, _ in found), default=1), min((n for _, n in found if n), default=None)


def small_batches(samples: Samples, feeds: Sequence[Feeds], engine: Engine) -> list[Feeds]:
    """Return the two smallest batches of samples that `engine` takes, unless `feeds` are such."""
    if not batch_axes(engine.inputs):
        return []
    least, _ = batch_limits(engine.inputs, engine.limits)
    axes = ((name, samples.axis(name)) for name in feeds[0])
    most = next((feeds[0][name].shape[at] for name, at in axes if at is not None), 1)
    return [samples.rows(slice(count)) for count in (least, least + 1) if count < most]


def rows_that_run(engine: Engine, samples: Samples, most: int) -> tuple[int, tuple[str, ...]]:
    """Return the samples per call: `most`, or 1 with a note where two do not run and one does.

    Such a model says that its batch may have any size, and has a state for one row.
    """
    size, _ = samples.batching(most, engine.inputs)
    if size != most or min(size, len(samples)) < 2:
        return most, ()
    try:
        engine(samples.rows(slice(2)))
    except (BadInput, Unsupported) as exc:
        try:
            engine(samples.rows(slice(1)))
        except (BadInput, Unsupported):
            raise exc from None
        return 1, (f"run one sample at a time, as two do not run together: {first_line(exc)}",)
    return most, ()


_LONGER = (
    *(16, 32, 64, 80, 96, 128, 160, 224, 256, 320, 400, 512, 640, 800, 1000, 1024, 1536, 2048),
    *(4096, 8000, 16000, 32000),
)
_SEARCH_S = 30.0  # limit of the search for sizes


def sizes_that_run(
    engine: Engine, given: Mapping[str, int], limits: AxisLimits | None = None
) -> tuple[list[dict[str, int]], tuple[str, ...]]:
    """Return sizes of the dynamic axes at which `engine` runs random inputs, and notes.

    Those of `parity_sizes` are tried with one or two rows. Where none runs: longer ones, with axes
    of states as large as the batch, and then single rows. `given`: the sizes that the user chose.
    Raises BadInput with the engine's own reason where none runs.
    """
    batch = batch_axes(engine.inputs)
    wanted = parity_sizes(engine.inputs, limits)
    chosen = [{**sizes, **given} for sizes in wanted]
    chosen = [sizes for n, sizes in enumerate(chosen) if sizes not in chosen[:n]]
    if chosen == [{}]:
        return chosen, ()
    problems: list[DeploykitError] = []
    least = {axis: low for axis, (low, _) in (limits or {}).items()}

    def runs(sizes: Mapping[str, int], rows: int, batch: Collection[str] = batch) -> bool:
        try:
            few = {
                axis: max(least.get(axis, 1), min(sizes.get(axis, rows), rows)) for axis in batch
            }
            engine(random_feeds(engine.inputs, {**sizes, **few, **given}))
        except (BadInput, Unsupported) as exc:
            problems.append(exc)
            return False
        return True

    good = [sizes for sizes in chosen if runs(sizes, 2)]
    if len(good) == len(chosen):
        return chosen, ()
    every = [axis for axis in wanted[0] if axis not in given and axis not in batch]
    # one free axis that is not the first, in an input without the batch: a state [2,?,128]
    named = [[a for a in spec.shape if isinstance(a, str)] for spec in engine.inputs]
    states = {axes[0] for axes in named if len(axes) == 1 and axes[0] in every}
    states -= {spec.shape[0] for spec in engine.inputs if spec.shape}
    end = time.monotonic() + _SEARCH_S
    tying: list[set[str]] = [set(), states] if states else [set()]
    for rows, tied in product((2, 1), tying):
        free = [axis for axis in every if axis not in tied]
        base = [{**each, **{axis: each[batch[0]] for axis in tied if batch}} for each in wanted]
        tries = [{axis: sizes[axis] for axis in free} for sizes in wanted]
        tries += [dict.fromkeys(free, size) for size in _LONGER if free]
        if len(free) in (2, 3):
            several = product(_LONGER[:: 2 * len(free) - 1], repeat=len(free))
            tries += [dict(zip(free, each, strict=True)) for each in several]
        for sizes in tries if not good else ():
            if time.monotonic() > end:
                break
            if runs({**base[-1], **sizes}, rows, {*batch, *tied}):
                good = [{**each, **sizes, **given} for each in (base if rows > 1 else base[:1])]
                longer = {axis: 2 * size for axis, size in sizes.items()}
                if free and runs({**base[-1], **longer}, rows, {*batch, *tied}):
                    good.append({**good[-1], **longer})
                break
    if not good:
        names = " ".join(f"`axis` {axis}=SIZE" for axis in every) or "`batch` SIZE"
        raise BadInput(
            f"no random inputs of any size that was tried run: {problems[0].message}",
            hint=f"give real inputs, `data`, or sizes that the model takes: {names}",
        ) from problems[0]
    good = [sizes for n, sizes in enumerate(good) if sizes not in good[:n]]
    shown = [", ".join(f"{axis} = {size}" for axis, size in each.items()) for each in good]
    reason = first_line(problems[0])
    return good, (f"compared at {'; '.join(shown)}; at other sizes it does not run: {reason}",)


def given_sizes(
    inputs: Sequence[TensorSpec],
    batch: int | None,
    axis: Mapping[str, int] | None,
    samples: Samples | None,
) -> dict[str, int]:
    """Return the sizes of random inputs that the user chose, by axis. Raises BadInput.

    There are none with samples, which have sizes of their own.
    """
    sizes = dict(axis or {})
    if batch is not None:
        sizes |= dict.fromkeys(batch_axes(inputs) or (BATCH,), batch)
    if sizes and samples is not None:
        raise BadInput(
            f"`axis` and `batch` are sizes of random inputs; those of {samples.where} have theirs"
        )
    known = dict.fromkeys(a for spec in inputs for a in spec.shape if isinstance(a, str))
    for name, size in sizes.items():
        if name not in known:
            raise BadInput(
                f"no input has a dynamic axis '{name}'",
                hint="the dynamic axes are: " + (", ".join(known) or "none"),
            )
        if size < 1:
            raise BadInput(f"`axis` {name} must be 1 or more, got {size}")
    return sizes


def axis_sizes(samples: Samples | None, inputs: Sequence[TensorSpec], batch: int) -> dict[str, int]:
    """Return the sizes of the dynamic axes in `samples`, with `batch` where the samples lie.

    An empty axis, as of the cache of a first step, counts as 1: no cost is known without it.
    """
    sizes = dict.fromkeys(batch_axes(inputs), batch)
    if samples is None:
        return sizes
    for spec in inputs:
        own, found = samples.axis(spec.name), samples.inputs[spec.name].shape
        for place, (axis, size) in enumerate(zip(spec.shape, found, strict=True)):
            if isinstance(axis, str):
                sizes.setdefault(axis, batch if place == own else max(size, 1))
    return sizes


def batch_that_fits(source: Graph, sizes: Mapping[str, int], most_bytes: int = MOST_BYTES) -> int:
    """Return the samples per call: 32, fewer where the largest tensor of one sample is large.

    `sizes`: of the dynamic axes at batch 1. Two engines run, each with some such tensors.
    """
    from deploykit.graph import cost

    largest = max((each.write_bytes or 0 for each in cost.node_costs(source, sizes)), default=0)
    return max(1, min(MOST_SAMPLES, most_bytes // max(largest, 1)))


def rows_that_fit(feeds: Sequence[Feeds], graph: Path) -> int:
    """Return the most rows, up to 32, with which no tensor in `graph` exceeds 128 MiB.

    The result is at least 2, so that a frozen batch shows, and 32 where the batch is fixed.
    """
    from deploykit.graph.graph import Graph

    opened = Graph.open(graph)
    batch = batch_axes(opened.inputs)
    if not batch:
        return MOST_SAMPLES
    largest = max(feeds, key=lambda each: sum(array.nbytes for array in each.values()))
    sizes = {
        axis: 1 if axis in batch else max(size, 1)
        for spec in opened.inputs
        if spec.name in largest  # else the engines differ, which their comparison reports
        for axis, size in zip(spec.shape, largest[spec.name].shape, strict=False)
        if isinstance(axis, str)
    }
    return max(2, batch_that_fits(opened, sizes, MOST_CALL_BYTES))


def first_rows(feeds: Sequence[Feeds], rows: int, inputs: Sequence[TensorSpec]) -> list[Feeds]:
    """Return at most `rows` rows of each feed, from first to last; all for `MOST_SAMPLES`."""
    if rows >= MOST_SAMPLES:
        return list(feeds)
    axes = batch_places(inputs)
    return [
        {
            name: array.take(spread_places(array.shape[axis], rows)[::-1], axis)
            if (axis := axes.get(name)) is not None
            else array
            for name, array in each.items()
        }
        for each in feeds
    ]


def rows_note(rows: int, usual: int = MOST_SAMPLES) -> tuple[str, ...]:
    """Return a note for the user where batches were smaller than usual."""
    if rows >= usual:
        return ()
    return (f"compared at batches of up to {rows}: larger ones take too much memory",)
