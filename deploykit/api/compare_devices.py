"""Repeat the articles' comparison on this machine: what training costs on each device."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.artefacts import Progress
from deploykit.api.outputs import claim_report, named_files
from deploykit.core.files import write_together
from deploykit.core.json_value import Record
from deploykit.core.machine import this_machine
from deploykit.core.paths import StrPath
from deploykit.core.recipe import load_recipe
from deploykit.core.statistics_basic import Interval

if TYPE_CHECKING:
    from deploykit.training.devices import DeviceTimes


@dataclass(frozen=True)
class DeviceRow(Record):
    """`samples_per_s`: of loader and step, in turns. `run_s`: all epochs at this rate.

    Of augmentation: of the loader alone, and `threads` are those that make batches.
    """

    device: str
    precision: str
    batch: int
    threads: int | None = None
    samples_per_s: Interval | None = None
    step_ms: Interval | None = None
    loader_ms: Interval | None = None
    run_s: Interval | None = None
    steps: int = 0
    load_1_min: float | None = None
    absent: str | None = None


@dataclass(frozen=True)
class DeviceTable(Record):
    """`crossovers`: what `find_crossovers` gives. `devices`: the version of the document."""

    folder: Path
    recipe: str
    data: str
    samples: int
    epochs: int
    batch: int
    created: str
    command: str
    machine: Mapping[str, Any]
    rows: tuple[DeviceRow, ...]
    crossovers: tuple[Mapping[str, Any], ...]
    verdict: tuple[str, ...] = ()
    augment: bool = False
    augmentation: tuple[DeviceRow, ...] = ()
    articles: tuple[Mapping[str, str], ...] = ()
    devices: int = 1


def compare_devices(
    recipe: str,
    out: StrPath,
    *,
    data: StrPath | None = None,
    batch_size: int | None = None,
    augment: bool | None = None,
    compile: bool = False,  # noqa: A002 - torch's own name for it
    force: bool = False,
    command: str = "",
    on_progress: Progress | None = None,
) -> DeviceTable:
    """Time steps and batches of `recipe` on the CPU and a GPU, in each precision that they have.

    Writes report.json, report.md and report.html into the folder `out`. `batch_size`: the middle
    one of three; an eighth and four times as much are the others.
    `augment`: the images too, as `train` does; what augmentation takes on each processor is timed
    anyway. `compile`: also with torch.compile. Nothing is trained to the end, and no accuracy
    is measured. Raises BadInput.
    """
    read = (data, *named_files(recipe))
    place = claim_report(out, read, force=force, keys=("devices", "rows", "articles"))
    chosen = load_recipe(recipe)
    from deploykit.training import devices
    from deploykit.training.recipes import read_splits

    splits = read_splits(chosen, Path(data) if data else None)
    middle = batch_size or chosen.batch_size
    batches = sorted({max(1, middle // 8), middle, 4 * middle})
    times = devices.time_devices(
        chosen, splits, batches, on_progress, augment=augment, compile=compile
    )
    augmentation = devices.time_augmentation(chosen, splits, batches, on_progress)
    samples = len(splits.train.labels)
    rows, augmented = (
        tuple(_row(each, samples * chosen.epochs) for each in found)
        for found in (times, augmentation)
    )
    table = DeviceTable(
        folder=place,
        recipe=recipe,
        data=splits.source,
        samples=samples,
        epochs=chosen.epochs,
        batch=min(middle, samples),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds"),
        command=command,
        machine=this_machine().to_dict(),
        rows=rows,
        crossovers=tuple(devices.find_crossovers(rows)),
        augment=chosen.augmented if augment is None else augment,
        augmentation=augmented,
        articles=devices.ARTICLES,
    )
    table = replace(table, verdict=tuple(devices.conclude(table)))
    _write(table)
    return table


def _write(table: DeviceTable) -> None:
    from deploykit.api.devices_page import devices_html, devices_markdown

    document = table.to_dict()
    files = {"html": devices_html(document), "md": devices_markdown(document)}
    files["json"] = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_together(table.folder, {f"report.{end}": each for end, each in files.items()})


def _row(times: DeviceTimes, samples: int) -> DeviceRow:
    """`samples`: of all epochs of a run."""
    from deploykit.measure.statistics import throughput

    row = DeviceRow(times.device, times.precision, times.batch, absent=times.absent)
    if times.absent is not None:
        return row
    steps_s = times.step_s or (0.0,) * len(times.loader_s)
    both = [sum(each) for each in zip(steps_s, times.loader_s, strict=True)]
    count = len(both)
    rate = throughput([times.batch] * count, both)
    one = [1] * count
    return replace(
        row,
        threads=times.threads,
        samples_per_s=rate,
        step_ms=_inverse(throughput(one, times.step_s), 1e3) if times.step_s else None,
        loader_ms=_inverse(throughput(one, times.loader_s), 1e3),
        run_s=_inverse(rate, samples),
        steps=count,
        load_1_min=times.load_1_min,
    )


def _inverse(rate: Interval, over: float) -> Interval:
    """How long `over` takes at a rate."""
    ends = (rate.value, rate.high, rate.low)
    return Interval(*(over / each if each > 0 else float("inf") for each in ends))
