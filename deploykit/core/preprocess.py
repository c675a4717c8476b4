"""Preprocessing of pixels, which becomes part of the model.

It goes into the graph, so that clients send bytes, and training, ONNX Runtime, an engine and a
server compute the same. Nothing is resized.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploykit.core.json_value import Record


@dataclass(frozen=True)
class Preprocess(Record):
    """value = (byte * scale - mean) / std, per channel, in the order of the bytes.

    The input is a uint8 image (N, H, W, C); the model gets float32 (N, C, H, W).
    """

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255

    @property
    def channels(self) -> int:
        return len(self.mean)


# https://docs.pytorch.org/vision/stable/models.html: the preprocessing of its ImageNet weights
IMAGENET = Preprocess("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
