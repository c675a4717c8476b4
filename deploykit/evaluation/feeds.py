"""Choose the inputs that two engines are compared on: samples, or random ones at sizes that run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Unsupported, first_line
from deploykit.core.tensors import BATCH, TensorSpec, batch_axes, batch_places, dynamic_sizes
from deploykit.engines.batching import spread_places
from deploykit.engines.data.examples import Example
from deploykit.engines.data.samples import Samples, random_feeds
from deploykit.engines.engine import Engine

if TYPE_CHECKING:
    from deploykit.graph.graph import Graph

Feeds: TypeAlias = Mapping[str, np.ndarray]
Sizes: TypeAlias = Mapping[str, int]  # of dynamic axes, by name
AxisLimits: TypeAlias = Mapping[str, tuple[int, int | None]]  # least and largest size by axis
MakeFeeds: TypeAlias = Callable[..., dict[str, np.ndarray]]

BATCHES = (1, 2, 7, 32)
_LENGTHS = (5, 12, 1, 33)  # lengths of sequences, one for each batch
_SIDES = (64, 96, 64, 128)  # sides of images whose height or width is dynamic
_LONGER = (
    *(16, 32, 64, 80, 96, 128, 160, 224, 256, 320, 400, 512, 640, 800, 1000, 1024, 1536, 2048),
    *(4096, 8000, 16000, 32000),
)
_SINGLE_ROWS = 8
_SEARCH_S = 30.0  # limit of the search for sizes: CPU time, whatever else the machine does
MOST_SAMPLES, MOST_BYTES = 32, 64 << 20
MOST_CALL_BYTES = 128 << 20  # limit of the largest tensor when comparing


def parity_sizes(
    inputs: Sequence[TensorSpec], limits: AxisLimits | None = None, usual: Sizes | None = None
) -> list[dict[str, int]]:
    """Return the sizes of dynamic axes to compare at: batches 1, 2, odd and large, several lengths.

    `limits`: least and largest size by axis, where the model has them. `usual`: sizes that the user
    has; the first two results then are near them.
    """
    limits, usual, batch = limits or {}, usual or {}, batch_axes(inputs)
    # sides of images must survive the pooling of a CNN
    sides = {axis for spec in inputs if len(spec.shape) == 4 for axis in spec.shape[1:]}
    axes = sorted({axis for spec in inputs for axis in spec.shape if isinstance(axis, str)})

    def size(axis: str, at: int) -> int:
        found = (BATCHES if axis in batch else _SIDES if axis in sides else _LENGTHS)[at]
        if axis in usual and axis != BATCH and at < 2:
            found = (usual[axis], -(-3 * usual[axis] // 4))[at]
        low, high = limits.get(axis, (1, None))
        return max(low, found if high is None else min(found, high))

    return _unique(({axis: size(axis, at) for axis in axes} for at in range(len(BATCHES))), {})


def _unique(sizes: Iterable[Sizes], chosen: Sizes) -> list[dict[str, int]]:
    """Return the sizes, with those of `chosen`, each once."""
    found = [{**each, **chosen} for each in sizes]
    return [each for n, each in enumerate(found) if each not in found[:n]]


def feeds_at_sizes(
    inputs: Sequence[TensorSpec],
    limits: AxisLimits | None = None,
    example: Example | None = None,
    sizes: Sequence[Sizes] | None = None,
    make: MakeFeeds = random_feeds,
) -> list[dict[str, np.ndarray]]:
    """Return inputs at each of the `sizes`, by default the `parity_sizes`, from one seed each.

    Where nothing but the batch differs, the smaller ones are rows from all over the largest, in
    reverse order: the outputs then also show whether a row depends on its place and on other rows.
    `make`: what makes them where there is no `example`.
    """
    make = example.feeds if example else make
    sizes = sizes or parity_sizes(inputs, limits, example.sizes(inputs) if example else {})
    largest = make(tuple(inputs), sizes[-1], len(sizes) - 1)
    by_rows = all(spec.shape[:1] == (BATCH,) and BATCH not in spec.shape[1:] for spec in inputs)

    def feeds(seed: int, each: Sizes) -> dict[str, np.ndarray]:
        if not by_rows or {**each, BATCH: 0} != {**sizes[-1], BATCH: 0}:
            return make(tuple(inputs), each, seed)
        places = spread_places(sizes[-1][BATCH], each[BATCH])
        return {name: array[places] for name, array in largest.items()}

    return [feeds(seed, each) for seed, each in enumerate(sizes[:-1])] + [largest]


def comparison_feeds(
    first: Engine,
    second: Engine,
    samples: Samples | None,
    graph: Path | None,
    sizes: Sizes | None = None,
    most: int = MOST_SAMPLES,
) -> tuple[list[Feeds], tuple[str, ...]]:
    """Return the inputs to compare two engines on, in batches that both take, and notes.

    They are the samples, where there are any, else random inputs at several sizes of the dynamic
    axes, see `random_inputs`. `graph`: the ONNX file that shows how many rows fit into memory; None
    where there is none. `sizes`: those that the user chose, of some axes or of the batch. `most`:
    rows of a batch.
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
    found = random_inputs(first, sizes or {}, limits)
    feeds = feeds_at_sizes(first.inputs, sizes=found.sizes, make=found.make)
    if graph is None:
        return list(feeds), found.notes
    rows = max(least, rows_that_fit(feeds, graph))
    return first_rows(feeds, rows, first.inputs), (*found.notes, *rows_note(rows, usual))


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


