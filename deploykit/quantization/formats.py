"""Store numbers in fewer bits: scales, and the steps of INT8, INT4 and FP8.

real = stored * scale. Large arrays are converted in parts, to need little memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.core.precision import BY_NAME
from deploykit.quantization.histograms import TINY

FP8, INT4 = map(helper.tensor_dtype_to_np_dtype, (TensorProto.FLOAT8E4M3FN, TensorProto.INT4))
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


def fp8_numbers(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`values` / `scale` as E4M3 without infinity (ONNX's FLOAT8E4M3FN), rounded to even.

    What is above 448 becomes 448: P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    found = np.empty(values.shape, FP8)
    for part in _rows(values):
        found[part] = np.clip(values[part] / scale, -FP8_PEAK, FP8_PEAK)
    return found


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


def _rows(values: np.ndarray) -> Iterator[tuple[slice, ...]]:
    """Slices along axis 0 of about `_PART` values each; all at once for a scalar."""
    if not values.ndim:
        yield ()
        return
    rows = max(1, _PART * len(values) // max(values.size, 1))
    for start in range(0, len(values), rows):
        yield (slice(start, start + rows),)
