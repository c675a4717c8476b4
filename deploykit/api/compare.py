"""Compare two artefacts on the same inputs, or one with its recorded samples."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api import golden
from deploykit.api.artefacts import parity_sizes
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Parity
from deploykit.core.json_value import json_value
from deploykit.core.paths import StrPath

if TYPE_CHECKING:
    import numpy as np

    from deploykit.measure.evaluate.divergence import Divergence, Run, Tap
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.engine import Arrays, Engine


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

    Without `b`, `a` runs on the golden samples next to it and is compared with the recorded
    outputs; the bound is then the manifest's, else 0.001. A TensorRT engine runs on its GPU, even
    where `device` is "cpu", and random inputs are of sizes that it accepts.
    """
    first = Artefact.open(a)
    if b is None:
        if data is not None:
            raise BadInput("`data` needs two files; one alone replays its golden samples")
        return Compared(_replay(first, max_error, device))
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.engine import load

    second, bound = Artefact.open(b), golden.MAX_ERROR if max_error is None else max_error
    places = [each.runtime.usable(device) for each in (first, second)]
    with load(first, places[0]) as left, load(second, places[1]) as right:
        feeds = _feeds(left, right, Path(data) if data else None)
        names = (first.name, second.name)
        parity = compare_engines(left, right, feeds, max_error=bound, names=names)
    diverging = None
    if not parity.passed and first.format == second.format == "onnx":
        diverging = _diverging(first.path, second.path, feeds, bound)
    return Compared(parity, diverging)


def _replay(artefact: Artefact, max_error: float | None, device: str) -> Parity:
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.engine import load

    with load(artefact, artefact.runtime.usable(device)) as engine:
        recorded, feeds, found = golden.find_and_open(artefact, engine.inputs, engine.outputs)
        bound = found.max_error if max_error is None else max_error
        names = (f"{found.reference}, recorded", artefact.name)
        return compare_engines(recorded, engine, [feeds], max_error=bound, names=names)


def _feeds(first: Engine, second: Engine, data: Path | None) -> list[dict[str, np.ndarray]]:
    from deploykit.runtimes.data.samples import random_feeds, read_samples

    if data is not None:
        samples = read_samples(data, first.inputs)
        size, used = samples.batching(32, (*first.inputs, *second.inputs))
        return list(samples.first(used).batches(size))
    sizes = parity_sizes(first.inputs, {**first.limits, **second.limits})
    return [random_feeds(first.inputs, each, seed) for seed, each in enumerate(sizes)]


def _diverging(
    a: Path, b: Path, feeds: Sequence[Mapping[str, np.ndarray]], max_error: float
) -> Divergence | None:
    """The first node whose tensor differs; None where the graphs share no names to go by."""
    from deploykit.measure.evaluate.divergence import first_divergence
    from deploykit.onnx_graph import probes
    from deploykit.onnx_graph.graph import Graph

    graphs = Graph.open(a), Graph.open(b)
    pairs = probes.shared(*graphs)
    with tempfile.TemporaryDirectory() as folder:
        left, right = (_tap(graph, Path(folder) / f"{n}.onnx") for n, graph in enumerate(graphs))
        try:
            return first_divergence(left, right, pairs, feeds[:1], max_error=max_error)
        except BadInput:
            return None


def _tap(graph: Graph, path: Path) -> Tap:
    """Run a graph as it is written and give the tensors asked for, however they are shown."""
    from deploykit.onnx_graph import probes
    from deploykit.runtimes.onnxruntime.engine import open_as_written

    def tap(names: Sequence[str]) -> Run:
        tapped, shown = probes.expose(graph, names)
        tapped.save(path)
        engine = open_as_written(path)

        def run(feeds: Arrays) -> list[np.ndarray]:
            values = engine(feeds)
            return [values[name] for name in shown]

        return run

    return tap
