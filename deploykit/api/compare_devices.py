"""Repeat the articles' comparison on this machine: what training costs on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.artefacts import Progress
from deploykit.api.outputs import claim_devices, named_files
from deploykit.core.files import write_json, write_text
from deploykit.core.json_value import Record
from deploykit.core.machine import this_machine
from deploykit.core.paths import StrPath
from deploykit.core.recipe import load_recipe

if TYPE_CHECKING:
    from deploykit.training.devices import DeviceRow

# what the articles claim, and what they measured for it
ARTICLES: tuple[Mapping[str, str], ...] = (
    {
        "claim": "28 times faster",
        "measured": "cats against dogs, 2,000 images, batches of 150, 20 epochs, TensorFlow: 340 s "
        "on a Ryzen 5 5600X, 13.04 s on an RTX 3070. That is 26 times by these totals, and more "
        "than 33 by its times per batch; TensorFlow's build, threads and precision are not given",
    },
    {
        "claim": "12 times the throughput (V100)",
        "measured": "nothing: peak arithmetic, of Tensor Cores in FP16 against its predecessor",
    },
    {
        "claim": "20 times without code change (A100)",
        "measured": "nothing: peak arithmetic, of TF32 against the generation before",
    },
)


METHOD = (
    "The loader makes batches, a step trains on one; samples/s are those of both, one after the "
    "other. The machine and its load averages are in devices.json."
)


@dataclass(frozen=True)
class DeviceTable(Record):
    """A row per device, precision and batch size, with the articles' claims.

    `crossover`: the batch from which on the GPU is faster; None where there is no GPU. Not all
    that this machine was doing is known: `rows` have its load average.
    """

    folder: Path
    recipe: str
    data: str
    machine: Mapping[str, Any]
    rows: tuple[DeviceRow, ...]
    crossover: Mapping[str, Any] | None
    articles: tuple[Mapping[str, str], ...] = ARTICLES


def compare_devices(
    recipe: str,
    out: StrPath,
    *,
    data: StrPath | None = None,
    batch_size: int | None = None,
    force: bool = False,
    on_progress: Progress | None = None,
) -> DeviceTable:
    """Time steps and batches of `recipe` on the CPU and a GPU, in each precision that they have.

    Writes devices.json and devices.md into the folder `out`. `batch_size`: the middle one of the
    three that are timed; an eighth and four times as much are the others. Nothing is trained to
    the end, and no accuracy is measured. Raises BadInput.
    """
    read = (data, *named_files(recipe))
    place = claim_devices(out, read, force=force)
    chosen = load_recipe(recipe)
    from deploykit.training.devices import find_crossover, measure_devices
    from deploykit.training.recipes import read_splits

    splits = read_splits(chosen, Path(data) if data else None)
    middle = batch_size or chosen.batch_size
    batches = sorted({max(1, middle // 8), middle, 4 * middle})
    rows = tuple(measure_devices(chosen, splits, batches, on_progress))
    machine = this_machine().to_dict()
    table = DeviceTable(place, recipe, splits.source, machine, rows, find_crossover(rows))
    write_json(place / "devices.json", table.to_dict())
    write_text(place / "devices.md", _markdown(table))
    return table


def header() -> tuple[str, ...]:
    return (
        "device",
        "precision",
        "batch",
        "threads",
        "step ms",
        "loader ms",
        "samples/s",
        "epoch s",
    )


def cells(row: DeviceRow) -> tuple[str, ...]:
    """A row of the table as text."""
    start = (row.device, row.precision, f"{row.batch:,}")
    if row.absent is not None:
        return (*start, "", row.absent, "", "", "")
    values = (row.step_ms, row.loader_ms, row.samples_per_s, row.epoch_s)
    return (*start, str(row.threads), *(f"{value or 0:,.4g}" for value in values))


def conclusion(table: DeviceTable) -> str:
    """One sentence on which device to train on."""
    if table.crossover is None:
        return "no crossover: without a GPU only the CPU was measured"
    batch, measured = table.crossover["batch"], table.crossover["measured"]
    if batch is None:
        return f"in float32 the CPU is faster at each measured batch: {_list(measured)}"
    return f"in float32 the GPU is faster from a batch of {batch} on; measured: {_list(measured)}"


def _list(batches: Sequence[int]) -> str:
    return ", ".join(map(str, batches))


def _markdown(table: DeviceTable) -> str:
    lines = [
        f"# Training {table.recipe} on each device",
        "",
        f"Data: {table.data}. Medians of a few steps after a warm-up. {METHOD}",
        "",
        "| " + " | ".join(header()) + " |",
        "| " + " | ".join("---" for _ in header()) + " |",
        *("| " + " | ".join(cells(row)) + " |" for row in table.rows),
        "",
        f"{conclusion(table)[0].upper()}{conclusion(table)[1:]}.",
        "",
        "## What the articles claim",
        "",
        "| claim | what was measured |",
        "| --- | --- |",
        *(f"| {each['claim']} | {each['measured']} |" for each in table.articles),
    ]
    return "\n".join(lines) + "\n"
