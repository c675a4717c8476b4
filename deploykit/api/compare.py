"""Compare two artefacts on the same inputs, or one with its recorded samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api import golden
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Parity
from deploykit.core.json_value import json_value
from deploykit.core.paths import StrPath

if TYPE_CHECKING:
    import numpy as np

    from deploykit.measure.evaluate.divergence import Divergence
    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.engine import Engine


@dataclass(frozen=True)
class Compared:
    """Parity of two artefacts, and where two ONNX graphs that differ first do so."""

    parity: Parity
    divergence: Divergence | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.parity.to_dict(), "divergence": json_value(self.divergence)}

    def _repr_html_(self) -> str:
        from deploykit.measure.report import notebook

        difference = self.divergence.text if self.divergence else None
        facts = {"result": self.parity.why, "first difference": difference}
        title = f"{self.parity.b} compared with {self.parity.a}"
        return notebook.facts_html(title, facts) + notebook.parity_html(self.parity)

    def raise_if_over(self) -> None:
        """Raise GateFailed naming the worst row, and the first node that differs."""
        try:
            self.parity.raise_if_over()
        except GateFailed as exc:
            if self.divergence is None:
                raise
            raise GateFailed(exc.message, hint=self.divergence.text) from None


def compare(
    a: ArtefactLike,
    b: ArtefactLike | None = None,
    *,
    data: StrPath | None = None,
    max_error: float | None = None,
    device: str = "cpu",
) -> Compared:
    """Run two artefacts on the same inputs, the samples of `data` or seeded random ones.

    The bound is 0.001 of the output's scale, or 8 times what float32 itself gives where that is
    more; `max_error` replaces both. Without `b`, `a` runs on the golden samples next to it and is
    compared with the recorded outputs; the bound is then the manifest's, else 0.001. A TensorRT
    engine runs on its GPU, even where `device` is "cpu", and random inputs are of sizes that it
    accepts.
    """
    first = Artefact.open(a)
    if b is None:
        if data is not None:
            raise BadInput("`data` needs two files; one alone replays its golden samples")
        return Compared(_replay(first, max_error, device))
    from deploykit.measure.evaluate.parity import (
        add_float32_errors,
        compare_engines,
        in_other_batches,
    )
    from deploykit.runtimes.data.checks import check_finite
    from deploykit.runtimes.data.samples import read_samples
    from deploykit.runtimes.engine import load

    second, bound = Artefact.open(b), golden.MAX_ERROR if max_error is None else max_error
    places = [each.runtime.usable(device) for each in (first, second)]
    with load(first, places[0]) as left, load(second, places[1]) as right:
        samples = read_samples(Path(data), left.inputs) if data else None
        feeds = _feeds(left, right, samples)
        names = (first.name, second.name)
        parity = compare_engines(left, right, feeds, max_error=bound, names=names)
        if samples and any(row.floating and row.problem for row in parity.rows):
            check_finite(samples)
        if not parity.passed and max_error is None:
            parity = add_float32_errors(parity, left, partial(in_other_batches, left), feeds)
    diverging = None
    if not parity.passed and first.format == second.format == "onnx":
        from deploykit.measure.evaluate.divergence import diverging_node

        diverging = diverging_node(first.path, second.path, feeds, bound)
    return Compared(parity, diverging)


def _replay(artefact: Artefact, max_error: float | None, device: str) -> Parity:
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.engine import load

    with load(artefact, artefact.runtime.usable(device)) as engine:
        recorded, feeds, found = golden.find_and_open(artefact, engine.inputs, engine.outputs)
        bound = found.max_error if max_error is None else max_error
        names = (f"{found.reference}, recorded", artefact.name)
        return compare_engines(recorded, engine, [feeds], max_error=bound, names=names)


def _feeds(first: Engine, second: Engine, samples: Samples | None) -> list[dict[str, np.ndarray]]:
    from deploykit.measure.evaluate.feeds import feeds_at_sizes

    if samples is not None:
        size, used = samples.batching(32, (*first.inputs, *second.inputs))
        return list(samples.first(used).batches(size))
    return feeds_at_sizes(first.inputs, {**first.limits, **second.limits})
