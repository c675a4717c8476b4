"""Preprocessing of pixels, which becomes part of the model.

It goes into the graph, so that clients send bytes, and training, ONNX Runtime, an engine and a
server compute the same. Nothing is resized.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, os_reason
from deploykit.core.files import check_readable
from deploykit.core.json_value import json_value
from deploykit.core.tensors import TensorSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Preprocess:
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

    def to_dict(self) -> dict[str, Any]:
        return json_value(self)


# https://docs.pytorch.org/vision/stable/models.html: the preprocessing of its ImageNet weights
IMAGENET = Preprocess("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def load_preprocess(reference: str) -> Preprocess:
    """Read `imagenet` or a TOML file with `mean`, `std` and perhaps `scale` (1/255 without it).

    Raises NotFound, or BadInput naming the file and the key at fault.
    """
    if reference == IMAGENET.name:
        return IMAGENET
    if not reference.endswith(".toml"):
        raise BadInput(
            f"`preprocess`: '{reference}' is neither 'imagenet' nor a .toml file",
            hint="a file holds: mean = [0.5, 0.5, 0.5] and std = [0.5, 0.5, 0.5]",
        )
    path = check_readable(Path(reference))
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise BadInput(f"{path}: is not valid TOML: {exc}") from exc
    except OSError as exc:
        raise BadInput(f"{path}: cannot be read: {os_reason(exc)}") from exc
    unknown = set(values) - {"mean", "std", "scale"}
    if unknown:
        raise BadInput(
            f"{path}: unknown key '{sorted(unknown)[0]}'", hint="the keys are: mean, std, scale"
        )
    mean, std = (_numbers(values.get(key), f"{path}: {key}") for key in ("mean", "std"))
    (scale,) = _numbers([values.get("scale", 1 / 255)], f"{path}: scale")
    if len(mean) != len(std):
        raise BadInput(
            f"{path}: mean has {len(mean)} values, std has {len(std)}; both need one per channel"
        )
    if min(std) <= 0 or scale <= 0:
        raise BadInput(f"{path}: std and scale must be above 0")
    return Preprocess(path.stem, mean, std, scale)


def from_bytes(inputs: Sequence[TensorSpec], preprocess: Preprocess) -> tuple[int, TensorSpec]:
    """The position of the image among the inputs, and its spec as uint8, channels last.

    Raises BadInput unless exactly one input is float32 (N, C, H, W) with the channels of
    `preprocess`.
    """
    found = [
        (place, spec)
        for place, spec in enumerate(inputs)
        if spec.dtype == "float32" and len(spec.shape) == 4 and spec.shape[1] == preprocess.channels
    ]
    if len(found) != 1:
        raise BadInput(
            f"`preprocess` {preprocess.name}: {len(found)} inputs are "
            f"float32[N,{preprocess.channels},H,W], exactly one must be",
            hint="the inputs are: " + ", ".join(map(str, inputs)),
        )
    place, spec = found[0]
    batch, channels, height, width = spec.shape
    return place, replace(spec, dtype="uint8", shape=(batch, height, width, channels))


def _numbers(values: object, where: str) -> tuple[float, ...]:
    good = isinstance(values, list) and all(
        isinstance(item, (int, float)) and not isinstance(item, bool) and math.isfinite(item)
        for item in values
    )
    if not isinstance(values, list) or not values or not good:
        raise BadInput(f"{where}: must be a list of numbers, one per channel")
    return tuple(float(item) for item in values)
