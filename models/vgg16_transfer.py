"""VGG-16 as a frozen backbone with a new head, 256 and one per class, on 224x224 pixels.

The transfer learning of "Deep Learning GPU Essentials": convolutions of VGG-16 trained on ImageNet,
frozen, flattened, then dense 256 with ReLU and one output per class; the softmax is in the loss.
The backbone runs in eval mode, so its 25,088 features of each image are computed once and only the
head is trained (`--unfreeze RATE` trains the backbone too).

Weights: `--weights FILE`, torchvision's for VGG-16, or a checkpoint of this recipe.

Data: `--data DIR` with one sub-folder of images per class, split 70, 10 and 20 per cent, or with
folders train, val and test that hold those; without it scikit-learn's real handwritten digits, 8x8
pixels enlarged to 224x224: 500 to train, 100 to calibrate and 300 to test.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from deploykit.core.extras import require
from deploykit.core.recipe import Recipe, Splits
from deploykit.core.task import IMAGENET, SHORTEST_EDGE, ImageInput
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.folders import class_splits
from deploykit.training.data import digit_splits, top1_per_sample

SIDE = 224
IMAGE = ImageInput("image", SIDE, SIDE, SHORTEST_EDGE, SIDE)  # the middle square
DIGITS = (500, 100, 300)  # to train, to calibrate, to test
WEIGHTS = (
    'python -c "import torch, torchvision; torch.save(torchvision.models.vgg16('
    "weights='DEFAULT').state_dict(), 'vgg16.pt')\"  ->  `weights` vgg16.pt"
)


class Vgg16Transfer(nn.Module):
    """image_NCHW: float32 (N, 3, 224, 224), normalised as for ImageNet -> logits (N, classes)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.backbone = require("torchvision.models").vgg16(weights=None)
        self.backbone.classifier = nn.Identity()
        self.head = nn.Sequential(nn.Linear(512 * 7 * 7, 256), nn.ReLU(), nn.Linear(256, classes))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.backbone(image))
        return logits


def data(path: Path | None) -> Splits:
    """Images uint8 (samples, 224, 224, 3), labels int64 (samples,)."""
    return digit_splits(SIDE, *DIGITS) if path is None else class_splits(path, IMAGE)


RECIPE = Recipe(
    build=Vgg16Transfer,
    data=data,
    inputs=(TensorSpec("image", "uint8", ("N", SIDE, SIDE, 3)),),
    outputs=(TensorSpec("logits", "float32", ("N", "classes")),),
    loss=F.cross_entropy,
    metric=top1_per_sample,
    metric_name="top-1 accuracy",
    epochs=30,
    batch_size=32,
    learning_rate=1e-3,
    preprocess=IMAGENET,
    backbone=("backbone", "head"),
    needs_weights=WEIGHTS,
)
