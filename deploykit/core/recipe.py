"""A recipe: what to train on what. Training needs it whole, loading a checkpoint needs its `build`.

In: a name (`mnist-cnn`), a path (`./mine.py`) or an import string (`pkg.mod:RECIPE`). Out:
`Recipe`. A recipe is callables only, so that this file needs neither torch nor numpy.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.core import paths as resources
from deploykit.core.errors import BadInput, NotFound
from deploykit.core.json_value import json_value
from deploykit.core.preprocess import Preprocess
from deploykit.core.tensors import TensorSpec


@dataclass(frozen=True)
class Split:
    """Labelled samples: `inputs` by name, each of shape (samples, ...); `labels` (samples,)."""

    inputs: Mapping[str, Any]
    labels: Any


@dataclass(frozen=True)
class Splits:
    """The same samples never stand in two of these. `source` says where they come from."""

    train: Split
    calibration: Split
    test: Split
    source: str


@dataclass(frozen=True)
class Recipe:
    """How to build a model, and what to train and test it on.

    `build()` gives a torch module with fresh weights; `data(path or None)` the splits;
    `inputs`/`outputs` the specs that `export` uses; `metric(outputs, labels)` one value per sample
    in 0..1 (for top-1: right or wrong), `metric_name` its name. `epochs`, `batch_size` and
    `learning_rate` are the defaults of `train`. `preprocess`: where the data and `inputs` are
    bytes, uint8 (N, H, W, C), and `build()` takes normalised float32 (N, C, H, W); training, export
    and what is made from it all do the same then.
    """

    build: Callable[[], Any]
    data: Callable[[Path | None], Splits]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    loss: Callable[[Any, Any], Any]
    metric: Callable[[Any, Any], Any]
    metric_name: str
    epochs: int
    batch_size: int
    learning_rate: float
    preprocess: Preprocess | None = None


@dataclass(frozen=True)
class RecipeInfo:
    """A recipe's name and what the first line of its file says of it."""

    name: str
    summary: str
    path: Path

    def to_dict(self) -> dict[str, Any]:
        return json_value(self)


def list_recipes() -> list[RecipeInfo]:
    """The recipes that come with deploykit; reads their docstrings and imports nothing."""
    found = []
    for path in sorted(resources.folder("models").glob("[a-z]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found.append(RecipeInfo(path.stem.replace("_", "-"), docstring.partition("\n")[0], path))
    return found


def bundled(name: str) -> Path:
    """The file of a recipe that comes with deploykit. Raises NotFound for any other name."""
    paths = {info.name: info.path for info in list_recipes()}
    if name not in paths:
        raise NotFound(
            f"no recipe '{name}'",
            hint=f"one of: {', '.join(paths)}; or a file: ./mine.py; or pkg.mod:RECIPE",
        )
    return paths[name]


def load_recipe(reference: str) -> Recipe:
    """Find and import a recipe by name, path or import string. Raises NotFound or BadInput."""
    if reference.endswith(".py"):
        target = f"{reference}:RECIPE"
    elif ":" in reference:
        target = reference
    else:
        target = f"{bundled(reference)}:RECIPE"
    recipe = resources.import_object(target)
    if not isinstance(recipe, Recipe):
        raise BadInput(f"{reference}: RECIPE is a {type(recipe).__name__}, not a deploykit Recipe")
    return recipe
