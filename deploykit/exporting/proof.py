"""Prove that an exported graph computes what the model does, at several sizes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.core.evidence import GoldenSamples, Parity, ParityRow, RowIndependence
from deploykit.core.tensors import batch_axes
from deploykit.engines.data.examples import Example
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.evaluation import golden
from deploykit.evaluation.feeds import (
    MOST_SAMPLES,
    first_rows,
    rows_note,
    rows_that_fit,
)
from deploykit.evaluation.parity import add_float32_errors, compare_engines, in_other_batches

if TYPE_CHECKING:
    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.engines.torch.loaded import Loaded
    from deploykit.exporting.onnx import Exported
    from deploykit.exporting.reasons import Decision

_FAR = 512  # the largest size that is tried where a branch may end
EXPORT_MAX_ERROR = 1e-4  # float32 on both sides: only the order of additions differs

_IN_PARTS = "compared in two parts: the values by which the answers are chosen, then the choice"


class Proof(NamedTuple):
    """The measurements of an exported graph. `decided`: which sizes it is for."""

    parity: Parity
    recorded: GoldenSamples | None
    batching: RowIndependence
    notes: tuple[str, ...]
    decided: tuple[Decision, ...]


def prove_export(
    loaded: Loaded,
    names: tuple[str, str],
    tmp: Path,
    feeds: Sequence[Mapping[str, np.ndarray]],
    max_error: float | None,
    done: Exported,
) -> Proof:
    """Compare the graph `tmp` with its source, record golden samples next to it, prove its batch.

    `names`: what the comparison calls the two. `feeds`: the inputs to compare on, at several sizes.
    `max_error`: the user's bound. `done`: how it was exported.
    """
    from deploykit.engines.torch.engine import TorchEngine

    most = rows_that_fit(feeds, tmp)
    feeds = first_rows(feeds, most, loaded.inputs)
    bound = EXPORT_MAX_ERROR if max_error is None else max_error
    with TorchEngine(loaded, names[0], "cpu", None) as reference:
        reference.limits = loaded.limits
        feeds, left_out = _taken(reference, feeds, loaded.example)
        check = partial(compare_engines, feeds_list=feeds, max_error=bound, names=names)
        with load(tmp, "cpu") as exported:
            parity = check(reference, exported)
            few = _few_rows(reference, feeds)
            recorded = golden.record(reference, few, tmp)
            rows = golden.prove_batch(exported, tmp, recorded, most)
            notes = (*left_out, *rows_note(most))
            chooses = all("float" not in spec.dtype for spec in loaded.outputs)
            if loaded.parts is not None and (chooses or not parity.passed):
                values, first = _compare_parts(loaded, tmp, done, exported, check, most)
                parity, rows = replace(parity, rows=values), rows if rows.passed else first
                notes += (_IN_PARTS,)
            notes += golden.batching_notes(exported, rows)
            decided = tuple(x for x in done.decided if _limits(x, reference, exported, done))
            if parity.passed:
                notes += _probe_outside(reference, exported, few)
        if max_error is None and not parity.passed:  # the graph is closed: float64 needs its memory
            least = feeds if most == MOST_SAMPLES else feeds[:1]  # in float64, with slow kernels
            least = sorted(least, key=lambda each: sum(array.size for array in each.values()))
            least = least[: max(1, len(least) - 1)]  # most graphs pass with the smallest
            try:
                parity = add_float32_errors(parity, reference, reference.in_float64, least)
            except DeploykitError:  # its code names float32: other batches, which need rows
                with suppress(DeploykitError):  # it takes no single rows either
                    by_rows = partial(in_other_batches, reference)
                    parity = add_float32_errors(parity, reference, by_rows, least[::-1])
        return Proof(parity, recorded, rows, notes, decided)


def _taken(
    reference: Engine, feeds: Sequence[Mapping[str, np.ndarray]], example: Example
) -> tuple[list[Mapping[str, np.ndarray]], tuple[str, ...]]:
    """Return the feeds that the model takes, with the example's values where it refuses others.

    A size at which it takes neither is left out, with a note; the first feeds are the example.
    """
    if not example.arrays:
        return list(feeds), ()
    kept, lost = [*feeds[:1]], []
    for each in feeds[1:]:
        sizes = Example(each).sizes(reference.inputs)
        for tried in (each, example.feeds(reference.inputs, sizes, floats=True)):
            with suppress(DeploykitError):
                reference(tried)
                kept.append(tried)
                break
        else:
            lost.append(" ".join(f"{axis}={size}" for axis, size in sorted(sizes.items())))
    notes = (f"not compared at {', '.join(lost)}, which the model does not take",)
    return kept, notes if lost else ()


def _few_rows(reference: Engine, feeds: Sequence[Arrays]) -> Arrays:
    """Return rows of the largest feeds, or all of them where edges of a graph point at rows."""
    specs = reference.inputs
    most = max(feeds, key=lambda each: sum(array.nbytes for array in each.values()))
    cut = {spec.name for spec in specs if spec.batched}
    few = {name: a[: golden.SAMPLES] if name in cut else a for name, a in most.items()}
    with suppress(DeploykitError):
        if not any(axis in spec.shape[1:] for axis in batch_axes(specs) for spec in specs):
            reference(few)
            return few
    return most


class _ChosenBy:
    """A model in two parts: `graph` gives the values, PyTorch chooses by them.

    Where scores differ by 1e-7, either choice is right, and equal choices show little of them. This
    has the parts of an Engine that a comparison needs.
    """

    def __init__(self, graph: Engine, choice: Engine) -> None:
        self.graph, self.choice = graph, choice
        self.inputs, self.outputs = graph.inputs, choice.outputs

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self.choice(self.graph(feeds))


def _compare_parts(
    loaded: Loaded,
    tmp: Path,
    done: Exported,
    exported: Engine,
    check: Callable[..., Parity],
    most: int,
) -> tuple[tuple[ParityRow, ...], RowIndependence]:
    """Return the rows of both parts, and the proof of the first one's batch."""
    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.exporting.onnx import export_module

    first, second = cast("tuple[Loaded, Loaded]", loaded.parts)
    with tempfile.TemporaryDirectory(dir=tmp.parent) as folder:
        file, sizes = Path(folder) / "first.onnx", done.job.sizes
        export_module(first, file, opset=done.opset, sizes=sizes)
        with (
            TorchEngine(first, "its first part", "cpu", None) as reference,
            TorchEngine(second, "its second part", "cpu", None) as choice,
            load(file, "cpu") as graph,
        ):
            values = check(reference, graph)
            chosen = check(cast("Engine", _ChosenBy(graph, choice)), exported)
            batch = golden.prove_batch(graph, file, None, most)
    return (*values.rows, *chosen.rows), batch


