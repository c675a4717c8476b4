"""Read the requested preprocessing of pixels, and apply it to the specs of a model's inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.files import read_toml
from deploykit.core.task import (
    COLOURS,
    IMAGENET,
    INTERPOLATIONS,
    RESIZE_RULES,
    SHORTEST_EDGE,
    Preprocess,
)
from deploykit.core.tensors import TensorSpec

_CHOICES = {"resize": RESIZE_RULES, "interpolation": INTERPOLATIONS, "colours": COLOURS}
_BYTES = {"resize_to": 1 << 14, "padding": 255}  # the largest value of each key


def load_preprocess(reference: str | None) -> tuple[Preprocess | None, dict[str, Any]]:
    """Read `imagenet`, or a TOML file with `mean`, `std` and optionally `scale` (by default 1/255).

    The second result has those fields of `ImageInput` that the file gives: `resize`, `resize_to`,
    `interpolation`, `colours` and `padding`. Raises NotFound, or BadInput naming the file and the
    key at fault.
    """
    if reference is None:
        return None, {}
    if reference == IMAGENET.name:
        return IMAGENET, {}
    if not reference.endswith(".toml"):
        raise BadInput(
            f"`preprocess`: '{reference}' is neither 'imagenet' nor a .toml file",
            hint="a file holds: mean = [0.5, 0.5, 0.5] and std = [0.5, 0.5, 0.5]",
        )
    path = Path(reference)
    values = read_toml(path)
    known = ("mean", "std", "scale", *_CHOICES, *_BYTES)
    if unknown := set(values) - set(known):
        raise BadInput(
            f"{path}: unknown key '{sorted(unknown)[0]}'", hint=f"the keys are: {', '.join(known)}"
        )
    mean, std = (_numbers(values.get(key), f"{path}: {key}") for key in ("mean", "std"))
    (scale,) = _numbers([values.get("scale", 1 / 255)], f"{path}: scale")
    if len(mean) != len(std):
        raise BadInput(
            f"{path}: mean has {len(mean)} values, std has {len(std)}; both need one per channel"
        )
    if min(std) <= 0 or scale <= 0:
        raise BadInput(f"{path}: std and scale must be above 0")
    placing = {key: values[key] for key in (*_CHOICES, *_BYTES) if key in values}
    for key, value in placing.items():
        if key in _CHOICES and value not in _CHOICES[key]:
            raise BadInput(
                f"{path}: {key} must be one of {', '.join(_CHOICES[key])}, got {value!r}"
            )
        if key in _BYTES and (type(value) is not int or not 0 <= value <= _BYTES[key]):
            raise BadInput(f"{path}: {key} must be an integer up to {_BYTES[key]}, got {value!r}")
    if ("resize_to" in placing) != (placing.get("resize") == SHORTEST_EDGE):
        raise BadInput(f'{path}: resize = "{SHORTEST_EDGE}" and resize_to go together')
    return Preprocess(path.stem, mean, std, scale), placing


def image_input(inputs: Sequence[TensorSpec], preprocess: Preprocess) -> tuple[int, TensorSpec]:
    """Return the position of the image among the inputs, and its spec as uint8, channels last.

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
    if (
        isinstance(values, list)
        and values
        and all(type(item) in (int, float) and math.isfinite(item) for item in values)
    ):
        return tuple(map(float, values))
    raise BadInput(f"{where}: must be a list of numbers, one per channel")
