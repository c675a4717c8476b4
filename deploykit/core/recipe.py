"""A recipe: how to build a model, and the data and loss to train it with.

Training uses all of it, opening a checkpoint only `build`. It holds callables, so this file needs
neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from deploykit.core import files as resources
from deploykit.core.errors import BadInput, NotFound, did_you_mean
from deploykit.core.json_value import Shown
from deploykit.core.task import ImageInput, Preprocess
from deploykit.core.tensors import TensorSpec


@dataclass(frozen=True)
class Split(Shown):
    """Labelled samples: `inputs` by name, each of shape (samples, ...); `labels` (samples,)."""

    inputs: Mapping[str, Any]
    labels: Any


@dataclass(frozen=True)
class Splits(Shown):
    """Training, calibration and test data without common samples; `source`: their origin.

    `classes`: the names of the labels 0, 1, … `skipped`: files that could not be read, with the
    reason. `build_with`: sizes that the model takes from the data, arguments of the recipe's
    `build`; a name in the shape of an output stands for such a size. `image`: how image files
    became the inputs, None where the data were no image files. The checkpoint keeps `classes` and
    `image`, and `export` hands them to the model's task, so that it is served as it was trained.
    """

    train: Split
    calibration: Split
    test: Split
    source: str
    classes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    build_with: Mapping[str, int] = field(default_factory=dict)
    image: ImageInput | None = None


@dataclass(frozen=True)
class Recipe(Shown):
    """A model's builder, and its data, loss and metric for training and testing.

    `build(**splits.build_with)` gives a torch module with fresh weights; `data(path or None)` the
    splits; `inputs`/`outputs` the specs that `export` uses; `metric(outputs, labels)` one value per
    sample in 0..1 (for top-1: right or wrong), `metric_name` its name. `epochs` and
    `batch_size` are the defaults of `train`. `schedule` of the `learning_rate`: "cosine", "linear",
    "one-cycle" or "constant". `clip_norm`: the largest norm of all gradients together.
    `preprocess`: for uint8 (N, H, W, C), where the module takes normalised float32 (N, C, H, W).

    `backbone`: the names of the child that is frozen, in eval mode, and of the head that is
    trained on its features: the module computes `head(backbone(x))`. `needs_weights`: how to get
    the backbone's weights, where it has none of its own. `report(module, splits)`: further figures
    of the trained module. `augment`: for `train --augment`, options of `training.data.Augment`;
    `augmented`: whether `train` augments by default.
    """

    build: Callable[..., Any]
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
    schedule: str = "cosine"
    clip_norm: float | None = None
    backbone: tuple[str, str] | None = None
    needs_weights: str = ""
    report: Callable[[Any, Splits], Mapping[str, Any]] | None = None
    augment: Mapping[str, float] | Callable[[Any, Any], Any] | None = None
    augmented: bool = False

    def sized_for(self, sizes: Mapping[str, int]) -> Recipe:
        """Return this recipe with a `build` for the `build_with` of some data."""
        if not sizes:
            return self
        outputs = tuple(
            replace(each, shape=tuple(sizes.get(str(axis), axis) for axis in each.shape))
            for each in self.outputs
        )
        return replace(self, build=partial(self.build, **sizes), outputs=outputs)


def list_recipes() -> dict[str, Path]:
    """Return the files of the recipes that come with deploykit, by name. Imports none."""
    paths = sorted(resources.folder("models").glob("[a-z]*.py"))
    return {path.stem.replace("_", "-"): path for path in paths}


def find_bundled(name: str) -> Path:
    """Return the file of a recipe that comes with deploykit. Raises NotFound for other names."""
    paths = list_recipes()
    if name not in paths:
        others = f"one of: {', '.join(paths)}; or a file: ./mine.py; or pkg.mod:RECIPE"
        raise NotFound(f"no recipe '{name}'", hint=did_you_mean(name, paths, others))
    return paths[name]


def load_recipe(reference: str) -> Recipe:
    """Find and import a recipe by name, path or import string. Raises NotFound or BadInput."""
    if reference.endswith(".py"):
        target = f"{reference}:RECIPE"
    elif ":" in reference:
        target = reference
    else:
        target = f"{find_bundled(reference)}:RECIPE"
    recipe = resources.import_object(target)
    if not isinstance(recipe, Recipe):
        raise BadInput(
            f"{reference}: RECIPE is a {type(recipe).__name__}; it must be a deploykit Recipe"
        )
    return recipe
