"""The inputs and outputs of an ONNX Runtime session as our specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploykit.core.errors import Unsupported
from deploykit.core.tensors import BATCH, TensorSpec

_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(string)": "string",
    **{
        f"tensor({kind}{bits})": f"{kind}{bits}"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}


def spec_of(path: Path, node: Any) -> TensorSpec:
    """The spec of `node`; an unnamed dynamic axis, None in ONNX Runtime, gets a name."""
    dtype = _DTYPES.get(node.type)
    if dtype is None:
        raise Unsupported(
            f"{path}: tensor '{node.name}' is a {node.type}, which is not supported",
            hint="export the model with float32 inputs and outputs",
        )
    sizes = [axis if isinstance(axis, (int, str)) else "" for axis in node.shape]
    unnamed = [f"{node.name}_{number}" if number else BATCH for number in range(len(sizes))]
    shape = tuple(n if s == "" else s for s, n in zip(sizes, unnamed, strict=True))
    return TensorSpec(node.name, dtype, shape)