class RandomInputs(NamedTuple):
    """Sizes of the dynamic axes at which a model runs what `make` makes, and notes."""

    sizes: list[dict[str, int]]
    notes: tuple[str, ...]
    make: MakeFeeds


def random_inputs(engine: Engine, given: Sizes, limits: AxisLimits | None = None) -> RandomInputs:
    """Find random inputs that `engine` runs, at the `parity_sizes` if it can, else at others.

    `given`: the sizes that the user chose. Where none runs, integers are 0 and 1 alone, as numbers
    of classes or rows of a small table may be; then axes are longer, those of states as large as
    the batch, and at last there are single rows. Raises BadInput with the engine's own reason.
    """
    inputs, least = engine.inputs, {axis: low for axis, (low, _) in (limits or {}).items()}
    batch, wanted = batch_axes(inputs), _unique(parity_sizes(inputs, limits), given)
    free = [axis for axis in wanted[0] if axis not in given and axis not in batch]
    problems: list[DeploykitError] = []
    ran: set[tuple[object, ...]] = set()  # sizes often differ in the batch alone

    def runs(sizes: Sizes, tied: Sequence[str] = (), make: MakeFeeds = random_feeds) -> bool:
        """Run inputs of two rows at most. `tied`: other axes that are as long as the batch."""
        rows = {axis: max(least.get(axis, 1), min(sizes[axis], 2)) for axis in (*batch, *tied)}
        tried = {**sizes, **rows, **given}
        if (key := (make, *tried.items())) not in ran:
            try:
                engine(make(inputs, tried))
            except (BadInput, Unsupported) as exc:
                problems.append(exc)
                return False
            ran.add(key)
        return True

    good, make, notes = [each for each in wanted if runs(each)], random_feeds, tuple[str, ...]()
    if not good and any(spec.dtype in ("int32", "int64") for spec in inputs):
        few: MakeFeeds = partial(random_feeds, integers=2)
        if good := [each for each in wanted if runs(each, make=few)]:
            reason = first_line(problems[0])
            make = few
            notes = (f"compared on the integers 0 and 1: larger ones it does not take: {reason}",)
    end = time.thread_time() + _SEARCH_S
    for sizes, longer, tied in () if good else _other_sizes(inputs, wanted, free):
        if time.thread_time() > end:
            break
        if runs(sizes[-1], tied):
            good = sizes + [longer] * (longer != sizes[-1] and runs(longer, tied))
            break
    if not good:
        names = " ".join(f"`axis` {axis}=SIZE" for axis in free) or "`batch` SIZE"
        cure = f", or sizes that the model takes: {names}" if wanted != [{}] else ""
        raise BadInput(
            f"no random inputs that were tried run: {problems[0].message}",
            hint=f"give real inputs, `data`{cure}",
        ) from problems[0]
    if good != wanted:
        shown = [", ".join(f"{axis} = {size}" for axis, size in each.items()) for each in good]
        text = f"compared at {'; '.join(shown)}; at other sizes it does not run: "
        notes += (text + first_line(problems[-1 if notes else 0]),)
    return RandomInputs(good, notes, make)


