"""Choose the processor that augments, by timing both, and the threads that make batches."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from deploykit.core.errors import OutOfMemory
from deploykit.core.machine import natural_number, usable_cores
from deploykit.core.recipe import Recipe, Split
from deploykit.training.augment import make_augmentation
from deploykit.training.batches import Batches
from deploykit.training.distributed import Processes
from deploykit.training.options import MOST_WORKERS, Settings

CPU = torch.device("cpu")
LIMITING = 0.1  # the share of the time from which on the loader is called the limit


@dataclass(frozen=True)
class Loader:
    """`batches`, and for the user in `note` where augmentation runs; "" without any.

    `cpu_ms`, `gpu_ms`: a batch made there, where both were timed.
    """

    batches: Batches
    note: str = ""
    cpu_ms: float | None = None
    gpu_ms: float | None = None

    def figures(self) -> dict[str, Any]:
        """For the manifest."""
        found: dict[str, Any] = {"workers": self.batches.workers}
        if self.batches.augmentation is not None:
            found["augment_on"] = self.batches.augmentation.device.type
        times = {"augment_cpu_ms": self.cpu_ms, "augment_gpu_ms": self.gpu_ms}
        return found | {name: round(ms, 4) for name, ms in times.items() if ms is not None}

    def conclude(self, share: float) -> list[str]:
        """What a run waited for: `share` of the time went by until its batches were there."""
        if share < LIMITING:
            waited = f"the steps waited for data in {share:.1%} of the time"
        else:
            more = "more " if self.batches.workers else ""
            cure = f"{more}`workers` make batches ahead of the steps where cores are free"
            waited = f"the data loader was the limit: {share:.0%} of the time; {cure}"
        return [each for each in (self.note, waited) if each]


def make_loader(recipe: Recipe, train: Split, settings: Settings, group: Processes) -> Loader:
    """The batches of a run. Raises BadInput where the recipe has nothing to augment."""
    options, device, size = settings.options, settings.device, settings.batch_size

    def make(where: torch.device | None) -> Batches:
        augmentation, workers = None, options.workers or 0
        if where is not None:
            augmentation = make_augmentation(recipe, train, where)
            if where == CPU and options.workers is None:
                workers = max(1, free_cores(device))
        return Batches(train, device, size, options.seed, group, augmentation, workers)

    if not settings.augment:
        return Loader(make(None))
    if device.type == "cpu":
        return Loader(make(CPU), "augmentation runs on the CPU, as the training does")
    if options.augment_on != "auto":
        where = CPU if options.augment_on == "cpu" else device
        return Loader(make(where), f"augmentation runs on {where.type}, as `augment_on` says")
    return _faster(make(CPU), make(device))


def _faster(on_cpu: Batches, on_gpu: Batches) -> Loader:
    """The one that makes batches in less time. Not yet run on a GPU."""
    cpu_ms = time_batches(on_cpu)
    try:
        gpu_ms = time_batches(on_gpu)
    except OutOfMemory as exc:
        return Loader(on_cpu, f"augmentation runs on the CPU: {exc.message}", cpu_ms)
    batches, where, ms, other_ms = on_cpu, "CPU", cpu_ms, gpu_ms
    if gpu_ms < cpu_ms:
        batches, where, ms, other_ms = on_gpu, "GPU", gpu_ms, cpu_ms
    other = f"{other_ms:.3g} ms on the {'CPU' if where == 'GPU' else 'GPU'}"
    note = f"augmentation runs on the {where}: {ms:.3g} ms per batch against {other}"
    return Loader(batches, note, cpu_ms, gpu_ms)


def time_batches(batches: Batches) -> float:
    """Milliseconds per batch, after a warm-up; the order of later batches is as before."""
    state, seconds = batches.shuffle.get_state(), 0.0
    for _ in range(2):
        started = time.perf_counter()
        made = sum(1 for _ in islice(batches, 3 * max(1, batches.workers)))
        if batches.device.type == "cuda":
            torch.cuda.synchronize(batches.device)
        seconds = (time.perf_counter() - started) / made
    batches.shuffle.set_state(state)
    return seconds * 1e3


def free_cores(device: torch.device) -> int:
    """Cores that no step computes on, of those that each process of this machine can have."""
    processes = natural_number(os.environ.get("LOCAL_WORLD_SIZE", "")) or 1
    used = torch.get_num_threads() if device.type == "cpu" else 1
    return min(MOST_WORKERS, max(0, usable_cores() // processes - used))
