"""A frozen backbone: its features are computed once, and the head is trained on them.

The head learns on standardised features: those of a backbone differ in scale by orders of
magnitude, and one step of the optimiser suits them all only when they are alike. The scales are
folded into the head's first layer at the end, so that the model stays what the recipe builds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deploykit.core.errors import BadInput
from deploykit.core.memory import check_fits
from deploykit.core.recipe import Recipe, Split
from deploykit.runtimes.torch.preprocess import before
from deploykit.runtimes.torch.weights import copy_weights, list_names
from deploykit.training.batches import tensors

_BATCH = 32
_LEAST_DEVIATION = 0.1  # of a feature, as a share of the mean: INT8 weights span less then
_CLOSE = 1e-3  # relative: the head on features against the whole module, in another batch size


@dataclass(frozen=True)
class Frozen:
    """The head, and the recipe whose inputs are the backbone's features.

    `mean`, `deviation`: shape (features,), what the features were standardised with; None where the
    head does not begin with a dense layer.
    """

    head: torch.nn.Module
    recipe: Recipe
    train: Split
    calibration: Split
    seconds: float
    mean: np.ndarray | None = None
    deviation: np.ndarray | None = None

    def fold(self, head: torch.nn.Module) -> None:
        """Let a head that was trained on standardised features take those of the backbone."""
        dense = _first_dense(head)
        if dense is None or self.mean is None or self.deviation is None:
            return
        weight_OD = dense.weight.detach().double().cpu() / torch.from_numpy(self.deviation)
        shift_O = weight_OD @ torch.from_numpy(self.mean)
        with torch.no_grad():
            dense.weight.copy_(weight_OD)
            dense.bias.sub_(shift_O.to(dense.bias))


def start_from(
    module: torch.nn.Module, recipe: Recipe, weights: dict[str, torch.Tensor], where: Path
) -> list[str]:
    """Copy `weights`, read from `where`, into the module or its backbone; returns notes.

    Raises BadInput where they do not fit.
    """
    if recipe.backbone is None:
        return list(copy_weights(where, module, weights))
    name = recipe.backbone[0]
    part = module.get_submodule(name)
    own = part.state_dict()
    named = {key.removeprefix(f"{name}."): value for key, value in weights.items()}
    kept = {key: value for key, value in named.items() if key in own}
    if not kept:
        raise BadInput(
            f"{where}: holds no weights of the recipe's backbone, such as {next(iter(own), name)}; "
            f"it holds {list_names(list(weights))}"
        )
    left = [key for key in named if key not in own]
    notes = list(copy_weights(where, part, kept))
    if left:
        notes.append(f"of {where.name}, {len(left)} tensors are not in the backbone: {left[0]}, …")
    return notes


def freeze(
    module: torch.nn.Module, recipe: Recipe, train: Split, calibration: Split, device: torch.device
) -> Frozen:
    """Run the backbone over the data once, in eval mode. Raises BadInput, OutOfMemory."""
    names = recipe.backbone or ("", "")
    backbone, head = (module.get_submodule(each) for each in names)
    backbone.requires_grad_(False)
    run = before(backbone.eval(), recipe.inputs, recipe.preprocess).to(device)
    started = time.perf_counter()
    features = [
        Split({"features": _run(run, each, device)}, each.labels) for each in (train, calibration)
    ]
    seconds = time.perf_counter() - started
    _check_composition(module, recipe, train, names, device)
    inner = replace(recipe, preprocess=None, inputs=(), backbone=None)
    mean, deviation = _standardise([each.inputs["features"] for each in features], head)
    return Frozen(head, inner, features[0], features[1], seconds, mean, deviation)


def _first_dense(head: torch.nn.Module) -> torch.nn.Linear | None:
    """The dense layer with a bias that the head, a sequence, begins with."""
    first = next(iter(head.children()), None) if isinstance(head, torch.nn.Sequential) else head
    return first if isinstance(first, torch.nn.Linear) and first.bias is not None else None


def _standardise(
    features: list[np.ndarray], head: torch.nn.Module
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Standardise the arrays in place by the first one's mean and deviation, and return these."""
    dense, (train, *_) = _first_dense(head), features
    if dense is None or train.ndim != 2:
        return None, None
    mean: np.ndarray = train.mean(axis=0, dtype=np.float64)
    deviation: np.ndarray = train.std(axis=0, dtype=np.float64)
    deviation = np.maximum(deviation, _LEAST_DEVIATION * deviation.mean())
    deviation[deviation == 0] = 1.0
    for array in features:
        if len(array):
            array -= mean.astype(np.float32)
            array /= deviation.astype(np.float32)
    return mean, deviation


def _run(run: Any, split: Split, device: torch.device) -> np.ndarray:
    inputs, _ = tensors(split, torch.device("cpu"))
    found: np.ndarray | None = None
    with torch.inference_mode():
        for start in range(0, len(split.labels), _BATCH):
            part = slice(start, start + _BATCH)
            values = run(*(each[part].to(device) for each in inputs)).float().cpu().numpy()
            if found is None:
                shape = (len(split.labels), *values.shape[1:])
                check_fits("the backbone's features", int(np.prod(shape)) * 4)
                found = np.empty(shape, np.float32)
            found[part] = values
    return found if found is not None else np.empty((0, 1), np.float32)


def _check_composition(
    module: torch.nn.Module,
    recipe: Recipe,
    split: Split,
    names: tuple[str, str],
    device: torch.device,
) -> None:
    """Raise BadInput unless the module computes head(backbone(x))."""
    backbone, head = (module.get_submodule(each) for each in names)
    inputs, _ = tensors(split, torch.device("cpu"))
    few = [each[:2].to(device) for each in inputs]
    module.eval()
    with torch.inference_mode():
        whole = before(module, recipe.inputs, recipe.preprocess).to(device)(*few)
        parts = head(before(backbone, recipe.inputs, recipe.preprocess).to(device)(*few))
        largest = float(whole.abs().max()) or 1.0
        if whole.shape != parts.shape or float((whole - parts).abs().max()) > _CLOSE * largest:
            raise BadInput(
                f"the recipe's module does not compute {names[1]}({names[0]}(x))",
                hint="its features cannot be computed once; leave the recipe's `backbone` out",
            )
