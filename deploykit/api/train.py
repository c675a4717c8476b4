"""Train a recipe into a checkpoint that `export` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api.artefacts import Made, Progress
from deploykit.api.outputs import SPLIT, claim, claim_splits, named_files
from deploykit.core.evidence import Evidence, TrainingRecord
from deploykit.core.files import sha256
from deploykit.core.machine import tool_versions
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.core.paths import StrPath
from deploykit.core.recipe import load_recipe

if TYPE_CHECKING:
    from deploykit.core.recipe import Splits


def train(
    recipe: str,
    out: StrPath,
    *,
    data: StrPath | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    amp: bool | None = None,
    weights: StrPath | None = None,
    seed: int = 0,
    save_splits: StrPath | None = None,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Made:
    """Train `recipe` ("mnist-cnn", `./mine.py` or `pkg.mod:RECIPE`) and write the checkpoint `out`.

    `data`: the recipe's data, where it does not bring its own. `amp`: mixed precision; on by
    default on a GPU. `weights`: a file to start from. `save_splits`: a folder that gets
    calibration.npz and test.npz, for `quantize` and `predict`. `force`: replace files that
    deploykit did not write.
    """
    out, start = Path(out), Path(weights) if weights else None
    read = (data, weights, *named_files(recipe))
    claim(out, "torch", read, force=force)
    places = claim_splits(save_splits, read, force=force) if save_splits is not None else []
    chosen = load_recipe(recipe)
    from deploykit.measure.statistics import proportion
    from deploykit.runtimes.torch import open as runtime
    from deploykit.training import loop

    initial = runtime.load_weights(start) if start else None
    splits = chosen.data(Path(data) if data else None)
    options = loop.TrainingOptions(epochs, batch_size, device, amp, seed)
    trained = loop.run_training(chosen, splits, options, weights=initial, on_progress=on_progress)
    runtime.save_checkpoint(out, trained.module, recipe, chosen.inputs, chosen.outputs)
    samples = len(trained.scores)
    score = proportion(round(trained.scores.sum()), samples)
    record = TrainingRecord(recipe, chosen.metric_name, samples, score, trained.figures)
    manifest = Manifest(
        format="torch",
        inputs=chosen.inputs,
        outputs=chosen.outputs,
        precision={"float32": sum(1 for _ in trained.module.parameters())},
        sha256=sha256(out),
        made_from=(sha256(start),) if start else (),
        made_with=tool_versions("torch"),
        evidence=Evidence(training=record),
    )
    write_manifest(out, manifest)
    _save(splits, places)
    return Made(out, manifest)


def _save(splits: Splits, places: Sequence[Path]) -> None:
    from deploykit.runtimes.data.samples import LABELS, write_npz

    for place, split in zip(places, (splits.calibration, splits.test), strict=False):
        write_npz(place, {**split.inputs, LABELS: split.labels}, kind=SPLIT)
