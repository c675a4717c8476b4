"""What a training step and its batches cost on each device, in each precision that it has."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deploykit.core.errors import OutOfMemory, Unsupported
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.statistics_basic import Interval
from deploykit.training.batches import check_labels
from deploykit.training.distributed import Processes
from deploykit.training.loader import make_loader, time_batches
from deploykit.training.loop import Run, use_tf32
from deploykit.training.options import Progress, TrainingOptions, settle
from deploykit.training.recipes import build_from_recipe

_FEWEST, _MOST = 3, 20  # steps of a row
_LIMIT_S = 10.0  # of the timed steps of a row: a slow one gets fewer
_ROUNDS = 8  # of batches that are augmented
AUGMENTED = "augmented batches"  # in place of a precision
PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("float32", "bf16"),
    "cuda": ("float32", "tf32", "bf16", "fp16"),
}
NO_GPU = "no NVIDIA GPU on this machine"
# what the articles claim, and what they measured for it
_PEAK = {"what": "peak arithmetic", "cpu": "–", "gpu": "–", "times": "–"}
ARTICLES: tuple[Mapping[str, str], ...] = (
    {
        "what": "the article: 20 epochs of 2,000 images, batch 150",
        "cpu": "340",
        "gpu": "13.04",
        "times": "26 by its totals",
    }
    | {
        "claim": "28 times faster",
        "measured": "TensorFlow on a Ryzen 5 5600X and an RTX 3070, 26 times by its totals, more "
        "than 33 by its times per batch; build, threads and precision are not given",
    },
    _PEAK
    | {"claim": "12 times the throughput (V100)", "measured": "nothing: FP16 in Tensor Cores"},
    _PEAK
    | {"claim": "20 times without code change (A100)", "measured": "nothing: TF32 against FP32"},
)


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds of each step and of each batch's making, in turns; `absent`: why there are none.

    Of augmentation there are no steps, and `threads` are those that make batches.
    """

    device: str
    precision: str
    batch: int
    threads: int | None = None
    step_s: tuple[float, ...] = ()
    loader_s: tuple[float, ...] = ()
    load_1_min: float | None = None
    absent: str | None = None


def time_devices(
    recipe: Recipe,
    splits: Splits,
    batches: Sequence[int],
    on_progress: Progress | None = None,
    *,
    augment: bool | None = None,
    compile: bool = False,  # noqa: A002 - torch's own name for it
) -> list[DeviceTimes]:
    """A row for each device, precision and batch size. Raises BadInput."""
    recipe = recipe.sized_for(splits.build_with)
    check_labels(recipe, splits)
    splits = replace(splits, calibration=_first(splits.calibration, 0))
    wanted = [
        (device, precision, compiled, batch)
        for device, precisions in PRECISIONS.items()
        for precision in precisions
        for compiled in ((False, True) if compile else (False,))
        for batch in batches
    ]
    rows = []
    for number, (device, precision, compiled, batch) in enumerate(wanted):
        name = f"{precision} compiled" if compiled else precision
        if on_progress is not None:
            on_progress(f"{device} {name}, batch {batch}", number / len(wanted))
        row = DeviceTimes(device, name, batch, absent=_lacks(device, precision))
        if row.absent is None:
            options = TrainingOptions(
                device=device,
                epochs=1,
                batch_size=batch,
                amp=precision in ("bf16", "fp16"),
                amp_dtype=precision if precision in ("bf16", "fp16") else "auto",
                tf32=precision != "float32",
                augment=augment,
                compile=compiled,
            )
            row = _time_row(recipe, splits, options, row)
        rows.append(row)
    return rows


def time_augmentation(
    recipe: Recipe, splits: Splits, batches: Sequence[int], on_progress: Progress | None = None
) -> list[DeviceTimes]:
    """A row for each batch size and processor that may augment; none without `recipe.augment`.

    From the images in memory until the augmented batch is where the steps run.
    """
    if recipe.augment is None or recipe.backbone is not None:
        return []
    trains_on, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    for batch, device in itertools.product(batches, PRECISIONS):
        if on_progress is not None:
            on_progress(f"{device} {AUGMENTED}, batch {batch}", 1.0)
        row = DeviceTimes(device, AUGMENTED, batch, absent=_lacks(device, AUGMENTED))
        if row.absent is None:
            options = TrainingOptions(
                device=trains_on, batch_size=batch, augment=True, augment_on=device
            )
            row = _time_making(recipe, splits.train, options, row)
        rows.append(row)
    return rows


def _time_making(
    recipe: Recipe, train: Split, options: TrainingOptions, row: DeviceTimes
) -> DeviceTimes:
    try:
        made = make_loader(recipe, train, settle(recipe, options), Processes()).batches
        seconds: list[float] = []
        while len(seconds) < _ROUNDS and (len(seconds) < _FEWEST or sum(seconds) < _LIMIT_S / 4):
            seconds.append(time_batches(made) / 1e3)
    except OutOfMemory as exc:
        return replace(row, absent=exc.message)
    batch = min(row.batch, len(train.labels))
    return replace(row, batch=batch, threads=made.workers, loader_s=tuple(seconds))


def _first(split: Split, count: int) -> Split:
    return Split({key: each[:count] for key, each in split.inputs.items()}, split.labels[:count])


def _lacks(device: str, precision: str) -> str | None:
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return NO_GPU
    if precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        return "this GPU has no TF32"
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU has no bfloat16"
    return None


