"""Golden samples: inputs and PyTorch's outputs, kept next to an artefact for replay.

`FILE.golden.npz` holds arrays `inputs/NAME` and `outputs/NAME`; the manifest names it with its hash
and the largest error that a replay may have. An artefact that is made from FILE gets a copy.
They also are what the proof that requests may be joined is run on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from deploykit.core.artefact import Artefact, Manifest
from deploykit.core.errors import BadInput
from deploykit.core.evidence import GoldenSamples, Parity, RowIndependence
from deploykit.core.files import check_inside, sha256
from deploykit.core.tensors import Specs, batch_axes, batch_places
from deploykit.engines.batching import looks_batched, prove_rows
from deploykit.engines.data.samples import read_npz, write_npz
from deploykit.engines.engine import Arrays, Engine, RecordedEngine
from deploykit.evaluation.feeds import batch_limits
from deploykit.evaluation.parity import compare_engines

if TYPE_CHECKING:
    import numpy as np


Joined: TypeAlias = "tuple[Arrays, Arrays]"  # inputs, and an engine's outputs for them

SAMPLES = 4
ROWS = 32  # as many as `serve` joins by default
MAX_ERROR = 1e-3  # the bound for a replay in float32 on another runtime
_INPUTS, _OUTPUTS = "inputs/", "outputs/"
_LARGEST_BYTES = 64 << 20
# The error of low precision on another runtime may be twice the one measured here.
_MARGIN = 2.0


def samples_path(artefact: Path) -> Path:
    return artefact.with_name(f"{artefact.name}.golden.npz")


def record(engine: Engine, feeds: Mapping[str, np.ndarray], artefact: Path) -> GoldenSamples | None:
    """Run `engine` once and write feeds and outputs next to `artefact`; None if too large."""
    outputs = engine(feeds)
    arrays = {f"{_INPUTS}{name}": array for name, array in feeds.items()}
    arrays |= {f"{_OUTPUTS}{name}": array for name, array in outputs.items()}
    if sum(array.nbytes for array in arrays.values()) > _LARGEST_BYTES:
        return None
    out = samples_path(artefact)
    write_npz(out, arrays)
    return GoldenSamples(out.name, sha256(out), engine.runtime, MAX_ERROR)


def carry(source: Artefact, to: Path) -> GoldenSamples | None:
    """Copy the samples of `source` next to `to`; None where it has none."""
    found = find_samples(source.path, source.manifest)
    if found is None:
        return None
    shutil.copyfile(source.path.with_name(found.file), samples_path(to))
    return replace(found, file=samples_path(to).name)


def loosen(golden: GoldenSamples, path: Path, engine: Engine) -> GoldenSamples:
    """Return the samples next to `path`, their bound raised to twice the error of `engine`."""
    worst = replay(golden, path, engine, path.name).worst.error
    bound = max(golden.max_error, _MARGIN * worst) if worst < float("inf") else golden.max_error
    return replace(golden, max_error=bound)


def replay(
    golden: GoldenSamples, path: Path, engine: Engine, name: str, max_error: float | None = None
) -> Parity:
    """Compare `engine` with the samples next to `path`, as many rows as it takes at once.

    `name`: what messages call the engine. `max_error`: None for the bound of the samples.
    """
    inputs, outputs = engine.inputs, engine.outputs
    feeds, values = open_samples(golden, path, inputs, outputs)
    batched = {spec.name: 0 for spec in outputs if spec.batched}
    batched |= batch_places((*inputs, *outputs), batch_axes(inputs))
    counts = (array.shape[batched[name]] for name, array in feeds.items() if name in batched)
    (low, high), count = batch_limits(inputs, engine.limits), next(counts, 1)
    rows = min(max(count, low), high or count)

    def fit(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Cut or repeat what has a row for each sample; an output may have others."""
        cut = {n for n, a in arrays.items() if n in batched and a.shape[batched[n]] == count}
        return {
            n: a.take(range(rows), axis=batched[n], mode="wrap") if n in cut else a
            for n, a in arrays.items()
        }

    feeds = fit(feeds)
    reference = RecordedEngine(inputs, outputs, fit(values), golden.reference)
    bound, names = golden.max_error, (f"{golden.reference}, recorded", name)
    bound = bound if max_error is None else max_error
    return compare_engines(reference, engine, [feeds], max_error=bound, names=names)


