"""Batches of a split on the device, in a random order that the seed decides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from deploykit.core.errors import BadInput
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.training.augment import DRAWS, Augmentation
from deploykit.training.distributed import Processes
from deploykit.training.prefetch import WaitClock, prefetch

# inputs in the recipe's order, labels, and the share of the whole batch's samples that they are
Batch = tuple[list[torch.Tensor], torch.Tensor, float]


class Batches:
    """Iterate over it once per epoch. `waited`: how long the training waited for batches.

    Each of the processes of `group` gets its part of every batch; one that would get none computes
    on a sample whose share is 0, as all take part in each step. `augmentation`: the random numbers
    of a sample are the same whoever makes its batch. `workers`: threads that make the next ones.
    """

    def __init__(
        self,
        split: Split,
        device: torch.device,
        batch_size: int,
        seed: int,
        group: Processes | None = None,
        augmentation: Augmentation | None = None,
        workers: int = 0,
    ) -> None:
        self.group = group or Processes()
        self.inputs, self.labels = tensors(split, augmentation.device if augmentation else device)
        self.device, self.batch_size = device, batch_size
        self.augmentation, self.workers = augmentation, workers
        self.shuffle = torch.Generator().manual_seed(seed)
        self.waited = WaitClock(device)

    @property
    def copied(self) -> bool:
        """Whether each batch is copied from the host to the device.

        A tensor on the device "cuda" reports "cuda:0", which is not equal to "cuda".
        """
        return self.labels.device.type == "cpu" and self.device.type != "cpu"

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        samples = len(self.labels)
        order = torch.randperm(samples, generator=self.shuffle)
        draws = None
        if self.augmentation is not None:
            draws = torch.rand((samples, DRAWS), generator=self.shuffle)
        parts = torch.split(order, self.batch_size)
        batches = prefetch(lambda rows: self._make(rows, order[:1], draws), parts, self.workers)
        for _ in parts:
            with self.waited:
                inputs, labels, share = next(batches)
                if self.copied:
                    inputs = [each.to(self.device, non_blocking=True) for each in inputs]
                    labels = labels.to(self.device, non_blocking=True)
            yield inputs, labels, share

    def _make(self, rows: torch.Tensor, first: torch.Tensor, draws: torch.Tensor | None) -> Batch:
        """This process's part of a batch, where the data are."""
        whole = len(rows)
        if self.group.size > 1:
            rows = rows.tensor_split(self.group.size)[self.group.rank]
        share = len(rows) / whole
        rows = rows if len(rows) else first
        there = rows.to(self.labels.device)
        inputs, labels = [each[there] for each in self.inputs], self.labels[there]
        if self.augmentation is not None and draws is not None:
            place = self.augmentation.place
            inputs[place] = self.augmentation(inputs[place], draws[rows])
        if self.copied:
            inputs, labels = [each.pin_memory() for each in inputs], labels.pin_memory()
        return inputs, labels, share


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