def _time_row(
    recipe: Recipe, splits: Splits, options: TrainingOptions, row: DeviceTimes
) -> DeviceTimes:
    try:
        settings = settle(recipe, options)
        torch.manual_seed(0)
        splits = replace(splits, train=_first(splits.train, row.batch))
        run = Run(recipe, splits, settings, build_from_recipe(recipe), "", Processes())
        run.module.train()
        with use_tf32(settings.tf32):
            step_s, loader_s, batch = _time_steps(run)
        if run.stepper.parts > 1:
            return replace(row, absent=f"too little memory: fits in {run.stepper.parts} parts only")
    except (OutOfMemory, Unsupported) as exc:
        return replace(row, absent=exc.message)
    return replace(
        row,
        batch=batch,
        threads=torch.get_num_threads(),
        step_s=tuple(step_s),
        loader_s=tuple(loader_s),
        load_1_min=round(os.getloadavg()[0], 2),
    )


def _time_steps(run: Run) -> tuple[list[float], list[float], int]:
    """Seconds of steps and of their batches, after a warm-up, and the size of a batch."""
    on_gpu, steps_s, loaders_s = run.settings.device.type == "cuda", list[float](), list[float]()
    loader, batch = itertools.chain.from_iterable(itertools.repeat(run.batches)), 0
    while len(steps_s) <= _MOST and (len(steps_s) <= _FEWEST or sum(steps_s[1:]) < _LIMIT_S):
        times = [time.perf_counter()]
        inputs, labels, _ = next(loader)
        for step in (None, run.stepper):
            if step is not None:
                step(inputs, labels)
            if on_gpu:
                torch.cuda.synchronize(run.settings.device)
            times.append(time.perf_counter())
        loaders_s.append(times[1] - times[0])
        steps_s.append(times[2] - times[1])
        batch = len(labels)
    return steps_s[1:], loaders_s[1:], batch


def find_crossovers(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Of each precision of the GPU: the smallest batch from which on it is faster than the CPU.

    float32 is compared with the CPU's float32, anything else with the CPU's fastest. Faster: the
    intervals do not touch. Within the batches that were `measured`; `batch` is None where the CPU
    is not slower at the largest. `rows` have device, precision, batch and `samples_per_s`.
    """
    rates: dict[tuple[str, str], dict[int, Interval]] = {}
    for row in rows:
        if row.samples_per_s is not None:
            rates.setdefault((row.device, row.precision), {})[row.batch] = row.samples_per_s
    found = []
    for (device, precision), gpu in rates.items():
        if device == "cpu":
            continue
        cpus = [
            each
            for (where, kind), each in rates.items()
            if where == "cpu" and (kind == "float32" or precision != "float32")
        ]
        common = sorted(batch for batch in gpu if any(batch in cpu for cpu in cpus))
        lost = [
            batch
            for batch in common
            if gpu[batch].low <= max(cpu[batch].high for cpu in cpus if batch in cpu)
        ]
        won = [batch for batch in common if not lost or batch > lost[-1]]
        entry = {"precision": precision, "batch": won[0] if won else None, "measured": common}
        found.append(entry)
    return found


def conclude(table: Any) -> list[str]:
    """What a table comes to: a headline, then the other sentences."""
    rows = [row for row in table.rows if row.samples_per_s is not None]
    like = {r.device: r for r in rows if (r.precision, r.batch) == ("float32", table.batch)}
    best = {r.device: r for r in sorted(rows, key=lambda row: row.samples_per_s.value)}
    work = f"{table.epochs} epochs of {table.samples:,} samples take"
    absent = next((row.absent for row in reversed(table.rows) if row.absent), "")
    if len(like) == 2:
        cpu, gpu = like["cpu"], like["cuda"]
        times = gpu.samples_per_s.value / cpu.samples_per_s.value
        first = (
            f"In float32 at batch {table.batch} the GPU trains {table.recipe} {times:.3g} times "
        )
        first += f"as fast as the CPU ({cpu.threads} threads): {work} {gpu.run_s.value:.3g} s "
        found = [first + f"against {cpu.run_s.value:.3g} s."]
    elif "cpu" in best:
        cpu = best["cpu"]
        first = f"The CPU ({cpu.threads} threads) trains {table.recipe} at most at "
        first += (
            f"{cpu.samples_per_s.value:,.4g} samples/s, in {cpu.precision} at batch {cpu.batch}: "
        )
        found = [first + f"{work} {cpu.run_s.value:.3g} s. GPU: not measured, {absent}."]
    else:
        return [f"Nothing could be measured: {absent}."]
    for each in table.crossovers:
        cpu_kind = "the CPU's float32" if each["precision"] == "float32" else "the CPU's fastest"
        at = f"from batch {each['batch']} on" if each["batch"] else "not at the largest batch"
        batches = ", ".join(map(str, each["measured"]))
        found.append(f"GPU {each['precision']} is ahead of {cpu_kind} {at} (measured: {batches}).")
    return found + conclude_augmentation(table)


def conclude_augmentation(table: Any) -> list[str]:
    """Where augmentation takes less time, in a sentence; none where nothing was augmented."""
    for each in find_crossovers(table.augmentation):
        where = f"from batch {each['batch']} on" if each["batch"] else "at no batch size"
        batches = ", ".join(map(str, each["measured"]))
        return [
            f"The GPU augments batches in less time than the CPU {where} (measured: {batches})."
        ]
    absent = next((row.absent for row in table.augmentation if row.absent), "")
    for row in table.augmentation:
        if row.batch == table.batch and row.loader_ms is not None:
            first = f"The CPU augments a batch of {row.batch} in {row.loader_ms.value:.3g} ms"
            return [f"{first}. GPU: not measured, {absent}."]
    return []
