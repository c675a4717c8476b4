"""Store numbers in fewer bits: scales, and the bytes of INT8, INT4, FP8 and bfloat16.

real = stored * scale. Large arrays are converted in parts, to need little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx

from deploykit.core.errors import BadInput
from deploykit.core.precision import BY_NAME
from deploykit.quantization.histograms import TINY

FP8_PEAK = BY_NAME["fp8"].max_stored  # the largest E4M3 number
_PART = 1 << 20  # values at a time


def channel_axis(node: onnx.NodeProto, rank: int) -> int | None:
    """The axis of the output channels of a weight; None where one scale has to do for all."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":  # with groups, that axis counts the channels of one group
        return None if any(a.name == "group" and a.i > 1 for a in node.attribute) else 1
    if node.op_type == "Gemm":
        return 0 if transposed(node) else 1
    return 1 if rank == 2 else None


def transposed(node: onnx.NodeProto) -> bool:
    """Whether a Gemm stores its weight as [outputs, inputs]."""
    return any(a.name == "transB" and a.i for a in node.attribute)


def weight_scale(values: np.ndarray, axis: int | None, name: str, steps: float = 127) -> np.ndarray:
    """The symmetric scale of `values`, float32: shape (channels,) along `axis`, () without one.

    Raises BadInput for NaN and infinity, naming the tensor.
    """
    others = tuple(i for i in range(values.ndim) if i != axis) if axis is not None else None
    peak = np.maximum(values.max(axis=others), -values.min(axis=others))  # abs() would copy
    if not np.isfinite(peak).all():
        raise BadInput(
            f"weight '{name}' holds NaN or infinity: it cannot be quantized",
            hint="the trained weights themselves are broken; see the training's loss",
        )
    return np.asarray(np.where(peak > TINY, peak / np.float32(steps), 1.0), np.float32)


def int8_steps(values: np.ndarray, scale: np.ndarray, axis: int | None) -> np.ndarray:
    """`values` in steps of `scale`, rounded to even, in -127..127; the shape of `values`."""
    shape = [1] * values.ndim
    if axis is not None:
        shape[axis] = -1
    at = np.broadcast_to(scale.reshape(shape if axis is not None else ()), values.shape)
    found = np.empty(values.shape, np.int8)
    for part in _rows(values):
        found[part] = np.clip(np.rint(values[part] / at[part]), -127, 127)
    return found


def fp8_bytes(values: np.ndarray, scale: np.ndarray) -> bytes:
    """`values` / `scale` as E4M3 without infinity (ONNX's FLOAT8E4M3FN), rounded to even.

    |values / scale| must be at most 448. A sign, 4 bits of exponent with bias 7, 3 of mantissa:
    P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    found = np.empty(values.shape, np.uint8)
    for part in _rows(values):
        scaled = np.clip(values[part] / scale, -FP8_PEAK, FP8_PEAK)
        _, exponent = np.frexp(scaled)  # |scaled| in 2**(exponent - 1) * [1, 2)
        power = np.maximum(exponent - 1, -6)  # below are the subnormals ...
        power[scaled == 0] = -6  # ... and zero, whose exponent frexp gives as 0
        eighths = np.rint(np.ldexp(np.abs(scaled), 3 - power)).astype(np.int32)
        # 8..16 eighths: the leading one, and a carry out of the mantissa, add to the exponent
        found[part] = (np.signbit(scaled) << 7) | (((power + 6) << 3) + eighths)
    return found.tobytes()


def int4_steps(
    values: np.ndarray, axis: int, block: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Steps in -7..7 of a matrix, and the scale of each `block` values along `axis`.

    `block` divides that axis. The scale has the matrix's shape, this axis divided by `block`.
    Raises BadInput for NaN and infinity, naming the tensor.
    """
    matrix = values if axis == 0 else values.T
    steps = np.empty(matrix.shape, np.int8)
    scale = np.empty((len(matrix) // block, matrix.shape[1]), np.float32)
    for number in range(len(scale)):
        part = slice(number * block, (number + 1) * block)
        scale[number] = weight_scale(matrix[part], 1, name, 7)
        steps[part] = np.clip(np.rint(matrix[part] / scale[number]), -7, 7)
    if axis == 0:
        return steps, scale
    return np.ascontiguousarray(steps.T), np.ascontiguousarray(scale.T)


def int4_bytes(steps: np.ndarray) -> bytes:
    """Integers in -8..7, two to a byte, the first in the low half."""
    flat = steps.astype(np.int8).reshape(-1).view(np.uint8) & 0xF
    flat = np.pad(flat, (0, flat.size % 2))
    return (flat[::2] | (flat[1::2] << 4)).tobytes()


def bfloat16_bytes(values: np.ndarray) -> bytes:
    """float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    found = np.empty(flat.size, np.uint16)
    for part in _rows(flat):
        bits = flat[part]
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        found[part] = np.where(nan, 0x7FC0, rounded >> 16)
    return found.tobytes()


def bfloat16_values(data: bytes) -> np.ndarray:
    """The float32 values, in one dimension, of what `bfloat16_bytes` gave."""
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _float16_bytes(values: np.ndarray) -> bytes:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).tobytes()


def _float16_values(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.float16).astype(np.float32)


# a half type -> its bytes of float32 values, rounded to nearest, ties to even; and the way back
HALVES: Mapping[str, tuple[Callable[[np.ndarray], bytes], Callable[[bytes], np.ndarray]]] = {
    "float16": (_float16_bytes, _float16_values),
    "bfloat16": (bfloat16_bytes, bfloat16_values),
}


def _rows(values: np.ndarray) -> Iterator[tuple[slice, ...]]:
    """Slices along axis 0 of about `_PART` values each; all at once for a scalar."""
    if not values.ndim:
        yield ()
        return
    rows = max(1, _PART * len(values) // max(values.size, 1))
    for start in range(0, len(values), rows):
        yield (slice(start, start + rows),)
