"""Batches of a split on the device, in a random order that the seed decides."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from deploykit.core.errors import BadInput
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.training.distributed import Processes

# inputs in the recipe's order, labels, and the share of the whole batch's samples that they are
Batch = tuple[list[torch.Tensor], torch.Tensor, float]


class Batches:
    """Iterate over it once per epoch. `waited_s`: how long the training waited for batches.

    Each of the processes of `group` gets its part of every batch; one that would get none computes
    on a sample whose share is 0, as all take part in each step.
    """

    def __init__(
        self,
        split: Split,
        device: torch.device,
        batch_size: int,
        seed: int,
        group: Processes | None = None,
    ) -> None:
        self.group = group or Processes()
        self.inputs, self.labels = tensors(split, device)
        self.device, self.batch_size = device, batch_size
        self.shuffle = torch.Generator().manual_seed(seed)
        self.waited_s = 0.0

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.labels), generator=self.shuffle)
        for rows in torch.split(order, self.batch_size):
            started = time.perf_counter()
            whole = len(rows)
            if self.group.size > 1:
                rows = rows.tensor_split(self.group.size)[self.group.rank]
            share = len(rows) / whole
            rows = (rows if len(rows) else order[:1]).to(self.device)
            batch = [each[rows] for each in self.inputs], self.labels[rows], share
            self.waited_s += time.perf_counter() - started
            yield batch


def check_labels(recipe: Recipe, splits: Splits) -> None:
    """Raise BadInput for no training data, and for labels that are none of the model's classes."""
    if not len(splits.train.labels):
        raise BadInput(f"{splits.source}: holds no training data")
    shape = recipe.outputs[0].shape if recipe.outputs else ()
    classes = shape[1] if len(shape) == 2 else None
    for name in ("train", "calibration", "test"):
        labels = np.asarray(getattr(splits, name).labels)
        if not isinstance(classes, int) or classes < 2 or labels.dtype.kind not in "iu":
            continue
        if labels.ndim == 1 and len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise BadInput(
                f"{splits.source}: the labels of its {name} data go from {labels.min()} to "
                f"{labels.max()}; the model has {classes} classes, 0 to {classes - 1}"
            )


def tensors(split: Split, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The arrays of a split on the device. Raises BadInput for a split that nothing can learn."""
    arrays = {**split.inputs, "labels": split.labels}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            arrays[name] = np.array(array)
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise BadInput(f"the recipe's data have different numbers of samples: {sizes}")
    found = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    labels = found.pop("labels")
    return list(found.values()), labels
