"""The inputs and outputs of an ONNX Runtime session as our specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploykit.core.errors import Unsupported
from deploykit.core.tensors import TensorSpec, axis_name

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
    shape = tuple(
        axis if isinstance(axis, int) else axis or axis_name(node.name, place)
        for place, axis in enumerate(node.shape)
    )
    return TensorSpec(node.name, dtype, shape)
