"""Prove that requests to an artefact may be joined, and pass that evidence on to its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact
from deploykit.core.evidence import GoldenSamples, RowIndependence
from deploykit.engines.batching import looks_batched, prove_rows
from deploykit.engines.engine import Engine
from deploykit.evaluation import golden

if TYPE_CHECKING:
    import numpy as np


ROWS = 32  # as many as `serve` joins by default


def prove_batch(
    engine: Engine, path: Path, samples: GoldenSamples | None, rows: int = ROWS
) -> RowIndependence:
    """Run `engine` on the golden samples next to `path`, if any, and on invented inputs.

    `rows`: fewer than `ROWS` where those need too much memory; `serve` then tries more itself.
    """
    return prove_rows(engine, min(ROWS, rows), samples=_inputs(engine, path, samples))


def add_evidence(engines: Sequence[Any], artefact: Artefact) -> None:
    """Give engines their file and the manifest's proof, or else inputs to prove it with.

    Raises BadInput for a file that is not the one its manifest describes.
    """
    for engine in engines:
        engine.source = artefact
    manifest = artefact.manifest
    if manifest is None:
        return
    proof, examples = manifest.evidence.batching, None
    if proof is None:
        samples = golden.find_samples(artefact.path, manifest)
        examples = _inputs(engines[0], artefact.path, samples)
    for engine in engines:
        engine.batching, engine.examples = proof, examples


def _inputs(
    engine: Engine, path: Path, samples: GoldenSamples | None
) -> Mapping[str, np.ndarray] | None:
    if samples is None or not all(spec.batched for spec in engine.inputs):
        return None
    return golden.open_samples(samples, path, engine.inputs, engine.outputs)[1]


def notes(engine: Engine, proof: RowIndependence) -> tuple[str, ...]:
    """Return notes for the user where axis 0 looks like a batch but is not."""
    if proof.passed or not looks_batched(engine):
        return ()
    return (f"`serve` will not join requests to it: {proof.why}",)
