"""Convert one tensor between the protocol's lists or bytes and an array of the model's dtype.

Raises BadInput where numpy would silently change a value: 1.5 to an integer, "1" to a number, 300
to int8, 1e300 to inf. Strings are arrays of `str`, bfloat16 is float32: see `core.tensors.carrier`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, quote
from deploykit.core.tensors import (
    DTYPE_BYTES,
    PROTOCOL_NAMES,
    Bytes,
    TensorSpec,
    carrier,
    fits_shape,
    without_batch,
)

BINARY_ONLY = ("FP16", "BF16")  # the protocol has no JSON form of them
STRING_BYTES = 64  # memory of a short Python string and its reference
LENGTH_BYTES = 4  # the length in front of every element of BYTES
_COPIED_BYTES = 64 << 10  # below this size a copy costs less than a view
_BLOCK = 16 << 10  # strings converted at once


@dataclass(frozen=True)
class Slot:
    """One input or output as the protocol names it."""

    spec: TensorSpec
    datatype: str
    dtype: np.dtype[Any]  # the dtype of the arrays that hold it
    item_bytes: int  # size of one element on the wire; 0 for BYTES, whose elements vary
    plain: bool  # whether the bytes on the wire equal the array's
    raw: bool = False  # BYTES stay bytes, such as an image's; else they are decoded as UTF-8


def make_slot(spec: TensorSpec) -> Slot:
    datatype, item_bytes = PROTOCOL_NAMES[spec.dtype], DTYPE_BYTES.get(spec.dtype, 0)
    plain = datatype not in ("BYTES", "BF16", "BOOL")
    return Slot(spec, datatype, np.dtype(carrier(spec.dtype)), item_bytes, plain)


def check_shape(shape: object, slot: Slot, max_batch: int) -> tuple[int, ...]:
    """Return a shape that fits the model; `max_batch` 0: axis 0 is not a batch. Raises BadInput."""
    spec = slot.spec
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise BadInput(
            f"input '{spec.name}': 'shape' must be a list of integers >= 0, got {quote(shape)}"
        )
    if not fits_shape(spec.shape, shape):
        lacks = without_batch(spec, shape)
        raise BadInput(f"input '{spec.name}' is {spec}, got shape {quote(shape)}{lacks}")
    if max_batch and shape[0] > max_batch:
        raise BadInput(
            f"input '{spec.name}': batch {quote(shape[0])} is above {max_batch}",
            hint="send smaller requests, or start the server with a larger `max_batch`",
        )
    return tuple(shape)


def from_bytes(
    body: Bytes, at: int, size: int, count: int, shape: tuple[int, ...], slot: Slot
) -> np.ndarray:
    """Read `count` elements from `size` bytes of `body` at `at`; numbers are not copied."""
    if slot.plain and count:
        array: np.ndarray = np.ndarray(shape, slot.dtype, body, at)
        return array
    if not slot.item_bytes:
        return _string_array(_elements(body, at, size, count, slot), shape, slot)
    if count == 0:
        return np.empty(_allocatable(shape, slot), slot.dtype)
    if slot.datatype == "BF16":
        upper = np.frombuffer(body, np.uint16, count, at)
        return (upper.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if np.frombuffer(body, np.uint8, count, at).max() > 1:
        raise BadInput(f"input '{slot.spec.name}': a BOOL byte is neither 0 nor 1")
    flags: np.ndarray = np.ndarray(shape, slot.dtype, body, at)
    return flags


def _elements(body: Bytes, at: int, size: int, count: int, slot: Slot) -> list[bytes]:
    """Split BYTES into elements, each of which follows its length in 4 bytes."""
    name, end = slot.spec.name, at + size
    elements = []
    for number in range(count):
        start = at + LENGTH_BYTES
        if start > end:
            raise BadInput(f"input '{name}': the bytes end before element {number} of {count}")
        at = start + int.from_bytes(body[at:start], "little")
        if at > end:
            raise BadInput(
                f"input '{name}': element {number} claims {at - start} bytes, {end - start} remain"
            )
        elements.append(bytes(body[start:at]))
    if at != end:
        raise BadInput(f"input '{name}': {end - at} bytes follow the last of {count} elements")
    return elements


def _string_array(elements: Sequence[object], shape: tuple[int, ...], slot: Slot) -> np.ndarray:
    """Return an array of `str`, as engines take it; bytes among the elements must be UTF-8."""
    name = slot.spec.name
    array = np.empty(_allocatable(shape, slot), object)
    flat = array.reshape(-1)
    for number, element in enumerate(elements):
        if type(element) is bytes and not slot.raw:
            try:
                element = element.decode()
            except UnicodeDecodeError:
                message = f"input '{name}': element {number} is not UTF-8, which this model needs"
                raise BadInput(message) from None
        elif type(element) is str and slot.raw:  # JSON has no bytes
            element = element.encode()
        elif type(element) is not (bytes if slot.raw else str):
            raise BadInput(f"input '{name}' is BYTES, 'data' holds {quote(element)}")
        flat[number] = element
    return array


def flatten(data: object, count: int, shape: tuple[int, ...], slot: Slot) -> list[Any]:
    """Return the `count` elements of a list that is flat or nested like `shape`."""
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
        sizes = f"shape {quote(list(shape))} has {quote(count)} elements"
        raise BadInput(f"input '{name}': {sizes}, 'data' has {len(flat)}")
    return flat


def from_list(flat: list[Any], shape: tuple[int, ...], slot: Slot) -> np.ndarray:
    """Convert a list of scalars to an array; only floats may be rounded."""
    if not slot.item_bytes:
        return _string_array(flat, shape, slot)
    if not flat:
        return np.empty(_allocatable(shape, slot), slot.dtype)
    name, datatype, dtype = slot.spec.name, slot.datatype, slot.dtype
    kinds: dict[str, set[type]] = {"b": {bool}, "f": {int, float}}
    allowed = kinds.get(dtype.kind, {int})
    wrong = set(map(type, flat)) - allowed
    if wrong:
        bad = next(value for value in flat if type(value) in wrong)
        raise BadInput(f"input '{name}' is {datatype}, 'data' holds {quote(bad)}")
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        for value in (min(flat), max(flat)):
            if not bounds.min <= value <= bounds.max:
                raise BadInput(f"input '{name}': {value} is out of range for {datatype}")
    with np.errstate(over="ignore"):
        array = np.array(flat, dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        for place in np.flatnonzero(~np.isfinite(array)):
            if math.isfinite(flat[place]):  # gRPC may carry infinity, but nothing becomes it
                raise BadInput(f"input '{name}': 'data' holds a number out of range for {datatype}")
    return array.reshape(shape)


def _allocatable(shape: tuple[int, ...], slot: Slot) -> tuple[int, ...]:
    """Return the shape if numpy can represent it: it multiplies all axes, even if one is 0."""
    if math.prod(max(1, n) for n in shape) * slot.dtype.itemsize > 1 << 62:
        raise BadInput(f"input '{slot.spec.name}': shape {quote(list(shape))} is too large")
    return shape


def to_bytes(array: np.ndarray, datatype: str) -> Bytes:
    """Encode an output as binary; bfloat16 is rounded to nearest, ties to even."""
    if datatype == "BYTES":
        return b"".join([b"".join(map(_to_element, block)) for block in string_blocks(array)])
    if datatype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)
        upper = (bits + (0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        nans = np.isnan(array.reshape(-1))  # rounding would turn some NaN into infinity
        upper[nans] = (bits[nans] >> 16) | 0x40
        return upper.tobytes()
    return number_bytes(array)


def number_bytes(array: np.ndarray) -> Bytes:
    """Return the bytes of numbers; of a large array that owns its memory without a copy."""
    if array.nbytes > _COPIED_BYTES and array.flags.owndata and array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8).data
    return array.tobytes()


def string_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the strings in parts: one C call for a million would hold the GIL for 0.2 s."""
    flat = array.reshape(-1)
    return (flat[at : at + _BLOCK] for at in range(0, flat.size, _BLOCK))


def array_bytes(array: np.ndarray) -> int:
    """Return the bytes of memory of an array, including its strings."""
    if array.dtype.kind != "O":
        return array.nbytes
    return array.nbytes + sum([sum(map(sys.getsizeof, block)) for block in string_blocks(array)])


def _to_element(element: object) -> bytes:
    data = element if type(element) is bytes else str(element).encode()
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def to_json(array: np.ndarray, datatype: str, name: str) -> list[str] | np.ndarray:
    """Return an output as orjson takes it, flat. Raises BadInput for what JSON cannot represent."""
    if datatype == "BYTES":
        with contextlib.suppress(UnicodeDecodeError):
            return [x.decode() if type(x) is bytes else str(x) for x in array.flat]
        what = "bytes that are not UTF-8"
    elif array.dtype.kind != "f" or np.isfinite(array).all():
        return np.ascontiguousarray(array).reshape(-1)
    else:
        what = "NaN or infinity"
    text = f"output '{name}' holds {what}, which JSON cannot represent"
    raise BadInput(text, hint="request it with 'binary_data': true")
