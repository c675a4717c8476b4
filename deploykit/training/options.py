"""The options, the recipe and the data of a training run, checked before its first step.

A recipe is the user's own code: what is wrong with it is reported by the name of its field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deploykit.core.arguments import check_arguments
from deploykit.core.errors import BadInput, Unsupported, users_code
from deploykit.core.machine import memory_errors
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.tensors import BATCH, TensorSpec, mismatch
from deploykit.engines.data.samples import Samples, check_finite, digests
from deploykit.engines.engine import check_device

LARGEST = 1e30  # a rate or norm, whose multiples are in float32 too
AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a run; None takes the recipe's value, or one that suits the device.

    `amp`: mixed precision, one of `AMP`. `patience`: epochs without a better score on the
    validation data after which the run ends, with the weights of the best one. `weights`: a file to
    start from. `checkpoint`: a file that gets the whole state after each epoch, and from which a
    run with the same options resumes. `tensorboard`: a folder for event files. `unfreeze`: train a
    backbone too, with this share of the learning rate. `fsdp`: spread the weights over the
    processes (FSDP2). `augment`: change the images as the recipe declares.
    """

    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    weights: Path | None = None
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
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not torch.cuda.is_available():
        raise Unsupported(
            f"device '{name}' was requested, but torch {torch.__version__} sees no GPU",
            hint="see: deploykit doctor",
        )
    return torch.device(name)


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
        found: object = recipe.build()
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


SCHEDULES = ("cosine", "linear", "one-cycle", "constant")
PARTS = ("train", "calibration", "test")


def check_recipe(recipe: Recipe) -> None:
    """Raise BadInput for a field with a value that no run can use."""
    try:
        check_arguments(Recipe, vars(recipe))
    except BadInput as exc:
        raise BadInput(f"the recipe's {exc.message}") from None

    def check(names: str, fits: Callable[[Any], object], expected: str) -> None:
        for name in names.split():
            if not fits(value := getattr(recipe, name)):
                raise BadInput(f"the recipe's `{name}` must be {expected}, got {value!r:.80}")

    specs = "TensorSpecs, such as (parse_spec('x:float32[N,3]'),)"
    check("inputs outputs", lambda x: x and all(isinstance(each, TensorSpec) for each in x), specs)
    function = "a function, or a module: torch.nn.CrossEntropyLoss()"
    check("loss metric", lambda x: not isinstance(x, type), function)  # it is called with a batch
    check("epochs batch_size", lambda x: x >= 1, "1 or more")
    rate = f"above 0, below {LARGEST:g}"
    check("learning_rate clip_norm", lambda x: x is None or 0 < x < LARGEST, rate)
    check("schedule", lambda x: x in SCHEDULES, f"one of {', '.join(SCHEDULES)}")


def check_splits(recipe: Recipe, splits: Splits) -> Splits:
    """Return the splits as NumPy arrays in the order of the recipe's inputs.

    Raises BadInput for data that do not fit the recipe's specs, for NaN, for labels that are none
    of the model's classes, and where there is nothing to train on or to test with.
    """
    where = splits.source
    try:
        check_arguments(Splits, vars(splits))
    except BadInput as exc:
        raise BadInput(f"{where}: its {exc.message}") from None
    parts: dict[str, Any] = {
        part: _check_split(recipe, getattr(splits, part), f"{where}: its {part} data")
        for part in PARTS
    }
    for part, kind in (("train", "training"), ("test", "test")):
        if not len(parts[part].labels):
            raise BadInput(f"{where}: holds no {kind} data")
    shape, classes = recipe.outputs[0].shape, len(splits.classes)
    if classes and len(shape) == 2 and isinstance(shape[1], int) and shape[1] != classes:
        raise BadInput(f"{where}: names {classes} classes, the model has {shape[1]}")
    if (image := splits.image) is not None:
        size = (image.height, image.width, 1 if image.colours == "L" else 3)
        specs = [spec for spec in recipe.inputs if spec.name == image.tensor]
        if not specs or mismatch(specs[0], "uint8", (1, *size)):
            raise BadInput(f"{where}: its `image` does not describe one of the recipe's inputs")
    return replace(splits, **parts)