def _other_sizes(
    inputs: Sequence[TensorSpec], wanted: Sequence[dict[str, int]], free: Sequence[str]
) -> Iterator[tuple[list[dict[str, int]], dict[str, int], list[str]]]:
    """Yield sizes to try, the last ones with axes twice as long, and axes as long as the batch.

    All `free` axes have one length. At last there are single rows.
    """
    batch = batch_axes(inputs)
    # one free axis that is not the first, in an input without the batch: a state [2,?,128]
    named = [[axis for axis in spec.shape if isinstance(axis, str)] for spec in inputs]
    states = {axes[0] for axes in named if len(axes) == 1 and axes[0] in free and batch}
    states -= {spec.shape[0] for spec in inputs if spec.shape}
    for base, tied in product((wanted, wanted[:1]), [[], sorted(states)] if states else [[]]):
        rows = [next((each[axis] for axis in batch), 1) for each in base]
        tying = [each | dict.fromkeys(tied, n) for each, n in zip(base, rows, strict=True)]
        axes = [axis for axis in free if axis not in tied]
        lengths = [{axis: tying[-1][axis] for axis in axes}]
        for each in lengths + [dict.fromkeys(axes, length) for length in _LONGER if axes]:
            sizes = _unique(tying, each)
            yield sizes, {**sizes[-1], **{axis: 2 * size for axis, size in each.items()}}, tied


def given_sizes(
    inputs: Sequence[TensorSpec], batch: int | None, axis: Sizes | None, samples: Samples | None
) -> dict[str, int]:
    """Return the sizes of random inputs that the user chose, by axis. Raises BadInput.

    There are none with samples, which have sizes of their own.
    """
    sizes = dict(axis or {})
    if batch is not None:
        rows = batch_axes(inputs) or (BATCH,)
        if both := sizes.keys() & {*rows}:
            raise BadInput(f"`batch` is the size of `axis` {min(both)}: give one of the two")
        sizes |= dict.fromkeys(rows, batch)
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
            what = f"`axis` {name}" if axis and name in axis else "`batch`"
            raise BadInput(f"{what} must be 1 or more, got {size}")
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


def batch_that_fits(source: Graph, sizes: Sizes, most_bytes: int = MOST_BYTES) -> int:
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
    found = dynamic_sizes(opened.inputs, {name: array.shape for name, array in largest.items()})
    sizes = {axis: 1 if axis in batch else max(size, 1) for axis, size in found.items()}
    return max(2, batch_that_fits(opened, sizes, MOST_CALL_BYTES))


def first_rows(feeds: Sequence[Feeds], rows: int, inputs: Sequence[TensorSpec]) -> list[Feeds]:
    """Return at most `rows` rows of each feed, from first to last; all for `MOST_SAMPLES`."""
    if rows >= MOST_SAMPLES:
        return list(feeds)
    axes = batch_places(inputs)

    def cut(name: str, array: np.ndarray) -> np.ndarray:
        axis = axes.get(name)
        if axis is None:
            return array
        return array.take(spread_places(array.shape[axis], rows)[::-1], axis)

    return [{name: cut(name, array) for name, array in each.items()} for each in feeds]


def single_rows(feeds: Sequence[Feeds], inputs: Sequence[TensorSpec]) -> list[Feeds]:
    """Return rows of the last of the feeds one at a time, where the first of them are one row.

    The few outputs of one random row may all be near 0, so that noise is large next to them.
    """
    axes = batch_places(inputs)
    rows = [{feed[name].shape[axis] for name, axis in axes.items()} for feed in feeds]
    return [
        {name: x.take([at], axes[name]) if name in axes else x for name, x in feeds[-1].items()}
        for at in range(min(_SINGLE_ROWS, *rows[-1]) if rows[0] == {1} else 0)
    ]


def rows_note(rows: int, usual: int = MOST_SAMPLES) -> tuple[str, ...]:
    """Return a note for the user where batches were smaller than usual."""
    if rows >= usual:
        return ()
    return (f"compared at batches of up to {rows}: larger ones take too much memory",)
