"""Scores of classes for each pixel become a mask: the class of each pixel of the image."""

from __future__ import annotations

from typing import Any

from deploykit.core.extras import require
from deploykit.core.tensors import TensorSpec
from deploykit.exporting.heads.classify import SCORES
from deploykit.exporting.heads.head import HeadRequest, TaskHead

torch = require("torch")


_PIXEL_SCORES = "segment needs scores of the classes of each pixel, float [N,classes,height,width]"


def add_mask(request: HeadRequest) -> TaskHead:
    """Add the argmax over classes, at the image's size. Raises BadInput."""
    at = request.find(SCORES, (4,), _PIXEL_SCORES, "Segmentation")
    notes = request.left_out(at)
    batch, count, *sides = request.loaded.outputs[at].shape
    if not isinstance(count, int) or count < 2:
        raise request.misfit(_PIXEL_SCORES)
    size = request.loaded.inputs[0].shape[1:3]
    places = [at] if tuple(sides) == size else [at, len(request.loaded.outputs)]
    if len(places) > 1:
        notes += (f"its scores of {sides[0]}x{sides[1]} are resized to the image's",)

    def grown(values: Any, *image_NHWC: Any) -> Any:
        values = values.to(torch.float32)
        for image in image_NHWC:
            shape = request.size if all(request.size) else tuple(image.shape[1:3])
            resize = torch.nn.functional.interpolate
            values = resize(values, size=shape, mode="bilinear", align_corners=False)
        return (values,)

    def mask(values: Any) -> Any:
        return (values.argmax(1).to(torch.int32),)

    out = TensorSpec("mask", "int32", (batch, *size))
    made = request.head(lambda *x: mask(*grown(*x)), places, [out], count, notes)
    raw = TensorSpec("pixel_scores", "float32", (batch, count, *size))
    return request.in_parts(made, grown, places, [raw], mask)
