"""Prove that an exported graph computes what the model does, at several sizes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.evidence import GoldenSamples, Parity, ParityRow, RowIndependence
from deploykit.core.tensors import batch_axes
from deploykit.engines.data.examples import Example
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.evaluation import golden
from deploykit.evaluation.feeds import (
    MOST_SAMPLES,
    first_rows,
    parity_sizes,
    rows_note,
    rows_that_fit,
)
from deploykit.evaluation.parity import add_float32_errors, compare_engines, in_other_batches
from deploykit.exporting.load import ExportSource
from deploykit.exporting.outside import probe_outside

if TYPE_CHECKING:
    import numpy as np

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
    source: ExportSource,
    tmp: Path,
    feeds: Sequence[Mapping[str, np.ndarray]],
    max_error: float | None,
    out_name: str,
    done: Exported,
) -> Proof:
    """Compare the graph `tmp` with its source, record golden samples next to it, prove its batch.

    `feeds`: the inputs to compare on, at several sizes. `max_error`: the user's bound. `out_name`:
    what the comparison calls the graph. `done`: how it was exported.
    """
    from deploykit.engines.torch.engine import TorchEngine

    loaded = source.loaded
    most = rows_that_fit(feeds, tmp)
    feeds = first_rows(feeds, most, loaded.inputs)
    bound = EXPORT_MAX_ERROR if max_error is None else max_error
    check = partial(compare_engines, max_error=bound, names=(source.name, out_name))
    with TorchEngine(loaded, source.name, "cpu", None) as reference:
        reference.limits = loaded.limits
        feeds, left_out = _taken(reference, feeds, loaded.example)
        with load(tmp, "cpu") as exported:
            try:
                parity = check(reference, exported, feeds)
            except DeploykitError as exc:
                axis = _fixed_axis(reference, exported, done)
                if axis is None:
                    raise
                raise BadInput(
                    f"{out_name}: the exporter fixed axis {axis}: at another size the graph does "
                    f"not compute what the model does ({exc.message})",
                    hint="export with a fixed size for that axis, or find where the model reads it "
                    "as a Python number",
                ) from exc
            few = _few_rows(reference, feeds)
            recorded = golden.record(reference, few, tmp)
            rows = golden.prove_batch(exported, tmp, recorded, most)
            notes = (*left_out, *rows_note(most))
            chooses = all("float" not in spec.dtype for spec in loaded.outputs)
            if loaded.parts is not None and (chooses or not parity.passed):
                values, first = _compare_parts(source, tmp, done, exported, feeds, check, most)
                parity, rows = replace(parity, rows=values), rows if rows.passed else first
                notes += (_IN_PARTS,)
            notes += golden.batching_notes(exported, rows)
            decided = tuple(x for x in done.decided if _limits(x, reference, exported, done))
            if parity.passed:
                notes += probe_outside(reference, exported, few)
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
    source: ExportSource,
    tmp: Path,
    done: Exported,
    exported: Engine,
    feeds: Sequence[Mapping[str, np.ndarray]],
    check: Callable[..., Parity],
    most: int,
) -> tuple[tuple[ParityRow, ...], RowIndependence]:
    """Return the rows of both parts, and the proof of the first one's batch."""
    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.exporting.onnx import export_module

    first, second = cast("tuple[Loaded, Loaded]", source.loaded.parts)
    with tempfile.TemporaryDirectory(dir=tmp.parent) as folder:
        file, sizes = Path(folder) / "first.onnx", done.job.sizes
        export_module(
            first.module,
            first.inputs,
            first.outputs,
            file,
            opset=done.opset,
            sizes=sizes,
            example=done.job.given,
        )
        with (
            TorchEngine(first, source.name, "cpu", None) as reference,
            TorchEngine(second, source.name, "cpu", None) as choice,
            load(file, "cpu") as graph,
        ):
            values = check(reference, graph, feeds)
            chosen = check(cast("Engine", _ChosenBy(graph, choice)), exported, feeds)
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


def _fixed_axis(reference: Engine, exported: Engine, done: Exported) -> str | None:
    """Return the first dynamic axis along which the graph fails and the model does not.

    Returns None where it fails at the sizes of the export too.
    """
    base = done.job.sizes
    example = done.job.given
    others = parity_sizes(reference.inputs, reference.limits, example.sizes(reference.inputs))
    changes = [{}, *({axis: each[axis]} for axis in base for each in others if axis in each)]
    for change in changes:
        feeds = example.feeds(reference.inputs, {**base, **change})
        with suppress(DeploykitError):
            reference(feeds)
            try:
                compare_engines(reference, exported, [feeds])
            except DeploykitError:
                return next(iter(change), None)
    return None
