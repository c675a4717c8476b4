"""Top-1 accuracy: per sample 1.0 where the largest value of the first output is the label."""

from __future__ import annotations

import numpy as np

from deploykit.core.errors import BadInput, GateFailed
from deploykit.runtimes.data.samples import Samples
from deploykit.runtimes.engine import Engine

TOP1 = "top-1 accuracy"


def top1(values: np.ndarray, labels: np.ndarray, where: str) -> np.ndarray:
    """1.0 where the largest of `values` (samples, classes) is the label, else 0.0.

    Returns float64 (samples,). Raises BadInput when the labels are not class numbers, or the values
    are not one per class, and GateFailed where one is NaN or infinity.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise BadInput(f"{where}: top-1 accuracy needs integer 'labels' of shape (samples,)")
    if values.ndim != 2 or len(values) != len(labels) or values.shape[1] < 2:
        raise BadInput(
            f"{where}: the first output is {values.shape}, top-1 needs (samples, classes)"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= values.shape[1]:
        raise BadInput(
            f"{where}: labels run from {labels.min()} to {labels.max()}, "
            f"the model has {values.shape[1]} classes"
        )
    broken = int((~np.isfinite(values) & (values != -np.inf)).any(1).sum())
    if broken:
        raise GateFailed(f"{where}: the model's answer is NaN or infinity for {broken} samples")
    right: np.ndarray = (values.argmax(1) == labels).astype(np.float64)
    return right


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
