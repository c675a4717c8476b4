"""The training loop: a recipe in, a trained module and its figures out.

Adam with the recipe's loss; its learning rate falls to zero along a half cosine. On a GPU mixed
precision is on unless refused. The same seed on the same CPU gives the same weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.runtimes.torch.preprocess import before


@dataclass(frozen=True)
class TrainingOptions:
    """What a user may change of a run; None takes the recipe's own."""

    epochs: int | None = None
    batch_size: int | None = None
    device: str = "auto"
    amp: bool | None = None
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """`module` in eval mode on the CPU; `scores`: the metric of each test sample, in order."""

    module: torch.nn.Module
    scores: np.ndarray
    figures: dict[str, Any]


Progress = Callable[[str, float], None]  # what happens now, share done 0..1


def run_training(
    recipe: Recipe,
    splits: Splits,
    options: TrainingOptions,
    *,
    weights: dict[str, torch.Tensor] | None = None,
    on_progress: Progress | None = None,
) -> Trained:
    """Train `recipe` on `splits.train`, then score it on `splits.test`.

    Raises BadInput for options out of range, Unsupported for a device that is not there.
    """
    epochs = _positive("epochs", options.epochs, recipe.epochs)
    batch_size = _positive("batch size", options.batch_size, recipe.batch_size)
    device = choose_device(options.device)
    amp = device.type == "cuda" if options.amp is None else options.amp
    torch.manual_seed(options.seed)
    module = recipe.build().to(device)
    if weights is not None:
        module.load_state_dict(weights)
    data = _tensors(splits.train, device)
    run = before(module, recipe.inputs, recipe.preprocess).to(device)
    module.train()
    started = time.perf_counter()
    mean_loss = float("nan")
    losses = _epochs(recipe, run, data, device, amp, batch_size, epochs, options.seed)
    for epoch, mean_loss in enumerate(losses, 1):
        if not np.isfinite(mean_loss):
            raise Unsupported(
                f"training diverged: the loss is {mean_loss} after epoch {epoch}",
                hint="switch mixed precision off (`amp`), or lower the recipe's learning rate",
            )
        if on_progress is not None:
            on_progress(f"epoch {epoch}/{epochs}, loss {mean_loss:.4f}", epoch / epochs)
    seconds = time.perf_counter() - started
    module = copy.deepcopy(module).cpu().eval()
    figures = {
        "epochs": epochs,
        "batch_size": batch_size,
        "device": str(device),
        "amp": amp,
        "seed": options.seed,
        "train_samples": len(data[1]),
        "train_seconds": round(seconds, 3),
        "final_loss": mean_loss,
        "data": splits.source,
    }
    return Trained(module, score_module(module, recipe, splits.test), figures)


def _epochs(
    recipe: Recipe,
    run: torch.nn.Module,
    data: tuple[dict[str, torch.Tensor], torch.Tensor],
    device: torch.device,
    amp: bool,
    batch_size: int,
    epochs: int,
    seed: int,
) -> Iterator[float]:
    """Train `run` in place; the mean loss after each epoch."""
    inputs, labels = data
    optimiser = torch.optim.Adam(run.parameters(), lr=recipe.learning_rate)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=amp and device.type == "cuda")
    shuffle = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(labels) // batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=steps)
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        for index in torch.split(torch.randperm(len(labels), generator=shuffle), batch_size):
            index = index.to(device)
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=half, enabled=amp):
                loss = recipe.loss(run(*(part[index] for part in inputs.values())), labels[index])
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
            schedule.step()
            total += loss.detach() * len(index)
        yield float(total) / len(labels)


def score_module(
    module: torch.nn.Module, recipe: Recipe, split: Split, batch_size: int = 256
) -> np.ndarray:
    """The recipe's metric for each sample of `split`, shape (samples,), on the CPU in float32."""
    run = before(module, recipe.inputs, recipe.preprocess)
    inputs, _ = _tensors(split, torch.device("cpu"))
    scores = []
    with torch.inference_mode():
        for start in range(0, len(split.labels), batch_size):
            part = slice(start, start + batch_size)
            values = run(*(tensor[part] for tensor in inputs.values()))
            values = values if isinstance(values, tuple) else (values,)
            named = {spec.name: v.numpy() for spec, v in zip(recipe.outputs, values, strict=True)}
            scores.append(recipe.metric(named, split.labels[part]))
    return np.concatenate(scores)


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU that torch can use, else the CPU. Raises BadInput or Unsupported."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"unknown device '{name}'", hint="one of: auto, cpu, cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"unknown device '{name}'", hint="one of: auto, cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported(
            f"device '{name}' was requested, but torch {torch.__version__} sees no GPU",
            hint="see: deploykit doctor",
        )
    return device


def _tensors(split: Split, device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs = {name: torch.from_numpy(array).to(device) for name, array in split.inputs.items()}
    return inputs, torch.from_numpy(split.labels).to(device)


def _positive(what: str, chosen: int | None, default: int) -> int:
    value = default if chosen is None else chosen
    if value < 1:
        raise BadInput(f"{what} must be 1 or more, got {value}")
    return value
