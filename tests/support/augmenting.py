"""Images that tests augment, and the draws that augmentation takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deploykit.training.data import DRAWS, Augment

EVERYTHING = Augment(2, flip=0.5, rotation_degrees=20, brightness=0.4, contrast=0.4, saturation=0.4)
_RANDOM = np.random.default_rng(0)
BYTES = _RANDOM.integers(0, 256, (40, 9, 13, 3), dtype=np.uint8)  # not square
FLOATS = _RANDOM.random((40, 1, 7, 5), dtype=np.float32)
KINDS = pytest.mark.parametrize("images", [BYTES, FLOATS], ids=["bytes", "floats"])


def random_draws(count: int) -> torch.Tensor:
    return torch.rand((count, DRAWS), generator=torch.Generator().manual_seed(5))
