"""Batches of a split on the device, in a random order that the seed decides."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from deploykit.core.errors import BadInput, OutOfMemory, did_you_mean, users_code
from deploykit.core.extras import require
from deploykit.core.json_value import Record
from deploykit.core.machine import memory_errors, natural_number, usable_cores
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.training.distributed import Processes
from deploykit.training.options import Settings

Part = TypeVar("Part")
Made = TypeVar("Made")


def prefetch(make: Callable[[Part], Made], parts: Sequence[Part], workers: int) -> Iterator[Made]:
    """Yield `make` of each part in order; `workers` threads, a core each, make as many ahead."""
    workers = min(workers, len(parts))
    if workers < 1:
        yield from map(make, parts)
        return
    threads, started = torch.get_num_threads(), threading.Barrier(workers + 1)

    def begin() -> None:
        torch.set_num_threads(1)  # affects this thread, and MKL in all threads
        started.wait()

    pool = ThreadPoolExecutor(workers, "batches", begin)
    try:
        pending: deque[Future[Made]] = deque(pool.submit(make, each) for each in parts[:workers])
        started.wait()
        torch.set_num_threads(threads)
        for number in range(len(parts)):
            made = pending.popleft().result()
            if number + workers < len(parts):
                pending.append(pool.submit(make, parts[number + workers]))
            yield made
    finally:
        pool.shutdown(cancel_futures=True)


class WaitClock:
    """Measures how long `device` was idle because its next batch was not there.

    On the CPU this is the time inside of `with`. A GPU still computes then: its own clock takes the
    time from the end of a step to the arrival of the next batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._seconds = device.type == "cuda", 0.0
        self._times: list[Any] = []  # the start and the end of each wait

    def __enter__(self, *_: object) -> None:
        if self._on_gpu:
            make_event: Any = torch.cuda.Event
            self._times.append(make_event(enable_timing=True))
            self._times[-1].record()
        else:
            self._times.append(time.perf_counter())

    __exit__ = __enter__

    @property
    def seconds(self) -> float:
        """Return the total so far; a GPU must have come to the last batch first."""
        pairs, self._times = zip(self._times[::2], self._times[1::2], strict=True), []
        for start, end in pairs:
            if self._on_gpu:
                end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
        return self._seconds


# Augmentation is written once, in torch, for bytes and floats, on the CPU and on a GPU. A pixel
# comes from operations that each round once, and the only sum is one of integers, so that a sample
# is the same to the last bit in any batch, on any number of threads and on either processor. Labels
# stay as they are.

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
DRAWS = 8  # random numbers that a sample takes
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}  # values at once: in a core's cache, in little memory
_FIXED = 1 << 16  # steps of a grey value whose mean is taken


