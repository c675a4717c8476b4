"""A recipe's metric for each sample of a split."""

from __future__ import annotations

import numpy as np
import torch

from deploykit.core.memory import memory_errors
from deploykit.core.recipe import Recipe, Split
from deploykit.runtimes.torch.preprocess import before
from deploykit.training.batches import tensors
from deploykit.training.recipes import score_samples

_SAMPLES = 256  # at once


def score_module(module: torch.nn.Module, recipe: Recipe, split: Split) -> np.ndarray:
    """The recipe's metric for each sample of `split`, shape (samples,), in float32.

    Computed on the device that holds `module`, in eval mode; the mode is restored. Raises
    OutOfMemory.
    """
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    run = before(module, recipe.inputs, recipe.preprocess).to(device)
    training = module.training
    run.eval()
    inputs, _ = tensors(split, torch.device("cpu"))
    scores = []
    with torch.inference_mode(), memory_errors(f"{device}: scoring {_SAMPLES} samples at once"):
        for start in range(0, len(split.labels), _SAMPLES):
            part = slice(start, start + _SAMPLES)
            values = run(*(each[part].to(device) for each in inputs))
            values = values if isinstance(values, tuple) else (values,)
            named = {
                spec.name: value.float().cpu().numpy()
                for spec, value in zip(recipe.outputs, values, strict=True)
            }
            scores.append(score_samples(recipe, named, split.labels[part]))
    run.train(training)
    return np.concatenate(scores) if scores else np.zeros(0)
