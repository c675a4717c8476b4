"""Give a model of another tool what a bundle needs next to it: a manifest and golden samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api import batching, golden
from deploykit.api.artefacts import carry_task, onnx_manifest
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Evidence
from deploykit.core.manifest import write_manifest
from deploykit.core.paths import StrPath
from deploykit.core.precision import CALIBRATED, max_engine_error, names_of
from deploykit.core.tensors import BATCH

if TYPE_CHECKING:
    import numpy as np

    from deploykit.runtimes.engine import Engine


def complete_model(
    source: Artefact, samples: StrPath | None, out: Path
) -> tuple[Artefact, tuple[str, ...]]:
    """`source` if it has manifest and golden samples, else a copy at `out` that has, and a note.

    The samples are run by ONNX Runtime on the CPU. `samples`: inputs as an .npz or a folder, also
    in place of recorded ones; None for random inputs, which say too little of an INT8 or FP8
    model: BadInput. Raises what opening and running the model raises.
    """
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.engine import load

    known = source.manifest
    if samples is None and known is not None and golden.find_samples(source.path, known):
        return source, ()
    graph = Graph.open(source.path)
    low = names_of(graph.precision) & set(CALIBRATED)
    if low and samples is None:
        raise BadInput(
            f"{source}: has no golden samples, and random inputs say too little of "
            f"{', '.join(sorted(low))}",
            hint="`samples`: an .npz or a folder of real inputs",
        )
    graph = graph.save(out)
    with load(out, "cpu") as engine:
        found = golden.record(engine, _inputs(engine, samples), out)
        if found is None:
            raise BadInput(f"{source}: its inputs and outputs are too large for golden samples")
        proof = known.evidence.batching if known else None
        proof = proof or batching.prove_batch(engine, out, found)
    found = replace(found, max_error=max(found.max_error, max_engine_error(graph.precision)))
    before = known.evidence if known else Evidence()
    evidence = replace(before, golden=found, batching=proof, weights=None)
    tools = ("onnx", "onnxruntime")
    manifest = onnx_manifest(
        graph, (source.sha256,), tools=tools, evidence=evidence, task=carry_task(source, out)
    )
    write_manifest(out, manifest)
    what = f"inputs of {samples}" if samples else "random inputs"
    note = f"golden samples recorded here with ONNX Runtime, on {what}"
    return Artefact.from_manifest(out, manifest), (note,)


def _inputs(engine: Engine, samples: StrPath | None) -> dict[str, np.ndarray]:
    from deploykit.measure.evaluate.feeds import parity_sizes
    from deploykit.runtimes.data.samples import random_feeds, read_samples

    if samples is None:
        return random_feeds(
            engine.inputs, {**parity_sizes(engine.inputs)[0], BATCH: golden.SAMPLES}
        )
    read = read_samples(Path(samples), engine.inputs)
    size, _ = read.batching(golden.SAMPLES, engine.inputs)
    return next(read.batches(size))
