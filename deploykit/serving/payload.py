"""One tensor of a request: its JSON `data` or its bytes, as an array of the model's dtype.

In: what the client sent and the shape, checked already. Out: a numpy array; BadInput where numpy
would change a value in silence: 1.5 to an integer, "1" to a number, 300 to int8, 1e300 to inf.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.tensors import TensorSpec

BINARY_ONLY = ("FP16", "BF16")  # the protocol gives them no JSON form


@dataclass(frozen=True)
class Slot:
    """One input or output as the protocol names it."""

    spec: TensorSpec
    datatype: str
    dtype: np.dtype[Any]


def from_bytes(body: bytes, at: int, count: int, shape: tuple[int, ...], slot: Slot) -> np.ndarray:
    if count == 0:
        return np.empty(_allocatable(shape, slot), slot.dtype)
    array = np.frombuffer(body, slot.dtype, count, at)
    if slot.datatype == "BOOL" and array.view(np.uint8).max() > 1:
        raise BadInput(f"input '{slot.spec.name}': a BOOL byte is neither 0 nor 1")
    if not array.flags.aligned:
        array = array.copy()  # native libraries may demand alignment
    return array.reshape(shape)


def from_json(
    data: object, count: int, size: int, shape: tuple[int, ...], slot: Slot, max_bytes: int
) -> np.ndarray:
    """`data` is flat or nested like `shape`."""
    name = slot.spec.name
    if type(data) is not list:
        raise BadInput(f"input '{name}': 'data' must be a list")
    if slot.datatype in BINARY_ONLY:
        raise BadInput(f"input '{name}' is {slot.datatype}, which must be sent as binary data")
    flat: list[Any] = data
    if len(shape) > 1 and data and type(data[0]) is list:
        for depth, length in enumerate(shape):
            if depth:
                if set(map(type, flat)) - {list} or set(map(len, flat)) - {length}:
                    raise BadInput(f"input '{name}': 'data' is not nested like {list(shape)}")
                flat = list(itertools.chain.from_iterable(flat))
            elif len(flat) != length:
                raise BadInput(f"input '{name}': 'data' has {len(flat)} rows, shape {list(shape)}")
    if len(flat) != count:
        raise BadInput(
            f"input '{name}': shape {show(list(shape))} has {show(count)} elements, "
            f"'data' has {len(flat)}"
        )
    if size > max_bytes:
        raise TooLarge(
            f"input '{name}' is {size} bytes, above the limit of {max_bytes}",
            hint="send smaller requests, or start the server with a larger --max-body-bytes",
        )
    if count == 0:
        return np.empty(_allocatable(shape, slot), slot.dtype)
    return _convert(flat, slot).reshape(shape)


def _allocatable(shape: tuple[int, ...], slot: Slot) -> tuple[int, ...]:
    """A shape with no elements that numpy can still represent: it multiplies the other sizes."""
    if math.prod(max(1, n) for n in shape) * slot.dtype.itemsize > 1 << 62:
        raise BadInput(f"input '{slot.spec.name}': shape {show(list(shape))} is too large")
    return shape


def _convert(flat: list[Any], slot: Slot) -> np.ndarray:
    """A list of JSON scalars as an array, each value unchanged but for a float's rounding."""
    name, datatype, dtype = slot.spec.name, slot.datatype, slot.dtype
    kinds: dict[str, set[type]] = {"b": {bool}, "f": {int, float}}
    allowed = kinds.get(dtype.kind, {int})
    wrong = set(map(type, flat)) - allowed
    if wrong:
        bad = next(value for value in flat if type(value) in wrong)
        raise BadInput(f"input '{name}' is {datatype}, 'data' holds {show(bad)}")
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        for value in (min(flat), max(flat)):
            if not bounds.min <= value <= bounds.max:
                raise BadInput(f"input '{name}': {value} is out of range for {datatype}")
    with np.errstate(over="ignore"):
        array = np.array(flat, dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise BadInput(f"input '{name}': 'data' holds a number out of range for {datatype}")
    return array


def show(value: object) -> str:
    """A client's value in an error text: printable ASCII, short."""
    text = (
        ascii(value) if not isinstance(value, int) or value.bit_length() < 256 else "a huge number"
    )
    return text if len(text) <= 80 else text[:77] + "..."