def _check_split(recipe: Recipe, split: Split, where: str) -> Split:
    arrays = {}
    with users_code(f"{where} cannot be read"):
        for name, value in {**split.inputs, "the labels": split.labels}.items():
            array = np.asarray(value)
            # torch takes neither another byte order nor negative strides
            arrays[str(name)] = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    labels = arrays.pop("the labels")
    names = [spec.name for spec in recipe.inputs]
    if sorted(arrays) != sorted(names):
        raise BadInput(
            f"{where} hold {', '.join(arrays) or 'no inputs'}, the recipe's inputs are "
            f"{', '.join(names)}"
        )
    if labels.dtype.kind not in "biuf" or labels.dtype.itemsize > 8 or not labels.ndim:
        kind = f"{labels.dtype}{list(labels.shape)}"
        raise BadInput(f"{where} have labels of {kind}, a number or more per sample is needed")
    found = Split({name: arrays[name] for name in names}, labels)
    if not any(array.size for array in (labels, *arrays.values())):
        return found
    for spec in recipe.inputs:
        array = arrays[spec.name]
        wanted = replace(spec, shape=(len(labels), *spec.shape[1:]))
        if (problem := mismatch(wanted, array.dtype.name, array.shape)) is not None:
            raise BadInput(f"{where}: {problem}", hint="change the recipe's `inputs` or its data")
    check_finite(Samples(arrays, labels, where))
    shape = recipe.outputs[0].shape
    classes = shape[1] if len(shape) == 2 else None
    if isinstance(classes, int) and classes > 1 and labels.dtype.kind in "iu" and labels.ndim == 1:
        low, high = labels.min(), labels.max()
        if not 0 <= low <= high < classes:
            raise BadInput(
                f"{where} have labels from {low} to {high}; the model has {classes} classes, 0 to "
                f"{classes - 1}"
            )
    return found


def check_outputs(recipe: Recipe, run: Any, split: Split, device: torch.device) -> None:
    """Run the module on two samples. Raises BadInput where its outputs are not the recipe's."""
    few = [torch.from_numpy(np.array(each[:2])).to(device) for each in split.inputs.values()]
    run.eval()
    with (
        users_code("the recipe's model failed on its own data"),
        memory_errors(f"{device}: a step on two samples"),
        torch.inference_mode(),
    ):
        found = run(*few)
    found = found if isinstance(found, tuple) else (found,)
    kinds = [type(each).__name__ for each in found]
    if len(found) != len(recipe.outputs) or set(kinds) != {"Tensor"}:
        raise BadInput(
            f"the recipe's model gives {', '.join(kinds)}, its `outputs` are "
            f"{', '.join(map(str, recipe.outputs))}: one tensor for each is needed"
        )
    for spec, value in zip(recipe.outputs, found, strict=True):
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        wanted = replace(spec, shape=(BATCH, *spec.shape[1:]))
        if mismatch(wanted, dtype, shape) is not None:
            raise BadInput(
                f"the recipe's `outputs` declare {spec}, its model gives {dtype}{list(shape)} for "
                "two samples"
            )


def shared_samples(splits: Splits) -> dict[str, dict[str, int]]:
    """Return how many samples each pair of splits shares, and the position of the `first`."""
    known = {
        part: list(digests(Samples(split.inputs, split.labels, splits.source)))
        for part in PARTS
        if (split := getattr(splits, part))
    }
    found = {}
    for one, other in (("test", "train"), ("test", "calibration"), ("calibration", "train")):
        there = set(known[other])
        shared = [place for place, digest in enumerate(known[one]) if digest in there]
        if shared:
            found[f"{one} in {other}"] = {"samples": len(shared), "first": shared[0]}
    return found


def score_classes(splits: Splits, scores: np.ndarray) -> dict[str, dict[str, int]]:
    """Return, by class, how many test samples are right, for scores of 0 and 1; else nothing."""
    labels = splits.test.labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not np.isin(scores, (0, 1)).all():
        return {}
    names = dict(enumerate(splits.classes))
    return {
        str(names.get(label, label)): {
            "right": int(scores[labels == label].sum()),
            "samples": int((labels == label).sum()),
        }
        for label in np.unique(labels).tolist()
    }


def explain_score(
    low: float, classes: Mapping[str, Mapping[str, int]], shared: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """Return notes on a score whose interval begins at `low`: what it does not show."""
    notes = [
        f"{each['samples']} samples of the {pair.replace(' in ', ' data are also in the ')} data, "
        f"the first is number {each['first']}: a score on them says little about new ones"
        for pair, each in shared.items()
    ]
    sizes = {name: each["samples"] for name, each in classes.items()}
    if len(sizes) > 1:
        most, fewest = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
        share = sizes[most] / sum(sizes.values())
        if low <= share:
            notes.append(
                f"always answering '{most}' is right for {share:.1%} of the test data: this score "
                "is not surely better"
            )
        if sizes[fewest] < 10:  # test samples of a class
            notes.append(
                f"the test data have {sizes[fewest]} of '{fewest}': too few to conclude from"
            )
    return notes
