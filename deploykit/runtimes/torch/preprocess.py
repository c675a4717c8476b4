"""Put `Preprocess` in front of a torch module: the one implementation, for training and export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.preprocess import Preprocess
from deploykit.core.tensors import TensorSpec

torch = require("torch")


class FromBytes(torch.nn.Module):  # type: ignore[misc, name-defined] # torch is imported through require
    """image_NHWC: uint8 (N, H, W, C) -> normalised float32 (N, C, H, W) -> `module`.

    `place`: which of the inputs is the image; the others go to `module` as they are.
    """

    def __init__(self, module: Any, preprocess: Preprocess, place: int = 0) -> None:
        super().__init__()
        self.module = module
        self.place = place
        mean, std = (
            torch.tensor(v, dtype=torch.float64) for v in (preprocess.mean, preprocess.std)
        )
        # (byte * scale - mean) / std as one multiplication and one addition
        for name, values in (("scale", preprocess.scale / std), ("shift", -mean / std)):
            self.register_buffer(f"byte_{name}", _per_channel(values), persistent=False)

    def forward(self, *inputs: Any) -> Any:
        # the cast comes first: TensorRT takes uint8 only there
        image_NHWC = inputs[self.place].to(torch.float32)
        image_NCHW = image_NHWC.permute(0, 3, 1, 2)
        image_NCHW = image_NCHW * self.byte_scale + self.byte_shift
        return self.module(*inputs[: self.place], image_NCHW, *inputs[self.place + 1 :])


def before(module: Any, inputs: Sequence[TensorSpec], preprocess: Preprocess | None) -> Any:
    """`module` as a recipe's data meet it: behind `preprocess`, if the recipe has one.

    `inputs`: the recipe's, one of them uint8 (N, H, W, C); else BadInput.
    """
    if preprocess is None:
        return module
    for place, spec in enumerate(inputs):
        if spec.dtype == "uint8" and spec.shape[3:] == (preprocess.channels,):
            return FromBytes(module, preprocess, place)
    raise BadInput(
        f"the recipe has a preprocess of {preprocess.channels} channels, but no input "
        f"uint8[N,H,W,{preprocess.channels}]",
        hint="its inputs are: " + ", ".join(map(str, inputs)),
    )


def _per_channel(values_C: Any) -> Any:
    return values_C.to(torch.float32).reshape(1, -1, 1, 1)
