"""Top-1 accuracy: per sample 1.0 where the largest value of the first output is the label."""

from __future__ import annotations

import numpy as np

from deploykit.core.errors import BadInput, GateFailed, quote
from deploykit.runtimes.data.samples import Samples
from deploykit.runtimes.engine import Engine

TOP1 = "top-1 accuracy"
_BLOCK = 4096  # samples at a time


def top1(values: np.ndarray, labels: np.ndarray, where: str) -> np.ndarray:
    """1.0 where the largest of `values` (samples, classes) is the label, else 0.0.

    Labels are as `class_numbers` takes them. Returns float64 (samples,). Raises BadInput when they
    are not classes, or the values are not one per class, and GateFailed where one is NaN or
    infinity.
    """
    if values.ndim != 2 or len(values) != len(labels) or values.shape[1] < 2:
        raise BadInput(
            f"{where}: the first output is {values.shape}, top-1 needs (samples, classes)"
        )
    labels = class_numbers(labels, values.shape[1], where)
    if int(labels.min()) < 0 or int(labels.max()) >= values.shape[1]:
        raise BadInput(
            f"{where}: labels run from {labels.min()} to {labels.max()}, "
            f"the model has {values.shape[1]} classes"
        )
    broken, right = 0, np.empty(len(values))
    for at in range(0, len(values), _BLOCK):  # `values` may be larger than the memory
        block = values[at : at + _BLOCK]
        broken += int((~np.isfinite(block) & (block != -np.inf)).any(1).sum())
        right[at : at + _BLOCK] = block.argmax(1) == labels[at : at + _BLOCK]
    if broken:
        raise GateFailed(f"{where}: the model's answer is NaN or infinity for {broken} samples")
    return right


def class_numbers(labels: np.ndarray, classes: int, where: str) -> np.ndarray:
    """Labels as integers (samples,): numbers of any type, as text too, or one-hot rows.

    Raises BadInput for other text, fractions, and rows that are not one-hot.
    """
    found = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if found.dtype.kind in "US":
        try:
            found = found.astype(np.int64)
        except ValueError:
            name = quote(labels.flat[0].item())
            raise BadInput(
                f"{where}: labels are names, such as {name}, and a model has none",
                hint="number the classes from 0, in the order of the model's output",
            ) from None
    if found.ndim == 2 and found.shape[1] == classes and found.dtype.kind in "biuf":
        hot = found == 1
        if bool((hot | (found == 0)).all() and (hot.sum(1) == 1).all()):
            places: np.ndarray = hot.argmax(1)
            return places
    if found.ndim == 1 and found.dtype.kind in "bf" and bool((np.trunc(found) == found).all()):
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise BadInput(
            f"{where}: labels are {labels.dtype}{list(labels.shape)}",
            hint=f"top-1 needs a class number for each sample, or a one-hot row of {classes}",
        )
    return found


def top1_scores(engine: Engine, samples: Samples, batch_size: int = 64) -> np.ndarray:
    """`top1` of an engine's first output over labelled samples. Raises BadInput."""
    if samples.labels is None:
        raise BadInput(f"{samples.where}: no array 'labels'")
    size, used = samples.batching(batch_size, engine.inputs)
    name, scores = engine.outputs[0].name, []
    for number, feeds in enumerate(samples.first(used).batches(size)):
        labels = samples.labels[number * size : number * size + size]
        scores.append(top1(engine(feeds)[name], labels, samples.where))
    return np.concatenate(scores)