def _limits(decision: Decision, reference: Engine, exported: Engine, done: Exported) -> bool:
    """Return whether the graph is not the model where `decision` does not hold.

    torch names every size that it compared: often both branches compute the same.
    """
    base = done.job.sizes
    least = {axis: reference.limits.get(axis, (1, None))[0] for axis in base}
    most = {axis: reference.limits.get(axis, (1, None))[1] or _FAR for axis in base}
    sizes = ({**base, a: n} for a in base for n in range(least[a], min(most[a], _FAR) + 1))
    outside = next((each for each in (*sizes, least) if decision.holds(each) is False), None)
    if outside is not None:
        feeds = [done.job.given.feeds(reference.inputs, outside, floats=True)]
        with suppress(DeploykitError):
            return not compare_engines(reference, exported, feeds).passed
    return True


_ROWS = 3
_OUTSIDE_MAX_ERROR = 1e-2  # of values this large; what float32 itself loses is added


def _probe_outside(
    reference: TorchEngine, exported: Engine, usual: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """Return a note for each kind of input on which the graph does not answer as the model does.

    A kernel may be exact on the comparison's ordinary values and wrong beyond: ONNX Runtime's
    Sigmoid is 0 from -18 on, and attention over a row that is masked as a whole has no definition
    that all share. `usual`: inputs that the model takes. What the model itself refuses is left out.
    """
    specs, notes = reference.inputs, []
    batched = {spec.name for spec in specs if spec.batched}
    arrays = {n: array[:_ROWS] if n in batched else array for n, array in usual.items()}
    masks = {x.name for x in specs if x.dtype == "bool" or "mask" in x.name.lower()}
    floats = {x.name: arrays[x.name] for x in specs if "float" in x.dtype and x.name not in masks}
    masks -= {x.name for x in specs if "float" in x.dtype}
    random, trials = np.random.default_rng(0), dict[str, dict[str, np.ndarray]]()
    for size in (1e2, 1e4, 0.0):
        trials[f"values of up to {size:g}" if size else "zeros"] = {
            name: random.uniform(-size, size, array.shape).astype(array.dtype)
            for name, array in floats.items()
        }
    for name in sorted(masks):
        for value in (True, False):
            what = f"'{name}' {str(value).lower()} everywhere"
            trials[what] = {name: np.full_like(arrays[name], value)}
    for what, changed in trials.items():
        feeds = {**arrays, **changed}
        with suppress(DeploykitError):
            reference(feeds)
            try:
                why = _difference(reference, exported, feeds, only_places=what == "zeros")
            except DeploykitError as exc:  # the graph does not take what the model does
                why = exc.message
            if why and changed:
                notes.append(f"with {what} the graph does not answer as PyTorch does: {why}")
    return tuple(notes)


def _difference(
    reference: TorchEngine,
    exported: Engine,
    feeds: Mapping[str, np.ndarray],
    *,
    only_places: bool,
) -> str:
    """Return by what the answers differ; "" if they do not, or float32 explains it.

    `only_places`: look at NaN and the infinities alone, as equal scores may be ordered differently.
    """
    parity = compare_engines(reference, exported, [feeds], max_error=_OUTSIDE_MAX_ERROR)
    if not parity.passed:
        with suppress(DeploykitError):  # its code names float32
            parity = add_float32_errors(parity, reference, reference.in_float64, [feeds])
    for row in parity.rows:
        if row.places_match and only_places:
            continue
        if not row.places_match or (row.problem and not row.floating):
            return f"output '{row.output}': {row.problem}"
        if not row.problem and row.error > parity.bound(row):
            return f"output '{row.output}' is off by {row.error:.2g} of its largest value"
    return ""
