"""The articles' table for this machine: what a training step costs on each device and precision.

Loader and compute are timed apart: batches are made first, then the same ones are trained on. Times
are medians over steps, after a warm-up; a GPU's work has ended when its clock stops.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deploykit.core.errors import OutOfMemory
from deploykit.core.json_value import Record
from deploykit.core.recipe import Recipe, Splits
from deploykit.training.batches import Batches
from deploykit.training.distributed import Processes
from deploykit.training.loop import Run, use_tf32
from deploykit.training.options import Progress, TrainingOptions, settle
from deploykit.training.recipes import build_from_recipe

_STEPS = 5
_LIMIT_S = 20.0  # of the timed steps of one row: a slow one gets fewer
PRECISIONS = ("float32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class DeviceRow(Record):
    """One device, precision and batch size; `absent`: why it was not measured.

    `step_ms`, `loader_ms`: medians per batch. `samples_per_s`: with both, one after the other.
    `epoch_s`: what an epoch of the recipe's data takes at that rate. `load_1_min`: the machine's
    load average when it was measured, on `threads` threads of this process.
    """

    device: str
    precision: str
    batch: int
    threads: int | None = None
    step_ms: float | None = None
    loader_ms: float | None = None
    samples_per_s: float | None = None
    epoch_s: float | None = None
    steps: int = 0
    load_1_min: float | None = None
    absent: str | None = None


def measure_devices(
    recipe: Recipe,
    splits: Splits,
    batches: Sequence[int],
    on_progress: Progress | None = None,
) -> list[DeviceRow]:
    """A row for each device, precision and batch size. Raises BadInput."""
    recipe = recipe.sized_for(splits.build_with)
    nothing = replace(splits.calibration, labels=splits.calibration.labels[:0])
    splits = replace(splits, calibration=nothing)
    wanted = list(_setups(batches))
    rows = []
    for number, (device, precision, batch) in enumerate(wanted):
        if on_progress is not None:
            on_progress(f"{device} {precision}, batch {batch}", number / len(wanted))
        absent = _lacks(device, precision)
        if absent is not None:
            rows.append(DeviceRow(device, precision, batch, absent=absent))
            continue
        try:
            rows.append(_row(recipe, splits, device, precision, batch))
        except OutOfMemory as exc:
            rows.append(DeviceRow(device, precision, batch, absent=exc.message))
    return rows


def _setups(batches: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    for device in ("cpu", "cuda"):
        for precision in PRECISIONS if device == "cuda" else ("float32", "bf16"):
            for batch in batches:
                yield device, precision, batch


def _lacks(device: str, precision: str) -> str | None:
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return "no GPU here"
    if precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        return "this GPU has no TF32"
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU has no bfloat16"
    return None


def _row(recipe: Recipe, splits: Splits, device: str, precision: str, batch: int) -> DeviceRow:
    options = TrainingOptions(
        device=device,
        epochs=1,
        batch_size=batch,
        amp=precision in ("bf16", "fp16"),
        amp_dtype=precision if precision in ("bf16", "fp16") else "auto",
        tf32=precision != "float32",
    )
    settings = settle(recipe, options)
    torch.manual_seed(0)
    run = Run(recipe, splits, settings, build_from_recipe(recipe), "", Processes())
    run.module.train()
    loader = _endless(run.batches)
    first = next(loader)

    def wait() -> None:
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)

    with use_tf32(settings.tf32):
        step_s = _median(lambda: run.stepper(first[0], first[1]), wait)
    loader_s = _median(lambda: next(loader), wait)
    rate = len(first[1]) / (step_s[0] + loader_s[0])
    samples = len(splits.train.labels)
    return DeviceRow(
        device=device if device == "cpu" else torch.cuda.get_device_name(),
        precision=precision,
        batch=len(first[1]),
        threads=torch.get_num_threads(),
        step_ms=round(step_s[0] * 1e3, 4),
        loader_ms=round(loader_s[0] * 1e3, 4),
        samples_per_s=round(rate, 1),
        epoch_s=round(samples / rate, 4),
        steps=step_s[1],
        load_1_min=round(os.getloadavg()[0], 2),
    )


def _endless(batches: Batches) -> Iterator[Any]:
    """Batches of the full size only, without end; all there is where the data are fewer."""
    while True:
        for inputs, labels, share in batches:
            if len(labels) == min(batches.batch_size, len(batches.labels)):
                yield inputs, labels, share


def _median(run: Callable[[], object], wait: Callable[[], None]) -> tuple[float, int]:
    """The median of some calls after a warm-up, and how many they were."""
    run()
    wait()
    times: list[float] = []
    while len(times) < _STEPS and (not times or sum(times) < _LIMIT_S):
        started = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times), len(times)


def find_crossover(rows: Sequence[DeviceRow]) -> dict[str, Any] | None:
    """The smallest batch from which on the GPU's float32 is faster; None without a GPU.

    Within the batches that were measured: `batch` is None where the CPU wins at each of them.
    """
    cpu, gpu = (
        {
            each.batch: each.samples_per_s
            for each in rows
            if each.precision == "float32" and each.samples_per_s and (each.device == "cpu") is here
        }
        for here in (True, False)
    )
    common = sorted(set(cpu) & set(gpu))
    if not common:
        return None
    lost = [batch for batch in common if gpu[batch] <= cpu[batch]]
    won = [batch for batch in common if not lost or batch > lost[-1]]
    return {"batch": won[0] if won else None, "measured": common}
