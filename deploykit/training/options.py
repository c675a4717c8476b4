"""The options and the result of a training run, and the choice of its device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deploykit.core.errors import BadInput, Unsupported, users_code
from deploykit.core.memory import memory_errors
from deploykit.core.recipe import Recipe, Splits
from deploykit.engines.torch.files import with_torchvision

LARGEST = 1e30  # a rate or norm, whose multiples are in float32 too
AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a run; None takes the recipe's value, or one that suits the device.

    `amp`: mixed precision, one of `AMP`. `patience`: epochs without a better score on the
    validation data after which the run ends, with the weights of the best one. `checkpoint`: a file
    that gets the whole state after each epoch, and from which a run with the same options resumes.
    `tensorboard`: a folder for event files. `unfreeze`: train a backbone too, with this share of
    the learning rate. `fsdp`: spread the weights over the processes (FSDP2). `augment`: change the
    images as the recipe declares.
    """

    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    device: str = "auto"
    amp: str | None = None
    seed: int = 0
    tf32: bool = True
    compile: bool = False
    unfreeze: float | None = None
    fsdp: bool = False
    patience: int | None = None
    checkpoint: Path | None = None
    tensorboard: Path | None = None
    augment: bool | None = None


@dataclass(frozen=True)
class Trained:
    """`module` in eval mode on the CPU; `scores`: the metric of each test sample, in order.

    `recipe` and `splits`: as they were trained, sized and checked. `history`: one entry per epoch.
    `notes`: what the user should know about the run.
    """

    module: torch.nn.Module
    scores: np.ndarray
    figures: dict[str, Any]
    recipe: Recipe
    splits: Splits
    history: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """The options of a run, all decided. `amp_dtype`: None for float32 throughout."""

    epochs: int
    batch_size: int
    device: torch.device
    amp_dtype: torch.dtype | None
    tf32: bool
    augment: bool
    options: TrainingOptions

    @property
    def channels_last(self) -> bool:
        """Return whether images have their channels last in memory, as GPU convolutions want."""
        return self.device.type == "cuda"

    @property
    def precision(self) -> str:
        if self.amp_dtype is not None:
            return str(self.amp_dtype).removeprefix("torch.")
        return "tf32" if self.tf32 else "float32"


def settle(recipe: Recipe, options: TrainingOptions) -> Settings:
    """Decide what `options` leaves open. Raises BadInput, or Unsupported for a missing device."""
    epochs = recipe.epochs if options.epochs is None else options.epochs
    batch_size = recipe.batch_size if options.batch_size is None else options.batch_size
    counts = {"epochs": epochs, "batch_size": batch_size, "patience": options.patience}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise BadInput(f"`{name}` must be 1 or more, got {value}")
    if options.learning_rate is not None and not 0 < options.learning_rate < LARGEST:
        raise BadInput(
            f"`learning_rate` must be above 0, below {LARGEST:g}, got {options.learning_rate}"
        )
    if options.unfreeze is not None and not (recipe.backbone and 0 < options.unfreeze <= 1):
        raise BadInput(
            f"`unfreeze` must be above 0, up to 1, got {options.unfreeze}"
            if recipe.backbone
            else "`unfreeze`: this recipe has no frozen backbone"
        )
    augment = recipe.augmented if options.augment is None else options.augment
    if augment and recipe.backbone and options.unfreeze is None:
        raise BadInput(
            "`augment`: the features of a frozen backbone are computed once, from the images as "
            "they are",
            hint="train the backbone too, with `unfreeze`",
        )
    if options.fsdp and (options.checkpoint or options.patience):
        raise BadInput("`fsdp` goes neither with `checkpoint` nor with `patience`")
    if not -(2**63) <= options.seed < 2**63:
        raise BadInput(f"`seed` must fit into 64 bits, got {options.seed}")
    device, amp = choose_device(options.device), options.amp
    on_gpu = device.type == "cuda"
    if amp is None:  # float16 needs loss scaling; older GPUs have nothing else
        bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        amp = ("bf16" if bf16 else "fp16") if on_gpu else "off"
    if amp not in AMP:
        raise BadInput(f"unknown `amp` '{amp}'", hint=f"one of: {', '.join(AMP)}")
    tf32 = on_gpu and options.tf32 and torch.cuda.get_device_capability(device) >= (8, 0)
    return Settings(epochs, batch_size, device, AMP[amp], tf32, augment, options)


def choose_device(name: str) -> torch.device:
    """Return the device; `auto` is the first GPU that torch can use, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"unknown device '{name}'", hint="one of: auto, cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported(
            f"device '{name}' was requested, but torch {torch.__version__} sees no GPU",
            hint="see: deploykit doctor",
        )
    return device


# A recipe is the user's own code: `users_code` reports its errors as such.


def read_splits(recipe: Recipe, path: Path | None) -> Splits:
    with users_code("the recipe's data failed"), memory_errors("the recipe's data"):
        found: object = recipe.data(path)
    if not isinstance(found, Splits):
        raise BadInput(f"the recipe's data are a {type(found).__name__}, they must be Splits")
    with users_code("the recipe's data have no names of classes, or no sizes, as Splits say"):
        # NumPy's strings and integers could not be read from a checkpoint, which runs no code
        return replace(
            found,
            classes=tuple(map(str, found.classes)),
            build_with={str(name): int(size) for name, size in found.build_with.items()},
        )


def build_from_recipe(recipe: Recipe) -> torch.nn.Module:
    """Return the recipe's model with fresh weights. Raises BadInput, MissingExtra, OutOfMemory."""
    with users_code("the recipe's build failed"), memory_errors("the recipe's model"):
        found: object = with_torchvision(recipe.build)
    if not isinstance(found, torch.nn.Module):
        raise BadInput(f"the recipe's build gave a {type(found).__name__}, not a torch.nn.Module")
    return found


def score_samples(recipe: Recipe, outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Return the recipe's metric, shape (samples,), in 0..1. Raises BadInput."""
    with users_code("the recipe's metric failed"):
        found = np.asarray(recipe.metric(outputs, labels), np.float64)
    if found.shape != (len(labels),):
        raise BadInput(
            f"the recipe's metric gave shape {found.shape}, one value for each of "
            f"{len(labels)} samples is needed"
        )
    if not (found.min(initial=0.0) >= 0.0 and found.max(initial=0.0) <= 1.0):
        raise BadInput(
            f"the recipe's metric must be within 0 and 1, got {found.min()} to {found.max()}"
        )
    return found