def open_samples(
    golden: GoldenSamples, artefact: Path, inputs: Specs, outputs: Specs
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the inputs and the outputs of the samples next to `artefact`. Raises BadInput."""
    path = artefact.with_name(golden.file)
    arrays = read_npz(path)
    feeds = {n.removeprefix(_INPUTS): a for n, a in arrays.items() if n.startswith(_INPUTS)}
    values = {n.removeprefix(_OUTPUTS): a for n, a in arrays.items() if n.startswith(_OUTPUTS)}
    for kind, there, specs in (("input", feeds, inputs), ("output", values, outputs)):
        names = {spec.name for spec in specs}
        if set(there) != names:
            raise BadInput(
                f"{path}: holds the {kind}s {', '.join(sorted(there))}, "
                f"the model's are {', '.join(sorted(names))}"
            )
    return feeds, values


def find_samples(artefact: Path, manifest: Manifest | None) -> GoldenSamples | None:
    """Return the samples that a manifest names, checked against the hash in it."""
    found = manifest.evidence.golden if manifest else None
    if found is None:
        return None
    if "/" in found.file or not 0 <= found.max_error < float("inf"):
        raise BadInput(f"{artefact}: its manifest's 'golden' entry is damaged")
    check_inside(artefact.parent, found.file, f"{artefact}: its golden samples")
    if sha256(artefact.with_name(found.file)) != found.sha256:
        raise BadInput(
            f"{artefact.with_name(found.file)}: is not the file that the manifest of "
            f"{artefact.name} describes (SHA-256 differs)"
        )
    return found


def keep_largest(
    feeds: Sequence[Arrays], kept: list[Joined]
) -> Callable[[int, Arrays, Arrays], None]:
    """Return an `each` of `compare_engines`: it keeps the most rows, and what they gave."""
    rows = [max((array.shape[:1] for array in each.values()), default=()) for each in feeds]

    def keep(number: int, _: Arrays, outputs: Arrays) -> None:
        if number == rows.index(max(rows)):
            kept.append((feeds[number], outputs))

    return keep


def prove_batch(
    engine: Engine,
    path: Path,
    samples: GoldenSamples | None,
    rows: int = ROWS,
    joined: Sequence[Joined] = (),
) -> RowIndependence:
    """Run `engine` on the golden samples next to `path`, if any, and on invented inputs.

    Args:
        engine: the engine.
        path: its file.
        samples: the golden samples next to it.
        rows: fewer than `ROWS` where those need too much memory; `serve` then tries more itself.
        joined: what `keep_largest` kept, if anything.
    """
    known = _row_inputs(engine, path, samples)
    return prove_rows(engine, min(ROWS, rows), samples=known, joined=next(iter(joined), None))


def add_evidence(engines: Sequence[Any], artefact: Artefact) -> None:
    """Give engines their file and the manifest's proof, or else inputs to prove it with.

    Raises BadInput for a file that is not the one its manifest describes.
    """
    for engine in engines:
        engine.source = artefact
    manifest = artefact.manifest
    if manifest is None:
        return
    proof, path = manifest.evidence.batching, artefact.path
    examples = None if proof else _row_inputs(engines[0], path, find_samples(path, manifest))
    for engine in engines:
        engine.batching, engine.examples = proof, examples


def _row_inputs(
    engine: Engine, path: Path, samples: GoldenSamples | None
) -> Mapping[str, np.ndarray] | None:
    if samples is None or not all(spec.batched for spec in engine.inputs):
        return None
    return open_samples(samples, path, engine.inputs, engine.outputs)[0]


def batching_notes(engine: Engine, proof: RowIndependence) -> tuple[str, ...]:
    """Return notes for the user where axis 0 looks like a batch but is not."""
    if proof.passed or not looks_batched(engine):
        return ()
    return (f"`serve` will not join requests to it: {proof.why}",)
