"""Store numbers in fewer bits: scales, and the steps of INT8, INT4 and FP8.

real = stored * scale.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput
from deploykit.core.precision import BY_NAME

# A histogram holds 128 KiB, however much it has seen.

PERCENTILE = 99.999  # measured best of 99.9 to 99.9999: benchmarks/quantizers.py
WORTH_CLIPPING = 10**0.07  # 0.7 dB: of 0.3, 0.7 and 1.5 the best in measurements
TINY = 1e-30  # a tensor below it is dead: any scale stores its zeros
_SIDE = 4096  # bins on either side of zero
_CHUNK = 1 << 16  # values at a time: what fits into a core's cache
_LEVELS = 128  # levels of an INT8 magnitude
_CUTS = np.geomspace(1, 0.01, 64)  # shares of the peak that the search for the least error tries


class TensorHistogram:
    """Counts of finite values in equal bins over [-limit, limit]; the limit doubles at need.

    `importance`: the weight of an error in each channel, which is the last axis of the values; None
    where all channels are the same.
    """

    def __init__(self, importance: np.ndarray | None = None) -> None:
        self.limit, self.has_nan = 0.0, False
        self.counts = np.zeros(2 * _SIDE, np.int64)
        self.importance = importance
        self.weighted = np.zeros(2 * _SIDE)  # the importance of the values in each bin, added up
        # the largest magnitude in each channel
        self.channel_peaks = np.zeros(0 if importance is None else len(importance), np.float32)

    def add(self, values: np.ndarray) -> tuple[float, float]:
        """Count the finite float32 `values`, of any shape; return the least and the largest.

        Afterwards `has_nan` says whether one of them was NaN.
        """
        flat, weights = values.reshape(-1), self.importance
        ends = low, high = _ends(flat)
        self.has_nan = math.isnan(low)
        if weights is not None and flat.size:
            rows = flat.reshape(-1, len(weights))
            seen = np.fmax(np.fmax.reduce(rows), -np.fmin.reduce(rows))
            self.channel_peaks = np.fmax(self.channel_peaks, seen)
        if self.has_nan:
            ends = low, high = _ends(flat[~np.isnan(flat)])
        if not (math.isfinite(low) and math.isfinite(high)) or self.has_nan:
            flat, weights = flat[np.isfinite(flat)], None
            low, high = _ends(flat)
        peak = max(high, -low)
        if peak > TINY:
            self.limit = self.limit or peak
            while peak > self.limit:
                self.counts, self.weighted = (
                    np.pad(each.reshape(-1, 2).sum(axis=1), _SIDE // 2)
                    for each in (self.counts, self.weighted)
                )
                self.limit *= 2
        if self.limit:
            self._count(flat, weights)
        else:  # nothing but zeros so far
            self.counts[_SIDE] += flat.size
        return ends

    def _count(self, flat: np.ndarray, weights: np.ndarray | None) -> None:
        per_bin = np.float32(_SIDE / self.limit)
        chunk = _CHUNK if weights is None else max(_CHUNK // len(weights), 1) * len(weights)
        repeated = None if weights is None else np.tile(weights, chunk // len(weights))
        for start in range(0, flat.size, chunk):
            scaled = flat[start : start + chunk] * per_bin
            scaled += np.float32(_SIDE)
            places = scaled.astype(np.intp)  # bincount wants this type
            self.counts += _count_values(places)
            if repeated is not None:
                self.weighted += _count_values(places, repeated[: len(places)])

    def percentile(self, share: float = PERCENTILE) -> tuple[float, float]:
        """Return the ends of the middle `share` per cent, to a bin."""
        tail = self.counts.sum() * (100 - share) / 200
        edges = np.linspace(-self.limit, self.limit, 2 * _SIDE + 1)
        low = int(np.argmax(np.cumsum(self.counts) > tail))
        high = 2 * _SIDE - int(np.argmax(np.cumsum(self.counts[::-1]) > tail))
        return min(float(edges[low]), 0.0), max(float(edges[high]), 0.0)

    def least_error(self) -> float:
        """Return the peak at which INT8's rounding and clipping add up to the least squared error.

        Rounding costs a twelfth of a squared step, and no more than the value itself.
        """
        mass = self._mass()
        tops = _CUTS * (np.flatnonzero(mass).max(initial=0) + 1) / _SIDE
        return self.limit * float(min(tops, key=lambda top: _squared_error(mass, top)))

    def gains(self, safe: float, least: float) -> bool:
        """Return whether [-least, least] makes much less squared INT8 error than [-safe, safe].

        Clipping for less may cut off what matters most at the outputs, which a tensor's own error
        does not show.
        """
        if not self.limit:
            return False
        errors = [_squared_error(self._mass(), peak / self.limit) for peak in (safe, least)]
        return errors[0] > WORTH_CLIPPING * errors[1]

    def _mass(self) -> np.ndarray:
        """Return the weight of each magnitude, smallest first."""
        counts = self.weighted if self.weighted.any() else self.counts
        mass: np.ndarray = (counts[_SIDE:] + counts[_SIDE - 1 :: -1]).astype(np.float64)
        mass[0] = 0.0  # zeros, of Relu or padding, are exact at any scale
        return mass


def _squared_error(mass: np.ndarray, top: float) -> float:
    """Return INT8's squared error. `top`: the largest value kept, where the last bin ends at 1."""
    values = (np.arange(_SIDE) + 0.5) / _SIDE
    rounded = np.minimum(values, top / (_LEVELS - 1) / math.sqrt(12))
    return float(mass @ np.where(values < top, rounded, values - top) ** 2)


def _ends(values: np.ndarray) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _count_values(places: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Count the values in each bin; the peak itself belongs to the last one."""
    found: np.ndarray = np.bincount(places, weights, 2 * _SIDE + 1)
    found[-2] += found[-1]
    return found[:-1]


FP8, INT4 = map(helper.tensor_dtype_to_np_dtype, (TensorProto.FLOAT8E4M3FN, TensorProto.INT4))
FP8_PEAK = BY_NAME["fp8"].max_stored  # the largest E4M3 number


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
    """Return whether a Gemm stores its weight as [outputs, inputs]."""
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
    if axis is not None:
        scale = scale.reshape([-1 if place == axis else 1 for place in range(values.ndim)])
    steps = np.asarray(values / scale)
    np.rint(steps, out=steps)
    return np.clip(steps, -127, 127, out=steps).astype(np.int8)


def fp8_numbers(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`values` / `scale` as E4M3 without infinity (ONNX's FLOAT8E4M3FN), rounded to even.

    Values above 448 become 448: P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    return np.asarray(np.clip(values / scale, -FP8_PEAK, FP8_PEAK)).astype(FP8)


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