@dataclass(frozen=True)
class Augment(Record):
    """The changes that `augment` may make to an image, in this order, each drawn per sample.

    `crop`: pad this many pixels on each side, then cut out the old size anywhere. `flip`: the
    share of images that are mirrored left to right. `rotation_degrees`: turn by up to this angle
    either way, about the middle, bilinear. Pixels from outside are 0. `brightness`,
    `contrast`, `saturation`: multiply by 1 - x to 1 + x, as torchvision's ColorJitter does, for
    bytes and for floats in 0..1; saturation only where there are three channels. Raises BadInput.
    """

    crop: int = 0
    flip: float = 0.0
    rotation_degrees: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        limits = {"crop": 1 << 15, "rotation_degrees": 180}
        for each in fields(self):
            value, most = getattr(self, each.name), limits.get(each.name, 1)
            number = isinstance(value, int if each.name == "crop" else (int, float))
            if isinstance(value, bool) or not number or not 0 <= value <= most:
                kind = "an integer" if each.name == "crop" else f"a number up to {most}"
                raise BadInput(f"augment: `{each.name}` must be {kind}, 0 or more, got {value!r}")

    @property
    def colours(self) -> bool:
        return bool(self.brightness or self.contrast or self.saturation)

    def __call__(self, images: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Return images like `images`: uint8 (N, H, W, C), or float32 (N, C, H, W).

        `uniform`: (N, 8) on the CPU, numbers in 0..1 that are all that is random.
        """
        from_bytes = images.dtype == torch.uint8
        images_NCHW = images.permute(0, 3, 1, 2) if from_bytes else images
        n, c, h, w = images_NCHW.shape
        if self.crop and self.crop >= min(h, w):
            raise BadInput(f"augment: `crop` is {self.crop}, the images are {h}x{w} pixels")
        numbers = self._numbers(uniform, h, w).to(images.device)
        found = torch.empty((n, c, h, w), dtype=images.dtype, device=images.device)
        size = max(1, _CHUNK[images.device.type] // max(1, c * h * w))
        for start in range(0, n, size):
            part = slice(start, start + size)
            found[part] = self._change(images_NCHW[part], numbers[part], 255.0 if from_bytes else 1)
        return found.permute(0, 2, 3, 1) if from_bytes else found

    def _numbers(self, uniform: torch.Tensor, h: int, w: int) -> torch.Tensor:
        """Return (N, 9): x and y of a pixel's source as a * x + b * y + c, then the factors.

        The source is in an image with a border of 1. In float64, and each angle by itself: the
        sines of a vector need not be those of single numbers.
        """
        rows = []
        for u in uniform.tolist():
            angle = math.radians(self.rotation_degrees) * (2 * u[0] - 1)
            cos, sin, mirror = math.cos(angle), math.sin(angle), -1.0 if u[1] < self.flip else 1.0
            dx, dy = (math.floor(each * (2 * self.crop + 1)) - self.crop for each in u[2:4])
            x, y = (w - 1) / 2, (h - 1) / 2
            across = (mirror * cos, mirror * sin, 1 + x + dx - mirror * (cos * x + sin * y))
            down = (-sin, cos, 1 + y + dy + sin * x - cos * y)
            jitter = (self.brightness, self.contrast, self.saturation)
            factors = (1 + part * (2 * each - 1) for part, each in zip(jitter, u[4:7], strict=True))
            rows.append((*across, *down, *factors))
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 9).float()

    def _change(self, images_NCHW: torch.Tensor, numbers: torch.Tensor, top: float) -> torch.Tensor:
        found = images_NCHW
        if self.crop or self.flip or self.rotation_degrees:
            found = _move(found, numbers[:, :6], between=self.rotation_degrees > 0)
        if self.colours:
            found = self._colour(found.float(), numbers[:, 6:, None, None, None], top)
        rounds = images_NCHW.dtype == torch.uint8 and found.dtype != torch.uint8
        return found.round() if rounds else found

    def _colour(self, images_NCHW: torch.Tensor, factors: torch.Tensor, top: float) -> torch.Tensor:
        bright, contrast, saturation = factors.unbind(1)
        found = images_NCHW
        if self.brightness:
            found = (found * bright).clamp_(0, top)
        if self.contrast:
            steps = (_grey(found) * (_FIXED / top)).round().to(torch.int64).sum((1, 2, 3))
            means = (steps * (top / _FIXED / max(1, found[0, 0].numel()))).float()
            shift = means[:, None, None, None] * (1 - contrast)
            found = (found * contrast).add_(shift).clamp_(0, top)
        if self.saturation and found.shape[1] == 3:
            grey = _grey(found).mul_(1 - saturation)
            found = (found * saturation).add_(grey).clamp_(0, top)
        return found


def _grey(images_NCHW: torch.Tensor) -> torch.Tensor:
    """Return (N, 1, H, W): ITU-R BT.601 as in torchvision; the mean unless 3 channels."""
    channels = images_NCHW.unbind(1)
    shares = (0.299, 0.587, 0.114) if len(channels) == 3 else (1 / len(channels),) * len(channels)
    found: torch.Tensor = channels[0] * shares[0]
    for channel, share in zip(channels[1:], shares[1:], strict=True):
        found.add_(channel * share)
    return found[:, None]


def _move(images_NCHW: torch.Tensor, numbers: torch.Tensor, *, between: bool) -> torch.Tensor:
    """Return each pixel from its source, outside of which all is 0; `between` pixels in float32."""
    n, c, h, w = images_NCHW.shape
    device = images_NCHW.device
    padded = torch.zeros((c, n, h + 3, w + 3), dtype=images_NCHW.dtype, device=device)
    padded[:, :, 1 : h + 1, 1 : w + 1] = images_NCHW.transpose(0, 1)
    flat = padded.view(c, -1)
    columns, rows = (torch.arange(each, device=device, dtype=torch.float32) for each in (w, h))
    a, b, first_x, d, e, first_y = numbers[:, :, None, None].unbind(1)
    x = (a * columns + (b * rows[:, None] + first_x)).clamp_(0, w + 1)
    y = (d * columns + (e * rows[:, None] + first_y)).clamp_(0, h + 1)
    x0, y0 = x.floor(), y.floor()
    first = torch.arange(n, device=device, dtype=torch.int32)[:, None, None] * padded[0, 0].numel()
    index = (y0.to(torch.int32) * (w + 3)).add_(x0.to(torch.int32)).add_(first).view(-1)

    def pixels(step: int) -> torch.Tensor:
        found = torch.stack([plane.index_select(0, index + step) for plane in flat])
        return found.view(c, n, h, w)

    if not between:
        return pixels(0).transpose(0, 1)
    across, down = x - x0, y - y0
    upper, lower = (
        (pixels(row) * (1 - across)).add_(pixels(row + 1) * across) for row in (0, w + 3)
    )
    return (upper * (1 - down)).add_(lower * down).transpose(0, 1)


@dataclass(frozen=True)
class Augmentation:
    """`change(images, uniform)` changes the input number `place`, on the processor `device`."""

    change: Change
    place: int
    device: torch.device

    def describe(self) -> str:
        """Return what it does, the same in each process."""
        if isinstance(self.change, Augment):
            return repr(self.change)
        return str(getattr(self.change, "__qualname__", type(self.change).__name__))

    def __call__(self, images: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Raises OutOfMemory, BadInput where the recipe's function fails."""
        where = f"{self.device}: the augmentation of {len(images)} images"
        with users_code("the recipe's augment failed"), memory_errors(where):
            found = self.change(images, uniform)
        kinds = [
            (each.dtype, tuple(each.shape)) if isinstance(each, torch.Tensor) else type(each)
            for each in (images, found)
        ]
        if kinds[0] != kinds[1]:
            raise BadInput(f"the recipe's augment gave {kinds[1]} for images of {kinds[0]}")
        return found


def make_augmentation(recipe: Recipe, split: Split, device: torch.device) -> Augmentation:
    """Augment the only input with four axes. Raises BadInput where there is none."""
    change = recipe.augment
    if change is None:
        raise BadInput(
            "`augment`: this recipe declares no augmentation",
            hint='its file says what to do: Recipe(..., augment={"crop": 4, "flip": 0.5})',
        )
    if isinstance(change, Mapping):
        names, options = [each.name for each in fields(Augment)], dict[str, Any](change)
        if odd := [name for name in options if name not in names]:
            hint = did_you_mean(str(odd[0]), names, f"one of: {', '.join(names)}")
            raise BadInput(f"augment: unknown option '{odd[0]}'", hint=hint)
        change = Augment(**options)
    places = [i for i, each in enumerate(split.inputs.values()) if np.ndim(each) == 4]
    if len(places) != 1:
        raise BadInput(f"`augment` needs one input of images, with four axes; it has {len(places)}")
    array = np.asarray(list(split.inputs.values())[places[0]])
    if array.dtype not in (np.uint8, np.float32):
        raise BadInput(f"`augment` takes images in uint8 or float32, not in {array.dtype}")
    if isinstance(change, Augment) and change.colours and array.dtype == np.float32 and array.size:
        low, high = array.min(), array.max()
        if not 0 <= low <= high <= 1:
            raise BadInput(
                f"augment: to change colours, floats must be in 0..1; these go from {low:.4g} to "
                f"{high:.4g}",
                hint="leave brightness, contrast and saturation out, or scale the data",
            )
    return Augmentation(change, places[0], device)


CPU = torch.device("cpu")
LIMITING = 0.5  # the share of the time above which the loader is called the limit
# inputs in the recipe's order, labels, and the share of the whole batch's samples that they are
Batch = tuple[list[torch.Tensor], torch.Tensor, float]


class Batches:
    """The batches of a run, iterated once per epoch. `waited`: how long the training waited.

    Each of the processes of `group` gets its part of every batch; one that would get none computes
    on a sample whose share is 0, as all take part in each step. `augmentation`: the random numbers
    of a sample are the same whoever makes its batch. `workers`: threads that make the next ones,
    on each free core where the CPU augments.
    `note`: where augmentation runs, or that batches are copied; `figures`: for the manifest.
    """

    def __init__(
        self,
        split: Split,
        device: torch.device,
        batch_size: int,
        seed: int,
        group: Processes | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.group, self.note = group or Processes(), ""
        there = augmentation.device if augmentation else device
        if there.type == "cuda" and augmentation is None:  # half of what is free, or they stay out
            needed = split.labels.nbytes + sum(each.nbytes for each in split.inputs.values())
            if needed > torch.cuda.mem_get_info(there)[0] / 2:
                there = CPU
                self.note = "the data take over half of the GPU's memory: each batch is copied"
        self.inputs, self.labels = tensors(split, there)
        self.device, self.batch_size = device, min(batch_size, len(split.labels))
        self.augmentation = augmentation
        on_cpu = augmentation is not None and augmentation.device == CPU
        self.workers = max(1, free_cores(device)) if on_cpu else 0
        self.figures: dict[str, Any] = {"workers": self.workers, "augment": None}
        if augmentation is not None:
            self.figures |= {"augment": augmentation.describe(), "augment_on": there.type}
        self.shuffle = torch.Generator().manual_seed(seed)
        self.waited = WaitClock(device)

    @property
    def copied(self) -> bool:
        return self.labels.device.type == "cpu" and self.device.type != "cpu"

    def conclude(self, share: float) -> list[str]:
        """Say what a run waited for: it spent `share` of the time waiting for its batches."""
        waited = f"the steps waited for data in {share:.1%} of the time"
        if share > LIMITING:
            cure = "; more cores would make batches ahead" if self.workers else ""
            waited = f"the data loader was the limit: {waited}{cure}"
        return [each for each in (self.note, waited) if each]

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        samples = len(self.labels)
        order = torch.randperm(samples, generator=self.shuffle)
        draws = None
        if self.augmentation is not None:
            draws = torch.rand((samples, DRAWS), generator=self.shuffle)
        parts = torch.split(order, self.batch_size)
        batches = prefetch(lambda rows: self._make(rows, order[:1], draws), parts, self.workers)
        for _ in parts:
            with self.waited:
                inputs, labels, share = next(batches)
                if self.copied:
                    inputs = [each.to(self.device, non_blocking=True) for each in inputs]
                    labels = labels.to(self.device, non_blocking=True)
            yield inputs, labels, share

    def _make(self, rows: torch.Tensor, first: torch.Tensor, draws: torch.Tensor | None) -> Batch:
        """Make this process's part of a batch, on the device that holds the data."""
        whole = len(rows)
        if self.group.size > 1:
            rows = rows.tensor_split(self.group.size)[self.group.rank]
        share = len(rows) / whole
        rows = rows if len(rows) else first
        there = rows.to(self.labels.device)
        inputs, labels = [each[there] for each in self.inputs], self.labels[there]
        if self.augmentation is not None and draws is not None:
            place = self.augmentation.place
            inputs[place] = self.augmentation(inputs[place], draws[rows])
        if self.copied:
            inputs, labels = [each.pin_memory() for each in inputs], labels.pin_memory()
        return inputs, labels, share


def tensors(split: Split, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the inputs and labels of a split on the device. Raises OutOfMemory."""
    with memory_errors(f"{device}: the data"):
        *inputs, labels = (
            torch.from_numpy(array if array.flags.writeable else np.array(array)).to(device)
            for array in (*split.inputs.values(), split.labels)
        )
    return inputs, labels


def choose_batches(recipe: Recipe, train: Split, settings: Settings, group: Processes) -> Batches:
    """Make the batches of a run, augmented on the faster processor. Raises BadInput."""

    def make(augment_on: torch.device | None = None) -> Batches:
        augmentation = make_augmentation(recipe, train, augment_on) if augment_on else None
        seed = settings.options.seed
        return Batches(train, settings.device, settings.batch_size, seed, group, augmentation)

    if not settings.augment:
        return make()
    on_cpu = make(CPU)
    if settings.device.type == "cpu":
        on_cpu.note = "augmentation runs on the CPU, as the training does"
        return on_cpu
    return faster(on_cpu, lambda: make(settings.device))


def faster(on_cpu: Batches, make_on_gpu: Callable[[], Batches]) -> Batches:
    """Return the one that makes batches in less time."""
    times_ms = {"cpu": time_batches(on_cpu)}
    try:
        on_gpu = make_on_gpu()
        times_ms["gpu"] = time_batches(on_gpu)
    except OutOfMemory as exc:
        on_cpu.note = f"augmentation runs on the CPU: {exc.message}"
        return on_cpu
    found = on_gpu if times_ms["gpu"] < times_ms["cpu"] else on_cpu
    times = " against ".join(f"{ms:.3g} ms on the {on.upper()}" for on, ms in times_ms.items())
    found.note = (
        f"augmentation runs on the {'GPU' if found is on_gpu else 'CPU'}: {times} per batch"
    )
    found.figures |= {f"augment_{on}_ms": round(ms, 4) for on, ms in times_ms.items()}
    return found


def time_batches(batches: Batches) -> float:
    """Return milliseconds per batch, after a warm-up; the order of later batches is as before."""
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
    """Return the cores that steps leave free, of this process's share of the machine's."""
    processes = natural_number(os.environ.get("LOCAL_WORLD_SIZE", "")) or 1
    used = torch.get_num_threads() if device.type == "cpu" else 1
    return max(0, usable_cores() // processes - used)


def top1_per_sample(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Return 1.0 for each sample whose largest logit is the label, else 0.0."""
    right: np.ndarray = (outputs["logits"].argmax(1) == labels).astype(np.float64)
    return right


def enlarged_digits(side: int, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` of the 1,797 digits in an order that is the same on every machine.

    Pixels float32 (count, side, side) in 0..1, enlarged linearly from 8x8; labels int64 (count,).
    """
    digits = require("sklearn.datasets").load_digits()
    order = np.random.RandomState(0).permutation(len(digits.images))[:count]  # a stable stream
    small = (digits.images[order] / 16.0).astype(np.float32)  # the largest of scikit-learn's pixels
    before = small.shape[1]
    at = np.clip((np.arange(side) + 0.5) * before / side - 0.5, 0, before - 1)
    distances = np.abs(at[:, None] - np.arange(before))  # of the centres of pixels
    resize = np.maximum(0.0, 1.0 - distances).astype(np.float32)
    large = np.clip(resize @ small @ resize.T, 0.0, 1.0)
    return large, digits.target[order].astype(np.int64)


def digit_splits(side: int, train: int, calibration: int, test: int) -> Splits:
    """The digits as grey images uint8 (samples, side, side, 3), for a model of any classes."""
    pixels, labels = enlarged_digits(side, train + calibration + test)
    grey = np.round(pixels * 255).astype(np.uint8)[..., None]
    colour = np.repeat(grey, 3, axis=3)
    return replace(
        cut_splits(colour, labels, train, calibration),
        source=f"scikit-learn digits, 8x8 enlarged to {side}x{side}",
        classes=tuple(map(str, range(10))),
        build_with={"classes": 10},
    )


def cut_splits(images: np.ndarray, labels: np.ndarray, train: int, calibration: int) -> Splits:
    """Cut `train` samples, then `calibration` ones, and leave the others to test."""
    ends = (0, train, train + calibration, len(labels))
    first, second, last = (Split({"image": images[a:b]}, labels[a:b]) for a, b in pairwise(ends))
    return Splits(first, second, last, source="")
