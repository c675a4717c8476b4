"""Prove that an exported graph computes what the model does, at several sizes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
    """What was measured of the graph."""

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
    """Compare the graph with the module, record golden samples next to it, prove its batch."""
    from deploykit.engines.torch.engine import TorchEngine

    loaded, names = source.loaded, (source.name, out_name)
    joined: list[JoinedRun] = []
    most = rows_that_fit(feeds, tmp)
    feeds = first_rows(feeds, most)
    with TorchEngine(loaded, source.name, "cpu", None) as reference:
        with load(tmp, "cpu") as exported:
            bound = EXPORT_MAX_ERROR if max_error is None else max_error
            keep = batching.keep_runs(exported, feeds, joined)
            parity = _compare(reference, exported, feeds, bound, names, done.job.sizes, keep)
            recorded = golden.record(reference, _few(feeds, loaded.inputs), tmp)
            rows = batching.prove_batch(exported, tmp, recorded, most, joined)
            notes = rows_note(most)
            chooses = all("float" not in spec.dtype for spec in loaded.outputs)
            if loaded.parts is not None and (chooses or not parity.passed):
                given = (exported, tmp, feeds, bound, names, done, most)
                parity, first = _compare_parts(loaded.parts, *given)
                rows, notes = rows if rows.passed else first, (*notes, _IN_PARTS)
            notes = (*notes, *batching.notes(exported, rows))
        if max_error is None and not parity.passed:  # the graph is closed: float64 needs its memory
            few = feeds if most == MOST_SAMPLES else feeds[:1]  # in float64, with slow kernels
            parity = _add_float32_errors(parity, reference, few)
        return Proof(parity, recorded, rows, notes)


class _Chained:
    """Of an Engine what a comparison needs: `second` takes the outputs of `first`."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self.inputs, self.outputs = first.inputs, second.outputs
        self._first, self._second = first, second

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self._second(self._first(feeds))


def _compare_parts(
    parts: tuple[Loaded, Loaded],
    exported: Engine,
    tmp: Path,
    feeds: Sequence[Mapping[str, np.ndarray]],
    bound: float,
    names: tuple[str, str],
    done: Exported,
    most: int,
) -> tuple[Parity, RowIndependence]:
    """Prove a model that chooses by values: what it chooses by, then what it chooses.

    Equal scores have no order: where a difference of 1e-7 decides, another box is chosen and both
    are right; and choices alone that are equal show little of the scores. So the first of `parts`
    is exported alone and compared, and the second, in PyTorch, chooses by the values of that graph.
    """
    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.exporting.onnx import export_module

    first, second = parts
    with tempfile.TemporaryDirectory(dir=tmp.parent) as folder:
        file = Path(folder) / "first.onnx"
        export_module(
            first.module, first.inputs, first.outputs, file, opset=done.opset, sizes=done.job.sizes
        )
        with (
            TorchEngine(first, names[0], "cpu", None) as reference,
            TorchEngine(second, names[0], "cpu", None) as chooses,
            load(file, "cpu") as graph,
        ):
            values = compare_engines(reference, graph, feeds, max_error=bound, names=names)
            chained = cast("Engine", _Chained(graph, chooses))
            chosen = compare_engines(chained, exported, feeds, max_error=bound, names=names)
            rows = batching.prove_batch(graph, file, None, most)
    return Parity(*names, (*values.rows, *chosen.rows), bound), rows


def _add_float32_errors(
    parity: Parity, reference: TorchEngine, feeds: Sequence[Mapping[str, np.ndarray]]
) -> Parity:
    """What float32 itself gives: in float64, else in other batches; the largest feeds left out.

    In float64 the smallest feeds come first: most graphs pass with them. Other batches need rows.
    """

    feeds = sorted(feeds, key=lambda each: sum(array.size for array in each.values()))
    feeds = feeds[: max(1, len(feeds) - 1)]
    try:
        return add_float32_errors(parity, reference, reference.in_float64, feeds)
    except DeploykitError:  # its code names float32
        with contextlib.suppress(DeploykitError):  # nor does it take single rows
            others = partial(in_other_batches, reference)
            parity = add_float32_errors(parity, reference, others, feeds[::-1])
        return parity


def _compare(
    reference: Engine,
    exported: Engine,
    feeds: Sequence[Mapping[str, np.ndarray]],
    max_error: float,
    names: tuple[str, str],
    sizes: Mapping[str, int],
    keep: Callable[[int, Arrays, Arrays], None],
) -> Parity:
    """Parity over all sizes; where the graph fails at one, the axis that it fixed is named.

    `sizes`: what the dynamic axes were exported at. `keep`: as `each` of a comparison.
    """

    try:
        return compare_engines(
            reference, exported, feeds, max_error=max_error, names=names, each=keep
        )
    except DeploykitError as exc:
        axis = _fixed_axis(reference, exported, sizes)
        if axis is None:
            raise
        raise BadInput(
            f"{names[1]}: the exporter fixed axis {axis}: at another size the graph does not "
            f"compute what the model does ({exc.message})",
            hint="export with a fixed size for that axis, or find where the model reads it as a "
            "Python number",
        ) from exc


def _fixed_axis(reference: Engine, exported: Engine, base: Mapping[str, int]) -> str | None:
    """The first dynamic axis along which the graph fails and the model does not.

    `base`: the sizes at which the graph was exported. None where it fails at these too.
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
    """Golden samples: the first few rows of the largest feeds, or all of a fixed batch."""
    largest = max(feeds, key=lambda each: sum(array.nbytes for array in each.values()))
    if not inputs[0].batched or len({spec.shape[0] for spec in inputs}) > 1:
        return largest
    return {name: array[: golden.SAMPLES] for name, array in largest.items()}
