"""Prove that an exported graph computes what the model does, at several sizes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.evidence import GoldenSamples, Parity, RowIndependence
from deploykit.core.tensors import TensorSpec
from deploykit.engines.batching import JoinedRun
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.evaluation import batching, golden
from deploykit.evaluation.parity import (
    MOST_SAMPLES,
    add_float32_errors,
    compare_engines,
    first_rows,
    in_other_batches,
    parity_sizes,
    rows_note,
    rows_that_fit,
)
from deploykit.exporting.load import ExportSource

if TYPE_CHECKING:
    import numpy as np

    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.engines.torch.loaded import Loaded
    from deploykit.exporting.onnx import Exported

EXPORT_MAX_ERROR = 1e-4  # float32 on both sides: only the order of additions differs
_IN_PARTS = "compared in two parts: the values by which the answers are chosen, then the choice"


class Proof(NamedTuple):
    """The measurements of an exported graph."""

    parity: Parity
    recorded: GoldenSamples | None
    batching: RowIndependence
    notes: tuple[str, ...]


def prove_export(
    source: ExportSource,
    tmp: Path,
    feeds: Sequence[Mapping[str, np.ndarray]],
    max_error: float | None,
    out_name: str,
    done: Exported,
) -> Proof:
    """Compare the graph with the module, record golden samples next to it, prove its batch.

    Args:
        source: the module.
        tmp: the graph.
        feeds: the inputs to compare on, at several sizes.
        max_error: the user's bound.
        out_name: what the comparison calls the graph.
        done: how it was exported.
    """
    from deploykit.engines.torch.engine import TorchEngine

    loaded = source.loaded
    joined: list[JoinedRun] = []
    most = rows_that_fit(feeds, tmp)
    feeds = first_rows(feeds, most, loaded.inputs)
    bound = EXPORT_MAX_ERROR if max_error is None else max_error
    check = partial(compare_engines, max_error=bound, names=(source.name, out_name))
    with TorchEngine(loaded, source.name, "cpu", None) as reference:
        with load(tmp, "cpu") as exported:
            try:
                keep = batching.keep_runs(exported, feeds, joined)
                parity = check(reference, exported, feeds, each=keep)
            except DeploykitError as exc:
                raise _name_fixed_axis(exc, reference, exported, done, out_name) from exc
            recorded = golden.record(reference, _few(feeds, loaded.inputs), tmp)
            rows = batching.prove_batch(exported, tmp, recorded, most, joined)
            notes = rows_note(most)
            chooses = all("float" not in spec.dtype for spec in loaded.outputs)
            if loaded.parts is not None and (chooses or not parity.passed):
                with _first_part(loaded.parts, source.name, tmp, done) as parts:
                    values = check(parts.reference, parts.graph, feeds)
                    chosen = check(cast("Engine", parts), exported, feeds)
                    first = batching.prove_batch(parts.graph, parts.file, None, most)
                parity = replace(parity, rows=(*values.rows, *chosen.rows))
                rows, notes = rows if rows.passed else first, (*notes, _IN_PARTS)
            notes = (*notes, *batching.notes(exported, rows))
        if max_error is None and not parity.passed:  # the graph is closed: float64 needs its memory
            few = feeds if most == MOST_SAMPLES else feeds[:1]  # in float64, with slow kernels
            parity = _add_float32_errors(parity, reference, few)
        return Proof(parity, recorded, rows, notes)


class _Parts:
    """A model that chooses by values, in two parts: a graph gives the values, PyTorch chooses.

    Equal scores have no order: where a difference of 1e-7 decides, another box is chosen and both
    are right; and choices alone that are equal show little of the scores. So the first part is
    exported alone and compared, and the second, in PyTorch, chooses by the values of that graph.
    It has the parts of an Engine that a comparison needs.
    """

    def __init__(self, file: Path, reference: Engine, graph: Engine, choice: Engine) -> None:
        self.file, self.reference, self.graph, self.choice = file, reference, graph, choice
        self.inputs, self.outputs = graph.inputs, choice.outputs

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self.choice(self.graph(feeds))


@contextlib.contextmanager
def _first_part(
    parts: tuple[Loaded, Loaded], name: str, tmp: Path, done: Exported
) -> Iterator[_Parts]:
    """Export the first of `parts` alone, as the whole model was."""
    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.exporting.onnx import export_module

    first, second = parts
    with tempfile.TemporaryDirectory(dir=tmp.parent) as folder:
        file, sizes = Path(folder) / "first.onnx", done.job.sizes
        export_module(
            first.module, first.inputs, first.outputs, file, opset=done.opset, sizes=sizes
        )
        with (
            TorchEngine(first, name, "cpu", None) as reference,
            TorchEngine(second, name, "cpu", None) as choice,
            load(file, "cpu") as graph,
        ):
            yield _Parts(file, reference, graph, choice)


def _add_float32_errors(
    parity: Parity, reference: TorchEngine, feeds: Sequence[Mapping[str, np.ndarray]]
) -> Parity:
    """Add float32's own errors: against float64, else other batches; without the largest feeds.

    In float64 the smallest feeds come first: most graphs pass with them. Other batches need rows.
    """

    feeds = sorted(feeds, key=lambda each: sum(array.size for array in each.values()))
    feeds = feeds[: max(1, len(feeds) - 1)]
    try:
        return add_float32_errors(parity, reference, reference.in_float64, feeds)
    except DeploykitError:  # its code names float32
        with contextlib.suppress(DeploykitError):  # it takes no single rows either
            others = partial(in_other_batches, reference)
            parity = add_float32_errors(parity, reference, others, feeds[::-1])
        return parity


def _name_fixed_axis(
    error: DeploykitError, reference: Engine, exported: Engine, done: Exported, name: str
) -> DeploykitError:
    """Return the error of a comparison, which names the axis that the exporter fixed, if it did."""
    axis = _fixed_axis(reference, exported, done.job.sizes)
    if axis is None:
        return error
    return BadInput(
        f"{name}: the exporter fixed axis {axis}: at another size the graph does not "
        f"compute what the model does ({error.message})",
        hint="export with a fixed size for that axis, or find where the model reads it as a "
        "Python number",
    )


def _fixed_axis(reference: Engine, exported: Engine, base: Mapping[str, int]) -> str | None:
    """Return the first dynamic axis along which the graph fails and the model does not.

    `base`: the sizes at which the graph was exported. Returns None where it fails at these too.
    """

    others = parity_sizes(reference.inputs, reference.limits)
    changes = [{}, *({axis: each[axis]} for axis in base for each in others if axis in each)]
    for change in changes:
        feeds = random_feeds(reference.inputs, {**base, **change})
        try:
            reference(feeds)
        except DeploykitError:
            continue
        try:
            compare_engines(reference, exported, [feeds])
        except DeploykitError:
            return next(iter(change), None)
    return None


def _few(
    feeds: Sequence[Mapping[str, np.ndarray]], inputs: tuple[TensorSpec, ...]
) -> Mapping[str, np.ndarray]:
    """Return golden samples: the first few rows of the largest feeds, or all of a fixed batch."""
    largest = max(feeds, key=lambda each: sum(array.nbytes for array in each.values()))
    if not inputs[0].batched or len({spec.shape[:1] for spec in inputs}) > 1:
        return largest
    return {name: array[: golden.SAMPLES] for name, array in largest.items()}
