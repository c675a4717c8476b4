"""Train a recipe into a checkpoint that `export` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.errors import BadInput, MissingExtra
from deploykit.core.evidence import Evidence, TrainingRecord
from deploykit.core.extras import install_command
from deploykit.core.files import StrPath, sha256, write_text
from deploykit.core.machine import tool_versions
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.core.recipe import Recipe, Splits, load_recipe
from deploykit.engines.data.samples import LABELS, write_npz
from deploykit.evaluation.artefacts import Made, Progress
from deploykit.evaluation.outputs import SPLIT, claim, claim_run, claim_splits, named_files
from deploykit.evaluation.statistics import proportion
from deploykit.training.curve import curve_svg

if TYPE_CHECKING:
    from deploykit.training.options import Trained

# of `train`, those that the loop does not take
_OWN = ("recipe", "out", "data", "weights", "curve", "save_splits", "strict_data", "force")
_NAMED = 3  # of the files that were skipped


def train(
    recipe: str,
    out: StrPath,
    *,
    data: StrPath | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    amp: bool | None = None,
    amp_dtype: str = "auto",
    tf32: bool = True,
    compile: bool = False,  # noqa: A002 - torch's own name for it
    channels_last: bool | None = None,
    unfreeze: float | None = None,
    augment: bool | None = None,
    augment_on: str = "auto",
    workers: int | None = None,
    fsdp: bool = False,
    schedule: str | None = None,
    clip_norm: float | None = None,
    patience: int | None = None,
    weights: StrPath | None = None,
    seed: int = 0,
    checkpoint: StrPath | None = None,
    curve: StrPath | None = None,
    tensorboard: StrPath | None = None,
    save_splits: StrPath | None = None,
    strict_data: bool = False,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Made:
    """Train `recipe` ("mnist-cnn", `./mine.py` or `pkg.mod:RECIPE`) and write the checkpoint `out`.

    Started by torchrun, each process trains on its part of every batch, and the first one writes.
    `data`: the recipe's data, where it does not bring its own. `amp`: mixed precision, on by
    default on a GPU; `amp_dtype`: "bf16", "fp16", or "auto" for bf16 where the device has it.
    `weights`: a file to start from. `checkpoint`: a file that gets the whole state after each
    epoch, and from which the same call goes on. `curve`: an SVG of loss and score. `tensorboard`:
    a folder for event files. `save_splits`: a folder that gets calibration.npz and test.npz, for
    `quantize` and `predict`. `strict_data`: refuse files that cannot be read, which are skipped
    otherwise. `augment`: change the images of each batch at random, as the recipe declares, on the
    processor that takes less time; None as the recipe says. `force`: replace files that deploykit
    did not write. The other options are those of `training.options.TrainingOptions`.
    """
    given = locals()
    options = {name: given[name] for name in given if name not in (*_OWN, "on_progress")}
    return _train(
        recipe,
        Path(out),
        options,
        data=Path(data) if data else None,
        start=Path(weights) if weights else None,
        curve=Path(curve) if curve else None,
        save_splits=save_splits,
        strict_data=strict_data,
        force=force,
        on_progress=on_progress,
    )


def _train(
    recipe: str,
    out: Path,
    given: dict[str, Any],
    *,
    data: Path | None,
    start: Path | None,
    curve: Path | None,
    save_splits: StrPath | None,
    strict_data: bool,
    force: bool,
    on_progress: Progress | None,
) -> Made:
    read = (data, start, *named_files(recipe))
    claim(out, "torch", read, force=force)
    places = claim_splits(save_splits, read, force=force) if save_splits is not None else []
    files = {name: Path(given[name]) for name in ("checkpoint", "tensorboard") if given[name]}
    claim_run((*read, out, *places), curve=curve, force=force, **files)
    try:
        chosen = load_recipe(recipe)
    except MissingExtra as exc:  # torch alone would lack the data and models of most recipes
        exc.hint = install_command("export,transfer")
        raise
    from deploykit.engines.torch import open as runtime
    from deploykit.training import distributed, loop
    from deploykit.training import options as recipes
    from deploykit.training.options import TrainingOptions

    initial = runtime.load_weights(start) if start else None
    with distributed.join_processes(given["device"]) as group:
        splits = recipes.read_splits(chosen, data)
        notes = _skipped(splits, strict_data)
        trained = loop.run_training(
            chosen,
            splits,
            TrainingOptions(**{**given, **files}),
            name=recipe,
            weights=initial,
            weights_from=start or Path("weights"),
            on_progress=on_progress if group.first else None,
            group=group,
        )
        chosen = chosen.sized_for(splits.build_with)
        if group.first:
            runtime.save_checkpoint(
                out, trained.module, recipe, chosen.inputs, chosen.outputs, splits
            )
            write_manifest(out, _manifest(out, recipe, chosen, trained, start))
            _save(splits, places)
            if curve is not None:
                _draw(curve, recipe, chosen, trained)
        group.wait()
    return Made(out, _manifest(out, recipe, chosen, trained, start), (*notes, *trained.notes))


def _draw(curve: Path, recipe: str, chosen: Recipe, trained: Trained) -> None:

    title = f"{recipe}: {trained.figures['precision']} on {trained.figures['device']}"
    write_text(curve, curve_svg(trained.history, title, chosen.metric_name))


def _skipped(splits: Splits, strict: bool) -> tuple[str, ...]:
    """A note on the files that could not be read; raises BadInput where `strict`."""
    if not splits.skipped:
        return ()
    more = len(splits.skipped) - _NAMED
    listed = "; ".join(splits.skipped[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
    if strict:
        raise BadInput(f"unreadable files, {len(splits.skipped)}: {listed}")
    return (f"unreadable files skipped, {len(splits.skipped)}: {listed}",)


def _manifest(
    out: Path, recipe: str, chosen: Recipe, trained: Trained, start: Path | None
) -> Manifest:

    samples = len(trained.scores)
    score = proportion(float(trained.scores.sum()), samples)
    record = TrainingRecord(recipe, chosen.metric_name, samples, score, trained.figures)
    return Manifest(
        format="torch",
        inputs=chosen.inputs,
        outputs=chosen.outputs,
        precision={"float32": sum(1 for _ in trained.module.parameters())},
        sha256=sha256(out),
        made_from=(sha256(start),) if start else (),
        made_with=tool_versions("torch"),
        evidence=Evidence(training=record),
    )


def _save(splits: Splits, places: Sequence[Path]) -> None:

    for place, split in zip(places, (splits.calibration, splits.test), strict=False):
        write_npz(place, {**split.inputs, LABELS: split.labels}, kind=SPLIT)
