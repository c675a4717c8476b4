"""Call what a recipe brings. It is the user's own code: what fails there is named as such."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deploykit.core.errors import BadInput, users_code
from deploykit.core.json_value import json_value
from deploykit.core.memory import memory_errors
from deploykit.core.recipe import Recipe, Splits
from deploykit.runtimes.torch.operators import with_torchvision


def read_splits(recipe: Recipe, path: Path | None) -> Splits:
    """The recipe's data. Raises BadInput."""
    with users_code("the recipe's data failed"), memory_errors("the recipe's data"):
        found: object = recipe.data(path)
    if not isinstance(found, Splits):
        raise BadInput(f"the recipe's data are a {type(found).__name__}, they must be Splits")
    return found


def build_from_recipe(recipe: Recipe) -> torch.nn.Module:
    """The recipe's model with fresh weights. Raises BadInput, MissingExtra, OutOfMemory."""
    with users_code("the recipe's build failed"), memory_errors("the recipe's model"):
        found: object = with_torchvision(recipe.build)
    if not isinstance(found, torch.nn.Module):
        raise BadInput(f"the recipe's build gave a {type(found).__name__}, not a torch.nn.Module")
    return found


def score_samples(recipe: Recipe, outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """The recipe's metric, shape (samples,), in 0..1. Raises BadInput."""
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


def report_figures(recipe: Recipe, module: torch.nn.Module, splits: Splits) -> Mapping[str, Any]:
    """Further figures of the trained module, as JSON values. Raises BadInput."""
    if recipe.report is None:
        return {}
    with users_code("the recipe's report failed"):
        found: dict[str, Any] = json_value(dict(recipe.report(module, splits)))
    return found
