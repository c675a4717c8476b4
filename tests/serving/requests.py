"""Requests and models of the Open Inference Protocol, for the decoder's tests."""

from __future__ import annotations

import json

import numpy as np

from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec
from deploykit.serving import oip

DTYPES = [name for name in PROTOCOL_NAMES if name != "bfloat16"]
LIMIT = 1 << 20


def model(dtype: str = "float32", *shape: int | str, max_batch: int = 8) -> oip.Signature:
    axes = shape or ("N", 4)
    return oip.signature(
        [TensorSpec("x", dtype, axes)], [TensorSpec("y", dtype, axes)], max_batch, LIMIT
    )


def two_inputs() -> oip.Signature:
    specs = [TensorSpec("a", "float32", ("N", 2)), TensorSpec("b", "int64", ("N",))]
    outputs = [TensorSpec("p", "float32", ("N", 2)), TensorSpec("q", "int64", ("N",))]
    return oip.signature(specs, outputs, 8, LIMIT)


def binary(arrays: dict[str, np.ndarray], **more: object) -> tuple[bytes, int]:
    """A request with every input as bytes, and the length of its JSON part."""
    items = [
        {
            "name": name,
            "datatype": PROTOCOL_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    head = json.dumps({"inputs": items, **more}).encode()
    return head + b"".join(array.tobytes() for array in arrays.values()), len(head)


def values(dtype: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(len(dtype) + sum(shape))
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    bounds = np.iinfo(dtype)
    array = rng.integers(bounds.min, bounds.max, shape, dtype=dtype, endpoint=True)
    if array.size > 1:
        array.flat[0], array.flat[1] = bounds.min, bounds.max
    return array
