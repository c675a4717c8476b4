"""`deploykit train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploykit.cli import output, texts
from deploykit.cli.types import Json


def register(app: typer.Typer) -> None:
    app.command()(train)


def train(
    recipe: Annotated[str, typer.Argument(help="mnist-cnn, ./mine.py or pkg.mod:RECIPE")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The checkpoint to write.")],
    data: Annotated[
        Path | None, typer.Option(help="The recipe's data, where it does not bring its own.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    amp: Annotated[
        bool | None,
        typer.Option("--amp/--no-amp", help="Mixed precision; on by default on a GPU."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights to start from.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and order.")] = 0,
    save_splits: Annotated[
        Path | None, typer.Option(help="A folder for calibration.npz and test.npz.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a recipe into a checkpoint that export understands."""
    from deploykit.api import build

    with output.Progress("train") as progress:
        result = build.train(
            recipe,
            out,
            data=data,
            epochs=epochs,
            batch_size=batch_size,
            device=device,
            amp=amp,
            weights=weights,
            seed=seed,
            save_splits=save_splits,
            on_progress=progress,
        )
    output.show(result, texts.made(result), as_json=as_json)
