"""Train a recipe into a checkpoint that `export` reads."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from deploykit.core.arguments import checked
from deploykit.core.artefact import Manifest
from deploykit.core.errors import DeploykitError, MissingExtra
from deploykit.core.evidence import Evidence, TrainingRecord
from deploykit.core.extras import install_command
from deploykit.core.files import (
    StrPath,
    atomic_write,
    check_readable,
    manifest_path,
    sha256,
    write_json,
)
from deploykit.core.machine import tool_versions
from deploykit.core.recipe import Splits, load_recipe
from deploykit.engines.data.samples import LABELS, write_npz
from deploykit.evaluation.artefacts import (
    SPLIT,
    Made,
    Progress,
    claim,
    claim_run,
    claim_splits,
    named_files,
)
from deploykit.evaluation.statistics import mean_score

_NAMED = 3  # skipped files that a note names


@checked
def train(
    recipe: str,
    out: StrPath,
    *,
    data: StrPath | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    device: str = "auto",
    amp: str | None = None,
    tf32: bool = True,
    compile: bool = False,  # noqa: A002 - torch's own name for it
    unfreeze: float | None = None,
    augment: bool | None = None,
    fsdp: bool = False,
    patience: int | None = None,
    weights: StrPath | None = None,
    seed: int = 0,
    checkpoint: StrPath | None = None,
    tensorboard: StrPath | None = None,
    save_splits: StrPath | None = None,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Made:
    """Train `recipe` and write the checkpoint `out`.

    Started by torchrun, each process trains on its part of every batch, and the first one writes.

    Args:
        recipe: "mnist-cnn", `./mine.py` or `pkg.mod:RECIPE`.
        data: the recipe's data, where it does not bring its own.
        learning_rate: in place of the recipe's, which was found with the recipe's own data.
        amp: mixed precision, "off", "bf16" or "fp16"; by default on a GPU, in bf16 where it has it.
        augment: change the images of each batch at random, as the recipe declares, on the processor
            that takes less time; None as the recipe says.
        weights: a file to start from.
        checkpoint: a file that gets the whole state after each epoch, and from which the same call
            goes on.
        tensorboard: a folder for event files.
        save_splits: a folder that gets calibration.npz and test.npz, for `quantize` and `predict`.
        force: replace files that deploykit did not write.

    The others are described in `training.options.TrainingOptions`.
    """
    given = locals()
    out = Path(out)
    files = {"weights": weights, "checkpoint": checkpoint, "tensorboard": tensorboard}
    start, state, events = (Path(path) if path else None for path in files.values())
    read = (data, start, *named_files(recipe))
    claim(out, "torch", read, force=force)
    places = claim_splits(save_splits, read, force=force) if save_splits is not None else []
    claim_run((*read, out, *places), checkpoint=state, tensorboard=events)
    try:
        chosen = load_recipe(recipe)
    except MissingExtra as exc:  # torch alone would lack the data and models of most recipes
        exc.hint = install_command("export,transfer")
        raise
    from deploykit.engines.torch import open as runtime
    from deploykit.training import distributed, loop
    from deploykit.training import options as inputs

    if start is not None and not start.is_dir():  # before the data, which may take long to read
        check_readable(start)
    if on_progress:
        on_progress("reading the data", 0.0)
    options = {each.name: given[each.name] for each in fields(inputs.TrainingOptions)}
    options |= zip(files, (start, state, events), strict=True)
    with distributed.join_processes(device) as group:
        inputs.check_recipe(chosen)
        trained = loop.run_training(
            chosen,
            inputs.read_splits(chosen, Path(data) if data else None),
            inputs.TrainingOptions(**options),
            name=recipe,
            on_progress=on_progress if group.first else None,
            group=group,
        )
        chosen, splits = trained.recipe, trained.splits
        shared = inputs.shared_samples(splits)
        score, classes = mean_score(trained.scores), inputs.score_classes(splits, trained.scores)
        figures = trained.figures | {"test_classes": classes, "shared_samples": shared}
        record = TrainingRecord(recipe, chosen.metric_name, len(trained.scores), score, figures)
        manifest = Manifest(
            format="torch",
            inputs=chosen.inputs,
            outputs=chosen.outputs,
            precision={"float32": sum(1 for _ in trained.module.parameters())},
            made_from=(sha256(start),) if start else (),
            made_with=tool_versions("torch"),
            evidence=Evidence(training=record),
        )

        def write(place: Path) -> None:
            with atomic_write(manifest_path(place)) as about:  # whole before the checkpoint is
                runtime.save_checkpoint(
                    place,
                    trained.module,
                    recipe,
                    chosen,
                    splits,
                    on_written=lambda file: write_json(
                        about, replace(manifest, sha256=sha256(file)).to_dict()
                    ),
                )

        if group.first:
            try:
                write(out)
            except DeploykitError as exc:  # a full disk, a folder that is gone: keep the training
                with suppress(DeploykitError, OSError):
                    spare = Path(tempfile.mkdtemp(prefix="deploykit-")) / out.name
                    write(spare)
                    exc.hint = f"the trained model is in {spare}, with its manifest: move them"
                raise
            for place, split in zip(places, (splits.calibration, splits.test), strict=False):
                write_npz(place, {**split.inputs, LABELS: split.labels}, kind=SPLIT)
        group.wait()
    notes = (*_skipped(splits), *trained.notes, *inputs.explain_score(score.low, classes, shared))
    return Made(out, replace(manifest, sha256=sha256(out)), notes)


def _skipped(splits: Splits) -> list[str]:
    count, more = len(splits.skipped), len(splits.skipped) - _NAMED
    listed = "; ".join(splits.skipped[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
    return [f"files skipped, {count}: {listed}"] if count else []
