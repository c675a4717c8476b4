"""Requests and models of the Open Inference Protocol, for the decoder's tests.

Written as a client would: nothing here uses the server's own code for tensors.
"""

from __future__ import annotations

import json
import struct

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec
from deploykit.serving.oip.request import Signature
from deploykit.serving.oip.request import signature as signature_of
from deploykit.serving.shared_memory import Region

DTYPES = list(PROTOCOL_NAMES)
JSON_DTYPES = [name for name in DTYPES if name not in ("float16", "bfloat16")]
LIMIT = 1 << 20
TEXTS = ("", "a\0b", "é😀", "0123456789" * 30, "\n\r\x1b[2J")


def model(
    dtype: str = "float32", *shape: int | str, max_batch: int = 8, **more: object
) -> Signature:
    axes = shape or ("N", 4)
    specs = [TensorSpec("x", dtype, axes)], [TensorSpec("y", dtype, axes)]
    return signature_of(*specs, max_batch, LIMIT, **more)


def two_inputs() -> Signature:
    specs = [TensorSpec("a", "float32", ("N", 2)), TensorSpec("b", "int64", ("N",))]
    outputs = [TensorSpec("p", "float32", ("N", 2)), TensorSpec("q", "int64", ("N",))]
    return signature_of(specs, outputs, 8, LIMIT)


def wire(dtype: str, array: np.ndarray) -> bytes:
    """The elements as a client sends them; of a float32 for BF16 it drops the lower half."""
    if dtype == "string":
        texts = [x if isinstance(x, bytes) else x.encode() for x in array.flat]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if dtype == "bfloat16":
        return (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return array.tobytes()


def tensor(dtype: str, array: np.ndarray, name: str = "x", **parameters: object) -> dict:
    """One input of the JSON part, its bytes to follow."""
    item = {"name": name, "datatype": PROTOCOL_NAMES[dtype], "shape": list(array.shape)}
    size = {} if parameters else {"binary_data_size": len(wire(dtype, array))}
    return {**item, "parameters": {**size, **parameters}}


def binary(arrays: dict[str, np.ndarray], **more: object) -> tuple[bytes, int]:
    """A request with every input as bytes, and the length of its JSON part."""
    dtypes = {n: "string" if a.dtype == object else a.dtype.name for n, a in arrays.items()}
    items = [tensor(dtypes[name], array, name) for name, array in arrays.items()]
    head = json.dumps({"inputs": items, **more}).encode()
    return head + b"".join(wire(dtypes[n], a) for n, a in arrays.items()), len(head)


def one(dtype: str, array: np.ndarray, **more: object) -> tuple[bytes, int]:
    """A request with the one input `x` as bytes, and the length of its JSON part."""
    head = json.dumps({"inputs": [tensor(dtype, array)], **more}).encode()
    return head + wire(dtype, array), len(head)


def values(dtype: str, *shape: int) -> np.ndarray:
    """Seeded values as an engine sees them, the extremes of the dtype among them."""
    rng = np.random.default_rng(len(dtype) + sum(shape))
    if dtype == "string":
        array = np.empty(shape, object)
        array.reshape(-1)[:] = [TEXTS[i % len(TEXTS)] + str(i // 5) for i in range(array.size)]
        return array
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "bfloat16":
        array = rng.standard_normal(shape).astype(np.float32)
        return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    bounds = np.iinfo(dtype)
    array = rng.integers(bounds.min, bounds.max, shape, dtype=dtype, endpoint=True)
    if array.size > 1:
        array.flat[0], array.flat[1] = bounds.min, bounds.max
    return array


class FakeMemory:
    """Shared memory that is none: one region `r`."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)

    def read(self, region: Region) -> memoryview:
        assert region.name == "r"
        return memoryview(bytes(self.bytes[region.offset :][: region.byte_size]))

    def write(self, region: Region, data: bytes) -> None:
        assert region.name == "r"
        if len(data) > region.byte_size:
            raise BadInput(f"{len(data)} bytes do not fit")
        self.bytes[region.offset : region.offset + len(data)] = data
