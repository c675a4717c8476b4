"""Random changes of training images: crop, flip, rotation and colour.

Written once, in torch, for bytes and floats, on the CPU and on a GPU. A pixel comes from operations
that each round once, and the only sum is one of integers, so that a sample is the same to the last
bit in any batch, on any number of threads and on either processor. Labels stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from deploykit.core.errors import BadInput, DeploykitError, did_you_mean, first_line
from deploykit.core.json_value import Record
from deploykit.core.memory import does_not_fit, lacks_memory
from deploykit.core.recipe import Recipe, Split

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
DRAWS = 8  # random numbers that a sample takes
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}  # values at once: in a core's cache, in little memory
_GREY = (0.299, 0.587, 0.114)
_FIXED = 1 << 16  # steps of a grey value whose mean is taken


@dataclass(frozen=True)
class Augment(Record):
    """What a recipe's `augment` may do to an image, in this order, each drawn per sample.

    `crop`: pad this many pixels on each side, then cut out the old size anywhere. `flip`: the
    share of images that are mirrored left to right. `rotation_degrees`: turn by up to this angle
    either way, about the middle, bilinear. What comes in from outside is 0. `brightness`,
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
        """Images like `images`: uint8 (N, H, W, C), or float32 (N, C, H, W).

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
        """Of each sample: x and y of a pixel's source as a * x + b * y + c, then factors: (N, 9).

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
        found = images_NCHW * bright if self.brightness else images_NCHW
        if self.brightness:
            found.clamp_(0, top)
        if self.contrast:
            steps = (_grey(found) * (_FIXED / top)).round().to(torch.int64).sum((1, 2, 3))
            means = (steps * (top / _FIXED / max(1, found[0, 0].numel()))).float()
            found = (found * contrast).add_(means[:, None, None, None] * (1 - contrast))
            found.clamp_(0, top)
        if self.saturation and found.shape[1] == 3:
            grey = _grey(found).mul_(1 - saturation)
            found = (found * saturation).add_(grey).clamp_(0, top)
        return found


def _grey(images_NCHW: torch.Tensor) -> torch.Tensor:
    """Shape (N, 1, H, W): ITU-R BT.601 as in torchvision, of other than three channels the mean."""
    channels = images_NCHW.unbind(1)
    shares = _GREY if len(channels) == 3 else (1 / len(channels),) * len(channels)
    found: torch.Tensor = channels[0] * shares[0]
    for channel, share in zip(channels[1:], shares[1:], strict=True):
        found.add_(channel * share)
    return found[:, None]


def _move(images_NCHW: torch.Tensor, numbers: torch.Tensor, *, between: bool) -> torch.Tensor:
    """Each pixel from its source, outside of which all is 0; `between` pixels in float32."""
    n, c, h, w = images_NCHW.shape
    device = images_NCHW.device
    padded = torch.zeros((c, n, h + 3, w + 3), dtype=images_NCHW.dtype, device=device)
    padded[:, :, 1 : h + 1, 1 : w + 1] = images_NCHW.transpose(0, 1)
    flat = padded.view(c, -1)
    columns, rows = (torch.arange(each, device=device, dtype=torch.float32) for each in (w, h))
    factors = numbers[:, :, None, None].unbind(1)
    places = []
    for (a, b, start), most in zip((factors[:3], factors[3:]), (w, h), strict=True):
        place_NHW = a * columns + (b * rows[:, None] + start)
        places.append(place_NHW.clamp_(0, most + 1))
    (x, y), (x0, y0) = places, (each.floor() for each in places)
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


def read_augment(recipe: Recipe) -> Change | None:
    """A recipe's `augment`: a function of its own, or options of `Augment`. Raises BadInput."""
    declared = recipe.augment
    if declared is None or callable(declared):
        return declared
    names = [each.name for each in fields(Augment)]
    for name in declared:
        if name not in names:
            hint = did_you_mean(str(name), names, f"one of: {', '.join(names)}")
            raise BadInput(f"augment: unknown option '{name}'", hint=hint)
    options: dict[str, Any] = dict(declared)
    return Augment(**options)


def describe_augment(recipe: Recipe) -> str:
    """What it does, the same in each process."""
    change = read_augment(recipe)
    if change is None or isinstance(change, Augment):
        return repr(change)
    return str(getattr(change, "__qualname__", type(change).__name__))


@dataclass(frozen=True)
class Augmentation:
    """`change(images, uniform)` changes the input number `place`, on the processor `device`."""

    change: Change
    place: int
    device: torch.device

    def __call__(self, images: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Raises OutOfMemory, BadInput where the recipe's function fails."""
        try:
            found = self.change(images, uniform)
        except DeploykitError:
            raise
        except Exception as exc:
            if isinstance(exc, torch.OutOfMemoryError) or lacks_memory(exc):
                where = f"{self.device}: the augmentation of {len(images)} images"
                raise does_not_fit(where, first_line(exc)) from exc
            what = f"{type(exc).__name__}: {first_line(exc)}"
            raise BadInput(f"the recipe's augment failed: {what}") from exc
        kinds = [
            (each.dtype, tuple(each.shape)) if isinstance(each, torch.Tensor) else type(each)
            for each in (images, found)
        ]
        if kinds[0] != kinds[1]:
            raise BadInput(f"the recipe's augment gave {kinds[1]} for images of {kinds[0]}")
        return found


def make_augmentation(recipe: Recipe, split: Split, device: torch.device) -> Augmentation:
    """Of the only input with four axes. Raises BadInput where there is nothing to augment."""
    change = read_augment(recipe)
    if change is None:
        raise BadInput(
            "`augment`: this recipe declares no augmentation",
            hint='its file says what to do: Recipe(..., augment={"crop": 4, "flip": 0.5})',
        )
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
